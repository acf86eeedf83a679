"""Linear: y = x @ w.T + b with each of its three GEMMs on operands of the recipe's formats."""

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand, RngKey
from hqsweep.gemm import mm_t
from hqsweep.nn.context import Context, current
from hqsweep.nn.module import Boundary, QuantizedModule
from hqsweep.nn.parameter import (
    check_held,
    check_main_grad,
    flatten_weight,
    gemm_weight,
    unflatten_weight,
    weight_operand,
)
from hqsweep.nn.weight import rounded
from hqsweep.quant import (
    HybridQuantizedTensor,
    LinearQuantizers,
    Operand,
    QuantizerRole,
    flatten,
    unflatten,
)
from hqsweep.quant.hybrid import DIRECTIONS, Direction


@dataclass(frozen=True, kw_only=True)
class _Call:
    """All that one call of the function below needs beside tensors."""

    name: str
    quantizers: LinearQuantizers
    dtype: torch.dtype
    context: Context
    main_grad: bool
    grad: bool
    """Whether autograd records: without it nothing of a direction that only backward reads is made."""

    def key(self, tensor: str) -> RngKey:
        return self.context.key(str(QuantizerRole("linear", tensor, self.name)))

    def weight(self, weight: Tensor | Operand, direction: Direction) -> Operand | ExactOperand:
        return weight_operand(weight, direction, self.quantizers.weight, self.dtype, self.key("weight"))

    def check_weight(self, weight: Tensor, needs_dx: bool, needs_dw: bool) -> None:
        """UserError, with the name of the module, for a weight that one of the GEMMs could not use."""
        try:
            if isinstance(weight, HybridQuantizedTensor):
                for direction in DIRECTIONS[: 1 + needs_dx]:
                    check_held(weight, direction, self.quantizers.weight)
            if self.main_grad and needs_dw:
                check_main_grad(weight)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

    def probe_weight(self, weight: Tensor) -> Tensor:
        """The high-precision weight, probed. For one that is held quantized that is the probe's original of the layer;
        without one the values held stand in for it in the errors of GEMMs, and no error of its own is reported."""
        if isinstance(weight, HybridQuantizedTensor):
            original = self.context.probe.originals.get(self.name)
            if original is None:
                return weight.dequantize(self.dtype)
            weight = original
        weight = weight.to(self.dtype)
        self.probe_tensor("weight", weight)
        return weight

    def probe_tensor(self, tensor: str, x: Tensor) -> None:
        if self.context.probe:
            self.context.probe.tensor(self.name, tensor, x, getattr(self.quantizers, tensor), self.key(tensor))

    def probe_gemm(self, gemm: str, a: Tensor, b: Tensor, actual: Tensor) -> None:
        if self.context.probe:
            self.context.probe.gemm(self.name, gemm, a, b, actual)


class _LinearFunction(torch.autograd.Function):
    """Saves the columnwise operand of x as codes, and of w what flatten_weight gives: the columnwise operand that is
    held, or w itself, of which it is made again in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, call: _Call) -> Tensor:
        needs_dx, needs_dw = (needed and call.grad for needed in ctx.needs_input_grad[:2])
        call.check_weight(weight, needs_dx, needs_dw)
        column = "codes" if needs_dw else None
        x_made = call.quantizers.input.quantize(x, rowwise="exact", columnwise=column, key=call.key("input"))
        y = mm_t(x_made.rowwise, call.weight(weight, "rowwise"), out_dtype=call.dtype)
        ctx.probed = None
        if call.context.probe:
            call.probe_tensor("input", x)
            ctx.probed = x, call.probe_weight(weight)
            call.probe_gemm("fprop", *ctx.probed, y)
        held, ctx.weight_skeleton = flatten_weight(weight) if needs_dx else ([], None)
        saved, ctx.skeleton = flatten(x_made.columnwise) if needs_dw else ([], None)
        ctx.call, ctx.held, ctx.dw_dtype = call, len(held), torch.float32 if call.main_grad else weight.dtype
        ctx.weight = weight if call.main_grad else None
        ctx.save_for_backward(*held, *saved)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        call, (x, w) = ctx.call, ctx.probed or (None, None)
        tensors = ctx.saved_tensors
        held, saved = tensors[: ctx.held], tensors[ctx.held :]
        dy, dx, dw = dy.to(call.dtype), None, None
        call.probe_tensor("grad_output", dy)
        wanted = dict(
            zip(DIRECTIONS, ("exact" if needed else None for needed in ctx.needs_input_grad[:2]), strict=True)
        )
        dy_made = call.quantizers.grad_output.quantize(dy, **wanted, key=call.key("grad_output"))
        if ctx.needs_input_grad[0]:
            w_column = call.weight(unflatten_weight(held, ctx.weight_skeleton), "columnwise")
            dx = mm_t(dy_made.rowwise, w_column, out_dtype=call.dtype)
            if ctx.probed:
                call.probe_gemm("dgrad", dy, w.t(), dx)
            dx = rounded(dx, call.quantizers.grad_input, call.key("grad_input"))
        if ctx.needs_input_grad[1]:
            dw = mm_t(dy_made.columnwise, unflatten(saved, ctx.skeleton), out_dtype=ctx.dw_dtype)
            if ctx.probed:
                call.probe_gemm("wgrad", dy.t(), x.t(), dw)
            if ctx.weight is not None:
                ctx.weight.main_grad.add_(dw)
                dw = None
        return dx, dw, None


class Linear(QuantizedModule):
    """y [..., N] = x [..., K] @ weight [N, K].T (+ bias [N]).

    x is rounded to `dtype` before quantization, y and dx are returned in `dtype`; weight stays in its own dtype (FP32
    master) and receives dw in it, unrounded. Inside quantized_model_init the weight is a HybridQuantizedTensor, whose
    operands are multiplied as they are. fuse_wgrad_accumulation: add dw in FP32 to weight.main_grad, and give autograd
    none. The role of each slot is QuantizerRole("linear", tensor, name). With output_quantizer_role
    (grad_input_quantizer_role), the role of whoever reads y (dx), y (dx) is rounded to the rowwise values of that
    role's quantizer; gradients pass that rounding unchanged. UserError, at the call, for a held weight of another
    quantizer and for a missing main_grad.
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
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.quantizers = quantizers
        self.dtype = dtype
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        weight = nn.init.normal_(torch.empty(out_features, in_features), std=1 / math.sqrt(in_features))
        role = QuantizerRole("linear", "weight", name)
        self.weight = gemm_weight(weight, quantizers.weight, role, dtype)

    def reset_parameters(self) -> None:
        """Draw the weight again, and zero the bias."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[1]))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        options = {"context": current(), "main_grad": self.fuse_wgrad_accumulation, "grad": torch.is_grad_enabled()}
        call = _Call(name=self.name, quantizers=self.active_quantizers(), dtype=self.dtype, **options)
        rows = x.reshape(-1, x.shape[-1]).to(self.dtype)
        y = _LinearFunction.apply(rows, self.weight, call)
        if self.bias is not None:
            y = y + self.bias.to(self.dtype)
        y = rounded(y, call.quantizers.output, call.key("output"))
        return y.view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        q = self.quantizers
        return f"{self.name}: input {q.input}, weight {q.weight}, grad_output {q.grad_output}"
