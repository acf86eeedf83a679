"""nn.Linear, and Hugging Face's Conv1D, by a recipe; and the linear that makes a language model's logits."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hqsweep.errors import UserError
from hqsweep.models.conversion import note_call, watched
from hqsweep.models.kinds import PLAIN, SwapKind
from hqsweep.nn.core.call import LinearCall
from hqsweep.nn.core.context import current
from hqsweep.nn.core.guards import in_autocast, untraced
from hqsweep.nn.core.module import PARTS, QuantizedModule
from hqsweep.nn.core.options import LinearOptions
from hqsweep.nn.core.parameter import is_held
from hqsweep.nn.linears import LinearBase, as_rows, linear_product
from hqsweep.ops.quantize.kernels import DTYPES, in_dtype
from hqsweep.parallel.wire.local import is_spread
from hqsweep.recipe.argument import module_quantizers
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.products import GemmModule, linear_module


class LinearPart(LinearBase):
    """The product of a converted linear: y [..., N] = x [..., K] @ weight [N, K].T (+ bias [N]). A call gives its
    tensors and its dtype. Everything else equals hqsweep.nn.Linear, to the byte."""

    module_type = "linear"
    weight_name = "weight"

    def call(self, weight: Tensor, dtype: torch.dtype) -> LinearCall:
        """The LinearCall of this weight in this dtype; UserError as check_dtype raises it."""
        check_dtype(self, weight, dtype)
        return LinearCall(**(self.linear_facts() | {"dtype": dtype}))

    def is_identity(self, dtype: torch.dtype) -> bool:
        """Whether the recipe asks for the plain product in this dtype."""
        identity = self.identity()
        return identity is not None and identity.dtype is dtype


def call_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of torch.autocast where it is on, else of the weight, which may have moved since it was converted."""
    return torch.get_autocast_dtype(x.device.type) if in_autocast(x.device) else weight.dtype


def check_dtype(part: LinearBase, weight: Tensor, dtype: torch.dtype) -> None:
    """UserError for a product in another dtype than float32, bfloat16 and float16. UserError, too, for a held weight
    that was quantized from another dtype than the product's: its values differ from the plain weight's."""
    if dtype not in DTYPES:
        raise UserError(f"{part.name}: the dtype of its product is {dtype}; it takes {', '.join(map(str, DTYPES))}")
    if is_held([weight]) and weight.source_dtype is not dtype:
        raise UserError(
            f"{part.name}: its weight is held quantized from values in {weight.source_dtype}, but its product is in"
            f" {dtype}; convert it with dtype={dtype}, or call it in {weight.source_dtype}"
        )


class ByPart:
    """The forward of a converted module with one product.

    If every slot is an identity of the call's dtype, its own forward runs, and the results are equal to the bit. On a
    step with a probe, the same product runs here.
    """

    def forward(self, input: Tensor) -> Tensor:
        part = getattr(self, PARTS)[0]
        note_call(part)
        if not torch.compiler.is_compiling() and is_spread(self.weight):
            raise UserError(
                f"{part.name}: its weight is a DTensor; tensor parallelism is not supported, FSDP and DDP are"
            )
        dtype = call_dtype(input, self.weight)
        if is_held([self.weight]):
            y = _held_product(self, input, dtype)
        elif not part.is_identity(dtype):
            y = linear_product(part.call(self.weight, dtype), input, self.matrix(self.weight), self.bias)
        elif current().probe is None:
            y = super().forward(input)
        else:
            y = probed_product(part.call(self.weight, dtype), self.product, input, self.matrix(self.weight))
        return watched(part, y)

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return f"{own}{', ' if own else ''}{getattr(self, PARTS)[0].extra_repr()}"


@untraced
def _held_product(module: ByPart, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A trace cannot take operands out of a weight that is held in them."""
    weight = module.matrix(module.weight)
    return linear_product(getattr(module, PARTS)[0].call(module.weight, dtype), x, weight, module.bias)


class ConvertedLinear(ByPart, nn.Linear):
    """An nn.Linear that computes by its part."""

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight [N, K]."""
        return weight

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The module's own forward, for matrix(weight)."""
        return F.linear(x, weight, self.bias)


setattr(ConvertedLinear, PLAIN, (ConvertedLinear, nn.Linear))


class ConvertedConv1D(ByPart):
    """A Conv1D of transformers, whose weight is [K, N], that computes by its part."""

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight [N, K], as a view."""
        return weight.t()

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The module's own forward, for matrix(weight)."""
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), weight.t())
        return y.view(*x.shape[:-1], y.shape[-1])


