"""DotProductAttention: softmax(q k^T) v, with the recipe's formats for each of its six GEMMs.

T positions, E the width of a head, S the softmax's output, dS the gradient of its input; a matrix per batch and head:
  scores = q k^T   qkv rowwise,  qkv rowwise      (blocks along E)
  o  = S v         s rowwise,    qkv columnwise   (blocks along T)
  dv = S^T do      s columnwise, do columnwise    (blocks along T)
  dS: do v^T       do rowwise,   qkv rowwise      (blocks along E)
  dq = dS k        dp rowwise,   qkv columnwise   (blocks along T)
  dk = dS^T q      dp columnwise, qkv columnwise  (blocks along T)

A mask can hide positions. A sink takes part in each row's softmax: one logit per head without a value. Its gradient is
-sum(S_sink sum_j(dS_j S_j)). Mask and sink are not operands.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import mm_t
from hqsweep.nn.core.call import Call
from hqsweep.nn.core.guards import once_differentiable, outside_autocast, returned
from hqsweep.nn.core.module import BOUNDARIES, Boundary, QuantizedModule
from hqsweep.nn.core.wire import AttentionRanks
from hqsweep.nn.sdpa import attend
from hqsweep.ops.quantize.kernels import input_in
from hqsweep.ops.quantize.request import Output
from hqsweep.quant.operand import HybridOperand, Operand, flatten, unflatten
from hqsweep.recipe.argument import RecipeArgument, module_quantizers
from hqsweep.recipe.products import attention_faults
from hqsweep.recipe.roles import TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sections import DpaQuantizers

TENSORS = TENSOR_TYPES["dpa"]


@dataclass(frozen=True, kw_only=True)
class AttentionCall(Call):
    """A call of dot-product attention."""

    quantizers: DpaQuantizers
    causal: bool
    scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(E)."""

    def fold(self, tensor: str, x: Tensor, **outputs: Output | None) -> HybridOperand:
        """Probe x [n, T, C], fold it to rows, and quantize it: one amax serves all matrices."""
        rows = x.reshape(-1, x.shape[-1])
        self.probe_tensor(tensor, rows)
        return self.quantize(tensor, rows, **outputs)


def _exact(operand: Operand | ExactOperand) -> ExactOperand:
    return operand.operand() if isinstance(operand, Operand) else operand


def _rows(operand: Operand | ExactOperand, length: int) -> ExactOperand:
    """Return matrices [n, length, C] from a rowwise operand of folded rows."""
    operand = _exact(operand)
    return replace(operand, matrix=operand.matrix.view(-1, length, operand.matrix.shape[1]))


def _columns(operand: Operand | ExactOperand, length: int) -> ExactOperand:
    """Return matrices [n, C, length] from a columnwise operand [C, n * length] of folded rows."""
    operand = _exact(operand)
    return replace(operand, matrix=operand.matrix.view(operand.matrix.shape[0], -1, length).transpose(0, 1))


def _third(operand: ExactOperand, index: int) -> ExactOperand:
    """Return q, k or v of an operand that holds all three."""
    return replace(operand, matrix=operand.matrix.chunk(3)[index])


def _bmm_t(a: ExactOperand, b: ExactOperand) -> Tensor:
    """Return float32 [n, m, l] for a [n, m, k] and b [n, l, k]."""
    return mm_t(a, b, out_dtype=torch.float32)


