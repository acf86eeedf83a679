"""Stacked experts by a recipe: [E, out, in] parameters whose products go through torch._grouped_mm, as groups.

They are parameters and not modules: a search for linears alone would silently miss most weights of a mixture. As for
linears, the class of their module is swapped. Its forward keeps the original's routing, gate and weighted sum, and
replaces the products. Their bytes equal hqsweep.nn.GroupedLinear's for the same rows.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.models.conversion import note_call, watched
from hqsweep.models.kinds import SwapKind, parts_of
from hqsweep.models.linear import call_dtype, check_dtype
from hqsweep.nn.core.context import current
from hqsweep.nn.core.guards import untraced
from hqsweep.nn.core.options import GroupedLinearOptions
from hqsweep.nn.core.parameter import is_held
from hqsweep.nn.grouped import ExpertParameters, ExpertSizes, GroupedBase
from hqsweep.ops.quantize.kernels import DTYPES
from hqsweep.ops.splits import Splits
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.products import GemmModule, grouped_linear_module

TITAN_NAMES = (("w1_EFD", "w2_EDF", "w3_EFD"), ("w1", "w2", "w3"))
"""The parameters of torchtitan's experts, by its versions: gate, down and up projection."""


class Stack(NamedTuple):
    """The place of one product's weights, for all experts, in the module."""

    weight: str
    """The attribute of the module, which also ends the name of the product's roles."""
    bias: str | None = None
    transposed: bool = False
    """Whether the weights are [E, in, out] instead of [E, out, in]."""

    def weight_of(self, module: nn.Module) -> Tensor:
        """Return the weights [E, out, in], as a view if they are transposed. It reads the attribute, which may be
        parametrized."""
        weight = getattr(module, self.weight)
        return weight.transpose(1, 2) if self.transposed else weight

    def sizes_of(self, module: nn.Module) -> ExpertSizes:
        experts, out_features, in_features = self.weight_of(module).shape
        return ExpertSizes(experts, in_features, out_features)