class LinearKind(SwapKind):
    """nn.Linear, and its subclasses that have its forward."""

    name = "linear"
    converted = ConvertedLinear

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def fault(self, module: nn.Module) -> str | None:
        if type(module).forward not in (nn.Linear.forward, ConvertedLinear.forward):
            return f"{type(module).__name__} has a forward of its own"
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention reads its weight and never calls it"
        return weight_fault(module.weight)

    def gemm_modules(self, module: nn.Module, name: str) -> list[GemmModule]:
        n, k = module.weight.shape
        return [linear_module(name, k, n, 0)]

    def parts(self, module: nn.Module, name: str, recipe: AnyRecipe) -> list[LinearPart]:
        quantizers, gemm = module_quantizers(recipe, "linear", name)
        return [LinearPart(name, quantizers, gemm, module.weight.dtype, LinearOptions())]


class Conv1DKind(LinearKind):
    """transformers.pytorch_utils.Conv1D, as in GPT-2."""

    name = "conv1d"
    converted = ConvertedConv1D

    def matches(self, module: nn.Module) -> bool:
        library = sys.modules.get("transformers.pytorch_utils")
        return library is not None and isinstance(module, library.Conv1D)

    def fault(self, module: nn.Module) -> str | None:
        own = sys.modules["transformers.pytorch_utils"].Conv1D.forward
        if type(module).forward not in (own, ByPart.forward):
            return f"{type(module).__name__} has a forward of its own"
        return weight_fault(module.weight)

    def gemm_modules(self, module: nn.Module, name: str) -> list[GemmModule]:
        k, n = module.weight.shape
        return [linear_module(name, k, n, 0)]

    def held_fault(self, module: nn.Module, part: QuantizedModule) -> str:
        return "it lies as [K, N]"


def weight_fault(weight: Tensor) -> str | None:
    """Why a weight cannot be quantized by a recipe; None: it can."""
    if nn.parameter.is_lazy(weight):
        return "its shape is not known before its first call"
    if type(weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__name__}, no plain tensor"
    if weight.layout is not torch.strided or weight.dim() != 2 or weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype} {tuple(weight.shape)}; it takes {', '.join(map(str, DTYPES))} [N, K]"
    return None


class _Shown(torch.autograd.Function):
    """Returns x as it is. Backward passes its gradient to `look`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[Tensor], None]) -> Tensor:
        ctx.look = look
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look(gradient.detach())
        return gradient, None


def probed_product(call: LinearCall, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """Return y [..., N] = product(x, weight), for x [..., K] and weight [N, K]. The probe of the call sees the tensors,
    and the products beside float32 ones."""
    seen: dict[str, Tensor] = {}

    def rows(tensor: Tensor) -> Tensor:
        return in_dtype(as_rows(tensor.detach()), call.dtype)

    def look_at_dy(gradient: Tensor) -> None:
        seen["dy"] = rows(gradient)
        call.probe_parts("grad_output", seen["dy"])

    def look_at_dx(gradient: Tensor) -> None:
        call.probe_gemms("dgrad", [seen["dy"]], [originals[0].t()], [rows(gradient)])

    def look_at_dw(gradient: Tensor) -> None:
        call.probe_gemms("wgrad", [seen["dy"].t()], [inputs.t()], [gradient])

    shown_weight = _Shown.apply(weight, look_at_dw)
    y = product(_Shown.apply(x, look_at_dx), shown_weight)
    inputs, originals = call.probe_forward(rows(x), [weight.detach()], rows(y))
    if y.requires_grad:
        y.register_hook(look_at_dy)
    return y


def output_projection(model: nn.Module) -> nn.Module | None:
    """Return the linear that makes logits of the vocabulary; else None.

    It is the one that the model names (get_output_embeddings, as in Hugging Face), or the last linear, if it has a row
    for each entry of an nn.Embedding.
    """
    said = getattr(model, "get_output_embeddings", None)
    if callable(said):
        try:
            projection = said()
        except (AttributeError, NotImplementedError):
            projection = None
        if isinstance(projection, nn.Linear):
            return projection
    modules = list(model.modules())
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    vocabularies = {module.num_embeddings for module in modules if isinstance(module, nn.Embedding)}
    return linears[-1] if linears and linears[-1].out_features in vocabularies else None
