"""quantized_model_init: modules that are built inside hold their GEMM weights as quantized operands."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.core.context import as_recipe, current
from hqsweep.nn.core.delayed import DelayedStates, ExpertStates
from hqsweep.quant.grouped import GroupedTensor
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
) -> nn.Parameter:
    """Return the parameter of a module: `weight` itself, or inside quantized_model_init its quantized form.

    dtype: the dtype of the module's tensors; weights are rounded to it before they are quantized. states: the module's
    states; for weights [E, N, K] of experts in one parameter, a list of the experts' states.
    """
    init = _INIT.get()
    if init is None:
        return nn.Parameter(weight)
    quantizer = init.change(quantizer if init.recipe is None else init.recipe.quantizer(role))
    options = {"source_dtype": dtype, "key": current().key(str(role))}
    options["states"] = states.of("weight", quantizer, device=weight.device)
    options["preserve_high_precision_init_val"] = init.preserve
    kind = HybridQuantizedTensor if weight.dim() == 2 else GroupedTensor
    held = kind.quantize(weight.detach(), quantizer, **options)
    held.shared.layer = role.name if role.expert is None else f"{role.name}.{role.expert}"
    return nn.Parameter(held)


def expert_parameters(
    weight: Tensor, quantizer: HybridQuantizer, role: QuantizerRole, dtype: torch.dtype, states: ExpertStates
) -> list[nn.Parameter]:
    """Return gemm_weight of every expert of a weight [E, N, K]: separate parameters under separate roles."""
    roles = [QuantizerRole(role.module_type, role.tensor_type, role.name, expert) for expert in range(len(weight))]
    return [
        gemm_weight(part.clone(), quantizer, own, dtype, state)
        for part, own, state in zip(weight, roles, states, strict=True)
    ]


def regroup(state: dict[str, Any], prefix: str, name: str, experts: int, *, single: bool) -> None:
    """Rename a parameter in a state_dict as the module names it: "weight" [E, ...], or "weight0" [...] and so on.

    Entries under the other names are stacked, or split. All other entries stay.
    """
    whole, parts = f"{prefix}{name}", [f"{prefix}{name}{expert}" for expert in range(experts)]
    if single and whole not in state and all(part in state for part in parts):
        state[whole] = stacked([state.pop(part) for part in parts])
    if not single and whole in state and len(state[whole]) == experts:
        state.update(zip(parts, state.pop(whole).unbind(0), strict=True))


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """[E, ...] of E tensors; quantized ones of equal quantizers keep their bytes."""
    held = [part for part in parts if isinstance(part, HybridQuantizedTensor)]
    if len(held) == len(parts) and len({part.quantizer for part in held}) == 1:
        return GroupedTensor.of(held)
    return torch.stack([part.dequantize() if isinstance(part, HybridQuantizedTensor) else part for part in parts])
