"""GroupedLinear: E linears, each for the rows of its own expert, whose GEMMs run together."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.formats import Format
from hqsweep.gemm.native import capability_of
from hqsweep.gemm.plan import GemmPlan, GroupGemm, gemm_plan
from hqsweep.nn.delayed import ExpertStates
from hqsweep.nn.grouped_rows import place_rows, take_rows
from hqsweep.nn.linear import LinearBase, as_rows
from hqsweep.nn.linear_call import LinearCall
from hqsweep.nn.linear_function import LinearFunction
from hqsweep.nn.options import GroupedLinearOptions
from hqsweep.nn.parameter import expert_parameters, expert_weights, gemm_weight, link_states, regroup
from hqsweep.nn.products import outside_autocast
from hqsweep.nn.recipe_argument import RecipeArgument, recipe_or_section
from hqsweep.ops.kernels import in_dtype
from hqsweep.ops.padding import PaddedSplits
from hqsweep.ops.splits import Splits
from hqsweep.quant.group import homogeneous
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.pairs import GEMMS
from hqsweep.recipe.roles import GRADIENTS, TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sections import LinearQuantizers, slots
from hqsweep.recipe.validate import check_products

NATIVE_MULTIPLE = 16
"""The number that the rows of every operand of tensor cores are a multiple of."""


class GroupedLinear(LinearBase):
    """y_e [m_e, N] = x_e [m_e, K] @ weight_e [N, K].T (+ bias_e [N]) for the experts e, whose rows follow each other.

    forward(x [..., K], m_splits): m_splits is the number of rows of each expert, zeros included, as a list or an
    integer tensor. Every expert is to the byte what a Linear of its own computes, with scales, blocks, random bits and
    states of delayed scaling of its own; on GPUs some plans of gemm/grouped.py sum in another order. Its slots have the
    roles QuantizerRole("grouped_linear", tensor, name, expert), whose quantizers must be equal for all experts.

    Parameters are weight0, weight1, ... and bias0, ...; with single_grouped_weight (single_grouped_bias) one `weight`
    [E, N, K] (`bias` [E, N]). Checkpoints of either load into the other. Inside quantized_model_init weights are held
    quantized. recipe is as that of Linear.

    Where a format contracts whole blocks of rows only (quantization_alignment), rows of zeros fill up the experts that
    need it, and are dropped again; nothing is copied where splits fit. Splits that only a GPU knows are not waited for:
    it fills up by itself, in a copy that has room for any splits and is made even where these fit, for nobody can know
    that without waiting. What does wait for them is a loop over experts: where the plan is one (products of float32
    operands, gemm=native but for rows of E4M3 codes, sizes that are no multiples of 8, GPUs for which torch._grouped_mm
    has no kernel), for quantizers with a quantize of their own, and under a probe. Gradients of weights pass through
    bfloat16 then, also where weights or main_grad are float32, for torch._grouped_mm stores nothing else; gradients of
    biases are sums row by row, another order of additions in float32. Splits that the host is given cost no wait, and
    where all are equal a GPU takes torch.bmm.
    single_grouped_weight spares a copy of all weights at each use where they have the module's dtype.
    Boundary slots are as those of Linear, one role for all experts; the rows of each expert are rounded by themselves,
    which waits for splits that only a GPU knows.

    UserError, naming tensor and expert, for quantizers that differ among experts; for splits that are no whole numbers,
    negative, not one for each expert, or do not add up to the rows of x; for x of another width.
    """

    module_type = "grouped_linear"

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
        if num_experts < 1:
            raise UserError(f"{name}: num_experts is {num_experts}; it takes 1 or more")
        quantizers, gemm = _quantizers(recipe, name, num_experts)
        super().__init__(name, quantizers, gemm, dtype, options)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.single_grouped_weight = options.single_grouped_weight
        self.single_grouped_bias = options.single_grouped_bias
        self.states = ExpertStates(num_experts)
        self.states.add(slots(quantizers))
        self._weight_splits = Splits.uniform(num_experts, out_features)
        self._last_splits: Splits | None = None
        self.plan_capability = options.plan_capability
        self._plans: tuple[LinearQuantizers | None, str, dict[tuple, dict[str, GemmPlan]]] = (None, "", {})
        self.has_bias = options.bias
        drawn = torch.stack([self._drawn(torch.empty(out_features, in_features)) for _ in range(num_experts)])
        role = QuantizerRole(self.module_type, "weight", name)
        if options.single_grouped_weight:
            self.register_parameter("weight", gemm_weight(drawn, quantizers.weight, role, dtype, self.states))
        else:
            self._register("weight", expert_parameters(drawn, quantizers.weight, role, dtype, self.states))
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
        return [getattr(self, f"{name}{expert}") for expert in range(self.num_experts)]

    @property
    def weights(self) -> list[Tensor]:
        """One parameter for each expert [N, K], or one for all [E, N, K]."""
        return self._parameters_of("weight")

    @property
    def biases(self) -> list[Tensor]:
        """The same of biases; empty without."""
        return self._parameters_of("bias") if self.has_bias else []

    def expert_weights(self) -> list[Tensor]:
        """The weight of each expert [N, K]: parameters, or views of the one that they are in."""
        return expert_weights(self.weights)

    def _drawn(self, weight: Tensor) -> Tensor:
        return nn.init.normal_(weight, std=1 / math.sqrt(self.in_features))

    def reset_parameters(self) -> None:
        """Draw the weights again, and zero the biases."""
        self.states.reset_parameters()
        link_states(self.weights, self.states)
        for weight in self.weights:
            self._drawn(weight)
        for bias in self.biases:
            nn.init.zeros_(bias)

    def slot_roles(self) -> dict[str, QuantizerRole | None]:
        """ "input0" -> role, for each tensor of each expert, expert by expert; then the boundary slots, one for all."""
        return _roles(self.name, self.num_experts) | self.boundary_roles()

    def get_quantizer_roles(self, *, fwd: bool) -> list[QuantizerRole | None]:
        """The roles of the forward slots, or of the backward ones, expert by expert, the boundary slot last."""
        own = [role for role in _roles(self.name, self.num_experts).values() if (role.tensor_type in GRADIENTS) != fwd]
        return [*own, self.output_quantizer_role if fwd else self.grad_input_quantizer_role]

    def chosen(self, resolved: Mapping[QuantizerRole, HybridQuantizer]) -> dict[str, HybridQuantizer | None]:
        """One quantizer for each tensor, and for each boundary slot; UserError where experts differ."""
        section = _section(resolved, self.slot_roles(), self.name, self.num_experts)
        boundaries = {slot: None if role is None else resolved[role] for slot, role in self.boundary_roles().items()}
        return {tensor: getattr(section, tensor) for tensor in TENSOR_TYPES[self.module_type]} | boundaries

    @property
    def quantization_alignment(self) -> int:
        """What the rows of each expert must be a multiple of in training, by the formats of this module alone."""
        quantizers = self.active_quantizers()
        native = NATIVE_MULTIPLE if self.gemm == "native" else 1
        return math.lcm(native, quantizers.input.row_multiple, quantizers.grad_output.row_multiple)

    @property
    def filling_multiple(self) -> int:
        """What rows of zeros fill up the rows of each expert to a multiple of, in a call now."""
        return self.quantization_alignment if torch.is_grad_enabled() else 1

    @outside_autocast
    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor | Splits) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise UserError(f"{self.name}: x has {x.shape[-1]} features, and the experts take {self.in_features}")
        rows = in_dtype(as_rows(x), self.dtype)
        splits = self._splits_of(m_splits, len(rows))
        y = self._filled_up(rows, splits)
        if self.active_quantizers().output is not None:
            y = LinearCall(**self.linear_facts(), splits=splits).rounded("output", y)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def _filled_up(self, rows: Tensor, splits: Splits) -> Tensor:
        """y of x [M, K], of experts whose rows are filled up to quantization_alignment with zeros where they must."""
        multiple = self.filling_multiple
        if isinstance(splits, PaddedSplits) and splits.multiple % multiple == 0:
            return self._apply_experts(rows, splits)
        if multiple > 1 and splits.sizes is None and len(rows):
            filled = PaddedSplits.over(splits, multiple, rows.device)
            y = self._apply_experts(place_rows(rows, filled.places, filled.rows), filled)
            return take_rows(y, filled.places)
        padded = splits if splits.sizes is None else splits.padded(multiple)
        if padded is splits:
            return self._apply_experts(rows, splits)
        parts = zip(rows.split(splits.host), splits.host, padded.host, strict=True)
        y = self._apply_experts(torch.cat([F.pad(part, (0, 0, 0, to - size)) for part, size, to in parts]), padded)
        return torch.cat([part[:size] for part, size in zip(y.split(padded.host), splits.host, strict=True)])

    def _splits_of(self, m_splits: Sequence[int] | Tensor | Splits, rows: int) -> Splits:
        """The splits of the call before where a list repeats them: their offsets are on the device already."""
        sizes = tuple(m_splits) if isinstance(m_splits, (list, tuple)) else None
        last = self._last_splits
        if sizes is not None and last is not None and last.sizes == sizes and last.rows == rows:
            return last
        try:
            splits = Splits.of(m_splits, rows, experts=self.num_experts)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None
        if sizes is not None:
            self._last_splits = splits
        return splits

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_last_splits": None, "_plans": (None, "", {})}

    def _apply_experts(self, x: Tensor, splits: Splits) -> Tensor:
        fields = self.linear_facts()
        plans = self._plans_of(fields["quantizers"], fields["gemm"], splits, x.device)
        call = LinearCall(**fields, splits=splits, weight_splits=self._weight_splits, plans=plans)
        weights = self.weights
        return LinearFunction.apply(x, call, len(weights), *weights, *self.biases)

    def _plans_of(
        self, quantizers: LinearQuantizers, gemm_mode: str, splits: Splits, device: torch.device
    ) -> dict[str, GemmPlan]:
        """The plans of all three GEMMs; those that calls under these quantizers have used are kept."""
        known, mode, plans = self._plans
        if known is not quantizers or mode != gemm_mode:
            plans = {}
            self._plans = quantizers, gemm_mode, plans
        splits_known = (splits.sizes is not None, splits.equal > 0)
        key = (device, self.plan_capability, self.fuse_wgrad_accumulation, self.weights[0].dtype, *splits_known)
        if key not in plans:
            formats = {g: [getattr(getattr(quantizers, t), d) for t, d in pair] for g, pair in GEMMS.items()}
            plans[key] = {g: self.plan(g, *pair, device, gemm_mode, splits_known) for g, pair in formats.items()}
        return plans[key]

    def plan(
        self,
        gemm: str,
        a: Format,
        b: Format,
        device: torch.device,
        gemm_mode: str,
        splits_known: tuple[bool, bool] = (True, False),
    ) -> GemmPlan:
        """How "fprop", "dgrad" or "wgrad" of these formats is computed; splits_known: whether the host knows the splits
        and that they are equal."""
        dw_dtype = torch.float32 if self.fuse_wgrad_accumulation else self.weights[0].dtype
        group = GroupGemm(
            gemm=gemm,
            sizes=(self.in_features, self.out_features),
            out_dtype=dw_dtype if gemm == "wgrad" else self.dtype,
            host_splits=splits_known[0],
            equal_splits=splits_known[1],
        )
        return gemm_plan(a, b, self.plan_capability or capability_of(device), gemm_mode, group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}; {self.num_experts} experts [{self.out_features}, {self.in_features}]"

    def set_tensor_parallel_attributes(self, parallel_mode: str | None) -> None:
        """Note on every parameter how tensor parallelism cuts it: tensor_model_parallel, partition_dim and
        partition_stride, as Megatron reads them. "column" cuts output features, "row" input features, None neither."""
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


def _roles(name: str, experts: int) -> dict[str, QuantizerRole]:
    module_type = GroupedLinear.module_type
    return {
        f"{tensor}{expert}": QuantizerRole(module_type, tensor, name, expert)
        for expert in range(experts)
        for tensor in TENSOR_TYPES[module_type]
    }


def _quantizers(recipe: RecipeArgument, name: str, experts: int) -> tuple[LinearQuantizers, str]:
    """The quantizers that all experts have, and the mode of their GEMMs."""
    section, gemm = recipe_or_section(recipe, GroupedLinear.module_type, name), "exact"
    if not isinstance(section, LinearQuantizers):
        recipe, roles = section, _roles(name, experts)
        section, gemm = _section(recipe.resolve(roles.values()), roles, name, experts), recipe.gemm
    check_products([(GroupedLinear.module_type, name, section)], gemm)
    return section, gemm


def _section(
    resolved: Mapping[QuantizerRole, HybridQuantizer], roles: Mapping[str, QuantizerRole], name: str, experts: int
) -> LinearQuantizers:
    tensors = TENSOR_TYPES[GroupedLinear.module_type]
    of_experts = {t: [resolved[roles[f"{t}{expert}"]] for expert in range(experts)] for t in tensors}
    return LinearQuantizers(**{t: homogeneous(own, f"{name}: {t}") for t, own in of_experts.items()})
