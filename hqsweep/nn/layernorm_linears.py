"""Linears after a norm: LayerNormLinear, whose norm is quantized as the linear's input, and LayerNormMLP.

LayerNormMLP is norm, linear, activation, linear. On a GPU the two linears and the activation between them are one
autograd function, MLPFunction: the activation and its gradient are quantized as they are computed, and never written in
high precision. All results have the bytes of fc2(activate(fc1(x))). Activations run on hqsweep's CUDA kernels, or by
torch's operators, the reference.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.nn.core.call import (
    NOTHING,
    KnownInput,
    LinearCall,
)
from hqsweep.nn.core.context import current, use_kernels
from hqsweep.nn.core.guards import once_differentiable, outside_autocast
from hqsweep.nn.core.options import LayerNormLinearOptions, MLPOptions
from hqsweep.nn.core.residual import AddsBranch, Branch, is_observed, whole
from hqsweep.nn.linears import (
    Gradient,
    Linear,
    as_rows,
    check_weights,
    delivered,
    input_column,
    keep,
    weight_column,
    wgrad,
)
from hqsweep.nn.norm_embedding import Norm
from hqsweep.ops.elementwise import INPUTS, activation, activation_backward, takes_activation
from hqsweep.ops.quantize.kernels import in_dtype, input_in
from hqsweep.recipe.argument import RecipeArgument, whole_recipe
from hqsweep.recipe.roles import QuantizerRole


class LayerNormLinear(AddsBranch, Linear):
    """y [..., N] = norm(x [..., K]) @ weight [N, K].T (+ bias [N]), with the roles of a Linear.

    The norm is named `name`.norm; see Norm, and Linear for the rest.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        recipe: RecipeArgument,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        options: LayerNormLinearOptions = LayerNormLinearOptions(),
    ) -> None:
        recipe = whole_recipe(recipe, name)
        super().__init__(in_features, out_features, name=name, recipe=recipe, bias=bias, dtype=dtype, options=options)
        norm = {"normalization": options.normalization, "epsilon": options.epsilon}
        self.norm = Norm(in_features, name=f"{name}.norm", recipe=recipe, **norm)

    def forward(self, x: Tensor) -> Tensor:
        return self._added(x, None)[1]

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
        total, h, known = self.normed(x, branch)
        return total, self._product(h, known)

    def normed(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor, KnownInput]:
        """Return norm.added(x, branch, dtype), and the KnownInput of the norm's output.

        KnownInput has the norm's input if the kernel quantizes while it computes; the output then has no values. It has
        the amaxes that the quantizer takes, if the norm's kernel finds them.
        """
        splits_tokens = self.parallel is not None and self.parallel.sequence is not None
        if splits_tokens and not torch.compiler.is_compiling():  # of the output, which is quantized whole
            return self.parallel.normed(self, x, branch)
        return normed_for(self, self.norm, x, branch)


def normed_for(linear: Linear, norm: Norm, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor, KnownInput]:
    """Return norm.added(x, branch, dtype) for a linear that reads it, and the KnownInput of LayerNormLinear.normed."""
    if torch.compiler.is_compiling() or not use_kernels(x):
        return *norm.added(x, branch, linear.dtype), NOTHING
    saves_column = torch.is_grad_enabled() and linear.weight.requires_grad and not linear.save_original_input
    quantizer, outputs = linear.active_quantizers().input, ("codes", "codes" if saves_column else None)
    if not (current().probe or linear.save_original_input) and quantizer.takes_normed(*outputs):
        described = norm.described(x, branch, linear.dtype)
        if described is not None:
            return *described[:2], KnownInput(normed=described[2])
    total, h, *amaxes = norm.measured(x, branch, linear.dtype, *quantizer.takes_amaxes(*outputs))
    return total, h, KnownInput(amaxes=amaxes)


def gelu(x: Tensor) -> Tensor:
    """GELU(x) by its tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """silu(g) * u with [g, u] = x: half the width (Shazeer, arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "swiglu": swiglu}
"""Name -> function. ops.activation.INPUTS has the ratio of the widths of input and output."""


