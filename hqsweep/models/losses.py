"""The loss of a user's model as the model defines it."""

from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.hf import Around, causal_lm_loss

TAKES = "it must be of Hugging Face, have a method loss(tokens, targets), or give logits [B, T, V] for [B, T]"


def model_loss(
    model: nn.Module, inputs: Tensor, targets: Tensor, around: Around = nullcontext
) -> tuple[Tensor, Tensor | None]:
    """(cross entropy, auxiliary loss or None), each [], of inputs and targets, int64 [B, T]; their sum is minimized.

    A Hugging Face model computes its own loss, with its forward in the context `around`. A model with a method `loss`
    gives what loss(inputs, targets) returns, one of the two or both. Any other gives the mean cross entropy in float32
    of the logits [B, T, V] that it returns, bare, first in a tuple or as `logits`. UserError for what is none of these.
    """
    if is_hugging_face(model):
        return causal_lm_loss(model, inputs, targets, around)
    own = getattr(model, "loss", None)
    if callable(own):
        return _own(own(inputs, targets), type(model).__name__)
    return F.cross_entropy(logits_of(model, inputs).flatten(0, -2).float(), targets.flatten()), None


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """The logits [B, T, V] of a model without a loss of its own; UserError where it returns something else."""
    logits = _logits(model(inputs))
    if not isinstance(logits, Tensor) or logits.shape[:-1] != inputs.shape:
        came = f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"model: {type(model).__name__} gave {came} for tokens {tuple(inputs.shape)}; {TAKES}")
    return logits


def is_hugging_face(model: nn.Module) -> bool:
    """Whether the model's forward takes labels, and computes their loss by its loss_function."""
    return hasattr(model, "loss_function") and hasattr(model, "config")


def _logits(out: Any) -> Any:
    if isinstance(out, tuple | list) and out:
        return out[0]
    return getattr(out, "logits", out)


def _own(out: Any, model: str) -> tuple[Tensor, Tensor | None]:
    loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    for value in (loss, *(() if aux is None else (aux,))):
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            came = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"model: {model}.loss gave {came}; it must give a loss [], or that and an auxiliary loss []"
            )
    return loss.reshape(()), None if aux is None else aux.reshape(())