class ExpertsPart(GroupedBase):
    """One product of all experts: y_e [m_e, N] = x_e [m_e, K] @ weight_e [N, K].T (+ bias_e [N]). A call gives its
    weights and its dtype."""

    def __init__(self, module: nn.Module, stack: Stack, name: str, recipe: AnyRecipe) -> None:
        dtype, options = getattr(module, stack.weight).dtype, GroupedLinearOptions()
        super().__init__(
            stack.sizes_of(module), name=f"{name}.{stack.weight}", recipe=recipe, dtype=dtype, options=options
        )
        self._weight_dtype, self.weight_name = dtype, stack.weight

    @property
    def weight_dtype(self) -> torch.dtype:
        return self._weight_dtype

    def is_plain(self, dtype: torch.dtype, weight: Tensor) -> bool:
        """Whether the recipe asks for the plain product of this weight, which torch.autocast does not reach."""
        identity = self.identity()
        return identity is not None and identity.dtype is dtype is weight.dtype and not is_held([weight])

    def forward(self, x: Tensor, splits: Splits, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """y of x [M, K], weight [E, N, K] and bias [E, N]. UserError as GroupedLinear raises it, and as check_dtype."""
        check_dtype(self, weight, dtype)
        self.dtype, self._weight_dtype = dtype, weight.dtype
        y = self.product(x, splits, ExpertParameters([weight], [] if bias is None else [bias]))
        return watched(self, y)


class ConvertedStacks:
    """Base of the classes that replace a class of experts."""

    @staticmethod
    @abstractmethod
    def stacks(module: nn.Module) -> Sequence[Stack]:
        """Return the products of such a module, converted or not, in the order in which forward unpacks them."""

    @abstractmethod
    def computed(self, products: "Sequence[_Product]", x: Tensor, *routing: Tensor) -> Tensor:
        """The result of the plain forward for its arguments, with these products."""

    def _run(self, plain: Callable[..., Tensor], x: Tensor, *routing: Tensor) -> Tensor:
        """The output by the parts. Where the recipe asks for plain products, the plain forward computes it, so that it
        is equal to the bit."""
        parts, products = parts_of(self), self._products(x)
        for part in parts:
            note_call(part)
        if not all(product.part.is_plain(product.dtype, product.weight) for product in products):
            if torch.compiler.is_compiling() and x.device.type == "cpu":
                return _untraced(self, x, *routing)
            return self.computed(products, x, *routing)
        y = watched(parts[0], plain(x, *routing))
        if current().probe:
            self._show(products, y, x, *routing)
        return y

    def _products(self, x: Tensor) -> "list[_Product]":
        """The products of a call, in the order of `stacks`."""
        pairs = zip(self.stacks(self), parts_of(self), strict=True)
        return [_Product.of(self, stack, part, x) for stack, part in pairs]

    def _show(self, products: "Sequence[_Product]", y: Tensor, x: Tensor, *routing: Tensor) -> None:
        """Show the probe the products of a plain forward, which cannot be observed: they are computed once more, and
        their gradients from the gradient of y."""
        own = [x.detach().requires_grad_(), *(product.weight.detach().requires_grad_() for product in products)]
        apart = [product.apart(weight) for product, weight in zip(products, own[1:], strict=True)]
        no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # none of torch.utils.checkpoint
        with torch.set_grad_enabled(y.requires_grad), no_hooks:
            beside = self.computed(apart, own[0], *(tensor.detach() for tensor in routing))

        def look(dy: Tensor) -> None:
            torch.autograd.grad(beside, own, dy.detach())

        if y.requires_grad:
            y.register_hook(look)

    def _splits(self, counts: Tensor, rows: int) -> Splits:
        """The splits of rows by counts [E], for all products of a call; a probe gets them, too."""
        part = parts_of(self)[0]
        splits = Splits.of(counts, rows, experts=part.num_experts)
        if probe := current().probe:
            probe.experts(part.name.rpartition(".")[0], splits.host, current().microbatch)
        return splits

    def extra_repr(self) -> str:
        return "\n".join([super().extra_repr(), *(part.extra_repr() for part in parts_of(self))]).strip()


def _by_parts(module: ConvertedStacks, x: Tensor, *routing: Tensor) -> Tensor:
    return module.computed(module._products(x), x, *routing)


_untraced = untraced(_by_parts)
"""Splits are numbers on a CPU, and a trace would be made anew for each routing."""


class _Product(NamedTuple):
    """A product of one call."""

    part: ExpertsPart
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module, stack: Stack, part: ExpertsPart, x: Tensor) -> "_Product":
        weight, bias = stack.weight_of(module), None if stack.bias is None else getattr(module, stack.bias)
        return cls(part, weight, bias, call_dtype(x, weight))

    def apart(self, weight: Tensor) -> "_Product":
        """The product with another weight, and with a bias without a gradient."""
        return self._replace(weight=weight, bias=None if self.bias is None else self.bias.detach())

    def __call__(self, rows: Tensor, splits: Splits) -> Tensor:
        return watched(self.part, self.part(rows, splits, self.weight, self.bias, self.dtype))


