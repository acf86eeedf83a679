"""MS-EDEN (+eden): the paper's formulas in float64, its statistics over seeds, and products whose signs cancel."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as hadamard_matrix

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.eden import stochastic_e4m3
from hqsweep.formats.elements import E2M1, E4M3
from hqsweep.formats.hadamard import drawn_signs, hadamard
from hqsweep.formats.inputs import draw
from hqsweep.formats.random import PlacedKey, segment_words
from hqsweep.nn import Linear, quantization, quantized_model_init
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe.argument import recipe_of
from hqsweep.recipe.sections import LinearQuantizers

SIZES = {16: "rht", 32: "rht32", 64: "rht64", 128: "rht128"}
V = 6 / (17 / 16 * 0.93)
KEY = RngKey(seed=3, slot="w", step=2**33 + 7)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 of Salmon et al. on Python's integers."""
    (k0, k1), (c0, c1, c2, c3), mask = key, counter, 2**32 - 1
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & mask, a >> 32 ^ c3 ^ k1, a & mask
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return [c0, c1, c2, c3]


def step_words(key: RngKey) -> tuple[int, int]:
    return key.step & (2**32 - 1), key.step >> 32


def signs_of(key: RngKey) -> np.ndarray:
    words = philox((key.seed, 0x29DE3891), (0, 0, *step_words(key)))
    return np.array([-1.0 if words[i // 32] >> i % 32 & 1 else 1.0 for i in range(128)])


def cast(x: np.ndarray, dtype) -> np.ndarray:
    return x.astype(dtype).astype(np.float64)


def ms_eden(y: np.ndarray, n: int, key: RngKey) -> tuple[np.ndarray, np.ndarray, float]:
    """MS-EDEN as the paper has it, in float64: (elements, scales, tensor scale) of transformed y [rows, cols]."""
    rows, cols = y.shape
    blocks = y.reshape(rows, cols // 16, 16)
    tensor_scale = np.abs(blocks).max() / (256 * V)
    scales = cast(np.abs(blocks).max(axis=2) / V / tensor_scale, ml_dtypes.float8_e4m3fn)[..., None]
    inverse = np.divide(1, scales * tensor_scale, out=np.zeros_like(scales), where=scales > 0)
    elements = cast(np.clip(blocks * inverse, -6, 6), ml_dtypes.float4_e2m1fn)
    groups, rounded = (a.reshape(rows, cols // n, n) for a in (blocks * (scales > 0), elements * scales * tensor_scale))
    own, dot = (groups * groups).sum(axis=2), (groups * rounded).sum(axis=2)
    factor = np.divide(own, dot, out=np.ones_like(own), where=dot > 0)
    corrected = scales[..., 0] * factor.repeat(n // 16, axis=1)
    drawn = [philox(key.words, (i, 0, *step_words(key)))[0] % 2**20 / 2**20 for i in range(corrected.size)]
    table = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    low = np.clip(np.searchsorted(table, corrected, side="right") - 1, 0, 125)
    share = (corrected - table[low]) / (table[low + 1] - table[low])
    up = share + np.array(drawn).reshape(corrected.shape) >= 1
    return elements.reshape(rows, cols), table[low + up], tensor_scale


def values(x: torch.Tensor, text: str, key: RngKey) -> torch.Tensor:
    """The values of x's operand, turned back to the basis of x."""
    format = parse(text)
    y = format.decode(format.encode(x, key=key), tuple(x.shape)).view(-1, format.rht)
    return (hadamard(y, size=format.rht, signed=False) * drawn_signs(key)[: format.rht]).view(x.shape)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_of_the_paper(size):
    x = draw("normal", 24, 256, dtype=torch.float32)
    x[:, :128] *= 16
    x[0], x[1], x[2] = 0, x[1] / 2**14, x[2] / 2**22  # scales of 0, subnormal ones, and values that are lost
    format = parse(f"nvfp4+{SIZES[size]}+eden")
    turned = (x.double().numpy().reshape(-1, size) * signs_of(KEY)[:size]) @ hadamard_matrix(size) / size**0.5
    y = format.basis(x, KEY).double().numpy()
    np.testing.assert_allclose(y, turned.reshape(x.shape), rtol=2**-8, atol=1e-5)
    buffers = format.encode(x, key=KEY)
    elements, scales, tensor_scale = ms_eden(y, size, KEY)
    written = E4M3.decode(buffers["s"]).double().numpy()
    np.testing.assert_array_equal(written, scales)
    stored = np.repeat(scales > 0, 16, axis=1)
    np.testing.assert_array_equal((E2M1.decode(format.codes(buffers)).double().numpy() * stored), elements * stored)
    assert buffers["g"].item() / format.divisor == pytest.approx(tensor_scale, rel=1e-6)
    decoded = format.decode(buffers, x.shape).double().numpy()
    np.testing.assert_allclose(decoded, elements * np.repeat(scales, 16, axis=1) * tensor_scale, rtol=1e-6)
    assert (scales == 0).sum() >= 32 and (scales[1] > 0).any() and (scales[1] < 2**-6).all()


@pytest.mark.parametrize("size", SIZES)
def test_signs_are_drawn_by_seed_and_step_and_not_by_slot(size):
    assert drawn_signs(KEY).tolist() == signs_of(KEY).tolist()
    assert torch.equal(drawn_signs(KEY), drawn_signs(KEY.under("rowwise")))
    placed = PlacedKey(KEY, 3, size, 4 * size)
    assert torch.equal(drawn_signs(KEY), drawn_signs(placed))
    for other in (RngKey(seed=4, slot="w", step=KEY.step), RngKey(seed=3, slot="w", step=8)):
        assert 32 < (drawn_signs(KEY) != drawn_signs(other)).sum() < 96
    counted = RngKey(seed=3, slot="w", step=0, counter=torch.tensor([KEY.step]))
    x, format = draw("heavy", 16, 4 * size), parse(f"nvfp4+{SIZES[size]}+eden")
    for name, buffer in format.encode(x, key=KEY).items():
        assert torch.equal(buffer, format.encode(x, key=counted)[name])
    assert torch.equal(segment_words(placed, 5, size), segment_words(KEY, 8, 4 * size)[3:, size // 16 : size // 8])


def test_scales_round_up_with_the_probability_of_their_distance():
    x = torch.tensor([1.0, 1.125, 1.0625, 1.03125, 447.0, 460.0, 2.0**-9 * 1.25, 2.0**-6 * 1.03125, 0.0])
    words = torch.arange(0, 2**20, 2**10)[:, None] + 2**31
    mean = E4M3.decode(stochastic_e4m3(x.expand(len(words), -1).contiguous(), words.expand(-1, len(x)))).mean(dim=0)
    assert mean.tolist() == [1.0, 1.125, 1.0625, 1.03125, 447.0, 448.0, 2.0**-9 * 1.25, 2.0**-6 * 1.03125, 0.0]


@pytest.mark.parametrize(("kind", "bias"), {"normal": 0, "scales": 0, "outliers": 0.02}.items())
def test_the_mean_over_seeds_tends_to_x_with_less_error_than_stochastic_rounding(kind, bias):
    x = draw("normal", 16, 512, dtype=torch.float32)
    if kind == "outliers":
        x[:, ::37] *= 30
    if kind == "scales":  # blocks of one group have scales of their own
        x *= 2.0 ** (torch.arange(512) // 16 % 8)
    count, power = 100, x.square().mean()
    mean, errors = torch.zeros_like(x), {"eden": 0.0, "sr": 0.0}
    for seed in range(count):
        key = RngKey(seed=seed, slot="x", step=1)
        own = values(x, "nvfp4+rht128+eden", key)
        fixed = parse("nvfp4+rht128+sr")
        y = fixed.decode(fixed.encode(x, key=key), tuple(x.shape))
        errors["eden"] += ((own - x).square().mean() / power / count).item()
        errors["sr"] += ((y - fixed.basis(x)).square().mean() / power / count).item()
        mean += own / count
    assert errors["eden"] < 0.6 * errors["sr"]
    # An unbiased mean has the error of one draw over their number; the rest is bias. A Hadamard transform of few
    # outliers is no uniformly random rotation, for which EDEN is exact.
    assert (mean - x).square().mean() / power < (1.25 / count + bias) * errors["eden"]
    assert ((mean * x).sum() / x.square().sum()).item() == pytest.approx(1, abs=5e-4)


def test_a_gaussian_has_the_error_that_the_paper_reports():
    x = draw("normal", 256, 1024, dtype=torch.float32)
    error = (values(x, "nvfp4+rht128+eden", KEY) - x).square().mean() / x.square().mean()
    assert error.item() == pytest.approx(9.8e-3, abs=0.2e-3)  # and 23.5e-3 by stochastic rounding, in Table 1


@pytest.mark.parametrize(("text", "message"), {
    "nvfp4+eden": r"eden corrects what a transform spreads; add \+rht128, or \+rht64",
    "nvfp4+rht+eden+sr": "eden cannot be combined with sr;",
    "nvfp4+rht+nosign+eden": "eden cannot be combined with nosign;",
    "nvfp4+rht+eden+2d+e1m2": "eden cannot be combined with 2d, e1m2;",
    "nvfp4+rht+eden+row_scaled": "row_scaled cannot be combined with rht, eden",
    "nvfp4+rht+eden+4over6": "4over6 cannot be combined with rht, eden",
    "nvfp4+edn": r"unknown option '\+edn' \(did you mean 'eden'\?\)",
}.items())  # fmt: skip
def test_options_that_it_does_not_take(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)
    with pytest.raises(ValueError, match="signs need an RngKey"):
        parse("nvfp4+rht+eden").encode(torch.ones(2, 16))


def gradients(layer: Linear, x: torch.Tensor, dy: torch.Tensor, seed: int) -> list[torch.Tensor]:
    leaf, layer.weight.grad = x.clone().requires_grad_(), None
    with quantization(seed=seed, step=3):
        layer(leaf).backward(dy)
    return [leaf.grad.double(), layer.weight.grad.double()]


def test_gradients_of_the_packaged_recipe_have_no_bias():
    """Both operands of dgrad and wgrad are unbiased, and independent but for the signs, which cancel."""
    x, dy, w = (draw("normal", 128, 128, seed).float() for seed in (1, 2, 3))
    name, stored = "nvfp4+4over6", "nvfp4+4over6|fp32@rowwise_dequantized"
    exact = LinearQuantizers.parse({"input": stored, "weight": stored, "grad_output": "fp32"}, "m")
    chosen = recipe_of("quartet2_like").linear
    assert [str(chosen.input.rowwise), str(chosen.weight.rowwise)] == [name, name]
    layers = [Linear(128, 128, bias=False, name="m", recipe=own, dtype=torch.float32) for own in (chosen, exact)]
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(w)
    true, count, means, errors = gradients(layers[1], x, dy, 0), 64, [0.0, 0.0], [0.0, 0.0]
    for seed in range(count):
        for i, (own, whole) in enumerate(zip(gradients(layers[0], x, dy, seed), true, strict=True)):
            means[i] = means[i] + own / count
            errors[i] += ((own - whole).norm() / whole.norm()).square().item() / count
    for mean, whole, error in zip(means, true, errors, strict=True):
        assert 0.005 < error < 0.03
        assert ((mean - whole).norm() / whole.norm()).square() < 1.5 * error / count


def test_both_operands_of_a_product_draw_the_same_signs():
    text, fixed = "nvfp4+rht32+eden", "nvfp4+rht32+sr"
    one = HybridQuantizer.parse(text)  # as +rht: one text for both directions transforms columns
    assert (str(one), str(one.rowwise), str(one.columnwise)) == (text, "nvfp4", text)
    for other, message in (
        (
            "nvfp4+rht128+eden|nvfp4+rht128+eden",
            r"\(of 128 with drawn signs, of 32 with drawn signs\), so they do not cancel",
        ),
        (f"{fixed}|{fixed}", r"\(of 32 with signs, of 32 with drawn signs\), so they do not cancel"),
        ("mxfp8", "must be on both operands or on neither"),
    ):
        section = {"input": f"nvfp4|{text}", "weight": f"nvfp4|{text}", "grad_output": other}
        with pytest.raises(UserError, match=message):
            Linear(128, 128, name="m", recipe=LinearQuantizers.parse(section, "m"))


def test_a_held_weight_has_the_signs_of_another_step():
    section = LinearQuantizers.parse(dict.fromkeys(("input", "weight", "grad_output"), "nvfp4|nvfp4+rht32+eden"), "m")
    section = replace(section, grad_output=HybridQuantizer.parse("nvfp4+rht32+eden|nvfp4+rht32+eden"))
    with quantized_model_init(), quantization(seed=1, step=1):
        layer = Linear(32, 32, bias=False, name="m", recipe=section)
    layer(torch.ones(32, 32).bfloat16())  # fprop reads rows, which have no transform
    with pytest.raises(UserError, match=r"m: the weight is held in .*\+eden draws new ones in every step"):
        layer(torch.ones(32, 32).bfloat16().requires_grad_())
