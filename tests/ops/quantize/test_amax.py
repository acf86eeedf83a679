"""Amaxes of all experts found by one call are those that a call for each expert finds."""

from itertools import pairwise

import pytest
import torch
from cases import BASES, DELAYED, REPRESENTATIVE, crossed
from support.ops.calls import device_splits, find_amax, quantize

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, RngKeys, parse
from hqsweep.formats.inputs import DISTRIBUTIONS, draw
from hqsweep.ops.quantize.kernels import spec_named
from hqsweep.ops.splits import Splits

SIXTEENS, ANY = (0, 128, 48, 0, 16, 160, 256, 0), (37, 0, 1, 128, 131, 300)
KEYS = RngKeys(seed=7, slots=tuple(map(str, range(8))), step=2**33 + 5)
AMAXES = [text for text in REPRESENTATIVE if parse(text).amax_name]
CASES = [(text, text, "original") for text in AMAXES] + [(AMAXES[0], None, "original"), (None, AMAXES[-1], "original")]
WAYS = [("auto", torch.bfloat16), ("auto", torch.float32), ("reference", torch.bfloat16)]
CASES += [(row, DELAYED, "rowwise_dequantized") for row in BASES] + [
    (row, column, ("original", "rowwise_dequantized")[index % 2])
    for index, (row, column) in enumerate(pairwise(AMAXES))
]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def sizes_of(case):
    return SIXTEENS if case[1] and parse(case[1]).column_multiple > 1 else ANY


def arguments(case, sizes, width, device):
    """Formats, and amaxes in which something stands already, some of it larger than what is there to be found."""
    row, column, source = (case[0] and parse(case[0])), (case[1] and parse(case[1])), case[2]
    experts, amaxes = len(sizes), {}
    generator = torch.Generator().manual_seed(0)
    for name, format, lines in (("out_rowwise", row, sum(sizes)), ("out_columnwise", column, experts * width)):
        if format and spec_named(format.text).amax_name:
            count = lines if spec_named(format.text).row_scaled else experts
            amaxes[name] = (torch.rand(count, generator=generator) ** 8 * 1e3).to(device)
    if source != "original" and spec_named(row.text).delayed:
        amaxes["rowwise_amax"] = torch.rand(experts, generator=generator).to(device) * 4
    return (row, column), {"columnwise_source": source}, amaxes


def keys_of(own):
    return {f"{direction}_key": own.under(direction) for direction in ("rowwise", "columnwise")}


def one_by_one(x, sizes, formats, options, places):
    start, width = 0, x.shape[1]
    for e, size in enumerate(sizes):
        own = {}
        for name, amaxes in places.items():
            lines = (start, start + size) if name != "out_columnwise" else (e * width, (e + 1) * width)
            part = amaxes[e : e + 1] if len(amaxes) == len(sizes) else amaxes[slice(*lines)]
            own[name] = part
        if size:
            find_amax(x[start : start + size], *formats, **options, **keys_of(KEYS[e]), **own)
        start += size


@pytest.mark.feature("H29")
@devices
@pytest.mark.parametrize(("case", "way"), crossed(CASES, WAYS, whole=CASES[::9]), ids=str)
def test_one_call_finds_what_a_call_for_each_expert_finds(case, way, device, monkeypatch):
    """From splits of the host and of a device, which is not asked; NaN is no amax, and infinity is."""
    backend, dtype = way
    sizes, width = sizes_of(case), 144
    x = draw("heavy", sum(sizes), width, dtype=dtype).to(device)
    x[200, 3], x[250, 100] = float("nan"), float("inf")
    for splits in (Splits.of(sizes, len(x)), device_splits(sizes, device)):
        formats, options, ours = arguments(case, sizes, width, device)
        theirs = {name: amaxes.clone() for name, amaxes in ours.items()}
        one_by_one(x, sizes, formats, options, theirs)
        if backend == "auto":
            monkeypatch.setattr("hqsweep.ops.quantize.amax._own", lambda *_, **__: pytest.fail("a call for one expert"))
        find_amax(x, *formats, splits=splits, **options, **keys_of(KEYS), **ours, backend=backend)
        monkeypatch.undo()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert splits.sizes or "host" not in vars(splits) or backend == "reference"


@pytest.mark.feature("H29")
@devices
def test_rows_beyond_the_last_expert_are_not_read(device):
    sizes, x, out = (16, 0, 32), torch.ones(64, 32, device=device), torch.zeros(3, device=device)
    x[48:] = 9
    on_device = torch.tensor(sizes, device=device)
    find_amax(
        x, parse("fp8_delayed"), splits=Splits(rows=64, count=3, sizes=None, device_sizes=on_device), out_rowwise=out
    )
    assert out.tolist() == [1, 0, 1]


def test_what_is_refused():
    x, out, delayed = torch.ones(48, 32), torch.zeros(2), parse("fp8_delayed")
    for splits, options, message in (
        (Splits.of((16, 16), 32), {"out_rowwise": out}, r"splits of 32 rows for a matrix of shape \(48, 32\)"),
        (Splits.of((48,), 48), {"out_rowwise": out}, "rowwise out .* takes 1 contiguous float32"),
        (Splits.of((16, 32), 48), {"out_columnwise": out}, "no format has no global amax to find for columnwise out"),
    ):
        with pytest.raises(UserError, match=message):
            find_amax(x, delayed, splits=splits, **options)
    formats = (parse("nvfp4+sr"), delayed)
    options = {"columnwise_source": "rowwise_dequantized", "out_rowwise": torch.zeros(2), "out_columnwise": out}
    with pytest.raises(ValueError, match="encode needs an RngKey"):
        find_amax(x, *formats, splits=Splits.of((16, 32), 48), **options)
    find_amax(x, delayed, splits=Splits.of((16, 32), 48))  # nothing asked for


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(16, 4), (48, 36), (32, 70), (272, 384), (4096, 768)], ids=str)
def test_a_gpu_finds_the_amax_of_transformed_columns(shape, distribution):
    """Alone, and together with X's own in one read; of whole matrices and of columns of wider ones. As the CPU does."""
    x = draw(distribution, *shape)
    wide = torch.cat([x, x * 2], 1).cuda()
    formats, keys = (parse("nvfp4"), parse("nvfp4+rht+sr")), {"columnwise_key": RngKey(seed=3, slot="t", step=5)}
    if shape[1] % 16:
        formats = (None, formats[1])
    expected, host = torch.full((1,), 0.01), quantize(x, *formats, **keys)
    find_amax(x, None, formats[1], out_columnwise=expected)
    for on_gpu in (x.cuda(), wide[:, : shape[1]], x.t().contiguous().cuda().t()):
        amax = torch.full((1,), 0.01, device="cuda")
        find_amax(on_gpu, None, formats[1], out_columnwise=amax)
        assert torch.equal(amax.cpu(), expected)
        operands = quantize(on_gpu, *formats, **keys)
        for direction in ("rowwise", "columnwise"):
            ours, theirs = getattr(operands, direction), getattr(host, direction)
            assert theirs is None or all(torch.equal(ours[name].cpu(), theirs[name]) for name in theirs)
