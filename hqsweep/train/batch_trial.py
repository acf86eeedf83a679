"""The trial of a model with data or a loss of its own, before anything starts.

The trial is a forward and a backward of one batch, as the run does them: on samples of the data, in training mode, in
the arm's recipe. A model that is too large for memory here does the forward alone, on the meta device.
"""

import math
from collections.abc import Hashable

import torch
from torch import Tensor, nn

from hqsweep.config.job import ConvergenceConfig
from hqsweep.errors import UserError
from hqsweep.models.batches import TAKES, BatchLoss, described
from hqsweep.models.build import build, outline
from hqsweep.models.convert import convert
from hqsweep.models.head_loss import model_loss
from hqsweep.models.trial import MOST, is_anywhere
from hqsweep.nn.core.context import quantization
from hqsweep.train import data

SAMPLES = 4
"""The most samples of the trial's batch."""
_TRIED: set[Hashable] = set()


def check_batch(config: ConvergenceConfig, *, on_cpu: bool) -> None:
    """UserError for a model that cannot be trained on the config's samples, or by its own loss. Once for each model and
    recipe. on_cpu: whether the run is on the CPU, as the trial is.

    Nothing is tried where this process may not import the functions that the config names.
    """
    section, train = config.model, config.train
    tried = (section.model_dump_json(), config.data.model_dump_json(), config.recipe.model_dump_json(), train.dtype)
    names = (section.loss_function, getattr(config.data, "factory", None))
    if tried in _TRIED or any(getattr(each, "is_name", False) for each in names) or config.recipe.has_names:
        return
    model = outline(section)
    if model is None:
        return
    dataset = data.loaded(config.data)
    loss = BatchLoss(packing=getattr(dataset, "packing", None), function=section.loss_function)
    if sum(parameter.numel() for parameter in model.parameters()) <= MOST:
        model = build(section, seed=0)
        convert(model, config.recipe.build(), head=section.head, attention=section.attention)
    loss.attach(model)
    device = next(model.parameters()).device
    count = min(SAMPLES, config.microbatch)
    inputs, targets = dataset.batch("train", config.seed, 0, count, train.context)
    batch = (inputs, targets) if loss.packing is None else loss.packing.unpack(inputs)
    try:
        _compute(model, inputs.to(device), targets.to(device), train.dtype)
    except UserError:
        raise
    except Exception as fault:
        if on_cpu or is_anywhere(fault):
            why = " ".join(str(fault).split())[:300] or "no message"
            raise UserError(
                f"model: {type(model).__name__} raised {type(fault).__name__} for a batch of {described(batch)}:"
                f" {why}; {TAKES}"
            ) from fault
    _TRIED.add(tried)


def _compute(model: nn.Module, inputs: Tensor, targets: Tensor, dtype: str) -> None:
    """The loss and, where there are values, its gradients, in training. UserError for a loss that trains nothing."""
    on_meta = inputs.device.type == "meta"
    model.train()
    with (
        torch.random.fork_rng(devices=[]),
        torch.set_grad_enabled(not on_meta),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16" and not on_meta),
        quantization(seed=0, step=1),
    ):
        torch.manual_seed(0)
        loss, aux = model_loss(model, inputs, targets)
        loss = loss if aux is None else loss + aux
    if on_meta:
        return
    if not loss.requires_grad:
        raise UserError(f"model: the loss of {type(model).__name__} has no gradient; it must depend on the parameters")
    if not math.isfinite(loss.item()):
        raise UserError(f"model: the loss of {type(model).__name__} is {loss.item()} on its first batch")
    loss.backward()
