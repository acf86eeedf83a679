"""quantize with splits: one call for all members gives the bytes of a call for each, on the CPU and on a GPU."""

import pytest
import torch
from cases import KERNEL_PAIRS, KERNELS, LOW_BASES, PLAIN, REPRESENTATIVE, crossed
from support.ops.calls import device_splits, quantize

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.splits import Splits

SIXTEENS = (0, 128, 48, 0, 16, 160, 256, 0)
ANY = (37, 0, 1, 128, 131, 300)
CASES = [(text, text, "original") for text in KERNELS] + [(None, PLAIN, "original"), (PLAIN, None, "original")]
PLAIN_CASES = [(text, text, "original") for text in LOW_BASES]
"""Cases of which tests take each width; other cases have one of them."""
CASES += [(*pair, ("original", "rowwise_dequantized")[index % 2]) for index, pair in enumerate(KERNEL_PAIRS)]
DTYPES = {256: (torch.bfloat16, torch.float32), 96: (torch.float16,), 48: (torch.bfloat16,)}
"""Width -> the dtypes of its matrices."""
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}|{c[1]}{'@' * (c[2] != 'original')}")
with_widths = pytest.mark.parametrize(
    ("case", "width"), crossed(CASES, DTYPES, whole=PLAIN_CASES), ids=lambda c: str(c).replace("'", "")
)


def keys(count: int, direction: str) -> list[RngKey]:
    return [RngKey(seed=7, slot=f"experts/{e}/{direction}", step=2**33 + 5) for e in range(count)]


def formats_of(case):
    row, column, source = case
    formats = {"rowwise": row and parse(row), "columnwise": column and parse(column)}
    return formats | {"columnwise_source": source}


def one_by_one(x, sizes, case, **options):
    """Packed results of a call for each expert, {direction: {buffer: flat}}."""
    experts, start = [], 0
    per_expert = {name: options.pop(name) for name in list(options) if name.endswith("_grid")}
    for e, size in enumerate(sizes):
        own = {f"{d}_key": keys(len(sizes), d)[e] for d in ("rowwise", "columnwise")}
        own |= {name: grids[e] for name, grids in per_expert.items()}
        experts.append(quantize(x[start : start + size], **formats_of(case), **own, **options))
        start += size
    packed = {}
    for direction in ("rowwise", "columnwise"):
        members = [tensors_of(getattr(each, direction)) for each in experts]
        packed[direction] = {n: torch.cat([m[n].reshape(-1) for m in members]) for n in members[0]}
    return packed


def on_device(packed, device):
    return {direction: {name: t.to(device) for name, t in buffers.items()} for direction, buffers in packed.items()}


def tensors_of(result) -> dict[str, torch.Tensor]:
    if result is None or isinstance(result, dict):
        return result or {}
    named = {"matrix": result.matrix, "factor": result.factor}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def at_once(x, splits, case, monkeypatch, **options):
    """The same from one call, which must not fall back on calls for each expert."""
    monkeypatch.setattr(
        "hqsweep.ops.quantize.quantize.of_member", lambda *_, **__: pytest.fail("a call for one expert")
    )
    own = {f"{d}_key": keys(splits.count, d) for d in ("rowwise", "columnwise")}
    operands = quantize(x, splits=splits, **formats_of(case), **own, **options)
    monkeypatch.undo()
    return {direction: tensors_of(getattr(operands, direction)) for direction in ("rowwise", "columnwise")}


def assert_same(actual, expected, what=""):
    """Equal bytes, as far as the expected ones go: buffers of splits that the host does not know may be longer."""
    for direction, wanted in expected.items():
        assert actual[direction].keys() == wanted.keys(), what
        for name, tensor in wanted.items():
            got = actual[direction][name]
            assert got.dtype == tensor.dtype and got.numel() >= tensor.numel(), (what, direction, name)
            same = got[: tensor.numel()].view(torch.uint8) == tensor.view(torch.uint8)
            assert bool(same.all()), (what, direction, name, int((~same).sum()))


