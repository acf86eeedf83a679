"""Whether a training's products on native tensor cores are there, before it starts."""

from functools import partial

import torch

from hqsweep.config.job import ConvergenceConfig
from hqsweep.errors import UserError
from hqsweep.gemm import native
from hqsweep.models.build import gemm_modules


def check_native(config: ConvergenceConfig, device: torch.device, vocab_size: int) -> None:
    """UserError with all GEMMs on gemm=native that the device has no product for; nothing falls back to gemm=exact."""
    recipe = config.recipe.build()
    if "native" not in (recipe.gemm, *(change.recipe.gemm for change in recipe.schedule)):
        return
    capability = native.capability_of(device)
    if missing := native.device_fault(capability):
        here = "the CPU" if capability is None else torch.cuda.get_device_name(device)
        raise UserError(f"recipe: {missing}; this run is on {here}; recipe.gemm=exact multiplies the same operands")
    config.check_recipe(gemm_modules(config, vocab_size), partial(native.refusal, capability))
