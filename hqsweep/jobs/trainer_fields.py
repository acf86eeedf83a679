"""The entries in the manifest of a trained run about its model, data and steps."""

import re
from itertools import pairwise

import torch

from hqsweep.formats import Format
from hqsweep.gemm import native
from hqsweep.gemm.plan import gemm_plan
from hqsweep.nn.core.module import QuantizedModule, quantized_modules, roles_of
from hqsweep.nn.experts.grouped import GroupedBase
from hqsweep.ops.fingerprint import kernel_digest
from hqsweep.recipe.pairs import MODULE_GEMMS
from hqsweep.recipe.stages import Stage
from hqsweep.train.loop import Trainer

SHARED_GPU = "{} ranks share a GPU and exchange by sockets, so steps take much longer than with one each"


def trainer_fields(trainer: Trainer) -> dict[str, object]:
    """The fields that are known before the first step: device, kernel digest, data, sizes, and the plan of every GEMM.

    tokens and epochs count from step 1, also for a run that continues another run's state.
    """
    device, dataset, train = trainer.device, trainer.dataset, trainer.config.train
    tokens = train.steps * train.batch * train.context
    warnings = dataset.warnings(tokens)
    if trainer.ranks.per_gpu > 1:
        warnings.append(SHARED_GPU.format(trainer.ranks.per_gpu))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "kernel_digest": kernel_digest(device),
        "data_hash": dataset.hash,
        "data": dataset.facts,
        "params": sum(shape.numel() for shape in trainer.shapes.values()),
        "tokens": tokens,
        "epochs": dataset.epochs(tokens),
        "gemm_plan": stage_plans(trainer, trainer.stages[0]),
        "recipe_schedule": schedule_fields(trainer),
        **trainer.adapter.facts,
        **trainer.adapter.taken,
        **({"warnings": warnings} if warnings else {}),
    }


def saved_fields(trainer: Trainer) -> dict[str, object]:
    """The field saved_for_backward: what a microbatch's forward keeps for backward.

    bytes and bytes_per_token are what autograd has saved beside the model. They are given only where autograd saves all
    of it, which excludes recomputation, offload and several ranks. input_bytes_per_element: the number for the input of
    each linear; layers with the same number are one entry.
    """
    train = trainer.config.train
    tokens = train.batch // train.microbatches * train.context
    inputs: dict[str, set[float]] = {}
    for name, nbytes in trainer.microbatches.of_all_stages(dict(trainer.adapter.saved_inputs(tokens))).items():
        inputs.setdefault(re.sub(r"\.\d+\.", ".*.", name), set()).add(nbytes)
    per_element = {name: sizes.pop() if len(sizes) == 1 else sorted(sizes) for name, sizes in inputs.items()}
    fields: dict[str, object] = {"input_bytes_per_element": per_element}
    if saved := trainer.microbatches.saved.nbytes:
        fields |= {"bytes": saved, "bytes_per_token": saved / tokens}
    return fields


def unused_warnings(trainer: Trainer) -> list[str]:
    """A warning about modules that should compute by the recipe but did not compute in a step; else []."""
    unused = trainer.adapter.unused()
    if not unused:
        return []
    more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
    return [
        f"{', '.join(unused[:3])}{more}: converted, but not used in the first step; something reads the weights and"
        " passes by the module, or never calls it, so the recipe says nothing of it"
    ]


def steps_fields(trainer: Trainer) -> dict[str, str | None]:
    """The field on how steps run: "graph" or "eager", and the reason for "eager"."""
    reason = trainer.runner.reason
    return {"run": "graph" if reason is None else "eager", "reason": reason}


def schedule_fields(trainer: Trainer) -> list[dict[str, object]]:
    """For each change of the recipe: the first step on the new recipe, and the GEMM plans that change."""
    plans = [stage_plans(trainer, stage) for stage in trainer.stages]
    return [
        {
            "first_step": stage.first_step,
            "gemm_plan": {name: new.get(name, {}) for name in old | new if new.get(name) != old.get(name)},
        }
        for stage, (old, new) in zip(trainer.stages[1:], pairwise(plans), strict=True)
    ]


def stage_plans(trainer: Trainer, stage: Stage) -> dict[str, dict[str, str]]:
    """Module -> GEMM -> "a x b: plan", in the recipe of a stage. Attention in high precision is left out, as torch
    computes it."""
    modules = [module for module in quantized_modules(trainer.model) if module.module_type in MODULE_GEMMS]
    resolved = stage.recipe.resolve(roles_of(trainer.model))
    place = {"gemm_mode": stage.recipe.gemm, "device": trainer.device}
    plans = {}
    for module in modules:
        quantizers = module.chosen(resolved)
        pairs = {
            gemm: [getattr(quantizers[tensor], direction) for tensor, direction in operands]
            for gemm, operands in MODULE_GEMMS[module.module_type].items()
        }
        low = any(not format.high_precision for pair in pairs.values() for format in pair)
        if low or module.module_type != "dpa":
            plans[module.name] = {
                gemm: f"{a} x {b}: {_plan(module, gemm, a, b, **place)}" for gemm, (a, b) in pairs.items()
            }
    return trainer.microbatches.of_all_stages(plans)


def _plan(module: QuantizedModule, gemm: str, a: Format, b: Format, gemm_mode: str, device: torch.device) -> str:
    if not isinstance(module, GroupedBase):
        return str(gemm_plan(a, b, native.capability_of(device), gemm_mode))
    return str(module.plan(gemm, a, b, device, gemm_mode))