def sizes_of(case) -> tuple[int, ...]:
    """Sizes as ragged as the columnwise format takes them."""
    return ANY if not case[1] or parse(case[1]).column_multiple == 1 else SIXTEENS


def layouts(rows, cols, device, dtype):
    """A matrix whose rows are whole and aligned, and others that are not."""
    x = draw("heavy", rows, cols, dtype=dtype).to(device)
    wide, high = torch.zeros(rows, cols + 3, dtype=dtype, device=device), torch.zeros(cols, rows, dtype=dtype)
    wide[:, :cols] = x
    high = high.to(device).copy_(x.t())
    return {"rows": x, "unaligned": wide[:, :cols], "columns": high.t()}


@pytest.mark.feature("F137")
@devices
@with_widths
def test_one_call_gives_the_bytes_of_a_call_for_each_expert(case, width, device, monkeypatch):
    """On the CPU, where the kernel is another one than that of a GPU."""
    for sizes in {SIXTEENS, sizes_of(case)}:
        for dtype in DTYPES[width]:
            for name, x in layouts(sum(sizes), width, device, dtype).items():
                splits = Splits.of(sizes, sum(sizes))
                expected = on_device(one_by_one(x.cpu(), sizes, case), device)
                assert_same(at_once(x, splits, case, monkeypatch), expected, (name, dtype, sizes))


@devices
@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4+rht"), ("nvfp4+tensor", "mxfp4+rht"), ("nvfp4", "nvfp4+ue5m3+rht")])
def test_rows_with_an_amax_beside_transformed_columns(pair, device, monkeypatch):
    """A matrix, and a single member: one pass finds both amaxes only where both formats have one."""
    x, case, sizes = draw("normal", 128, 96, dtype=torch.bfloat16), (*pair, "original"), (128,)
    expected = one_by_one(x, sizes, case, backend="reference")
    assert_same(one_by_one(x.to(device), sizes, case), on_device(expected, device), "matrix")
    got = at_once(x.to(device), Splits.of(sizes, 128), case, monkeypatch)
    assert_same(got, on_device(expected, device), "member")


@devices
@cases
def test_exact_operands(case, device, monkeypatch):
    output = {"rowwise_output": "exact", "columnwise_output": "exact"}
    for width in (256, 96, 48):
        x = draw("heavy", sum(SIXTEENS), width, dtype=torch.bfloat16).to(device)
        expected = one_by_one(x, SIXTEENS, case, **output)
        actual = at_once(x, Splits.of(SIXTEENS, len(x)), case, monkeypatch, **output)
        for direction in ("rowwise", "columnwise"):  # a NaN may have other bits
            assert_same({direction: without_nan(actual[direction])}, {direction: without_nan(expected[direction])})


@devices
@with_widths
def test_exact_columns_by_rows(case, width, device, monkeypatch):
    """What a call for each expert gives, turned, whether the kernel stores whole tiles or not."""
    for sizes in {SIXTEENS, sizes_of(case)} if case[1] else ():
        x = draw("heavy", sum(sizes), width, dtype=torch.bfloat16).to(device)
        splits = Splits.of(sizes, len(x))
        output = {"columnwise_output": "exact"}
        expected = one_by_one(x, sizes, case, **output)
        parts = expected["columnwise"]["matrix"].split([size * width for size in sizes])
        turned = [part.view(width, size).t().reshape(-1) for part, size in zip(parts, sizes, strict=True)]
        expected["columnwise"]["matrix"] = torch.cat(turned)
        for known in (splits, device_splits(sizes, device)):
            actual = at_once(x, known, case, monkeypatch, by_rows=True, **output)
            for direction in ("rowwise", "columnwise"):
                wanted = {direction: without_nan(expected[direction])}
                assert_same({direction: without_nan(actual[direction])}, wanted, sizes)


def without_nan(tensors):
    return {name: torch.where(t.isnan(), torch.full_like(t, 7.0), t) for name, t in tensors.items()}


@pytest.mark.feature("F137")
@devices
@cases
def test_splits_that_the_host_does_not_know(case, device, monkeypatch):
    """Buffers of the largest size that any splits need, written as far as these need it."""
    sizes = sizes_of(case)
    x = draw("heavy", sum(sizes), 128, dtype=torch.bfloat16).to(device)
    assert_same(at_once(x, device_splits(sizes, device), case, monkeypatch), one_by_one(x, sizes, case))