class ConvertedExperts(ConvertedStacks):
    """Experts of Hugging Face (use_experts_implementation): the routing, gate and sums of its grouped_mm forward."""

    @staticmethod
    def stacks(module: nn.Module) -> list[Stack]:
        names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
        return [Stack(n, f"{n}_bias" if module.has_bias else None, module.is_transposed) for n in names]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self._run(super().forward, hidden_states, top_k_index, top_k_weights)

    def computed(self, products: "Sequence[_Product]", x: Tensor, *routing: Tensor) -> Tensor:
        (up, down), (top_k_index, top_k_weights) = products, routing
        (tokens, top_k), experts = top_k_index.shape, up.part.num_experts
        chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
        ends = torch.searchsorted(chosen, torch.arange(experts + 1, device=chosen.device, dtype=chosen.dtype))
        splits = self._splits(ends.diff(), len(chosen))
        hidden = up(x[order // top_k], splits)
        hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        y = down(hidden, splits)
        if getattr(self, "has_post_expert_norm", False):
            y = self.post_expert_norm(y)
        y = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return y[places].view(tokens, top_k, -1).sum(dim=1).to(x.dtype)


class ConvertedGroupedExperts(ConvertedStacks):
    """torchtitan's GroupedExperts: w2(silu(w1 x) * w3 x) for rows that are sorted by their experts already."""

    @staticmethod
    def stacks(module: nn.Module) -> list[Stack]:
        return [Stack(name) for name in titan_names(module)]

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return self._run(super().forward, x, num_tokens_per_expert)

    def computed(self, products: "Sequence[_Product]", x: Tensor, *routing: Tensor) -> Tensor:
        gate, down, up = products
        splits = self._splits(routing[0].to(torch.int64), len(x))
        activation = getattr(self, "activation_fn", None)
        gated, linear = gate(x, splits), up(x, splits)
        hidden = F.silu(gated) * linear if activation is None else activation(gated, linear)
        return down(hidden, splits).type_as(x)


class ExpertsKind(SwapKind):
    """Base of the kinds of experts."""

    name = "experts"
    option = "experts"
    converted: type[ConvertedStacks]

    def fault(self, module: nn.Module) -> str | None:
        for stack in self.converted.stacks(module):
            weight = getattr(module, stack.weight)
            if type(weight) not in (Tensor, nn.Parameter):
                return f"its {stack.weight} is a {type(weight).__name__}, no plain tensor"
            if weight.dim() != 3 or weight.dtype not in DTYPES:
                takes = f"it takes {', '.join(map(str, DTYPES))} [E, N, K]"
                return f"its {stack.weight} is {weight.dtype} {tuple(weight.shape)}; {takes}"
        return None

    def gemm_modules(self, module: nn.Module, name: str) -> list[GemmModule]:
        sizes = {stack.weight: stack.sizes_of(module) for stack in self.converted.stacks(module)}
        return [grouped_linear_module(f"{name}.{w}", k, n) for w, (_, k, n) in sizes.items()]

    def parts(self, module: nn.Module, name: str, recipe: AnyRecipe) -> list[ExpertsPart]:
        return [ExpertsPart(module, stack, name, recipe) for stack in self.converted.stacks(module)]

    def held_fault(self, module: nn.Module, part: ExpertsPart) -> str | None:
        lies_turned = any(s.transposed for s in self.converted.stacks(module) if s.weight == part.weight_name)
        return "it lies as [E, K, N]" if lies_turned else None


class HuggingFaceExperts(ExpertsKind):
    """Modules that transformers lets compute by functions of its ExpertsInterface."""

    converted = ConvertedExperts

    def matches(self, module: nn.Module) -> bool:
        forward = type(module).forward
        by_interface = getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"
        return by_interface or isinstance(module, ConvertedExperts)

    def fault(self, module: nn.Module) -> str | None:
        if getattr(module, "_is_expert_parallel", False):
            return "its experts are spread over ranks"
        return super().fault(module)


class TorchtitanExperts(ExpertsKind):
    """GroupedExperts of torchtitan, whose forward takes (x, num_tokens_per_expert)."""

    converted = ConvertedGroupedExperts

    def matches(self, module: nn.Module) -> bool:
        if isinstance(module, ConvertedGroupedExperts):
            return True
        code = getattr(type(module).forward, "__code__", None)
        arguments = () if code is None else code.co_varnames[1 : code.co_argcount]
        takes_counts = len(arguments) == 2 and arguments[1].startswith("num_tokens_per_expert")
        return takes_counts and type(module).__name__ == "GroupedExperts" and bool(titan_names(module))


def titan_names(module: nn.Module) -> Sequence[str]:
    """The parameters of gate, down and up projection of a module that has these alone; empty for any other."""
    return next((names for names in TITAN_NAMES if _own(module).keys() == set(names)), ())


class UnknownExperts(ExpertsKind):
    """Modules with stacked weights whose forward is not known: they are listed as skipped."""

    def matches(self, module: nn.Module) -> bool:
        return not type(module).__module__.startswith("torch.") and any(map(_is_stack, _own(module).values()))

    def fault(self, module: nn.Module) -> str:
        stacks = {name: tuple(weight.shape) for name, weight in _own(module).items() if _is_stack(weight)}
        named = " and ".join(f"{name} {shape}" for name, shape in stacks.items())
        return f"what {type(module).__name__} computes of its stacked weights is not known: {named}"


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _is_stack(weight: Tensor) -> bool:
    """Whether it may be one matrix for each expert."""
    return weight.dim() == 3 and weight.is_floating_point() and min(weight.shape) > 1


EXPERT_KINDS = (HuggingFaceExperts(), TorchtitanExperts(), UnknownExperts())
