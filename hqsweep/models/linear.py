"""nn.Linear by a recipe: the class of the module is swapped, and nothing else about it.

A parameter of another class would break ties and be replaced by load_state_dict(assign=True); a `forward` in the
instance would go on computing with the module that a copy was made of. With the class swapped, state_dict, parameters,
ties, hooks, copies and isinstance(module, nn.Linear) stay as they are.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hqsweep.errors import UserError
from hqsweep.models.first_step import watched
from hqsweep.models.kinds import Kind, note_call, parts_of
from hqsweep.nn.context import current
from hqsweep.nn.linear import LinearBase, linear_product
from hqsweep.nn.linear_call import LinearCall
from hqsweep.nn.module import PARTS
from hqsweep.nn.options import LinearOptions
from hqsweep.nn.recipe_argument import module_quantizers
from hqsweep.ops.kernels import DTYPES
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.validate import GemmModule, linear_module


class LinearPart(LinearBase):
    """The product of a converted linear: y [..., N] = x [..., K] @ weight [N, K].T (+ bias [N]), which it is called
    with. Everything is as in hqsweep.nn.Linear, whose bytes it gives, with the dtype of the call."""

    module_type = "linear"

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """UserError for a dtype that is not float32, bfloat16 or float16."""
        if dtype not in DTYPES:
            raise UserError(f"{self.name}: the dtype of its product is {dtype}; it takes {', '.join(map(str, DTYPES))}")
        call = LinearCall(**(self.linear_facts() | {"dtype": dtype}))
        return linear_product(call, x, weight, bias)

    def is_identity(self, dtype: torch.dtype) -> bool:
        """Whether the plain product in this dtype is what the recipe says, and no probe looks."""
        identity = self.active_quantizers().identity
        return identity is not None and identity.dtype is dtype and current().probe is None


def call_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """That of torch.autocast where it is on, else that of the weight, which may have moved since it was converted."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class ConvertedLinear(nn.Linear):
    """An nn.Linear that computes by its part. Where every slot is an identity of the call's dtype, and no probe looks,
    its own forward runs, so that it is equal to the bit."""

    def forward(self, input: Tensor) -> Tensor:
        part = getattr(self, PARTS)[0]
        note_call(part)
        dtype = call_dtype(input, self.weight)
        if part.is_identity(dtype):
            return watched(part, super().forward(input))
        return watched(part, part.product(input, self.weight, self.bias, dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {getattr(self, PARTS)[0].extra_repr()}"


@cache
def converted_class(plain: type[nn.Linear]) -> type[nn.Linear]:
    """The class that takes the place of a class of linears: one for each, since torch.compile guards classes."""
    if plain is nn.Linear:
        return ConvertedLinear
    return type(f"Converted{plain.__name__}", (ConvertedLinear, plain), {"__reduce__": _reduce, "plain": plain})


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    return _rebuilt, (module.plain,), module.__getstate__()


def _rebuilt(plain: type[nn.Linear]) -> nn.Module:
    converted = converted_class(plain)
    return converted.__new__(converted)


def plain_class(converted: type) -> type | None:
    """The class whose place this one takes; None for any other."""
    return nn.Linear if converted is ConvertedLinear else converted.__dict__.get("plain")


class LinearKind(Kind):
    """nn.Linear, and its subclasses with its forward."""

    name = "linear"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def fault(self, module: nn.Module) -> str | None:
        if type(module).forward not in (nn.Linear.forward, ConvertedLinear.forward):
            return f"{type(module).__name__} has a forward of its own"
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention reads its weight and never calls it"
        return weight_fault(module.weight)

    def gemm_modules(self, module: nn.Linear, name: str) -> list[GemmModule]:
        n, k = module.weight.shape
        return [linear_module(name, k, n, 0)]

    def parts(self, module: nn.Linear, name: str, recipe: AnyRecipe) -> list[LinearPart]:
        quantizers, gemm = module_quantizers(recipe, "linear", name)
        return [LinearPart(name, quantizers, gemm, module.weight.dtype, LinearOptions())]

    def swap(self, module: nn.Module) -> None:
        module.__class__ = converted_class(type(module))

    def restore(self, module: nn.Module) -> None:
        module.__class__ = plain_class(type(module))

    def check_restore(self, module: nn.Module) -> None:
        if plain_class(type(module)) is None:
            raise UserError(
                f"{parts_of(module)[0].name}: {type(module).__name__} was made of the converted class afterwards, as"
                " parametrizations and FSDP do; undo that before revert"
            )


def weight_fault(weight: Tensor) -> str | None:
    """Why a weight is none that a recipe can quantize."""
    if nn.parameter.is_lazy(weight):
        return "its shape is not known before its first call"
    if type(weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__name__}, no plain tensor"
    if weight.layout is not torch.strided or weight.dim() != 2 or weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype} {tuple(weight.shape)}; it takes {', '.join(map(str, DTYPES))} [N, K]"
    return None