@devices
@pytest.mark.parametrize("count", [1, 129, 300])
def test_many_experts(count, device, monkeypatch):
    generator = torch.Generator().manual_seed(count)
    sizes = (torch.randint(-3, 5, (count,), generator=generator).clamp(0) * 16).tolist()
    sizes[-1] = 144
    x = draw("heavy", sum(sizes), 128, dtype=torch.bfloat16).to(device)
    for case in (("mxfp8+2d", "mxfp8", "original"), ("nvfp4+sr", "nvfp4", "original")):
        expected = one_by_one(x, sizes, case)
        assert_same(at_once(x, Splits.of(sizes, len(x)), case, monkeypatch), expected, case)


@devices
@pytest.mark.parametrize("text", [text for text in REPRESENTATIVE if parse(text).amax_name])
def test_given_amaxes_are_the_experts_own(text, device, monkeypatch):
    x, grids = draw("heavy", sum(SIXTEENS), 128, dtype=torch.bfloat16).to(device), {}
    name, row_scaled = parse(text).amax_name, parse(text).row_scaled
    for direction in ("rowwise", "columnwise"):
        tall = [(size if direction == "rowwise" else 128) if row_scaled else 1 for size in SIXTEENS]
        amaxes = [1.0 + e + torch.arange(float(rows)).view(-1, 1) for e, rows in enumerate(tall)]
        grids[f"{direction}_grid"] = [{name: amax.to(device)} for amax in amaxes]
    case = (text, text, "original")
    expected = one_by_one(x, SIXTEENS, case, **grids)
    assert_same(at_once(x, Splits.of(SIXTEENS, len(x)), case, monkeypatch, **grids), expected)


def test_what_a_call_for_each_expert_refuses_is_refused():
    x, format = torch.zeros(48, 32), parse("nvfp4")
    with pytest.raises(UserError, match=r"expert 1: .* takes a multiple of 16 rows"):
        quantize(x, None, format, splits=Splits.of((32, 12, 4), 48))
    with pytest.raises(UserError, match=r"expert 0: .* takes its scale from the amaxes of earlier steps"):
        quantize(x, parse("fp8_delayed"), splits=Splits.of((48,), 48))
    with pytest.raises(ValueError, match="encode needs an RngKey"):
        quantize(x, parse("nvfp4+sr"), splits=Splits.of((48,), 48))
    with pytest.raises(UserError, match="statistics are those of one matrix"):
        quantize(x, format, splits=Splits.of((48,), 48), statistics=True)
    with pytest.raises(UserError, match=r"splits of 32 rows over 2 experts for a matrix of shape \(48, 32\)"):
        quantize(x, format, splits=Splits.of((16, 16), 32))


@pytest.mark.feature("F137", "A28")
@pytest.mark.gpu
@cases
def test_gpu_graph_serves_other_splits_without_waiting(case):
    """Captured under one routing, replayed under another: nothing of the splits was read by the host."""
    x = draw("heavy", sum(SIXTEENS), 256, dtype=torch.bfloat16).cuda()
    splits = Splits(rows=len(x), count=len(SIXTEENS), sizes=None, device_sizes=None)
    offsets = torch.zeros(len(SIXTEENS) + 1, dtype=torch.int64, device="cuda")
    splits.cached("offsets", lambda device: offsets, x.device)
    own = {f"{d}_key": keys(splits.count, d) for d in ("rowwise", "columnwise")}

    def call():
        return quantize(x, splits=splits, **formats_of(case), **own, backend="kernel")

    offsets.copy_(torch.tensor([0, *[len(x)] * len(SIXTEENS)]))
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    for sizes in (SIXTEENS, SIXTEENS[::-1]):
        offsets.copy_(torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()]))
        graph.replay()
        actual = {d: tensors_of(getattr(outputs, d)) for d in ("rowwise", "columnwise")}
        assert_same(actual, one_by_one(x, sizes, case))
