"""Recomputation: a part of a model keeps only its inputs, and runs again in backward.

torch.utils.checkpoint, reentrant or not, gives the same bytes as no checkpoint for every module here. Nothing draws
from a generator's state, since random bits are keyed by seed, slot, step and index. Saving has no side effects, and
modules keep no state between calls that would change a second run. torch's functions recompute under the autocast() and
quantization() of the backward pass, which therefore must run inside them. A module refuses a second run elsewhere if it
would give other bytes.
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
    """Return function(*args) by torch.utils.checkpoint without reentry, under this call's quantization() and
    autocast().

    So backward may run outside both. function: a module or a closure over modules that does not draw from torch's
    generators. Tensors in args are kept until backward.
    """
    if torch.compiler.is_compiling():  # which takes no context_fn, and knows both as it traces the function
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    context, recipe = current(), autocast_recipe()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), replayed(context, recipe)

    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