class ActivationFunction(torch.autograd.Function):
    """z bfloat16 [..., W] -> h bfloat16 [..., W / inputs], by the kernels. It saves z. Its gradient cannot be
    differentiated again; the linears around it refuse gradients of gradients."""

    @staticmethod
    def forward(ctx, z: Tensor, kind: str, end: Tensor | None = None) -> Tensor:
        rows = z.reshape(-1, z.shape[-1]).contiguous()
        ctx.kind = kind
        ctx.save_for_backward(rows, end)
        h = activation(rows, kind, False, None, end)[0]
        return h if z.dim() == 2 else h.view(*z.shape[:-1], h.shape[-1])

    @staticmethod
    def backward(ctx, dh: Tensor) -> tuple[Tensor, None, None]:
        rows, end = ctx.saved_tensors
        matrix = in_dtype(dh, rows.dtype).reshape(-1, dh.shape[-1]).contiguous()
        dz = activation_backward(matrix, rows, ctx.kind, False, None, end)[0]
        return dz if dh.dim() == 2 else dz.view(*dh.shape[:-1], dz.shape[-1]), None, None


def activate(z: Tensor, kind: str, end: Tensor | None = None) -> Tensor:
    """Return activation(z) [..., W / inputs] of z [..., W], computed in float32.

    end: int64 [1] on the device, the number of rows in use; later rows may be skipped. The result is bfloat16 if
    use_kernels chooses the kernels and they take z, else float32 by torch's operators. A linear that rounds it to
    bfloat16 reads the same values either way, except for the kernels' exponential.
    """
    if use_kernels(z) and takes_activation(z, kind):
        return ActivationFunction.apply(z, kind, end)
    return ACTIVATIONS[kind](z.float())


