"""The three GEMMs of a linear as one autograd function: y = x @ w.T + b, and from dy: dx = dy @ w, dw = dy.T @ x."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand
from hqsweep.nn.call import Call
from hqsweep.nn.parameter import (
    check_held,
    check_main_grad,
    flatten_weight,
    held_operand,
    link_states,
    unflatten_weight,
)
from hqsweep.nn.workspace import WeightWorkspace
from hqsweep.ops.plan import in_dtype
from hqsweep.quant.hybrid import DIRECTIONS, Direction
from hqsweep.quant.operand import HybridOperand, Operand, Skeleton, flatten, unflatten
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.sections import LinearQuantizers


@dataclass(frozen=True, kw_only=True)
class LinearCall(Call):
    """A call of a linear."""

    quantizers: LinearQuantizers
    main_grad: bool
    """Whether dw is added to weight.main_grad."""
    save_original: bool
    """Whether x is saved instead of its columnwise operand, which is then made in backward."""
    workspace: WeightWorkspace | None

    def use_held(self, weight: Tensor) -> None:
        """Note that this step uses a weight that is held quantized in fp8_delayed."""
        link_states(weight, self.states)
        if isinstance(weight, HybridQuantizedTensor) and weight.states:
            replace(weight.states, step=self.context.step, record=self.grad).use()

    def weight(
        self, weight: Tensor | Operand, direction: Direction, *, needs_dx: bool = False
    ) -> Operand | ExactOperand:
        """The operand of one direction, from the workspace when there is one. needs_dx: dgrad will ask for the
        columnwise one, which the workspace then makes from the same read of the weight."""
        quantizer = self.quantizers.weight
        held = held_operand(weight, direction, quantizer)
        if held is not None:
            return held

        def make(directions: Collection[Direction]) -> HybridOperand:
            return self.quantize(
                "weight", in_dtype(weight, self.dtype), **dict.fromkeys(directions, self.product_takes)
            )

        if self.workspace is None:
            return getattr(make([direction]), direction)
        forms = dict.fromkeys([direction, "columnwise"] if needs_dx else [direction], self.product_takes)
        return self.workspace.take([weight], forms, quantizer, self.key("weight"), make)

    def check_weight(self, weight: Tensor, needs_dx: bool, needs_dw: bool) -> None:
        """UserError, with the name of the module, for a weight that one of the GEMMs could not use."""
        try:
            if isinstance(weight, HybridQuantizedTensor):
                for direction in DIRECTIONS[: 1 + needs_dx]:
                    check_held(weight, direction, self.quantizers.weight)
            if self.main_grad and needs_dw:
                check_main_grad(weight)
        except UserError as error:
            raise UserError(f"{self.layer}: {error}") from None

    def saved_input(self, tensors: tuple[Tensor, ...], skeleton: Skeleton | None) -> Operand | ExactOperand:
        """The columnwise operand of x, from what was saved of it."""
        if skeleton is None:
            return self.quantize("input", tensors[0], columnwise=self.product_takes).columnwise
        return unflatten(tensors, skeleton)

    def probe_weight(self, weight: Tensor) -> Tensor:
        """The high-precision weight, probed. For one that is held quantized that is the probe's original of the layer;
        without one the values held stand in for it in the errors of GEMMs, and no error of its own is reported."""
        if isinstance(weight, HybridQuantizedTensor):
            original = self.context.probe.originals.get(self.layer)
            if original is None:
                return weight.dequantize(self.dtype)
            weight = original
        weight = weight.to(self.dtype)
        self.probe_tensor("weight", weight)
        return weight


class LinearFunction(torch.autograd.Function):
    """Saves of x its columnwise operand as codes (with save_original x itself), and of w what flatten_weight gives: the
    columnwise operand that is held, or w itself, of which it is made again in backward. db is the sum of the
    unquantized dy in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        needs_dx, needs_dw = (needed and call.grad for needed in ctx.needs_input_grad[:2])
        call.check_weight(weight, needs_dx, needs_dw)
        call.use_held(weight)
        column = "codes" if needs_dw and not call.save_original else None
        x_made = call.quantize("input", x, rowwise=call.product_takes, columnwise=column)
        y = call.product(x_made.rowwise, call.weight(weight, "rowwise", needs_dx=needs_dx), call.dtype)
        ctx.probed = None
        if call.context.probe:
            call.probe_tensor("input", x)
            ctx.probed = x, call.probe_weight(weight)
            call.probe_gemm("fprop", *ctx.probed, y)
        held, ctx.weight_skeleton = flatten_weight(weight) if needs_dx else ([], None)
        kept = [x] if needs_dw and call.save_original else []
        saved, ctx.skeleton = flatten(x_made.columnwise) if column else (kept, None)
        ctx.call, ctx.held, ctx.dw_dtype = call, len(held), torch.float32 if call.main_grad else weight.dtype
        ctx.weight = weight if call.main_grad else None
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*held, *saved)
        return y if bias is None else y.add_(bias.to(call.dtype))

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        call, (x, w) = ctx.call, ctx.probed or (None, None)
        tensors = ctx.saved_tensors
        held, saved = tensors[: ctx.held], tensors[ctx.held :]
        dy, dx, dw, db = in_dtype(dy, call.dtype), None, None, None
        call.probe_tensor("grad_output", dy)
        row, column = (call.product_takes if needed else None for needed in ctx.needs_input_grad[:2])
        dy_made = call.quantize("grad_output", dy, rowwise=row, columnwise=column)
        if ctx.needs_input_grad[0]:
            w_column = call.weight(unflatten_weight(held, ctx.weight_skeleton), "columnwise")
            dx = call.product(dy_made.rowwise, w_column, call.dtype)
            if ctx.probed:
                call.probe_gemm("dgrad", dy, w.t(), dx)
            dx = call.rounded("grad_input", dx)
        if ctx.needs_input_grad[1]:
            dw = call.product(dy_made.columnwise, call.saved_input(saved, ctx.skeleton), ctx.dw_dtype)
            if ctx.probed:
                call.probe_gemm("wgrad", dy.t(), x.t(), dw)
            if ctx.weight is not None:
                ctx.weight.main_grad.add_(dw)
                dw = None
        if ctx.needs_input_grad[2]:
            db = dy.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None
