"""GroupedBase: the products of E experts, each with its own rows, for any class of weights.

For experts that are padded on a device, rows go to their places in a larger matrix of zeros, and come back. Places
differ from each other, so nothing is ever added up, neither here nor in backward.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format
from hqsweep.gemm.native import GemmPlan, GroupGemm, capability_of, gemm_plan
from hqsweep.nn.core.call import NOTHING, LinearCall
from hqsweep.nn.core.delayed import ExpertStates
from hqsweep.nn.core.guards import outside_autocast, returned, untraced
from hqsweep.nn.core.options import GroupedLinearOptions
from hqsweep.nn.core.parameter import is_held
from hqsweep.nn.core.wire import Codes, ExpertRanks
from hqsweep.nn.linears import LinearBase, LinearFunction, as_rows
from hqsweep.ops.quantize.kernels import input_in
from hqsweep.ops.splits import PaddedSplits, Splits
from hqsweep.quant.group import homogeneous
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.argument import RecipeArgument, recipe_or_section
from hqsweep.recipe.pairs import GEMMS
from hqsweep.recipe.products import check_products
from hqsweep.recipe.roles import GRADIENTS, TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sections import LinearQuantizers, slots

NATIVE_MULTIPLE = 16
"""Tensor cores take operands whose number of rows is a multiple of this."""
GROUPED = "grouped_linear"


class ExpertSizes(NamedTuple):
    """E, K and N of the weights [N, K] of E experts."""

    experts: int
    in_features: int
    out_features: int


class ExpertParameters(NamedTuple):
    """The weights and biases of a call: one tensor for each expert, or one for all, whose first axis is the expert."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor] = ()


