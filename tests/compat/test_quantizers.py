"""Factories written against TransformerEngine run here by changing imports, and each is the recipe of its name."""

import re
from pathlib import Path

import pytest
import torch

from hqsweep import compat
from hqsweep.compat import CustomRecipe, DelayedScalingRequest, DType, Float8CurrentScalingQuantizer, NVFP4Quantizer
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import QuantizerRole, parse_recipe
from hqsweep.recipe.roles import module_roles
from hqsweep.sweep.grid.compose import load_recipe

TWINS = {"high_precision": "bf16"}
"""Factory -> the recipe whose name it has not."""
NAMES = [
    "high_precision", "current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "high_precision_fwd_mxfp8_bwd",
    "mxfp8_fwd_nvfp4_bwd", "nvfp4_1d_weight", "mxfp8_fwd_high_precision_bwd", "nvfp4_row_scaled_fwd_mxfp8_bwd",
    "nvfp4_row_scaled_fwd_high_precision_bwd", "delayed_scaling", "nvfp4_linear_fp8_dpa",
    "nvfp4_linear_mxfp8_dpa",
]  # fmt: skip
ROLES = [
    *module_roles("linear", "layers.0.attn.qkv"),
    *module_roles("grouped_linear", "layers.0.mlp.experts"),
    *module_roles("dpa", "layers.0.attn.dpa"),
]


def with_our_imports(source: str) -> dict:
    """Run a module of TransformerEngine's API with its imports replaced, and nothing else."""
    source, count = re.subn(r"^from transformer_engine[\w.]* import", "from hqsweep.compat import", source, flags=re.M)
    assert count and "import transformer_engine" not in source
    names = {"__name__": "replaced"}
    exec(compile(source, "replaced.py", "exec"), names)
    return names


THEIRS = with_our_imports((Path(__file__).parent / "te_factories.py").read_text())


@pytest.mark.feature("F10", "F20", "F144", "F142", "F143")
@pytest.mark.parametrize("name", NAMES)
def test_a_factory_is_the_recipe_of_its_name(name):
    recipe = parse_recipe(load_recipe(name))
    custom = CustomRecipe(qfactory=THEIRS[name], fp8_dpa=name.endswith("_dpa"))
    assert custom.resolve(ROLES) == recipe.resolve(ROLES)


def test_autocast_takes_the_recipe_of_a_factory_by_its_name():
    module, x = compat.LayerNormLinear(64, 96), torch.randn(32, 64)
    results = []
    for recipe in ("nvfp4", CustomRecipe(qfactory=compat.nvfp4_factory), "format:nvfp4"):
        module.zero_grad()
        with compat.autocast(enabled=True, recipe=recipe), quantization(seed=1, step=1):
            module(x).float().square().mean().backward()
        results.append(module.weight.grad.clone())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_no_factory_is_left_out():
    written = {n for n, f in THEIRS.items() if getattr(f, "__module__", "") == "replaced" and callable(f)}
    assert written - {"tensor_of_linear", "plain_nvfp4"} == set(NAMES) and len(NAMES) == 14


@pytest.mark.feature("F13")
@pytest.mark.parametrize(
    "name", ["high_precision", "delayed_scaling", "current_scaling", "float8_block_scaling", "mxfp8", "nvfp4"]
)
def test_the_base_factories_are_here_to_build_on(name):
    ours = getattr(compat, f"{name}_factory")
    assert CustomRecipe(qfactory=ours).resolve(ROLES) == CustomRecipe(qfactory=THEIRS[name]).resolve(ROLES)
    assert name == "delayed_scaling" or HybridQuantizer.parse(ours(None))


def test_delayed_scaling_asks_for_the_format_by_slot():
    request, attention = THEIRS["delayed_scaling"](None), QuantizerRole("dpa", "dp", "attn")
    texts = [request.text(QuantizerRole("linear", t, "fc")) for t in ("input", "weight", "grad_output")]
    assert texts == ["fp8_delayed", "fp8_delayed", "fp8_delayed+e5m2"]
    assert request == compat.delayed_scaling_factory(None)
    local = compat.DelayedScalingRequest(reduce_amax=False)
    assert local.text(QuantizerRole("linear", "input", "fc")) == "fp8_delayed+local_amax"
    assert THEIRS["nvfp4_linear_fp8_dpa"](attention).text(attention) == "fp8_delayed+e5m2+most_recent+history1"


