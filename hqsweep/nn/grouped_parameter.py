"""The weights and biases of a grouped linear: one parameter for each expert, or one for all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.delayed import DelayedStates, Quantizers
from hqsweep.nn.parameter import gemm_weight, link_states
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.roles import QuantizerRole


class ExpertStates(nn.ModuleList):
    """The states of delayed scaling of each expert: "3.input_rowwise" in a state_dict is one of expert 3."""

    def __init__(self, experts: int) -> None:
        super().__init__(DelayedStates() for _ in range(experts))

    def add(self, quantizers: Quantizers) -> None:
        """DelayedStates.add for every expert, which all have these quantizers."""
        for states in self:
            states.add(quantizers)

    def keep(self, quantizers: Quantizers) -> None:
        """DelayedStates.keep for every expert, which all have these quantizers."""
        for states in self:
            states.keep(quantizers)

    def reset_parameters(self) -> None:
        """Forget everything."""
        for states in self:
            for state in states.values():
                state.reset_parameters()


def group_weights(
    weight: Tensor,
    quantizer: HybridQuantizer,
    role: QuantizerRole,
    dtype: torch.dtype,
    states: ExpertStates,
    *,
    single: bool,
) -> list[nn.Parameter]:
    """A parameter [N, K] for each expert of weight [E, N, K], or a single one for all, as gemm_weight makes them."""
    if single:
        return [gemm_weight(weight, quantizer, role, dtype, states)]
    roles = [QuantizerRole(role.module_type, role.tensor_type, role.name, expert) for expert in range(len(weight))]
    return [
        gemm_weight(part.clone(), quantizer, own, dtype, state)
        for part, own, state in zip(weight, roles, states, strict=True)
    ]


def link_group_states(weights: Sequence[Tensor], states: Sequence[DelayedStates]) -> None:
    """link_states for every expert."""
    if weights[0].dim() == 3:
        return link_states(weights[0], states)
    for weight, own in zip(weights, states, strict=True):
        link_states(weight, own)


def regroup(state: dict[str, Any], prefix: str, name: str, experts: int, *, single: bool) -> None:
    """Have a state_dict name a parameter as the module does: "weight" [E, ...], or "weight0" [...] and so on.

    What is there under the other names is stacked, or taken apart; nothing else is touched.
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
