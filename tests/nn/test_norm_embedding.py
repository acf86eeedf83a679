"""Norm against torch in float64, and on CUDA kernels against torch's operators."""

import pytest
import torch
import torch.nn.functional as F
from support.nn import emulated

from hqsweep.nn import LayerNormLinear, LayerNormMLP, layernorm_linears
from hqsweep.nn import norm_embedding as norm_module
from hqsweep.nn.core.context import current, quantization
from hqsweep.nn.core.options import LayerNormLinearOptions as LinearOptions
from hqsweep.nn.core.options import MLPOptions
from hqsweep.nn.norm_embedding import EPSILON, Norm
from hqsweep.ops.quantize import operators
from hqsweep.ops.quantize.kernels import NO_KEY
from hqsweep.quant import hybrid
from hqsweep.recipe import Recipe

BF16, MXFP8 = (Recipe.from_config({"linear": text}) for text in ("bf16", "mxfp8"))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_it_is_torchs_norm_in_float32(normalization):
    norm = Norm(32, name="n", recipe=BF16, normalization=normalization)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x, dy = torch.randn(2, 4, 32).bfloat16().requires_grad_(), torch.randn(2, 4, 32)
    norm(x).backward(dy)
    x64, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    if normalization == "RMSNorm":
        y = F.rms_norm(x64, (32,), weight, EPSILON)
    else:
        y = F.layer_norm(x64, (32,), weight, norm.bias.detach().double(), EPSILON)
        assert torch.allclose(norm.bias.grad, dy.sum((0, 1)), rtol=1e-5)
    y.backward(dy.double())
    assert norm(x).dtype == torch.float32
    torch.testing.assert_close(norm(x).double(), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.weight.grad.double(), weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=2**-8, atol=1e-4)


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ValueError, match="n: normalization is 'BatchNorm'; allowed: RMSNorm, LayerNorm"):
        Norm(32, name="n", recipe=BF16, normalization="BatchNorm")


def gradients(norm, x, branch, *, use):
    """What Norm.added gives, and gradients, of a loss that reads what `use` names of the sum and the output."""
    x, branch = x.clone().requires_grad_(), None if branch is None else branch.clone().requires_grad_()
    norm.zero_grad()
    tensors = dict(zip(("total", "h"), norm.added(x, branch, torch.bfloat16), strict=True))
    g = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(x.shape, generator=g).to(x.device) for name in tensors}
    sum((tensors[name].float() * weights[name]).sum() for name in use).backward()
    return [*tensors.values(), x.grad, *([] if branch is None else [branch.grad]), *(p.grad for p in norm.parameters())]


def assert_same_as_torchs(norm, x, branch, **tolerance):
    for use in (("total", "h"), ("h",), ("total",)):
        actual = gradients(norm, x, branch, use=use)
        with quantization(kernels=False):
            expected = gradients(norm, x, branch, use=use)
        for a, b in zip(actual, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, **tolerance)


STREAMS = [(x, b) for x in (torch.float32, torch.bfloat16) for b in (torch.float32, torch.bfloat16, None)]
streams = pytest.mark.parametrize("stream", STREAMS, ids=str)


@streams
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_gradients_go_where_they_do_without_kernels(normalization, stream, monkeypatch):
    """The kernels replaced by torch: of the stream, the branch, gain and bias, from both outputs or either."""
    monkeypatch.setattr(norm_module, "use_kernels", lambda x: current().kernels)
    monkeypatch.setattr(norm_module.norm, "norm", emulated.norm)
    monkeypatch.setattr(norm_module.norm, "norm_backward", emulated.norm_backward)
    norm = Norm(32, name="n", recipe=BF16, normalization=normalization)
    x, branch = (None if dtype is None else torch.randn(2, 4, 32).to(dtype) for dtype in stream)
    assert_same_as_torchs(norm, x, branch, rtol=2**-7, atol=1e-5)


QUANTIZERS = {
    "fp8_current": (True, None),
    "nvfp4": (True, None),
    "nvfp4+2d+rht+sr": (True, True),
    "nvfp4+rht+nosign": (True, False),
    "mxfp8|nvfp4+rht": (True, True),
    "nvfp4|mxfp8": (True, None),
    "nvfp4|nvfp4+rht@rowwise_dequantized": (True, None),
    "mxfp8|nvfp4@rowwise_dequantized": (False, None),
    "nvfp4+row_scaled|mxfp8": (False, None),
    "fp8_delayed": (False, None),
    "mxfp8": (False, None),
}