@pytest.mark.feature("F13")
def test_a_linear_under_autocast_with_their_factory_is_ours_to_the_bit():
    results = []
    for theirs in (True, False):
        text = {"input": "mxfp8|nvfp4+rht", "weight": "mxfp8|nvfp4@rowwise_dequantized", "grad_output": "nvfp4+rht+sr"}
        torch.manual_seed(0)
        module = Linear(64, 96, name="fc", recipe="bf16" if theirs else text)
        x = draw("heavy", 32, 64).clamp(-100, 100).requires_grad_()
        if theirs:
            with compat.autocast(enabled=True, recipe=CustomRecipe(qfactory=THEIRS["mxfp8_fwd_nvfp4_bwd"])):
                y = module(x)
        else:
            y = module(x)
        y.backward(draw("normal", 32, 96, 1))
        results.append((y.detach(), x.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


ONE = compat.MXFP8Quantizer(DType.kFloat8E4M3)


def scaled(scale, dtype=DType.kFloat8E4M3, **options):
    return compat.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), dtype, **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False),
         "nvfp4+rht+nosign"),
        (lambda: NVFP4Quantizer(with_random_sign_mask=False), "nvfp4"),
        (lambda: Float8CurrentScalingQuantizer(DType.kFloat8E5M2, force_pow_2_scales=True, amax_epsilon=0.5),
         "fp8_current+e5m2+pow2+eps0.5"),
        (lambda: compat.Float8BlockQuantizer(DType.kFloat8E4M3, force_pow_2_scales=False), "fp8_block+2d+fp32_scale"),
        (lambda: compat.MXFP8Quantizer(DType.kFloat8E5M2), "mxfp8+e5m2"),
        (lambda: compat.IdentityQuantizer(dtype=torch.float32), "fp32"),
    ],
)  # fmt: skip
def test_every_option_reaches_the_format(make, text):
    assert make() == HybridQuantizer.parse(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NVFP4Quantizer(with_rht=True), "with_rht=True and with_post_rht_amax=False differ"),
        (lambda: NVFP4Quantizer(fp4_dtype=DType.kFloat8E4M3), "fp4_dtype is DType.kFloat8E4M3; it takes"),
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=3), "nvfp4_e4m3_max is 3; it takes 448 or 256"),
        (lambda: NVFP4Quantizer(with_amax_reduction=True), "with_amax_reduction=True has no counterpart"),
        (lambda: compat.MXFP8Quantizer(DType.kFloat4E2M1), "MXFP8Quantizer: fp8_dtype is DType.kFloat4E2M1; it takes"),
        (lambda: compat.Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=3), "block_scaling_dim is 3"),
        (lambda: compat.IdentityQuantizer(dtype=torch.float64), "dtype is torch.float64; it takes"),
        (lambda: DelayedScalingRequest(margin=2).text(QuantizerRole()), "DelayedScalingRequest: margin=2 has no"),
        (lambda: DelayedScalingRequest(amax_compute_algo="mean").text(QuantizerRole()), "is 'mean'; it takes 'max' or"),
        (lambda: compat.HybridQuantizer(rowwise_quantizer=DelayedScalingRequest(), columnwise_quantizer=None),
         "rowwise_quantizer is DelayedScalingRequest"),
        (lambda: compat.HybridQuantizer(rowwise_quantizer=ONE, columnwise_quantizer=ONE),
         r"distinct rowwise and columnwise quantizers; give a copy\(\)"),
        (lambda: compat.HybridQuantizer(rowwise_quantizer=ONE.copy(), columnwise_quantizer=ONE,
                                        columnwise_source="row"),
         "columnwise_source"),
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True)(torch.ones(16, 16)), "row_scaled is for rowwise operands only"),
        (lambda: scaled(1.0).update_quantized(torch.ones(16, 16), ONE(torch.ones(16, 16))),
         "Float8Quantizer cannot update a HybridQuantizedTensor"),
        (lambda: scaled(1.0)(torch.ones(16, 16)).clone().copy_(torch.ones(16, 16)), "fp8_delayed"),
    ],
)  # fmt: skip
def test_what_would_change_a_number_and_is_not_here_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_row_scaled_nvfp4_alone_has_no_columnwise_operand():
    custom = CustomRecipe(qfactory=lambda role: NVFP4Quantizer(row_scaled_nvfp4=True))
    with pytest.raises(UserError, match=r"fc/linear/input.*nvfp4\+row_scaled is for rowwise operands only"):
        custom.quantizer(QuantizerRole("linear", "input", "fc"))


