"""Which product the GEMMs of a module take: that of its recipe, of autocast's, of the stage of a schedule."""

import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import mm_t
from hqsweep.nn import Linear, LinearOptions, autocast, quantization, quantized_model_init, set_recipe
from hqsweep.nn.core.module import quantized_modules
from hqsweep.nn.core.parameter import rounded
from hqsweep.nn.dot_product_attention import DotProductAttention
from hqsweep.nn.transformer import TransformerLayer
from hqsweep.quant import HybridQuantizer, Operand
from hqsweep.recipe import Recipe

KEY = RngKey(seed=0, slot="norm/norm/weight", step=0)


def test_fp32_is_the_weight_itself():
    weight = torch.randn(32)
    assert rounded(weight, HybridQuantizer.parse("fp32"), KEY) is weight


def test_values_are_the_formats_and_gradients_pass_through():
    weight = torch.randn(8, 64, requires_grad=True)
    format = parse("mxfp4")
    seen = rounded(weight, HybridQuantizer.parse("mxfp4"), KEY)
    assert torch.equal(seen, format.decode(format.encode(weight.detach()), (8, 64)))
    seen.backward(torch.full((8, 64), 3.0))
    assert torch.equal(weight.grad, torch.full((8, 64), 3.0))


FP8 = {"input": "fp8_current", "weight": "fp8_current", "grad_output": "fp8_current+e5m2"}
EXACT, NATIVE = (Recipe.from_config({"linear": FP8, "gemm": gemm}) for gemm in ("exact", "native"))
PAIRS = ["fp8_current x fp8_current", "fp8_current+e5m2 x fp8_current", "fp8_current+e5m2 x fp8_current"]


@pytest.fixture
def seen(monkeypatch):
    """Pairs that the tensor cores are given; here the exact product stands in for theirs."""
    pairs = []

    def product(a, b, *, out_dtype):
        assert isinstance(a, Operand) and isinstance(b, Operand)
        pairs.append(f"{a.format} x {b.format}")
        return mm_t(a, b, out_dtype=out_dtype)

    monkeypatch.setattr("hqsweep.gemm.native.mm_t_native", product)
    return pairs


def build(recipe=None, held=False, save_original_input=False):
    torch.manual_seed(0)
    with quantized_model_init(enabled=held):
        module = Linear(
            64, 96, name="layer", recipe=FP8, options=LinearOptions(save_original_input=save_original_input)
        )
    if recipe:
        set_recipe(module, recipe)
    return module


def train(module):
    x = draw("normal", 32, 64).requires_grad_()
    y = module(x)
    y.backward(draw("normal", 32, 96, 1))
    return y.detach(), x.grad, module.weight.grad


def assert_same(a, b):
    assert all(map(torch.equal, a, b))


@pytest.mark.feature("F57")
@pytest.mark.parametrize("options", [{}, {"held": True}, {"save_original_input": True}], ids=str)
def test_native_gives_codes_to_the_tensor_cores_for_all_three_gemms(seen, options):
    expected = train(build(EXACT, **options))
    assert seen == []
    assert_same(train(build(NATIVE, **options)), expected)
    assert seen == PAIRS


@pytest.mark.feature("F57")
def test_the_recipe_of_autocast_decides(seen):
    module = build(EXACT)
    with autocast(recipe=NATIVE):
        train(module)
    assert seen == PAIRS
    set_recipe(module, NATIVE)
    seen.clear()
    for context in (autocast(recipe=EXACT), autocast(enabled=False)):
        with context:
            train(module)
    assert seen == []


def test_modules_built_from_a_recipe_have_its_mode():
    layer = TransformerLayer(64, 128, 2, name="layers.0", recipe=NATIVE)
    modes = {module.name: module.gemm for module in quantized_modules(layer) if module.module_type != "norm"}
    names = ("attn.qkv", "attn.dpa", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert modes == {f"layers.0.{name}": "native" for name in names}


def test_backward_follows_the_forward_that_it_belongs_to(seen):
    module = build(NATIVE)
    y = module(draw("normal", 32, 64).requires_grad_())
    set_recipe(module, EXACT)
    y.sum().backward()
    assert seen == PAIRS


def test_a_cached_weight_is_made_again_for_the_other_product(seen):
    module, x = build(EXACT), draw("normal", 32, 64)
    with quantization(step=1, cache_weights=True), torch.no_grad():
        expected = module(x)
        set_recipe(module, NATIVE)
        assert torch.equal(module(x), expected) and seen == PAIRS[:1]


def test_without_tensor_cores_the_module_says_its_name_and_computes_nothing():
    with pytest.raises(UserError, match="layer: fp8_current x fp8_current: gemm=native needs a GPU of compute"):
        build(NATIVE)(draw("normal", 32, 64))


@pytest.mark.feature("F60")
def test_high_precision_has_one_product_in_every_mode():
    bf16 = [Recipe.from_config({"linear": "bf16", "gemm": gemm}) for gemm in ("exact", "strict", "native")]
    expected, *others = (train(build(recipe)) for recipe in bf16)
    for other in others:
        assert_same(other, expected)


def test_attention_has_no_native_product_but_in_high_precision():
    module = DotProductAttention(name="layers.0.attn.dpa", recipe="fp8_current")
    q = draw("normal", 32, 64).view(1, 32, 64)
    with pytest.raises(UserError, match=r"layers.0.attn.dpa qk: .* under gemm=native: only the products of linears"):
        set_recipe(module, Recipe.from_config({"linear": FP8, "dpa": "fp8_current", "gemm": "native"}))
    set_recipe(module, NATIVE)
    assert module(q, q, q).shape == q.shape
