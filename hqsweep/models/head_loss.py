"""The loss of a user's model: as the model defines it, or by chunks of tokens, so that its logits never exist whole.

HeadLoss runs the forward of a causal language model of Hugging Face as it is, with two replacements. The output
projection returns its input, and the model's loss_function computes projection and cross entropy of that input by
nn.linear_loss. The model still adds other terms to its loss, such as the auxiliary loss of a mixture. This is right
only where nothing lies between the projection and the standard loss, and nothing else reads the logits: why_whole()
tries that beforehand.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.batches import ATTRIBUTE, checked
from hqsweep.models.conversion import note_call, watched
from hqsweep.models.hf import Around, causal_lm_loss, unpacked
from hqsweep.models.kinds import is_sharded
from hqsweep.models.linear import ConvertedLinear, LinearPart, call_dtype, output_projection
from hqsweep.nn.core.call import LinearCall
from hqsweep.nn.core.context import current, use_kernels
from hqsweep.nn.core.module import PARTS
from hqsweep.nn.core.options import LinearOptions
from hqsweep.nn.linear_loss import product_cross_entropy
from hqsweep.parallel.wire.local import is_spread
from hqsweep.recipe.argument import module_quantizers
from hqsweep.recipe.sections import LinearQuantizers

TAKES = "it must be of Hugging Face, have a method loss(tokens, targets), or give logits [B, T, V] for [B, T]"
TOKENS = 8
"""Tokens of check_causal's trial."""
LEAK = 1e-4
"""The least change of logits, relative to the largest, that is not rounding. Where a token changes the sizes of
products, as in a mixture of experts, float32 sums have another order."""


def model_loss(
    model: nn.Module, inputs: Tensor, targets: Tensor, around: Around = nullcontext
) -> tuple[Tensor, Tensor | None]:
    """(cross entropy, auxiliary loss or None), each [], of inputs and targets, int64 [B, T]; a training minimizes their
    sum.

    A Hugging Face model computes its own loss, with its forward in the context `around`. A model with a method `loss`
    returns one or both from loss(inputs, targets). Any other model returns logits [B, T, V], bare, first in a tuple or
    as `logits`; the loss is their mean cross entropy in float32. UserError for any other output. A model that has a
    models.batches.BatchLoss computes that, of inputs as bytes.
    """
    if (other := model.__dict__.get(ATTRIBUTE)) is not None:
        with around():
            return other(model, inputs, targets)
    if is_hugging_face(model):
        return causal_lm_loss(model, inputs, targets, around)
    own = getattr(model, "loss", None)
    if callable(own):
        return checked(own(inputs, targets), f"model: {type(model).__name__}.loss")
    return F.cross_entropy(logits_of(model, inputs).flatten(0, -2).float(), targets.flatten()), None


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the logits [B, T, V] of a model without its own loss. UserError if it returns another result."""
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


TOKENS = 8
"""Tokens of the trial."""
TOLERANCE = 1e-5
"""The relative tolerance of the trial's losses, which are float32 sums in another order."""
BETWEEN = "something lies between its output projection and its loss"
FORWARDS = (nn.Linear.forward, ConvertedLinear.forward)


class Changed(RuntimeError):
    """loss_function did not get the output of the replaced projection."""