def results(module, x, branch):
    """The sum, the output and all gradients."""
    x, branch = x.clone().requires_grad_(), branch.clone().requires_grad_()
    module.zero_grad()
    with quantization(seed=1, step=0):
        total, y = module.added(x, branch)
    ((y.float() * torch.arange(y.numel(), device=y.device).view(y.shape).cos()).sum() + total.float().sum()).backward()
    return [total, y, x.grad, branch.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("text", QUANTIZERS)
def test_the_amaxes_that_the_norm_finds_are_those_that_the_quantizer_would(text, kind, device, monkeypatch):
    """To the byte; and what it finds is what the quantizer takes. On a CPU the kernels are replaced by torch."""
    if device == "cpu":
        emulated.install(monkeypatch, (norm_module, layernorm_linears), hybrid)
        monkeypatch.setattr(norm_module.norm, "norm", emulated.norm)
        monkeypatch.setattr(norm_module.norm, "norm_backward", emulated.norm_backward)
    asked, kernel = [], norm_module.norm.norm
    monkeypatch.setattr(norm_module.norm, "norm", lambda *a: asked.append(a[6:]) or kernel(*a))
    columns = "nvfp4" + text.split("nvfp4")[-1].split("@")[0].removeprefix("+2d") if "rht" in text else "mxfp8"
    recipe = Recipe.from_config({"linear": {"input": text, "weight": "mxfp8", "grad_output": f"mxfp8|{columns}"}})
    torch.manual_seed(0)
    build = {"linear": lambda: LayerNormLinear(64, 96, name="m", recipe=recipe)}
    build["mlp"] = lambda: LayerNormMLP(64, 128, name="m", recipe=recipe)
    runs, x, branch = [], torch.randn(2, 64, 64, device=device), torch.randn(2, 64, 64, device=device).bfloat16()
    for measures in (norm_module.norm.measures, lambda *_: False):
        monkeypatch.setattr(norm_module.norm, "measures", measures)
        torch.manual_seed(1)
        runs.append(results(build[kind]().to(device), x, branch))
    assert asked == [QUANTIZERS[text], (False, None)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def torchs_statistics(x, branch, gain, bias, epsilon):
    return emulated.norm(x, branch, gain, bias, epsilon, x.dtype)[1:]


def torchs_quantize_normed(request, of):
    h = emulated.formula(of.total, of.gain, of.bias, of.epsilon).bfloat16()
    options = (request.row_text, request.column_text, request.dequantized, request.row_exact, request.column_exact)
    return operators.quantize(h, *options, NO_KEY, NO_KEY, None, None, False)


@pytest.mark.feature("T3")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("text", ["mxfp8", "fp8_block", "mxfp8|fp8_block+2d", "mxfp8@rowwise_dequantized", "mxfp4"])
def test_a_norm_quantized_as_it_is_computed_gives_the_same_bytes(text, kind, normalization, device, monkeypatch):
    """With a stream of bfloat16 the norm itself is never made. On a CPU the kernels are replaced by torch."""
    if device == "cpu":
        emulated.install(monkeypatch, (norm_module, layernorm_linears), hybrid)
        for name, function in (("norm", emulated.norm), ("norm_backward", emulated.norm_backward)):
            monkeypatch.setattr(norm_module.norm, name, function)
        monkeypatch.setattr(norm_module.norm, "norm_statistics", torchs_statistics)
        monkeypatch.setattr(hybrid, "quantize_normed", torchs_quantize_normed)
    calls = []
    for name in ("norm", "norm_statistics"):
        kernel = getattr(norm_module.norm, name)
        monkeypatch.setattr(norm_module.norm, name, lambda *a, k=kernel, n=name: calls.append(n) or k(*a))
    recipe = Recipe.from_config({"linear": {"input": text, "weight": "mxfp8", "grad_output": "mxfp8"}})
    options = {"normalization": normalization}
    build = {"linear": lambda: LayerNormLinear(128, 96, name="m", recipe=recipe, options=LinearOptions(**options))}
    build["mlp"] = lambda: LayerNormMLP(128, 128, name="m", recipe=recipe, options=MLPOptions(**options))
    torch.manual_seed(0)
    runs, (x, branch) = [], torch.randn(2, 2, 128, 128, device=device).bfloat16()
    for takes in (norm_module.takes_normed, lambda _: False):
        monkeypatch.setattr(norm_module, "takes_normed", takes)
        torch.manual_seed(1)
        runs.append(results(build[kind]().to(device), x, branch))
    assert calls == ["norm_statistics", "norm"]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_norm_of_another_dtype_than_the_quantizer_reads_is_made(monkeypatch):
    for module in (norm_module, layernorm_linears):
        monkeypatch.setattr(module, "use_kernels", lambda x: True)
    monkeypatch.setattr(norm_module.norm, "norm", emulated.norm)
    module = LayerNormLinear(128, 96, name="m", recipe=MXFP8, dtype=torch.float32)
    x = torch.randn(128, 128).bfloat16()
    expected = module._product(emulated.norm(x, None, module.norm.weight, None, EPSILON, torch.float32)[0])
    assert torch.equal(module(x), expected)


@pytest.mark.gpu
@streams
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_kernels_are_near_torchs_operators(normalization, stream):
    norm = Norm(768, name="n", recipe=BF16, normalization=normalization).cuda()
    torch.nn.init.normal_(norm.weight)
    x, branch = (None if dtype is None else torch.randn(2, 100, 768).to(dtype).cuda() for dtype in stream)
    exact = stream[0] == torch.float32
    assert_same_as_torchs(norm, x, branch, rtol=2**-7, atol=1e-4 if exact else 2**-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["width 6", "width 8192", "float16", "bfloat16 gain"])
def test_what_the_kernels_do_not_take_is_torchs(case, monkeypatch):
    width = int(case.split()[1]) if case.startswith("width") else 64
    norm = Norm(width, name="n", recipe=BF16).cuda()
    x = torch.randn(8, width, device="cuda").to(torch.float16 if case == "float16" else torch.float32)
    if case == "bfloat16 gain":
        norm = norm.bfloat16()
    calls = []
    monkeypatch.setattr(norm_module.norm, "norm", lambda *arguments: calls.append(arguments))
    actual = norm.added(x, None, torch.bfloat16)
    with quantization(kernels=False):
        expected = norm.added(x, None, torch.bfloat16)
    assert not calls and all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