class GroupedBase(LinearBase):
    """The parts of a GroupedLinear beside its parameters: roles, states, splits, and the way products are computed.

    A subclass names the dtype of its weights, and passes them to `product`.
    """

    module_type = GROUPED
    parallel: ExpertRanks | None = None

    def __init__(
        self,
        sizes: ExpertSizes,
        *,
        name: str,
        recipe: RecipeArgument,
        dtype: torch.dtype,
        options: GroupedLinearOptions,
    ) -> None:
        if sizes.experts < 1:
            raise UserError(f"{name}: num_experts is {sizes.experts}; it takes 1 or more")
        quantizers, gemm = _quantizers(recipe, name, sizes.experts)
        super().__init__(name, quantizers, gemm, dtype, options)
        self.num_experts, self.in_features, self.out_features = sizes
        self.all_experts, self.first_expert = sizes.experts, 0
        self.states = ExpertStates(sizes.experts)
        self.states.add(slots(quantizers))
        self._weight_splits = Splits.uniform(sizes.experts, sizes.out_features)
        self._last_splits: Splits | None = None
        self.plan_capability = options.plan_capability
        self._plans: tuple[LinearQuantizers | None, str, dict[tuple, dict[str, GemmPlan]]] = (None, "", {})

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the weights and of dw."""
        raise NotImplementedError

    def slot_roles(self) -> dict[str, QuantizerRole | None]:
        """Return "input0" -> role, for each tensor of each expert, expert by expert; then one boundary slot for all."""
        return _roles(self.name, self.all_experts) | self.boundary_roles()

    def get_quantizer_roles(self, *, fwd: bool) -> list[QuantizerRole | None]:
        """Return the roles of the forward or backward slots, expert by expert, the boundary slot last."""
        own = [role for role in _roles(self.name, self.all_experts).values() if (role.tensor_type in GRADIENTS) != fwd]
        return [*own, self.output_quantizer_role if fwd else self.grad_input_quantizer_role]

    def chosen(self, resolved: Mapping[QuantizerRole, HybridQuantizer]) -> dict[str, HybridQuantizer | None]:
        """Return one quantizer for each tensor and each boundary slot. UserError if experts differ."""
        section = _section(resolved, self.slot_roles(), self.name, self.all_experts)
        boundaries = {slot: None if role is None else resolved[role] for slot, role in self.boundary_roles().items()}
        return {tensor: getattr(section, tensor) for tensor in TENSOR_TYPES[self.module_type]} | boundaries

    def hold_experts(self, first: int, count: int) -> None:
        """Reduce the module to the experts first to first + count. Slots and states keep their names."""
        self.first_expert, self.num_experts = first, count
        self.states = self.states.part(first, count)
        self.resize()

    def resize(self) -> None:
        """Update the sizes from the present experts and features."""
        self._weight_splits = Splits.uniform(self.num_experts, self.out_features)
        self._last_splits, self._plans = None, (None, "", {})
        self.workspace.clear()

    def linear_facts(self) -> dict[str, Any]:
        return super().linear_facts() | {"first_expert": self.first_expert}

    @property
    def quantization_alignment(self) -> int:
        """In training, the rows of each expert must be a multiple of this. It follows from the formats of this module
        alone."""
        quantizers = self.active_quantizers()
        native = NATIVE_MULTIPLE if self.gemm == "native" else 1
        return math.lcm(native, quantizers.input.row_multiple, quantizers.grad_output.row_multiple)

    @property
    def filling_multiple(self) -> int:
        """The rows of each expert are padded with zeros to a multiple of this, in a call now."""
        return self.quantization_alignment if torch.is_grad_enabled() else 1

    @outside_autocast
    def product(
        self,
        x: Tensor,
        m_splits: Sequence[int] | Tensor | Splits,
        parameters: ExpertParameters,
        codes: Codes | None = None,
    ) -> Tensor:
        """Return y [..., N] of x [..., K]. m_splits: the number of rows of each expert.

        codes: codes of x and of the gradient of y, if rows come as codes from other ranks. Splits are padded then.
        """
        if torch.compiler.is_compiling() and is_held(parameters.weights):
            return self._product_untraced(x, m_splits, parameters, codes)
        if x.shape[-1] != self.in_features:
            raise UserError(f"{self.name}: x has {x.shape[-1]} features, and the experts take {self.in_features}")
        rows = input_in(as_rows(x), self.dtype, self.name)
        splits = self._splits_of(m_splits, len(rows))
        if codes is None:
            y = self._filled_up(rows, splits, parameters)
        else:
            y = self._apply_experts(rows, splits, parameters, codes)
        if self.active_quantizers().output is not None:
            y = LinearCall(**self.linear_facts(), splits=splits).rounded("output", y)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    _product_untraced = untraced(product)

    def _filled_up(self, rows: Tensor, splits: Splits, parameters: ExpertParameters) -> Tensor:
        """Return y of x [M, K], with the rows of experts padded with zeros to quantization_alignment if necessary."""
        multiple = self.filling_multiple
        if isinstance(splits, PaddedSplits) and splits.multiple % multiple == 0:
            return self._apply_experts(rows, splits, parameters)
        if multiple > 1 and splits.sizes is None and len(rows):
            filled = PaddedSplits.over(splits, multiple, rows.device)
            y = self._apply_experts(place_rows(rows, filled.places, filled.rows), filled, parameters)
            return take_rows(y, filled.places)
        padded = splits if splits.sizes is None else splits.padded(multiple)
        if padded is splits:
            return self._apply_experts(rows, splits, parameters)
        parts = zip(rows.split(splits.host), splits.host, padded.host, strict=True)
        filled_rows = torch.cat([F.pad(part, (0, 0, 0, to - size)) for part, size, to in parts])
        y = self._apply_experts(filled_rows, padded, parameters)
        return torch.cat([part[:size] for part, size in zip(y.split(padded.host), splits.host, strict=True)])

    def _splits_of(self, m_splits: Sequence[int] | Tensor | Splits, rows: int) -> Splits:
        """Return the Splits of m_splits. A list that repeats the previous call's returns its Splits, already on the
        device."""
        lasting = isinstance(m_splits, (list, tuple)) and not torch.compiler.is_compiling()
        sizes = tuple(m_splits) if lasting else None
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

    def _apply_experts(
        self, x: Tensor, splits: Splits, parameters: ExpertParameters, codes: Codes | None = None
    ) -> Tensor:
        if self.parallel is not None:
            return self.parallel.product(self, x, splits, parameters, codes)
        weights, biases = parameters
        call = LinearCall(**self.expert_facts(splits, x.device))
        return LinearFunction.apply(x, call, NOTHING, len(weights), *weights, *biases)

    def expert_facts(self, splits: Splits, device: torch.device) -> dict[str, Any]:
        """Return the fields of a LinearCall for rows on a device."""
        facts = self.linear_facts()
        plans = self._plans_of(facts["quantizers"], facts["gemm"], splits, device)
        return facts | {"splits": splits, "weight_splits": self._weight_splits, "plans": plans}

    def _plans_of(
        self, quantizers: LinearQuantizers, gemm_mode: str, splits: Splits, device: torch.device
    ) -> dict[str, GemmPlan]:
        """Return the plans of all three GEMMs. Plans of earlier calls with these quantizers are kept.

        A trace makes its own plans, since its graph may be shared.
        """
        splits_known = (splits.for_plans and splits.sizes is not None, splits.for_plans and splits.equal > 0)
        if torch.compiler.is_compiling():
            return self._planned(quantizers, gemm_mode, splits_known, device)
        known, mode, plans = self._plans
        if known is not quantizers or mode != gemm_mode:
            plans = {}
            self._plans = quantizers, gemm_mode, plans
        key = (device, self.plan_capability, self.fuse_wgrad_accumulation, self.weight_dtype, self.dtype, *splits_known)
        if key not in plans:
            plans[key] = self._planned(quantizers, gemm_mode, splits_known, device)
        return plans[key]

    def _planned(
        self, quantizers: LinearQuantizers, gemm_mode: str, splits_known: tuple[bool, bool], device: torch.device
    ) -> dict[str, GemmPlan]:
        formats = {g: [getattr(getattr(quantizers, t), d) for t, d in pair] for g, pair in GEMMS.items()}
        return {g: self.plan(g, *pair, device, gemm_mode, splits_known) for g, pair in formats.items()}

    def plan(
        self,
        gemm: str,
        a: Format,
        b: Format,
        device: torch.device,
        gemm_mode: str,
        splits_known: tuple[bool, bool] = (True, False),
    ) -> GemmPlan:
        """Return the plan for "fprop", "dgrad" or "wgrad" of these formats.

        splits_known: whether the host knows the splits, and they are equal.
        """
        dw_dtype = torch.float32 if self.fuse_wgrad_accumulation else self.weight_dtype
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


def _roles(name: str, experts: int) -> dict[str, QuantizerRole]:
    module_type = GROUPED
    return {
        f"{tensor}{expert}": QuantizerRole(module_type, tensor, name, expert)
        for expert in range(experts)
        for tensor in TENSOR_TYPES[module_type]
    }


def _quantizers(recipe: RecipeArgument, name: str, experts: int) -> tuple[LinearQuantizers, str]:
    """Return the common quantizers of all experts, and the mode of their GEMMs."""
    section, gemm = recipe_or_section(recipe, GROUPED, name), "exact"
    if not isinstance(section, LinearQuantizers):
        recipe, roles = section, _roles(name, experts)
        section, gemm = _section(recipe.resolve(roles.values()), roles, name, experts), recipe.gemm
    check_products([(GROUPED, name, section)], gemm)
    return section, gemm


def _section(
    resolved: Mapping[QuantizerRole, HybridQuantizer], roles: Mapping[str, QuantizerRole], name: str, experts: int
) -> LinearQuantizers:
    tensors = TENSOR_TYPES[GROUPED]
    of_experts = {t: [resolved[roles[f"{t}{expert}"]] for expert in range(experts)] for t in tensors}
    return LinearQuantizers(**{t: homogeneous(own, f"{name}: {t}") for t, own in of_experts.items()})


def place_rows(x: Tensor, places: Tensor, count: int) -> Tensor:
    """Return [count, D] with row places[i] equal to x[i], all others zero. x: [M, D]; places: int64 [M], all
    different."""
    return _Place.apply(x, places, count)


def take_rows(y: Tensor, places: Tensor) -> Tensor:
    """Return y[places] [M, D] of y [count, D]; the gradient of other rows is zero. places: as in place_rows."""
    return _Take.apply(y, places)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        return returned(x.new_zeros(count, x.shape[1]).index_copy_(0, places, x))

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return take_rows(dy, *ctx.saved_tensors), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(y)
        return y.index_select(0, places)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None]:
        return place_rows(dx, *ctx.saved_tensors, ctx.count), None
