"""Trials of a user's model on a few tokens before anything starts: its forward must take tokens, and must not see later
ones. The run itself finds other faults."""

from collections.abc import Hashable
from contextlib import AbstractContextManager

import torch
from torch import nn

from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import HFModelConfig
from hqsweep.errors import UserError
from hqsweep.models.build import build, outline
from hqsweep.models.head_loss import TAKES, check_causal, model_loss
from hqsweep.models.hf import one_layer

MOST = 200_000_000
"""The most parameters that a model may have to get memory for a trial."""
ANYWHERE = ("torch.nn.modules.", "transformers.models.")
"""The packages whose modules refuse an input on every device alike."""


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


_TRIED: set[tuple[Hashable, ...]] = set()


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
