"""quantized_model_init: modules that are built inside hold their GEMM weights as quantized operands."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.core.context import as_recipe, current
from hqsweep.nn.core.delayed import DelayedStates, ExpertStates
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import Section


@dataclass(frozen=True)
class _Init:
    recipe: AnyRecipe | None
    preserve: bool
    change: Callable[[HybridQuantizer], HybridQuantizer] = lambda quantizer: quantizer
    """A function from the quantizer of a weight to the quantizer in which it is held."""


_INIT: ContextVar[_Init | None] = ContextVar("hqsweep_quantized_model_init", default=None)


@contextmanager
def quantized_model_init(
    *,
    enabled: bool = True,
    recipe: AnyRecipe | Section | HybridQuantizer | str | Mapping[str, Any] | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Build modules inside with quantized GEMM weights: HybridQuantizedTensor, in both directions of their recipe.

    recipe: as autocast takes it. It gives the quantizers of the held weights by their roles; by default each module's
    own recipe does. Modules of hqsweep.compat have no recipe, so they need one here, and the same one in autocast.
    Biases, gains and embeddings stay unquantized. It works under no_grad and on the meta device, where Module.to_empty
    and reset_parameters follow.
    preserve_high_precision_init_val: keep initial values on the CPU, from which an optimizer starts its masters.
    Random bits of +sr are keyed by the surrounding quantization(). UserError for a recipe that does not parse.
    """
    whole = None if recipe is None else as_recipe(recipe, "quantized_model_init")
    token = _INIT.set(_Init(whole, preserve_high_precision_init_val) if enabled else None)
    try:
        yield
    finally:
        _INIT.reset(token)


@contextmanager
def held_in(change: Callable[[HybridQuantizer], HybridQuantizer]) -> Iterator[None]:
    """Hold weights that are built inside, under quantized_model_init, in the quantizer change(quantizer)."""
    init = _INIT.get()
    token = _INIT.set(init and replace(init, change=change))
    try:
        yield
    finally:
        _INIT.reset(token)


def holds_weights() -> bool:
    """Return whether GEMM weights made now are held quantized: inside quantized_model_init."""
    return _INIT.get() is not None


def gemm_weight(
    weight: Tensor,
    quantizer: HybridQuantizer,
    role: QuantizerRole,
    dtype: torch.dtype,
    states: DelayedStates | ExpertStates,
    kind: type[HybridQuantizedTensor] = HybridQuantizedTensor,
) -> nn.Parameter:
    """Return the parameter of a module: `weight` itself, or inside quantized_model_init its quantized form.

    dtype: the dtype of the module's tensors; weights are rounded to it before they are quantized. states: the module's
    states; for weights [E, N, K] of experts in one parameter, a list of the experts' states. kind: the class of the
    quantized form, GroupedTensor for [E, N, K].
    """
    init = _INIT.get()
    if init is None:
        return nn.Parameter(weight)
    quantizer = init.change(quantizer if init.recipe is None else init.recipe.quantizer(role))
    options = {"source_dtype": dtype, "key": current().key(str(role))}
    options["states"] = states.of("weight", quantizer, device=weight.device)
    options["preserve_high_precision_init_val"] = init.preserve
    held = kind.quantize(weight.detach(), quantizer, **options)
    held.shared.layer = role.name if role.expert is None else f"{role.name}.{role.expert}"
    return nn.Parameter(held)
