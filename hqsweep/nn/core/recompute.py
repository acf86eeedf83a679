"""Recomputation: a part of a model keeps its inputs only, and runs again in backward to make what backward reads.

torch.utils.checkpoint, reentrant or not, gives the same bytes as no checkpoint for every module here: nothing is drawn
from a generator's state (random bits are keyed by seed, slot, step and index), saving is pure, and modules keep nothing
between calls that a second run would find changed. Those of torch compute again under the autocast() and the
quantization() of the backward pass, which has to run inside of them; a module refuses a second run outside of those of
the first where that would give other bytes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hqsweep.nn.core.context import autocast_recipe, current, replayed

Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...])


def recomputed(function: Callable[..., Outputs], *args: object) -> Outputs:
    """function(*args) by torch.utils.checkpoint without reentry, under the quantization() and autocast() of this call.

    Backward may therefore run outside of both. function: a module or a closure over modules, which draws nothing from
    torch's generators; tensors in args are kept until backward.
    """
    if torch.compiler.is_compiling():  # which takes no context_fn, and knows both as it traces the function
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    context, recipe = current(), autocast_recipe()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), replayed(context, recipe)

    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