def _softmax(scores: Tensor, mask: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the softmax of each row of scores, and the sink's share of it, [n, T, 1] or None.

    scores: float32 [n, T, T]; mask: [B, 1 or H, T, T]; sinks: [H]. A row that attends to nothing is zero, as in torch's
    scaled_dot_product_attention.
    """
    n, t, _ = scores.shape
    if mask is not None:
        by_heads = scores.view(mask.shape[0], -1, t, t)
        by_heads = by_heads.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else by_heads + mask
        scores = by_heads.view(n, t, t)
    if sinks is not None:
        column = sinks.float().repeat(n // len(sinks)).view(n, 1, 1).expand(n, t, 1)
        s, of_sink = torch.cat([scores, column], dim=-1).softmax(dim=-1).split([t, 1], dim=-1)
        return s, of_sink
    s = scores.softmax(dim=-1)
    if mask is not None and mask.dtype == torch.bool:
        s = s.view(mask.shape[0], -1, t, t).masked_fill(~mask.any(dim=-1, keepdim=True), 0.0).view(n, t, t)
    return s, None


class _AttentionFunction(torch.autograd.Function):
    """Attention as an autograd function.

    It saves as codes q, k and v in both directions and S columnwise. It also saves S in the call's dtype, and the
    sink's share of each softmax.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, call: AttentionCall
    ) -> Tensor:
        t, width = q.shape[1:]
        qkv = call.fold("qkv", torch.cat([q, k, v]), rowwise="codes", columnwise="codes")
        row, column = _rows(qkv.rowwise, t), _columns(qkv.columnwise, t)
        ctx.scale = 1 / math.sqrt(width) if call.scale is None else call.scale
        scores = _bmm_t(_third(row, 0), _third(row, 1)) * ctx.scale
        if call.causal:
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        s, of_sink = _softmax(scores, mask, sinks)
        s = s.to(call.dtype)
        s_operand = call.fold("s", s, rowwise="exact", columnwise="codes")
        o = _bmm_t(_rows(s_operand.rowwise, t), _third(column, 2)).to(call.dtype)
        parts = [flatten(x) for x in (qkv.rowwise, qkv.columnwise, s_operand.columnwise)]
        ctx.skeletons, ctx.counts = [skeleton for _, skeleton in parts], [len(tensors) for tensors, _ in parts]
        ctx.call, ctx.sinks = call, None if sinks is None else (len(sinks), sinks.dtype)
        ctx.save_for_backward(s, of_sink, *(tensor for tensors, _ in parts for tensor in tensors))
        return returned(o)

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        call, (s, of_sink, *saved) = ctx.call, ctx.saved_tensors
        spans = pairwise(accumulate(ctx.counts, initial=0))
        operands = [unflatten(saved[a:b], k) for (a, b), k in zip(spans, ctx.skeletons, strict=True)]
        t = s.shape[1]
        row, column, s_column = _rows(operands[0], t), _columns(operands[1], t), _columns(operands[2], t)
        do_operand = call.fold("do", do.to(call.dtype), rowwise="exact", columnwise="exact")
        dv = _bmm_t(s_column, _columns(do_operand.columnwise, t))
        ds = _bmm_t(_rows(do_operand.rowwise, t), _third(row, 2))
        mean = (ds * s).sum(dim=-1, keepdim=True)
        ds = s.float() * (ds - mean)
        dsinks = None
        if of_sink is not None:
            heads, dtype = ctx.sinks
            dsinks = -(of_sink * mean).view(-1, heads, t).sum(dim=(0, 2)).to(dtype)
        ds_operand = call.fold("dp", ds.to(call.dtype), rowwise="exact", columnwise="exact")
        dq = _bmm_t(_rows(ds_operand.rowwise, t), _third(column, 1)) * ctx.scale
        dk = _bmm_t(_columns(ds_operand.columnwise, t), _third(column, 0)) * ctx.scale
        gradients = call.rounded("grad_input", torch.cat([dq, dk, dv]).to(call.dtype)).chunk(3)
        return *gradients, None, dsinks, None


def quantized_attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, mask: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return attention of q, k, v [..., T, E] as [..., T, E] in the call's dtype.

    mask: [B, 1 or H, T, T] for q [B, H, T, E]: bool, True for positions to attend to, or floats to add to the scores.
    sinks: [H]. UserError, with the module's name, for a T that blocks do not divide.
    """
    faults = "; ".join(attention_faults({x: call.quantizer(x) for x in TENSORS}, q.shape[-2]))
    if faults:
        raise UserError(f"{call.name} dpa: {faults}")
    folded = (input_in(x.reshape(-1, *x.shape[-2:]), call.dtype, f"{call.name} dpa") for x in (q, k, v))
    return _AttentionFunction.apply(*folded, mask, sinks, call).view(q.shape)


class _RoundGradients(torch.autograd.Function):
    """Return q, k and v unchanged. Backward rounds their gradients together, as the boundary slot grad_input says."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        ctx.call = call
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows = torch.cat([gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]).to(ctx.call.dtype)
        parts = ctx.call.rounded("grad_input", rows).chunk(3)
        return *(part.view(g.shape).to(g.dtype) for part, g in zip(parts, gradients, strict=True)), None


