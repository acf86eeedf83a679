"""Trials of a user's model before anything starts: on a few tokens, or on a batch of its own data.

On tokens the forward must take them, and must not see later ones. With data or a loss of its own, a model computes the
forward and the backward of one batch as the run does: on samples of the data, in training mode, in the arm's recipe. A
model that is too large for memory here does the forward alone, on the meta device. The run itself finds other faults.
"""

import math
from collections.abc import Hashable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import HFModelConfig
from hqsweep.errors import UserError
from hqsweep.models.batches import BATCHES, BatchLoss, described
from hqsweep.models.build import build, outline
from hqsweep.models.convert import convert
from hqsweep.models.head_loss import TAKES, check_causal, model_loss
from hqsweep.models.hf import one_layer
from hqsweep.nn.core.context import quantization
from hqsweep.train import data

MOST = 200_000_000
"""The most parameters that a model may have to get memory for a trial."""
ANYWHERE = ("torch.nn.modules.", "transformers.models.")
"""The packages whose modules refuse an input on every device alike."""
SAMPLES = 4
"""The most samples of the trial's batch."""
_TRIED: set[tuple[Hashable, ...]] = set()
"""The models that this process has tried."""


def check_trial(config: ConvergenceConfig, *, on_cpu: bool) -> None:
    """UserError for a user's model that cannot be trained on tokens [2, context], or that sees tokens that come later.
    Once for each model that this process builds. on_cpu: whether the run is on the CPU, as the trial is."""
    section, vocab_size = config.model, config.data.vocab_estimate
    of_model = section.model_dump_json(exclude={"init_noise", "quantized_weights"})
    tried = (of_model, config.train.context, config.train.dtype, vocab_size, on_cpu)
    if tried in _TRIED:
        return
    model = one_layer(section.path, MOST) if isinstance(section, HFModelConfig) else _tried(config, on_cpu)
    if model is not None:
        check_causal(model, vocab_size)
        _TRIED.add(tried)


def _tried(config: ConvergenceConfig, on_cpu: bool) -> nn.Module | None:
    """Return the model with memory, after a forward of tokens if it needs one.

    None if this process may not import it, or does not build it.
    """
    model, context = outline(config.model), config.train.context
    if model is None or next(model.parameters(), None) is None:
        return None
    device = next(model.parameters()).device
    fault = _fault(model, context, device)
    if device.type == "meta":
        if sum(parameter.numel() for parameter in model.parameters()) > MOST:
            return None
        try:
            model = build(config.model, seed=0)
        except UserError:  # such as one that is built on a GPU
            return None
    if fault is not None or on_cpu:  # the meta device lacks values and checks no dtypes
        fault = _fault(model, context, torch.autocast("cpu", torch.bfloat16, enabled=config.train.dtype == "bf16"))
    if fault is not None and (on_cpu or is_anywhere(fault)):
        name, why = type(model).__name__, (str(fault).strip() or "no message").splitlines()[0]
        raise UserError(
            f"model: {name} raised {type(fault).__name__} for tokens (2, {context}): {why}; {TAKES}"
        ) from fault
    return model


def _fault(model: nn.Module, context: int, around: AbstractContextManager) -> Exception | None:
    """Return the exception that the loss raises in the context `around`, or None. UserError for an output without a
    loss."""
    tokens = torch.zeros(2, context, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), around:
            model_loss(model, tokens, tokens)
    except UserError:
        raise
    except Exception as error:
        return error
    return None


def is_anywhere(fault: Exception) -> bool:
    """Whether an exception does not depend on the device: a library's module refuses its input."""
    trace = fault.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").startswith(ANYWHERE)


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
                f" {why}; {BATCHES}"
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