class HeadLoss:
    """The loss of a model by chunks, in `with head_loss(): model(input_ids=..., labels=y, shift_labels=y)`.

    Values equal the projection in its own arithmetic (bfloat16, or the recipe's where it is converted), and a cross
    entropy of its logits in float32. The gradient of the weight is a float32 sum over chunks. Chunks are formed where
    nn.linear_cross_entropy forms them: on hqsweep's kernels and in bfloat16. If `chunk` is given, they always are, with
    so many rows, a multiple of 128. Elsewhere the model's own loss_function gets its own logits, within the same call.
    Targets are tokens, without -100. Use it only where why_whole() returns None.
    """

    def __init__(self, model: nn.Module, chunk: int | None = None) -> None:
        self.model, self.chunk = model, chunk
        self.head = output_projection(model)
        section, gemm = module_quantizers("format:bf16", "linear", "head")
        self._plain = LinearPart("head", section, gemm, torch.bfloat16, LinearOptions())

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context of a forward. It is not for a forward in torch.compile, which may have compiled the model's
        layers or its body."""
        if is_sharded(self.head):  # whose weight is whole in its own forward alone
            yield
            return
        inputs: list[Tensor] = []
        with _replaced(self.model, self.head, inputs, self._loss):
            yield

    def _loss(self, h: Tensor, targets: Tensor) -> Tensor | None:
        """Return the mean cross entropy, or None if it is not computed here."""
        weight, part = self.head.weight, None
        dtype = call_dtype(h, weight)
        if is_spread(weight) or dtype is not torch.bfloat16 or not (self.chunk or use_kernels(h)):
            return None
        if isinstance(self.head, ConvertedLinear):
            part = getattr(self.head, PARTS)[0]
            call = part.call(weight, dtype)
        else:
            call = _unseen(LinearCall(**self._plain.linear_facts()), self._plain.quantizers)
        if call.quantizers.output is not None:
            return None
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # gradients, which are neither counted nor moved
            loss = product_cross_entropy(call, h, weight, targets.to(h.device), self.chunk)
        if part is not None:
            note_call(part)
            loss = watched(part, loss)
        return loss


def why_whole(model: nn.Module) -> str | None:
    """Why the loss of a model needs its logits whole, as a part of a sentence, or None: then HeadLoss gives it.

    It runs two forwards of a few tokens in evaluation, of the model as it is and with the projection taken out.
    """
    if not is_hugging_face(model):
        return "it is of no Hugging Face model"
    head, loss = output_projection(model), getattr(model.loss_function, "__name__", "one of its own")
    if loss != "ForCausalLMLoss":
        return f"its loss is {loss}"
    if head is None or type(head).forward not in FORWARDS or "forward" in head.__dict__:
        return "its output projection is no plain linear"
    if head.bias is not None:
        return "its output projection has a bias"
    if _has_hooks(head):
        return "its output projection has hooks"
    try:
        own, apart = _trial(model, head)
    except Changed:
        return BETWEEN
    except Exception as error:
        return f"a trial of it raised {type(error).__name__}"
    if not torch.isclose(own, apart, rtol=TOLERANCE, atol=0).item():
        return BETWEEN
    return None


@torch.no_grad()
def _trial(model: nn.Module, head: nn.Module) -> tuple[Tensor, Tensor]:
    """The losses of the model as it is, and of its projection's input."""
    device, training = head.weight.device, model.training
    tokens = torch.arange(TOKENS, device=device).remainder(len(head.weight))[None]
    inputs: list[Tensor] = []
    own_loss = model.loss_function

    def of_input(h: Tensor, targets: Tensor) -> Tensor:
        logits = type(head).forward(head, h)
        return own_loss(logits=logits, labels=targets, vocab_size=len(head.weight), shift_labels=targets)

    model.eval()
    try:
        call = {"input_ids": tokens, "labels": tokens, "shift_labels": tokens, "use_cache": False}
        own = model(**call).loss
        with _replaced(model, head, inputs, of_input):
            return own, model(**call).loss
    finally:
        model.train(training)


@contextmanager
def _replaced(model: nn.Module, head: nn.Module, inputs: list[Tensor], loss_of: Any) -> Iterator[None]:
    """Within this context the projection returns its input, and the loss_function is loss_of(input, targets), or the
    model's own where that gives None."""
    own_loss, own_is_set = model.loss_function, "_loss_function" in model.__dict__

    def keep(h: Tensor) -> Tensor:
        inputs.append(h)
        return h

    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        h, targets = inputs.pop(), options.get("shift_labels")
        if logits is not h or inputs:
            raise Changed(BETWEEN)
        others = [name for name, value in options.items() if name != "shift_labels" and value is not None]
        loss = None
        if targets is not None and not others and vocab_size == len(head.weight):
            loss = loss_of(h, targets)
        if loss is None:
            loss = own_loss(logits=type(head).forward(head, h), labels=labels, vocab_size=vocab_size, **options)
        return loss

    head.forward, model.loss_function = keep, loss_function
    try:
        yield
    finally:
        del head.forward
        if own_is_set:
            model.loss_function = own_loss
        else:
            del model._loss_function


def _unseen(call: LinearCall, quantizers: LinearQuantizers) -> LinearCall:
    """The call of a projection that no recipe takes: neither autocast nor a sample of error statistics reaches it."""
    return replace(call, quantizers=quantizers, context=replace(current(), probe=None), workspace=None)


def _has_hooks(module: nn.Module) -> bool:
    return any(
        len(hooks) for name, hooks in vars(module).items() if name.endswith("_hooks") and "state_dict" not in name
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def check_causal(model: nn.Module, vocab_size: int) -> None:
    """Raise UserError for a model whose logits change with a later token.

    A model with its own loss, or one that does not run on a few tokens on its device, passes.
    """
    if not is_hugging_face(model) and callable(getattr(model, "loss", None)):
        return
    tokens = torch.arange(TOKENS, device=next(model.parameters()).device).remainder(vocab_size)[None]
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % vocab_size
    training = model.training
    model.eval()
    try:
        logits, changed = _repeated_logits(model, tokens), _repeated_logits(model, other)
    except Exception:  # the training raises it
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
    around = unpacked() if "transformers" in sys.modules else nullcontext()  # whose import takes seconds
    with torch.random.fork_rng(devices=[]), around:
        torch.manual_seed(0)
        options = {"input_ids": tokens, "use_cache": False} if is_hugging_face(model) else {}
        return model(**options).logits if options else logits_of(model, tokens)
