"""The loss of a user's model as the model defines it, and the check that no token sees later ones.

The loss of a model that sees later tokens says nothing: it was given what it predicts.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.hf import Around, causal_lm_loss, unpacked

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


TOKENS = 8
"""The number of tokens of the trial."""
LEAK = 1e-4
"""The least change of logits, relative to the largest of them, that is no rounding: where a token changes the sizes of
products, as in a mixture of experts, float32 sums have another order."""


def check_causal(model: nn.Module, vocab_size: int) -> None:
    """UserError for a model of which logits change with a token after theirs. One with a loss of its own, or one that
    does not run on a few tokens where it lies, is not judged."""
    if not is_hugging_face(model) and callable(getattr(model, "loss", None)):
        return
    tokens = torch.arange(TOKENS, device=next(model.parameters()).device).remainder(vocab_size)[None]
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % vocab_size
    training = model.training
    model.eval()
    try:
        logits, changed = _repeated_logits(model, tokens), _repeated_logits(model, other)
    except Exception:  # what is wrong is said by the training
        return
    finally:
        model.train(training)
    change, largest = (changed - logits)[:, :-1].abs().max(), logits.abs().max()
    if change > max(LEAK, torch.finfo(logits.dtype).eps) * largest:
        raise UserError(
            f"model: {type(model).__name__} sees tokens that come later: its logits changed with a token after theirs,"
            " so that the loss of the next token says nothing; give a causal model (an encoder of Hugging Face takes"
            " is_decoder=true in its config.json), or one whose method loss(tokens, targets) is what it is trained for"
        )


@torch.no_grad()
def _repeated_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of a forward whose random numbers, if it draws any, are always the same."""
    with torch.random.fork_rng(devices=[]), unpacked():
        torch.manual_seed(0)
        options = {"input_ids": tokens, "use_cache": False} if is_hugging_face(model) else {}
        return model(**options).logits if options else logits_of(model, tokens)
