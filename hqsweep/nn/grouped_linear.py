"""GroupedLinear: E linears, each for the rows of its own expert, whose GEMMs run together."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.nn.core.delayed import ExpertStates
from hqsweep.nn.core.options import GroupedLinearOptions, gemm_weight
from hqsweep.nn.core.parameter import expert_weights, link_states
from hqsweep.nn.core.wire import Codes
from hqsweep.nn.grouped import ExpertParameters, ExpertSizes, GroupedBase
from hqsweep.ops.splits import Splits
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.argument import RecipeArgument
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.torch_private import local_tensor


class GroupedLinear(GroupedBase):
    """y_e [m_e, N] = x_e [m_e, K] @ weight_e [N, K].T (+ bias_e [N]) for the experts e, whose rows follow each other.

    forward(x [..., K], m_splits): m_splits is the number of rows of each expert, zeros included, as a list or an
    integer tensor. Each expert has the bytes of a separate Linear, with its own scales, blocks, random bits and states
    of delayed scaling. On GPUs some plans of gemm/grouped.py sum in another order. Slots have the roles
    QuantizerRole("grouped_linear", tensor, name, expert), whose quantizers must be equal for all experts.

    Parameters are weight0, weight1, ... and bias0, ...; with single_grouped_weight (single_grouped_bias) one `weight`
    [E, N, K] (`bias` [E, N]). Checkpoints of either kind load into the other. Inside quantized_model_init weights are
    held quantized. recipe: as in Linear. single_grouped_weight saves a copy of all weights at each use, if they have
    the module's dtype.

    Some formats need whole blocks of rows (quantization_alignment). Experts are then padded with zero rows, which are
    dropped again; splits that fit cause no copy. If only a GPU knows the splits, it pads by itself, without a wait. It
    then always copies, into memory with room for any splits, since the host cannot know whether they fit.

    A loop over experts waits for the splits. It runs in these cases: a plan that is a loop (products of float32
    operands; gemm=native except for rows of E4M3 codes; sizes that are no multiples of 8; GPUs for which
    torch._grouped_mm has no kernel), quantizers with their own quantize, and a probe. Without the loop, gradients of
    weights pass through bfloat16, even if weights or main_grad are float32, because torch._grouped_mm stores nothing
    else. Gradients of biases are then sums row by row, another order of additions in float32. Splits on the host cost
    no wait, and a GPU takes torch.bmm if all are equal.

    Boundary slots are as in Linear, one role for all experts. Each expert's rows are rounded by themselves, which waits
    for splits that only a GPU knows.

    UserError, naming tensor and expert, for quantizers that differ among experts; for splits that are no whole numbers,
    negative, not one for each expert, or do not add up to the rows of x; for x of another width.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        name: str,
        recipe: RecipeArgument,
        dtype: torch.dtype = torch.bfloat16,
        options: GroupedLinearOptions = GroupedLinearOptions(),
    ) -> None:
        sizes = ExpertSizes(num_experts, in_features, out_features)
        super().__init__(sizes, name=name, recipe=recipe, dtype=dtype, options=options)
        self.single_grouped_weight = options.single_grouped_weight
        self.single_grouped_bias = options.single_grouped_bias
        self.has_bias = options.bias
        drawn = torch.stack([self._drawn(torch.empty(out_features, in_features)) for _ in range(num_experts)])
        role = QuantizerRole(self.module_type, "weight", name)
        if options.single_grouped_weight:
            one = gemm_weight(drawn, self.quantizers.weight, role, dtype, self.states, GroupedTensor)
            self.register_parameter("weight", one)
        else:
            self._register("weight", expert_parameters(drawn, self.quantizers.weight, role, dtype, self.states))
        if options.bias:
            zeros = torch.zeros(num_experts, out_features)
            self._register(
                "bias", [nn.Parameter(part) for part in ((zeros,) if options.single_grouped_bias else zeros.clone())]
            )

    def _register(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        single = getattr(self, f"single_grouped_{name}")
        for expert, parameter in enumerate(parameters):
            self.register_parameter(name if single else f"{name}{expert}", parameter)

    def _parameters_of(self, name: str) -> list[Tensor]:
        if getattr(self, f"single_grouped_{name}"):
            return [getattr(self, name)]
        return [getattr(self, f"{name}{expert}") for expert in self._numbers]

    @property
    def _numbers(self) -> range:
        """The numbers of the held experts."""
        return range(self.first_expert, self.first_expert + self.num_experts)

    @property
    def weights(self) -> list[Tensor]:
        """One parameter for each expert [N, K], or one for all [E, N, K]."""
        return self._parameters_of("weight")

    @property
    def biases(self) -> list[Tensor]:
        """One parameter for each expert [N], or one for all [E, N]; empty without biases."""
        return self._parameters_of("bias") if self.has_bias else []

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor | Splits, codes: Codes | None = None) -> Tensor:
        own = (self.weights, self.biases) if self.parallel is None else self.parallel.own(self)
        return self.product(x, m_splits, ExpertParameters(*own), codes)

    def expert_weights(self) -> list[Tensor]:
        """Return the weight [N, K] of each expert: parameters, or views of the single parameter."""
        return expert_weights(list(map(local_tensor, self.weights)))

    def hold_experts(self, first: int, count: int) -> None:
        """Reduce the module to some experts, and drop the parameters of all others.

        The kept parameters share no memory with the dropped ones. Parameters of single experts keep their names.
        """
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            if getattr(self, f"single_grouped_{name}"):
                whole = getattr(self, name)
                part = whole.detach()[first : first + count].clone()
                self.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
                continue
            for expert in set(self._numbers) - set(range(first, first + count)):
                delattr(self, f"{name}{expert}")
        super().hold_experts(first, count)

    def _drawn(self, weight: Tensor) -> Tensor:
        return nn.init.normal_(weight, std=1 / math.sqrt(self.in_features))

    def reset_parameters(self) -> None:
        """Draw the weights again, and zero the biases."""
        self.states.reset_parameters()
        link_states(list(map(local_tensor, self.weights)), self.states)
        for weight in self.weights:
            self._drawn(weight)
        for bias in self.biases:
            nn.init.zeros_(bias)

    def set_tensor_parallel_attributes(self, parallel_mode: str | None) -> None:
        """Set Megatron's attributes for tensor parallelism on every parameter.

        These are tensor_model_parallel, partition_dim and partition_stride. "column" cuts output features, "row" input
        features, None neither.
        """
        if parallel_mode not in ("column", "row", None):
            raise UserError(f"{self.name}: parallel_mode is {parallel_mode!r}; it takes 'column', 'row' or None")
        dim = {"column": -2, "row": -1, None: None}[parallel_mode]
        for weight in self.weights:
            _set_parallel(weight, dim)
        for bias in self.biases:
            _set_parallel(bias, -1 if parallel_mode == "column" else None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            single = getattr(self, f"single_grouped_{name}")
            regroup(state_dict, prefix, name, self.num_experts, single=single)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _set_parallel(parameter: Tensor, dim: int | None) -> None:
    parameter.tensor_model_parallel = dim is not None
    parameter.partition_dim = -1 if dim is None else parameter.dim() + dim
    parameter.partition_stride = 1


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
