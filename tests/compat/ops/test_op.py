"""Single operations against torch, and a user's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.compat import (
    DelayedScaling,
    DType,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    autocast,
    ops,
)
from hqsweep.errors import UserError

M, W = 8, 64


def rows(width: int = W, seed: int = 0) -> Tensor:
    return torch.randn(M, width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def gated(function, x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return function(a) * b


def clamped(x: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + offset)


def situ(x: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return beta1 * torch.tanh(a / beta1) * a.sigmoid() * beta2 * torch.tanh(b / beta2)


def blocks(x: Tensor, size: int) -> Tensor:
    """The halves of x, which alternate in blocks."""
    parts = x.split(size, dim=-1)
    return torch.cat([*parts[::2], *parts[1::2]], dim=-1)


SCALES = torch.rand(M, generator=torch.Generator().manual_seed(9)).requires_grad_()
CASES = {
    "GELU": (ops.GELU(), tanh_gelu), "QGELU": (ops.QGELU(), qgelu), "ReLU": (ops.ReLU(), F.relu),
    "SReLU": (ops.SReLU(), lambda x: F.relu(x) ** 2), "SiLU": (ops.SiLU(), F.silu),
    "GEGLU": (ops.GEGLU(), lambda x: gated(tanh_gelu, x)), "GLU": (ops.GLU(), lambda x: gated(torch.sigmoid, x)),
    "QGEGLU": (ops.QGEGLU(), lambda x: gated(qgelu, x)), "ReGLU": (ops.ReGLU(), lambda x: gated(F.relu, x)),
    "SReGLU": (ops.SReGLU(), lambda x: gated(lambda a: F.relu(a) ** 2, x)),
    "SwiGLU": (ops.SwiGLU(), lambda x: gated(F.silu, x)),
    "SwiGLU in blocks": (ops.SwiGLU(glu_interleave_size=8), lambda x: gated(F.silu, blocks(x, 8))),
    "ClampedSwiGLU": (ops.ClampedSwiGLU(limit=0.5, alpha=1.5), lambda x: clamped(x, 0.5, 1.5)),
    "SiTUGLU": (ops.SiTUGLU(beta1=2.0), lambda x: situ(x, 2.0)),
    "Identity": (ops.Identity(), lambda x: x), "Reshape": (ops.Reshape((4, -1)), lambda x: x.view(4, -1)),
    "ConstantScale": (ops.ConstantScale(0.5), lambda x: x * 0.5),
    "L2Normalization": (ops.L2Normalization(), lambda x: F.normalize(x, eps=0)),
    "Quantize": (ops.Quantize(), lambda x: x),
}  # fmt: skip
SCALED = {
    "ScaledSwiGLU": (ops.ScaledSwiGLU(), lambda x: gated(F.silu, x)),
    "ScaledSReLU": (ops.ScaledSReLU(), lambda x: F.relu(x) ** 2),
    "ScaledSiTUGLU": (ops.ScaledSiTUGLU(8, beta2=3.0), lambda x: situ(blocks(x, 8), beta2=3.0)),
    "ScaledClampedQGeGLU": (ops.ScaledClampedQGeGLU(limit=0.5), lambda x: clamped(x, 0.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_torchs(name):
    op, function = CASES[name]
    x = rows()
    y, expected = op(x), function(x)
    torch.testing.assert_close(y, expected)
    own, theirs = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, expected))
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)
    assert op(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("name", SCALED)
def test_rows_are_multiplied_by_an_extra_input(name):
    op, function = SCALED[name]
    x = rows()
    y, expected = op(x, SCALES), function(x) * SCALES[:, None]
    torch.testing.assert_close(y, expected)
    gradients = [torch.autograd.grad(out.square().sum(), (x, SCALES)) for out in (y, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("shape", [(W,), (2, 32)])
@pytest.mark.parametrize("centered", [False, True])
def test_norms_are_torchs(kind, shape, centered):
    op = getattr(ops, kind)(shape, zero_centered_gamma=centered, eps=1e-3)
    with torch.no_grad():
        op.weight.normal_()
    x = rows().view(M, *shape)
    gain = op.weight + centered
    own = F.layer_norm(x, shape, gain, op.bias, 1e-3) if kind == "LayerNorm" else F.rms_norm(x, shape, gain, 1e-3)
    torch.testing.assert_close(op(x), own)
    op.reset_parameters()
    assert op.weight.unique().tolist() == [0.0 if centered else 1.0] and op.weight.shape == shape


def test_dropout_is_torchs():
    op, x = ops.Dropout(0.5), rows()
    torch.manual_seed(1)
    y = op(x)
    torch.manual_seed(1)
    assert torch.equal(y, F.dropout(x, 0.5)) and torch.equal(op.eval()(x), x)


@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (True, True)])
def test_rounding_is_that_of_the_quantizers(forward, backward):
    x, dy = rows(), rows(seed=3).detach()
    with autocast(recipe=MXFP8BlockScaling()):
        y = ops.Quantize(forward, backward)(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    rounded = MXFP8Quantizer(DType.kFloat8E4M3)
    assert torch.equal(y, rounded(x.detach()).dequantize() if forward else x)
    assert torch.equal(dx, rounded(dy).dequantize() if backward else dy)


def test_a_linear_is_a_product_and_a_bias():
    op, x = ops.Linear(W, 32), rows()
    torch.nn.init.normal_(op.bias)
    torch.testing.assert_close(op(x), F.linear(x, op.weight, op.bias))
    assert [type(part).__name__ for part in op.basic_ops] == ["BasicLinear", "Bias"] and op.is_fused_op
    assert (op.basic_ops[0].in_features, op.basic_ops[0].out_features) == (W, 32)
    torch.testing.assert_close(ops.Sequential(*op.basic_ops)(x), op(x))
    low = ops.Linear(W, 32, dtype=torch.bfloat16)
    assert low(x).dtype is torch.bfloat16  # of its weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op(x).dtype is torch.bfloat16
    with pytest.raises(UserError, match=r"ops.Linear: tensor_parallel_mode='row' takes no bias"):
        ops.Linear(W, 32, tensor_parallel_mode="row")


@pytest.mark.parametrize("scaled", [False, True])
def test_experts_take_their_splits_as_an_extra_input(scaled):
    op, x, splits = ops.GroupedLinear(2, W, 32, scale_bias=scaled), rows(), torch.tensor([3, 5])
    for bias in (op.bias0, op.bias1):
        torch.nn.init.normal_(bias)
    scales = SCALES.detach() if scaled else torch.ones(M)
    expected = torch.cat([
        F.linear(own, weight) + bias * scale[:, None]
        for own, weight, bias, scale in zip(
            x.split([3, 5]), (op.weight0, op.weight1), (op.bias0, op.bias1), scales.split([3, 5]), strict=True
        )
    ])  # fmt: skip
    torch.testing.assert_close(op(x, splits, scales) if scaled else op(x, splits), expected)
    assert op.num_quantizers("forward") == 4 and op.num_quantizers("backward") == 2
    with pytest.raises(UserError, match=r"buffers of the caller \(output\) have no counterpart here"):
        op(x, splits, *([scales] if scaled else []), output=torch.empty(M, 32))


class Cubed(ops.BasicOperation):
    """A user's operation, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        ctx.save_for_backward(input_)
        return self.scale * input_**3

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * 3 * self.scale * x**2, (torch.sum(grad_output * x**3),)


def test_an_operation_of_a_user_has_its_own_backward():
    op, x = Cubed(), rows()
    model = ops.Sequential(ops.ConstantScale(2.0), op)
    y, expected = model(x), op.scale * (2 * x) ** 3
    torch.testing.assert_close(y, expected)
    gradients = [torch.autograd.grad(out.square().sum(), (x, op.scale)) for out in (y, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_rounding_by_delayed_scaling_has_a_history():
    op, x = ops.Quantize(), rows().detach()
    for factor in (1.0, 64.0):
        with autocast(recipe=DelayedScaling(amax_history_len=2)):
            y = op(x * factor)
    assert y.abs().max() < 2 * x.abs().max()  # by the scale of the first call


@pytest.mark.parametrize("kind", ["SiLU", "SwiGLU"])
def test_the_gradient_may_be_taken_at_values_in_fp8(kind):
    op, plain, x = getattr(ops, kind)(cache_quantized_input=True), getattr(ops, kind)(), rows()
    low = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(x.detach()).dequantize().requires_grad_()
    y = op(x)
    assert torch.equal(y, plain(x))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(plain(low).sum(), low)[0])
