"""What the modules of nn compute, put together again from format references and plain torch: an oracle for them.

No quantizer, kernel, workspace or saved operand takes part; each direction is encoded by the reference in a step of its
own. Only the order of the GEMMs' sums is shared with the modules, through mm_t.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.formats import ExactOperand, RngKey
from hqsweep.gemm.exact import mm_t
from hqsweep.nn import LayerNormLinear, LayerNormMLP, Linear, MultiheadAttention, TransformerLayer
from hqsweep.nn.layers.norm import Norm
from hqsweep.nn.linear.activation import ACTIVATIONS
from hqsweep.quant.hybrid import HybridQuantizer


class _Linear(torch.autograd.Function):
    """y = x w^T + b by formula, from x [M, K] in the module's dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, b: Tensor | None, module: Linear) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, w)
        y = mm_t(_row(module, "input", x), _row(module, "weight", w.to(module.dtype)), out_dtype=module.dtype)
        return y if b is None else y + b.to(module.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        module, (x, w) = ctx.module, ctx.saved_tensors
        dx = mm_t(
            _row(module, "grad_output", dy), _column(module, "weight", w.to(module.dtype)), out_dtype=module.dtype
        )
        dw = mm_t(_column(module, "grad_output", dy), _column(module, "input", x), out_dtype=w.dtype)
        return dx, dw, dy.sum(0, dtype=torch.float32) if ctx.needs_input_grad[2] else None, None


def composed(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), with its parameters and quantizers, for the modules with linears; attention in high precision."""
    match module:
        case LayerNormLinear():
            return _linear(module, _norm(module.norm, x))
        case Linear():
            return _linear(module, x)
        case LayerNormMLP():
            return _linear(module.fc2, ACTIVATIONS[module.activation](composed(module.fc1, x).float()))
        case MultiheadAttention():
            b, t, d = x.shape
            heads = composed(module.qkv, x).view(b, t, 3, module.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = heads if heads.is_cuda else heads.float()
            o = F.scaled_dot_product_attention(q, k, v, is_causal=module.is_causal)
            return _linear(module.proj, o.transpose(1, 2).reshape(b, t, d))
        case TransformerLayer():
            x = x + composed(module.attn, x).to(x.dtype)
            return x + composed(module.mlp, x).to(x.dtype)
    raise TypeError(f"no composition of {type(module).__name__}")


def _linear(module: Linear, x: Tensor) -> Tensor:
    y = _Linear.apply(x.reshape(-1, x.shape[-1]).to(module.dtype), module.weight, module.bias, module)
    return y.view(*x.shape[:-1], -1)


def _norm(norm: Norm, x: Tensor) -> Tensor:
    if norm.bias is None:
        return F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.epsilon)
    return F.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, norm.epsilon)


def _row(module: Linear, tensor: str, x: Tensor) -> ExactOperand:
    format = getattr(module.quantizers, tensor).rowwise
    return format.operand(format.encode(x, None, _key(module, tensor, "rowwise")), tuple(x.shape))


def _column(module: Linear, tensor: str, x: Tensor) -> ExactOperand:
    quantizer: HybridQuantizer = getattr(module.quantizers, tensor)
    if quantizer.columnwise_source == "rowwise_dequantized":
        codes = quantizer.rowwise.encode(x, None, _key(module, tensor, "rowwise"))
        x = quantizer.rowwise.decode(codes, tuple(x.shape)).to(x.dtype)
    x, format = x.t(), quantizer.columnwise
    return format.operand(format.encode(x, None, _key(module, tensor, "columnwise")), tuple(x.shape))


def _key(module: Linear, tensor: str, direction: str) -> RngKey:
    """Outside of any quantization(): seed 0, step 0."""
    return RngKey(seed=0, slot=f"{module.name}/linear/{tensor}/{direction}", step=0)