class MLPFunction(torch.autograd.Function):
    """x [M, D], w1 [inputs * F, D], w2 [D, F] -> fc2(activation(fc1(x))) [M, D], in bfloat16 on CUDA.

    It saves z = fc1(x) [M, inputs * F], and the inputs of fc1 and fc2 as LinearFunction does. The calls of fc1 and fc2
    have no probe and no boundaries; the call of fc2 has no save_original.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, first: LinearCall, second: LinearCall, kind: str, known: KnownInput, w1: Tensor, w2: Tensor
    ) -> Tensor:
        needs_dx, *_, needs_dw1, needs_dw2 = (needed and first.grad for needed in ctx.needs_input_grad)
        needs_dz = needs_dx or needs_dw1
        check_weights(first, (w1,), needs_dx, needs_dw1)
        column = input_column(first, needs_dw1)
        operands = first.quantize_input(x, known, rowwise=first.product_takes, columnwise=column)
        w = first.weight((w1,), "rowwise", needs_dx=needs_dx)
        z = first.product("fprop", operands.rowwise, w, first.dtype)
        saved1, ctx.first = keep(first, (w1,), x if needs_dw1 else None, operands.columnwise, needs_dx)
        del operands, w  # an exact matrix, perhaps
        check_weights(second, (w2,), needs_dz, needs_dw2)
        outputs = {"rowwise": second.product_takes, "columnwise": input_column(second, needs_dw2)}
        operands = second.quantize_activated("input", z, None, kind, **outputs)
        w = second.weight((w2,), "rowwise", needs_dx=needs_dz)
        y = second.product("fprop", operands.rowwise, w, second.dtype)
        saved2, ctx.second = keep(second, (w2,), None, operands.columnwise, needs_dz)
        ctx.call, ctx.kind, ctx.count = first, kind, len(saved1)
        ctx.save_for_backward(*saved1, *saved2, *([z] if needs_dz else []))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Gradient, ...]:
        tensors, first, second = ctx.saved_tensors, ctx.first.call, ctx.second.call
        needs_dx, *_, needs_dw1, needs_dw2 = ctx.needs_input_grad
        needs_dz, saved = needs_dx or needs_dw1, tensors[ctx.count :]
        dx = dw1 = dw2 = None
        takes_activation = second.product_takes
        outputs = {
            "rowwise": takes_activation if needs_dz else None,
            "columnwise": takes_activation if needs_dw2 else None,
        }
        operands = second.quantize("grad_output", in_dtype(dy, second.dtype), **outputs)
        if needs_dz:
            dh = second.product("dgrad", operands.rowwise, weight_column(ctx.second, saved), second.dtype)
        if needs_dw2:
            h_column = second.saved_input(ctx.second.parts(saved)[1], ctx.second.skeleton)
            (dw2,) = delivered(ctx.second, wgrad(ctx.second, operands.columnwise, h_column), [True])
            del h_column
        if not needs_dz:
            return None, None, None, None, None, None, dw2
        takes_activation = first.product_takes
        outputs = {
            "rowwise": takes_activation if needs_dx else None,
            "columnwise": takes_activation if needs_dw1 else None,
        }
        operands = first.quantize_activated("grad_output", tensors[-1], dh, ctx.kind, **outputs)
        if needs_dx:
            dx = first.product("dgrad", operands.rowwise, weight_column(ctx.first, tensors), first.dtype)
        if needs_dw1:
            x_column = first.saved_input(ctx.first.parts(tensors)[1], ctx.first.skeleton)
            (dw1,) = delivered(ctx.first, wgrad(ctx.first, operands.columnwise, x_column), [True])
        return dx, None, None, None, None, dw1, dw2


def joins(fc1: Linear, fc2: Linear, kind: str, x: Tensor) -> bool:
    """Return whether joined() computes the MLP of x.

    It needs hqsweep's CUDA kernels, and plain linears in bfloat16 without observers. A rank has all, or parts that are
    quantized alone.
    """
    if not use_kernels(x) or current().probe or is_observed(fc1) or is_observed(fc2) or fc2.save_original_input:
        return False
    quantizers = (fc1.active_quantizers(), fc2.active_quantizers())
    bounded = any(q is not None for section in quantizers for q in (section.output, section.grad_input))
    plain = fc1.bias is None and fc2.bias is None and fc1.dtype is fc2.dtype is torch.bfloat16
    if not plain or bounded:
        return False
    if fc1.parallel is None or fc2.parallel is None:
        return fc1.parallel is fc2.parallel and fc1.weight.shape[0] % (8 * INPUTS[kind]) == 0
    return fc1.parallel.joins(fc1, fc2, kind, x)


@outside_autocast
def joined(fc1: Linear, x: Tensor, fc2: Linear, kind: str, known: KnownInput = NOTHING) -> Branch:
    """Return fc2(activation(fc1(x))) of x [..., D] for its next reader (Linear.branch), if joins() allows it.

    If fc1 has a norm, x is the norm's output. known: facts of x that are known before it is quantized.
    """
    if fc1.parallel is not None:
        return fc1.parallel.mlp(fc1, x, fc2, kind, known)
    calls = LinearCall(**fc1.linear_facts()), LinearCall(**fc2.linear_facts())
    rows = input_in(as_rows(x), fc1.dtype, fc1.name)
    y = MLPFunction.apply(rows, *calls, kind, known, fc1.weight, fc2.weight)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


class LayerNormMLP(AddsBranch):
    """x [..., D] -> fc2(activation(fc1(norm(x)))) [..., D]; `ffn` is the width of fc2's input.

    The activation is computed in float32. The linears are named `name`.fc1 and `name`.fc2.
    """

    def __init__(
        self,
        dim: int,
        ffn: int,
        *,
        name: str,
        recipe: RecipeArgument,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        options: MLPOptions = MLPOptions(),
    ) -> None:
        super().__init__()
        if options.activation not in ACTIVATIONS:
            raise ValueError(f"{name}: activation is {options.activation!r}; allowed: {', '.join(ACTIVATIONS)}")
        self.activation, times = options.activation, INPUTS[options.activation]
        shared = {"recipe": whole_recipe(recipe, name), "bias": bias, "dtype": dtype}
        norm = LayerNormLinearOptions(normalization=options.normalization)
        self.fc1 = LayerNormLinear(dim, times * ffn, name=f"{name}.fc1", options=norm, **shared)
        self.fc2 = Linear(ffn, dim, name=f"{name}.fc2", **shared)

    def get_quantizer_roles(self, *, fwd: bool) -> list[QuantizerRole | None]:
        """Return the roles of fc1, then the roles of fc2."""
        return self.fc1.get_quantizer_roles(fwd=fwd) + self.fc2.get_quantizer_roles(fwd=fwd)

    def forward(self, x: Tensor) -> Tensor:
        return whole(self._added(x, None)[1])

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Branch]:
        if joins(self.fc1, self.fc2, self.activation, x):
            total, h, known = self.fc1.normed(x, branch)
            return total, joined(self.fc1, h, self.fc2, self.activation, known)
        total, z = self.fc1.added(x, branch)
        return total, self.fc2.branch(activate(z, self.activation))