class DotProductAttention(QuantizedModule):
    """softmax(q k^T / sqrt(E)) v for q, k, v [..., T, E] -> [..., T, E], in `dtype`.

    recipe: a Recipe or CustomRecipe, DpaQuantizers, or its text or mapping. It gives one quantizer each for qkv (q, k
    and v share it, and one amax), s (the softmax's output), do (the gradient of the output) and dp (the gradient of the
    softmax's input). If all four have one high precision, torch's scaled_dot_product_attention runs. Otherwise the T x
    T matrices are computed. Leading axes are folded into rows, so T must be a multiple of the blocks along it.
    Roles: QuantizerRole("dpa", tensor, name). Boundary slots are as in Linear; grad_input is the gradients of q, k and
    v.
    UserError for a T that does not fit, for +row_scaled (no batched product takes a factor per row), and for
    gemm=native (it has no batched product).
    """

    module_type = "dpa"
    BOUNDARIES = BOUNDARIES
    output_quantizer_role = Boundary("output")
    grad_input_quantizer_role = Boundary("grad_input")
    parallel: AttentionRanks | None = None
    """How ranks share the heads, or the tokens; None: this rank has all."""

    def __init__(self, *, name: str, recipe: RecipeArgument, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.name, self.dtype = name, dtype
        self.quantizers, self.gemm = module_quantizers(recipe, self.module_type, name)

    def unread_boundaries(self) -> list[QuantizerRole | None]:
        """Roles with only a name, which TransformerEngine passes for attention in place of None."""
        unread = [slot for slot, role in self.boundary_roles().items() if role is None]
        return [QuantizerRole(name=f"{self.name}.dpa_{slot}") for slot in unread]

    @property
    def high_precision(self) -> bool:
        """Whether nothing is quantized."""
        return is_high_precision(self.quantizers)

    @property
    def splits_tokens(self) -> bool:
        """Whether each rank has some of the tokens."""
        return self.parallel is not None and self.parallel.tokens is not None

    def is_plain(self) -> bool:
        """Return whether a call now quantizes nothing, rounds no output or gradient, and has all tokens."""
        quantizers = self.active_quantizers()
        rounds = quantizers.output is not None or quantizers.grad_input is not None
        return not (self.splits_tokens or rounds) and is_high_precision(quantizers)

    @outside_autocast
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
        facts = self.call_facts() | {"causal": is_causal}
        shared = self.parallel is not None
        call = self.parallel.call(facts, math.prod(q.shape[:-3])) if shared else AttentionCall(**facts)
        if is_high_precision(call.quantizers):
            if call.quantizers.grad_input is not None:
                q, k, v = _RoundGradients.apply(q, k, v, call)
            attends = self.parallel.attend if self.splits_tokens else attend
            o = attends(q, k, v, is_causal=is_causal)
        elif self.splits_tokens:
            raise UserError(
                f"{self.name}: tokens are spread over ranks, and attention in low precision reads whole sequences; give"
                " recipe.dpa high precision"
            )
        else:
            o = quantized_attention(q, k, v, call)
        if call.quantizers.output is None:
            return o
        return call.rounded("output", o.to(self.dtype))

    def extra_repr(self) -> str:
        return f"{self.name}: " + ", ".join(f"{tensor} {getattr(self.quantizers, tensor)}" for tensor in TENSORS)


def is_high_precision(quantizers: DpaQuantizers) -> bool:
    """Return whether all four tensors have one high precision."""
    formats = {f for x in TENSORS for q in [getattr(quantizers, x)] for f in (q.rowwise, q.columnwise)}
    return len(formats) == 1 and formats.pop().high_precision