def test_row_scaled_nvfp4_is_called_for_rowwise_operands():
    x = draw("heavy", 32, 64)
    tensor = NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)(x)
    theirs = HybridQuantizer.parse("nvfp4+row_scaled|mxfp8").quantize(x, columnwise=None).rowwise
    assert tensor.columnwise is None and tensor.rowwise.format == theirs.format
    assert all(torch.equal(tensor.rowwise.buffers[name], buffer) for name, buffer in theirs.buffers.items())


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("kFloat8E4M3", "float8_e4m3fn"), ("kFloat8E5M2", "float8_e5m2")])
def test_float8_quantizer_multiplies_by_its_scale_and_writes_the_amax(dtype, torch_dtype):
    """A scale that no amax gives, so that only the multiplication has these bytes."""
    x, torch_dtype = draw("heavy", 32, 64).float().clamp(-100, 100), getattr(torch, torch_dtype)
    quantizer = scaled(1.7734375, DType[dtype])
    tensor, codes = quantizer(x), (x * quantizer.scale).to(torch_dtype)
    assert torch.equal(tensor.rowwise.buffers["q"], codes.view(torch.uint8))
    assert torch.equal(tensor.columnwise.buffers["q"], codes.view(torch.uint8).t())
    assert tensor.rowwise.buffers["s"].item() == (1 / quantizer.scale).item() and quantizer.amax == x.abs().amax()
    assert torch.equal(tensor.dequantize(), codes.float() * (1 / quantizer.scale))
    quantizer.scale.fill_(2.0)
    quantizer.update_quantized(x, tensor)
    assert torch.equal(tensor.dequantize(), (x * 2).to(torch_dtype).float() / 2)
    assert isinstance(tensor, compat.Float8Tensor) and not quantizer.is_requantization_safe()


@pytest.mark.parametrize("write", [torch.Tensor.copy_, lambda tensor, x: tensor.quantize_(x)])
def test_a_scaled_tensor_is_written_under_the_present_scale(write):
    quantizer, x = scaled(3.0), torch.linspace(-2, 2, 21)
    tensor = quantizer(torch.ones(21))
    quantizer.scale.fill_(1.5)
    write(tensor, x)
    assert torch.equal(tensor.dequantize(), scaled(1.5)(x).dequantize()) and quantizer.amax == 2
    tensor.quantize_(torch.zeros(21), noop_flag=torch.ones(1))
    assert tensor._scale_inv == torch.tensor([1 / 1.5]) and tensor.dequantize().any()


def test_float8_quantizer_quantizes_a_slot_under_its_scale():
    module, x = compat.Linear(64, 96, bias=False, params_dtype=torch.bfloat16), draw("normal", 32, 64)
    quantizer = scaled(3.0)

    def factory(role):
        return quantizer if role is not None and role.tensor_type == "input" else compat.IdentityQuantizer()

    with compat.autocast(recipe=CustomRecipe(qfactory=factory)):
        y = module(x)
    decoded = (x.float() * 3).to(torch.float8_e4m3fn).bfloat16()
    expected = (decoded.float() @ module.weight.float().t()) * (1 / quantizer.scale)
    torch.testing.assert_close(y, expected.bfloat16(), rtol=1e-2, atol=1e-3)
    assert quantizer.amax == x.abs().amax().float()


def test_an_identity_casts_to_its_dtype():
    x = draw("normal", 32, 64).float()
    assert torch.equal(compat.IdentityQuantizer()(x).dequantize(), x)
    half = compat.IdentityQuantizer(dtype=torch.float16)
    assert half(x).dtype is half.make_empty((2, 4), device="cpu").dtype is torch.float16
    assert torch.equal(half(x).dequantize(), x.half())


