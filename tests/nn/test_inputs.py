"""What modules are given: memory that torch reads with other signs, and dtypes that torch's modules refuse."""

import pytest
import torch
from cases import crossed
from torch import nn
from transformers.pytorch_utils import Conv1D

import hqsweep
from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.nn import (
    DotProductAttention,
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    linear_cross_entropy,
    quantization,
    quantized_model_init,
    set_recipe,
)
from hqsweep.nn.norm_embedding import Norm
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
RECIPES = ["bf16", "mxfp8", "fp8_current", "fp8_block", "nvfp4|mxfp8", "nvfp4+sr", "fp8_delayed"]
OWN = {
    "linear": lambda **options: Linear(64, 64, bias=True, **options),
    "norm_linear": lambda **options: LayerNormLinear(64, 64, **options),
    "mlp": lambda **options: LayerNormMLP(64, 96, **options),
    "grouped": lambda **options: _Grouped(**options),
    "attention": lambda **options: MultiheadAttention(64, 2, **options),
    "dpa": lambda **options: _Attention(**options),
    "norm": lambda dtype, **options: Norm(64, **options),
    "loss": lambda **options: _Loss(**options),
}
CONVERTED = {"converted": lambda: nn.Linear(64, 64), "conv1d": lambda: Conv1D(64, 64)}
MODULES = [*OWN, *CONVERTED]


class _Grouped(GroupedLinear):
    def __init__(self, **options):
        super().__init__(2, 64, 64, **options)

    def forward(self, x):
        return super().forward(x.flatten(0, -2), [32, 32]).view(x.shape)


class _Attention(DotProductAttention):
    def forward(self, x):
        return super().forward(x, x, x)


class _Loss(Linear):
    def __init__(self, **options):
        super().__init__(64, 64, **options)

    def forward(self, x):
        return linear_cross_entropy(x, self, torch.arange(64, device=x.device), 128).expand(x.shape)


def build(name, recipe, dtype, device="cpu"):
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name](name="m", recipe=recipe, dtype=dtype).to(device)
    model = nn.Sequential(CONVERTED[name]()).to(device, dtype)
    hqsweep.convert(model, recipe)
    return model


def turned(x):
    """The values of x in memory of the opposite signs, as the imaginary part of a conjugate has them."""
    return torch._neg_view(-x.detach())


def step(module, x, dy):
    """Output and gradients, of x first."""
    module.zero_grad()
    x.requires_grad_()
    x.grad = None
    with quantization(step=1, seed=3):
        y = module(x)
        y.backward(dy.to(y.dtype) if not dy.is_neg() else turned(dy.to(y.dtype)))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_same(ours, expected):
    assert len(ours) == len(expected) > 1
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@devices
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_of_the_opposite_signs_is_read_as_torch_reads_it(dtype, name, device):
    """x, dy, and parameters, each alone."""
    module = build(name, "mxfp8", dtype, device)
    x, dy = (torch.randn(1, 64, 64, device=device).to(dtype) for _ in range(2))
    expected = step(module, x.clone(), dy)
    assert_same(step(module, turned(x), dy), expected)
    assert_same(step(module, x.clone(), turned(dy)), expected)
    for owner in module.modules():
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None:
                owner._parameters[key] = nn.Parameter(turned(parameter))
    assert_same(step(module, x.clone(), dy), expected)


@devices
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_reads_such_memory(recipe, held, device):
    z, dy = torch.randn(32, 64, dtype=torch.complex64, device=device), torch.randn(32, 96, device=device)
    x = z.conj().imag
    assert x.is_neg() and not x.is_contiguous()

    def trained(given):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96)).to(device)
        with quantized_model_init(enabled=held), quantization(step=0):
            hqsweep.convert(model, recipe)
        return step(model, given, dy)

    assert_same(trained(x.detach()), trained(x.resolve_neg().clone()))


@devices
def test_a_weight_is_quantized_from_such_memory(device):
    x, key = torch.randn(64, 64, device=device), RngKey(seed=0, slot="w", step=0)
    for text in ("mxfp8", "nvfp4+sr", "fp8_current|mxfp4"):
        quantizer = HybridQuantizer.parse(text)
        held, other = (HybridQuantizedTensor.quantize(given, quantizer, key=key) for given in (x, turned(x)))
        assert torch.equal(held.dequantize(), other.dequantize())
        with torch.no_grad():
            assert torch.equal(held.copy_(turned(2 * x)).dequantize(), other.copy_(2 * x).dequantize())


REFUSED = [torch.int64, torch.int8, torch.bool, torch.float64, torch.complex64, torch.complex32, torch.float8_e4m3fn]


def of_dtype(dtype):
    x = torch.randn(1, 64, 64)
    return x > 0 if dtype == torch.bool else torch.complex(x, x).to(dtype) if dtype.is_complex else (3 * x).to(dtype)


@pytest.mark.parametrize(
    ("name", "recipe", "dtype"), crossed(MODULES, ["bf16", "format:mxfp8"], REFUSED, whole=MODULES[:1])
)
def test_dtypes_that_torchs_modules_refuse_are_refused(name, recipe, dtype):
    module, x = build(name, recipe, torch.float32), of_dtype(dtype)
    if name == "dpa" and recipe == "bf16":  # attention of torch's own, which takes float64 as it is
        return
    with pytest.raises(
        UserError, match=rf": its input is {dtype} \[.*64\]; it takes float32, bfloat16, float16, so cast"
    ):
        module(x)


@pytest.mark.parametrize("dtype", REFUSED)
def test_a_linear_in_its_own_dtype_and_in_autocast_refuses_them_too(dtype):
    """Where torch's own product is computed, torch refuses them."""
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    hqsweep.convert(model, "bf16")
    with pytest.raises((RuntimeError, UserError)):
        model(of_dtype(dtype))
    set_recipe(model, "mxfp8")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match=f"0: its input is {dtype}"):
        model(of_dtype(dtype))


def test_complex_weights_do_not_lose_their_imaginary_parts():
    module = Linear(64, 64, name="m", recipe="mxfp8").to(torch.complex64)
    with pytest.raises(UserError, match=r"got torch.complex64 \[64, 64\] where torch.bfloat16 is computed with"):
        module(torch.randn(4, 64))
    with quantized_model_init():
        held = Linear(64, 64, name="m", recipe="mxfp8").weight
    with pytest.raises(UserError, match=r"quantize_: got torch\.complex64"), torch.no_grad():
        held.copy_(torch.zeros(64, 64, dtype=torch.complex64))
