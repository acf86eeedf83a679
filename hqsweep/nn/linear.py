"""Linear: y = x @ w.T + b with each of its three GEMMs on operands of the recipe's formats."""

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from hqsweep.formats import RngKey
from hqsweep.gemm import mm_t
from hqsweep.nn.context import Context, current
from hqsweep.nn.module import Boundary, QuantizedModule
from hqsweep.nn.weight import rounded
from hqsweep.quant import LinearQuantizers, QuantizerRole, flatten, unflatten
from hqsweep.quant.hybrid import DIRECTIONS


@dataclass(frozen=True, kw_only=True)
class _Call:
    """All that one call of the function below needs beside tensors."""

    name: str
    quantizers: LinearQuantizers
    dtype: torch.dtype
    context: Context

    def key(self, tensor: str) -> RngKey:
        return self.context.key(str(QuantizerRole("linear", tensor, self.name)))

    def probe_tensor(self, tensor: str, x: Tensor) -> None:
        if self.context.probe:
            self.context.probe.tensor(self.name, tensor, x, getattr(self.quantizers, tensor), self.key(tensor))

    def probe_gemm(self, gemm: str, a: Tensor, b: Tensor, actual: Tensor) -> None:
        if self.context.probe:
            self.context.probe.gemm(self.name, gemm, a, b, actual)


class _LinearFunction(torch.autograd.Function):
    """Saves the columnwise operand of x as codes, and w itself: w's columnwise operand is made again in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, call: _Call) -> Tensor:
        q, w = call.quantizers, weight.to(call.dtype)
        column = "codes" if ctx.needs_input_grad[1] else None
        x_made = q.input.quantize(x, rowwise="exact", columnwise=column, key=call.key("input"))
        w_made = q.weight.quantize(w, rowwise="exact", columnwise=None, key=call.key("weight"))
        y = mm_t(x_made.rowwise, w_made.rowwise, out_dtype=call.dtype)
        call.probe_tensor("input", x)
        call.probe_tensor("weight", w)
        call.probe_gemm("fprop", x, w, y)
        saved, ctx.skeleton = [], None
        if ctx.needs_input_grad[1]:
            saved, ctx.skeleton = flatten(x_made.columnwise)
        ctx.call, ctx.probed_x = call, x if call.context.probe else None
        ctx.save_for_backward(weight, *saved)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        call, q = ctx.call, ctx.call.quantizers
        weight, *saved = ctx.saved_tensors
        dy, w = dy.to(call.dtype), weight.to(call.dtype)
        dx = dw = None
        call.probe_tensor("grad_output", dy)
        wanted = ("exact" if needed else None for needed in ctx.needs_input_grad[:2])
        dy_made = q.grad_output.quantize(dy, **dict(zip(DIRECTIONS, wanted, strict=True)), key=call.key("grad_output"))
        if ctx.needs_input_grad[0]:
            w_made = q.weight.quantize(w, rowwise=None, columnwise="exact", key=call.key("weight"))
            dx = mm_t(dy_made.rowwise, w_made.columnwise, out_dtype=call.dtype)
            call.probe_gemm("dgrad", dy, w.t(), dx)
            dx = rounded(dx, q.grad_input, call.key("grad_input"))
        if ctx.needs_input_grad[1]:
            x_column = unflatten(saved, ctx.skeleton)
            dw = mm_t(dy_made.columnwise, x_column, out_dtype=weight.dtype)
            if ctx.probed_x is not None:
                call.probe_gemm("wgrad", dy.t(), ctx.probed_x.t(), dw)
        return dx, dw, None


class Linear(QuantizedModule):
    """y [..., N] = x [..., K] @ weight [N, K].T (+ bias [N]).

    x is rounded to `dtype` before quantization, y and dx are returned in `dtype`; weight stays in its own dtype (FP32
    master) and receives dw in it, unrounded. The role of each slot is QuantizerRole("linear", tensor, name). With
    output_quantizer_role (grad_input_quantizer_role), the role of whoever reads y (dx), y (dx) is rounded to the
    rowwise values of that role's quantizer; gradients pass that rounding unchanged.
    """

    module_type = "linear"
    BOUNDARIES = MappingProxyType({"output": "output_quantizer_role", "grad_input": "grad_input_quantizer_role"})
    output_quantizer_role = Boundary("output")
    grad_input_quantizer_role = Boundary("grad_input")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        quantizers: LinearQuantizers,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.name = name
        self.quantizers = quantizers
        self.dtype = dtype
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.normal_(self.weight, std=1 / math.sqrt(in_features))

    def forward(self, x: Tensor) -> Tensor:
        call = _Call(name=self.name, quantizers=self.active_quantizers(), dtype=self.dtype, context=current())
        rows = x.reshape(-1, x.shape[-1]).to(self.dtype)
        y = _LinearFunction.apply(rows, self.weight, call)
        if self.bias is not None:
            y = y + self.bias.to(self.dtype)
        y = rounded(y, call.quantizers.output, call.key("output"))
        return y.view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        q = self.quantizers
        return f"{self.name}: input {q.input}, weight {q.weight}, grad_output {q.grad_output}"