@pytest.mark.parametrize(
    ("make", "safe", "row_only", "block"),
    [
        (lambda: scaled(1.0), False, True, 1),
        (lambda: Float8CurrentScalingQuantizer(DType.kFloat8E4M3), True, True, 1),
        (lambda: compat.Float8BlockQuantizer(DType.kFloat8E4M3), True, False, 128),
        (ONE.copy, True, False, 32),
        (NVFP4Quantizer, True, False, 16),
        (lambda: NVFP4Quantizer(stochastic_rounding=True), False, False, 16),
        (compat.IdentityQuantizer, True, False, 1),
        (lambda: compat.HybridQuantizer(rowwise_quantizer=ONE.copy(), columnwise_quantizer=ONE.copy()), True, False, 1),
        (lambda: compat.HybridQuantizer(rowwise_quantizer=ONE.copy(), columnwise_quantizer=NVFP4Quantizer(
            stochastic_rounding=True)), False, True, 1),
        (lambda: compat.HybridQuantizer(rowwise_quantizer=scaled(1.0), columnwise_quantizer=ONE.copy()),
         False, True, 1),
    ],
)  # fmt: skip
def test_what_a_quantizer_says_of_itself(make, safe, row_only, block):
    quantizer = make()
    assert (quantizer.is_requantization_safe(), quantizer.supports_only_rowwise_all_gather()) == (safe, row_only)
    for size in (1, 16, 32, 128):
        whole = size % block == 0
        assert (
            quantizer.is_quantizable(torch.empty(size, 128))
            == quantizer.is_quantizable(torch.empty(128, size))
            == whole
        )


def test_a_hybrid_sets_the_usages_of_its_parts_and_asks_only_used_ones():
    parts = scaled(1.0), ONE.copy()
    hybrid = compat.HybridQuantizer(rowwise_quantizer=parts[0], columnwise_quantizer=parts[1])
    assert [part.get_usages() for part in parts] == [
        {"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}
    ]  # fmt: skip
    assert hybrid.rowwise_quantizer is parts[0] and not hybrid.is_requantization_safe()
    hybrid.set_usage(rowwise=False)
    assert hybrid.is_requantization_safe()
    hybrid.columnwise_source = "rowwise_dequantized"
    assert not hybrid.is_requantization_safe()


def test_parts_of_a_hybrid_with_methods_of_their_own_are_called():
    x = draw("heavy", 32, 64).float()
    hybrid = compat.HybridQuantizer(
        rowwise_quantizer=scaled(1.5), columnwise_quantizer=ONE.copy(), columnwise_source="rowwise_dequantized"
    )
    tensor, decoded = hybrid(x), scaled(1.5)(x).dequantize()
    assert torch.equal(tensor.rowwise.dequantize(), decoded)
    assert torch.equal(tensor.columnwise.dequantize(), ONE(decoded).columnwise.dequantize())


def test_a_quantizer_of_hqsweep_may_be_a_part():
    part = HybridQuantizer.parse("nvfp4|mxfp8")
    hybrid = compat.HybridQuantizer(rowwise_quantizer=part, columnwise_quantizer=part)
    assert hybrid == part and hybrid.is_requantization_safe()

    class Own(HybridQuantizer):
        """A quantizer of a user."""

    with pytest.raises(UserError, match="HybridQuantizer: Own may quantize by a method of its own"):
        compat.HybridQuantizer(rowwise_quantizer=Own(part.rowwise, part.columnwise), columnwise_quantizer=part)


def test_arguments_that_are_buffers_have_no_effect_and_say_so():
    with pytest.warns(DeprecationWarning, match="use_existing_amax, scale and amax have no effect"):
        made = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, scale=torch.ones(2))
    assert made == Float8CurrentScalingQuantizer(DType.kFloat8E4M3)


def test_a_hybrid_updates_the_directions_of_its_usages():
    hybrid = compat.HybridQuantizer(
        rowwise_quantizer=NVFP4Quantizer(), columnwise_quantizer=ONE.copy(), columnwise_source="rowwise_dequantized"
    )
    x = draw("heavy", 32, 64)
    tensor, rowwise, expected = hybrid(x), hybrid(x).rowwise.dequantize(), hybrid(3 * x).columnwise.dequantize()
    hybrid.set_usage(rowwise=False)
    assert hybrid.update_quantized(3 * x, tensor) is tensor
    assert torch.equal(tensor.rowwise.dequantize(), rowwise) and torch.equal(tensor.columnwise.dequantize(), expected)
