"""Properties that the arithmetic must have whatever the bytes are."""

import pytest
import torch
from cases import ELEMENTS_OF_MX, EVERY_OPTION, HIGH, REPRESENTATIVE

from hqsweep.formats import NAMES, RngKey, options, parse
from hqsweep.formats.elements import E2M1
from hqsweep.formats.hadamard import hadamard
from hqsweep.formats.inputs import DISTRIBUTIONS, draw
from hqsweep.formats.nvfp4 import stochastic_e2m1
from hqsweep.formats.random import philox, random_bytes

KEY = RngKey(seed=0, slot="test", step=0)


@pytest.mark.parametrize("text", [text for text in EVERY_OPTION if parse(text).two_d and not parse(text).rht])
def test_2d_codes_of_the_transpose_are_the_transposed_codes(text):
    format, x = parse(text), draw("heavy", 160, 96)
    row, column = format.encode(x), format.encode(x.t())
    assert torch.equal(format.codes(row), format.codes(column).t())
    assert torch.equal(row["s"], column["s"].t())


@pytest.mark.parametrize("distribution", sorted(set(DISTRIBUTIONS) - {"nonfinite"}))
@pytest.mark.parametrize("text", ELEMENTS_OF_MX)
def test_mx_never_saturates(text, distribution):
    format, x = parse(text), draw(distribution, 64, 96)
    buffers = format.encode(x)
    limit = format.scales(buffers).repeat_interleave(32, dim=1) * format.element.max
    assert (x.float().abs() <= limit * (1 + 2**-23)).all()


def scales_are_powers_of_two(text):
    format = parse(text)
    exact = format.high_precision or format.scaling == "mx" or getattr(format, "pow2", False)
    return exact and not (format.rht or format.stochastic)


@pytest.mark.parametrize("text", [text for text in EVERY_OPTION if scales_are_powers_of_two(text)])
def test_quantizing_what_was_dequantized_changes_nothing(text):
    format, x = parse(text), draw("normal", 64, 128)
    once = format.decode(format.encode(x), (64, 128))
    assert torch.equal(once, format.decode(format.encode(once), (64, 128)))


@pytest.mark.parametrize("text", [text for text in REPRESENTATIVE if text not in HIGH and not parse(text).delayed])
def test_a_given_grid_replaces_the_own_amax(text):
    format, x = parse(text), draw("normal", 64, 128)
    whole, half = format.encode(x, key=KEY), x[:32]
    grid = {k: g[: (g.shape[0] + 1) // 2] if g.shape[0] > 1 else g for k, g in format.grid(x, KEY).items()}
    part = format.encode(half, grid, KEY)
    assert torch.equal(format.codes(part), format.codes(whole)[:32])


@pytest.mark.feature("F21", "F23", "F24", "F25", "F26")
def test_hadamard_is_orthogonal_and_cancels():
    x, y = draw("normal", 8, 64).float(), draw("normal", 8, 64, seed=1).float()
    torch.testing.assert_close(hadamard(x) @ hadamard(y).t(), x @ y.t(), rtol=1e-5, atol=1e-4)
    assert not torch.equal(hadamard(x), hadamard(x, signed=False))


def test_philox_known_answers():
    # Random123 kat_vectors, philox4x32 10 rounds.
    zero = torch.zeros(1, dtype=torch.int64)
    assert [w.item() for w in philox((0, 0), (zero,) * 4)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = torch.full((1,), 0xFFFFFFFF)
    answer = [w.item() for w in philox((0xFFFFFFFF, 0xFFFFFFFF), (ones,) * 4)]
    assert answer == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_random_bytes_depend_on_key_and_index_alone():
    a = random_bytes(KEY, 4, 40)
    assert torch.equal(a.flatten(), random_bytes(KEY, 1, 160).flatten())
    for other in (
        RngKey(seed=1, slot="test", step=0),
        RngKey(seed=0, slot="t", step=0),
        RngKey(seed=0, slot="test", step=1),
    ):
        assert not torch.equal(a, random_bytes(other, 4, 40))
    counts = torch.bincount(random_bytes(KEY, 256, 1024).flatten().int(), minlength=256).double()
    assert ((counts - 1024).square() / 1024).sum() < 256 + 5 * (2 * 256) ** 0.5  # chi-square, 5 sigma


def test_stochastic_rounding_is_unbiased_over_all_random_bytes():
    x = torch.linspace(-6, 6, 2401)
    codes = stochastic_e2m1(x[None].expand(256, -1).contiguous(), torch.arange(256, dtype=torch.uint8)[:, None])
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    bias = E2M1.decode(codes).double().mean(0) - x.double()
    assert (bias.abs() <= step / 256).all()


def test_stochastic_rounding_needs_a_key():
    with pytest.raises(ValueError, match="needs an RngKey"):
        parse("nvfp4+sr").encode(torch.ones(1, 16))


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"nvfp4\+2d: the contracted axis has 40 elements; it takes a multiple of 16"):
        parse("nvfp4+2d").shapes(16, 40)
    assert parse("mxfp8").shapes(3, 33) == {"q": (3, 33), "s": (3, 2)}


@pytest.mark.parametrize("shape", [(0, 32), (16, 0), (0, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_empty_matrices_have_empty_codes_and_zero_amaxes(name, shape):
    for text in (name, *(f"{name}+{option}" for option in options(name) if option in ("2d", "row_scaled", "4over6"))):
        format = parse(text)
        buffers = format.encode(torch.zeros(shape), format.grid(torch.zeros(shape)))
        assert {n: tuple(b.shape) for n, b in buffers.items()} == format.shapes(*shape)
        assert format.decode(buffers, shape).shape == shape
        assert all((amax == 0).all() for amax in format.grid(torch.zeros(shape)).values())
