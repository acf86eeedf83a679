"""Validation before a model is built: every GEMM of every module, all faults in one message."""

from functools import partial

import pytest

from hqsweep.errors import UserError
from hqsweep.gemm import native
from hqsweep.recipe import CustomRecipe, parse_recipe
from hqsweep.recipe.products import GemmModule, attention_module, linear_module
from hqsweep.recipe.validate import validate

LINEARS = [
    ("layers.0.attn.qkv", 128, 384),
    ("layers.0.mlp.fc1", 128, 704),
    ("layers.1.attn.qkv", 128, 384),
    ("head", 128, 256),
]
NVFP4 = {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"}


def check(linear="mxfp8", *, tokens=2048, more=(), device_fault=None, **sections):
    recipe = parse_recipe({"name": "r", "linear": linear, **sections})
    validate(recipe, 100, [*(linear_module(*shape, tokens) for shape in LINEARS), *more], device_fault)


def test_valid_recipes_pass():
    for linear in ("mxfp8", "bf16", NVFP4, "nvfp4|mxfp8@rowwise_dequantized"):
        check(linear)
    check(gemm="strict")


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        ({**NVFP4, "input": "nvfp4"},
         r"layers.0.attn.qkv wgrad: grad_output columnwise nvfp4\+rht\+sr cannot meet input columnwise nvfp4:"
         r".*both operands or on neither.*\(and in 2 more\)"),
        ({**NVFP4, "weight": "nvfp4+rht"},
         "dgrad: grad_output rowwise nvfp4.sr cannot meet weight columnwise nvfp4.rht"),
    ],
)  # fmt: skip
def test_rht_on_one_operand_is_refused_in_any_mode(linear, message):
    with pytest.raises(UserError, match=message):
        check(linear)


@pytest.mark.feature("F49")
@pytest.mark.parametrize(
    ("linear", "message"),
    [
        ({"input": "nvfp4|mxfp8", "weight": "mxfp8", "grad_output": "mxfp8"},
         "fprop: input rowwise nvfp4 cannot meet weight rowwise mxfp8 under gemm=strict: their scaling modes differ"),
        ("fp8_block+2d", "128x128 tiles on both sides"),
        ({"input": "bf16", "weight": "fp16", "grad_output": "bf16"}, "takes one dtype"),
    ],
)  # fmt: skip
def test_strict_refuses_pairs_without_hardware_and_exact_takes_them(linear, message):
    check(linear)
    with pytest.raises(UserError, match=message):
        check(linear, gemm="strict")


def test_strict_takes_what_tensor_cores_take():
    check({"input": "mxfp8", "weight": "mxfp4", "grad_output": "mxfp8+e5m2"}, gemm="strict")
    check({"input": "fp8_block", "weight": "fp8_block+2d", "grad_output": "fp8_block"}, gemm="strict", tokens=64)
    check({"input": "fp8_delayed", "weight": "fp8_current", "grad_output": "fp8_delayed+e5m2"}, gemm="strict")


ON_HOPPER = partial(native.refusal, (9, 0))
FP8_BLOCK = {"input": "fp8_block", "weight": "fp8_block+2d", "grad_output": "fp8_block"}


def test_native_takes_what_strict_takes_until_the_device_is_known():
    for linear in ("mxfp8", "nvfp4", FP8_BLOCK):
        check(linear, gemm="native")
    with pytest.raises(UserError, match=r"fprop: input rowwise mxfp8 cannot meet .* under gemm=native: their scaling"):
        check(FP8_BLOCK | {"input": "mxfp8|fp8_block"}, gemm="native")


def test_native_tells_all_that_the_device_has_no_product_for():
    check({"input": "fp8_current", "weight": "fp8_current", "grad_output": "fp8_current+e5m2"}, gemm="native",
          device_fault=ON_HOPPER)  # fmt: skip
    check("mxfp8", device_fault=ON_HOPPER)  # gemm=exact asks no device
    linear = {"input": "fp8_block|mxfp8", "weight": "fp8_block+2d", "grad_output": "fp8_block|mxfp8"}
    schedule = [{"at": 50, "linear": FP8_BLOCK}]
    with pytest.raises(UserError) as raised:
        check(linear, gemm="native", tokens=72, schedule=schedule, device_fault=ON_HOPPER)
    text = str(raised.value)
    for part in (
        "layers.0.attn.qkv fprop: input rowwise fp8_block cannot meet weight rowwise fp8_block+2d under gemm=native:"
        " tensor cores take multiples of 16, which rows of the first operand (72) is not (and in 2 more)",
        "wgrad: grad_output columnwise mxfp8 cannot meet input columnwise mxfp8 under gemm=native: sm_90 has no product"
        " for mxfp8; it has: fp8_block, fp8_current, fp8_delayed, fp8_row"
        " (and in 2 more)",
        "wgrad: grad_output columnwise fp8_block cannot meet input columnwise fp8_block under gemm=native: tensor cores"
        " take multiples of 16, which the contracted axis (72) is not (and in 2 more) (from step 51 on)",
    ):
        assert part in text
    assert text.count("fprop: input rowwise fp8_block cannot") == 1  # of the second stage only what is new
    check(FP8_BLOCK, gemm="native", device_fault=ON_HOPPER)  # rows of one tile


def test_native_has_no_product_for_quantized_attention():
    attention = attention_module("layers.0.attn.dpa", 64, 128)
    check("bf16", gemm="native", more=[attention])
    message = "dpa qk: qkv rowwise fp8_current cannot meet .* under gemm=native: only the products of linears"
    with pytest.raises(UserError, match=message):
        check("bf16", dpa="fp8_current", gemm="native", more=[attention])


@pytest.mark.feature("T6")
def test_axes_that_do_not_fit_the_block_are_named():
    message = (
        "head wgrad: the contracted axis has 100 elements, but grad_output columnwise nvfp4 takes a multiple of 16"
    )
    with pytest.raises(UserError, match=message):
        check(head="nvfp4", tokens=100)


@pytest.mark.feature("F61", "T1", "T31")
def test_all_faults_are_told_at_once():
    linear = {"input": "nvfp4|nvfp4+rht", "weight": "mxfp8", "grad_output": "nvfp4"}
    with pytest.raises(UserError) as raised:
        check(linear, gemm="strict", tokens=100, overrides=[{"name": "lost.*", "linear": "bf16"}])
    text = str(raised.value)
    for part in (
        "overrides[0] ('lost.*') matches no module",
        "layers.0.attn.qkv fprop: input rowwise nvfp4 cannot meet weight rowwise mxfp8",
        "layers.0.attn.qkv dgrad: grad_output rowwise nvfp4 cannot meet weight columnwise mxfp8",
        "wgrad: the contracted axis has 100 elements",
        "wgrad: grad_output columnwise nvfp4 cannot meet input columnwise nvfp4+rht: the random Hadamard",
    ):
        assert part in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"name": "layer.0.attn.qkv"}, r"'layer.0.attn.qkv'\) matches no module .did you mean 'layers.0.attn.qkv'"),
        ({"layers": 2}, r"overrides\[0\] \(layers 2\) matches no module; the model has layers 0 to 1"),
        ({"layers": "first(1)", "name": "head"}, r"'head' and layers first\(1\)\) matches no module"),
    ],
)
def test_overrides_must_match_something(override, message):
    with pytest.raises(UserError, match=message):
        check(overrides=[{**override, "linear": "bf16"}])


def test_an_override_for_a_type_that_the_model_has_not_matches_nothing():
    with pytest.raises(UserError, match="matches no module"):
        check(overrides=[{"layers": 0, "grouped_linear": "bf16"}])


@pytest.mark.feature("F61", "T1", "T31")
def test_the_gemms_of_attention_are_checked():
    attention = attention_module("layers.0.attn.dpa", 40, 100)
    for message, dpa in {
        "dpa s rowwise nvfp4: the context has 100 positions; its blocks take a multiple of 16": {"s": "nvfp4"},
        "dpa qk: the contracted axis has 40 elements, but qkv rowwise nvfp4 takes": {"qkv": "nvfp4|bf16"},
        "dpa qkv nvfp4[+]row_scaled: attention takes one global amax a tensor": {"qkv": "nvfp4+row_scaled|bf16"},
    }.items():
        with pytest.raises(UserError, match=message):
            check(dpa=dpa, more=[attention])
    with pytest.raises(UserError, match="dpa dv: s columnwise bf16 cannot meet do columnwise mxfp8 under gemm=strict"):
        check("bf16", dpa={"do": "bf16|mxfp8"}, gemm="strict", more=[attention])


@pytest.mark.feature("F11", "F67")
def test_grouped_linears_are_checked_with_their_own_section():
    grouped = GemmModule(
        module_type="grouped_linear",
        name="layers.0.mlp.experts.fc1",
        shapes=dict(fprop=(32, 64, 128), dgrad=(32, 128, 64), wgrad=(64, 128, 0)),
    )
    check(grouped_linear="nvfp4|mxfp8", more=[grouped])
    section = {"input": "nvfp4+row_scaled|mxfp8", "weight": "mxfp8", "grad_output": "mxfp8"}
    message = r"experts.fc1 fprop: input rowwise nvfp4\+row_scaled cannot meet weight rowwise mxfp8"
    with pytest.raises(UserError, match=message):
        check(grouped_linear=section, gemm="strict", more=[grouped])


def test_a_factory_is_asked_once_for_each_slot_and_checked_the_same():
    asked = []

    def factory(role):
        asked.append(role)
        return "nvfp4+rht" if role.tensor_type == "input" else "nvfp4"

    modules = [linear_module(*shape, 64) for shape in LINEARS]
    with pytest.raises(UserError, match=r"wgrad: grad_output columnwise nvfp4 cannot meet input columnwise nvfp4\+rht"):
        validate(CustomRecipe(qfactory=factory), 100, modules)
    assert len(asked) == len(set(asked)) == 3 * len(LINEARS)
