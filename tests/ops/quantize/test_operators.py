"""The operators: their arguments, fake shapes, torch.compile, CUDA graphs, no synchronisation."""

import pytest
import torch
from cases import FEW_KERNEL_PAIRS, KERNELS
from support.ops.calls import find_amax, quantize
from support.ops.statistics import assert_same_row

from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.gemm.product import scale_product
from hqsweep.ops.library import has_kernels
from hqsweep.ops.quantize import operators
from hqsweep.ops.quantize.amax import find_amax_
from hqsweep.ops.quantize.dequantize import decode, dequantize
from hqsweep.ops.quantize.kernels import NO_KEY

KEY = RngKey(seed=7, slot="test", step=5)
pairs = pytest.mark.parametrize("pair", FEW_KERNEL_PAIRS, ids="|".join)
two_pairs = pytest.mark.parametrize("pair", [("nvfp4+row_scaled", "fp8_current"), ("mxfp4+sr", "nvfp4")], ids="|".join)


def operator_arguments(x, row, column, *, exact=False, statistics=False):
    return (x, row, column, False, exact, exact, [1, 2, 3], [4, 5, 6], None, None, statistics)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("statistics", [False, True])
@pairs
def test_the_operator_keeps_the_rules_of_torch_library(pair, exact, statistics):
    x = draw("heavy", 64, 160)
    arguments = operator_arguments(x, *pair, exact=exact, statistics=statistics)
    if not statistics:  # opcheck compares outputs of two calls; sums over NaN-free data are equal too, but it is slow
        torch.library.opcheck(torch.ops.hqsweep.quantize.default, arguments)
    with torch._subclasses.FakeTensorMode() as mode:
        expected = torch.ops.hqsweep.quantize(mode.from_tensor(x), *arguments[1:])
    operands = torch.ops.hqsweep.quantize(*arguments)
    assert [(t.shape, t.dtype, t.device) for t in operands] == [(t.shape, t.dtype, t.device) for t in expected]


def test_dequantize_and_find_amax_keep_the_rules_of_torch_library():
    buffers = list(parse("nvfp4").encode(draw("heavy", 32, 64)).values())
    torch.library.opcheck(torch.ops.hqsweep.dequantize.default, (buffers, "nvfp4", 32, 64, False, torch.bfloat16))
    amax = torch.zeros(1, 1)
    arguments = (draw("heavy", 32, 64), "nvfp4", "", False, [0, 0, 0], None, amax, None)
    torch.library.opcheck(torch.ops.hqsweep.find_amax_.default, arguments)


def both_and_back(x, row, column):
    operands = quantize(x, row, column, rowwise_key=KEY, columnwise_key=KEY)
    value = dequantize(operands.rowwise, row, tuple(x.shape), torch.float32)
    return list(operands.rowwise.values()), list(operands.columnwise.values()), value.sum() + x.sum()


def by_operators(x, row, column):
    operands = torch.ops.hqsweep.quantize(*operator_arguments(x * 2, row, column))
    count = len(parse(row).layout)
    value = torch.ops.hqsweep.dequantize(operands[:count], row, *x.shape, False, torch.float32)
    return [*operands, value + 1]


@pytest.mark.slow
@two_pairs
def test_the_operators_compile_without_a_break(pair):
    compiled = torch.compile(lambda x: by_operators(x, *pair), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (64, 96):
        x = draw("heavy", rows, 160)
        for a, b in zip(by_operators(x, *pair), compiled(x), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@two_pairs
def test_quantize_and_dequantize_compile_in_one_graph(pair):
    """Keys, errors and plans are worked out while tracing; another step is another graph."""
    torch.compiler.reset()
    row, column = (parse(text) for text in pair)
    compiled = torch.compile(both_and_back, fullgraph=True, backend="aot_eager")
    for rows in (64, 96, 32):
        x = draw("heavy", rows, 160)
        expected, actual = both_and_back(x, row, column), compiled(x, row, column)
        for a, b in zip(expected[0] + expected[1], actual[0] + actual[1], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert expected[2] == actual[2]


def test_a_dispatch_mode_sees_the_operator():
    """Outside of traced graphs the operator is bypassed; modes that record or fake operators must not miss it."""

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    names, x = [], draw("heavy", 32, 64)
    expected = quantize(x, parse("mxfp8"), None).rowwise
    with Seen():
        operands = quantize(x, parse("mxfp8"), None).rowwise
    assert names == ["hqsweep::quantize"] and all(torch.equal(operands[n], expected[n]) for n in expected)


def test_find_amax_raises_what_stands_there():
    x = draw("normal", 32, 64)
    amax, row, column = x.float().abs().max(), torch.tensor([[1e9]]), torch.zeros(1, 1)
    find_amax(x, parse("nvfp4"), parse("fp8_current"), out_rowwise=row, out_columnwise=column)
    assert row.item() == pytest.approx(1e9) and column.item() == amax.item()
    per_row = torch.zeros(32, 1)
    find_amax(x, parse("nvfp4+row_scaled"), None, out_rowwise=per_row)
    assert torch.equal(per_row, x.float().abs().amax(dim=1, keepdim=True))


def test_leading_axes_are_rows_and_gaps_between_rows_are_skipped():
    x = draw("heavy", 64, 160)
    expected = quantize(x, parse("mxfp8"), parse("nvfp4"))
    wide = torch.full((64, 200), torch.nan, dtype=x.dtype)
    wide[:, 8:168] = x
    for view in (x.view(4, 16, 160), wide[:, 8:168], x.view(2, 2, 16, 160)):
        operands = quantize(view, parse("mxfp8"), parse("nvfp4"), backend="kernel")
        for direction in ("rowwise", "columnwise"):
            got, wanted = getattr(operands, direction), getattr(expected, direction)
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("shape", [(0, 64), (32, 0), (0, 0)])
def test_nothing_in_gives_nothing_out(shape):
    for text in KERNELS:
        x, format = torch.empty(shape, dtype=torch.bfloat16), parse(text)
        operands = quantize(x, format, format, rowwise_key=KEY, columnwise_key=KEY, backend="kernel")
        assert operands.rowwise["q"].numel() == 0 and operands.columnwise["q"].numel() == 0


COUNTS = slice(4, 7)


def assert_same_statistics(got, wanted):
    """Tile by tile: sums up to float32, the largest magnitude and the counts exactly; then what is told of them."""
    sums, counted = (s.sums.double().cpu() for s in (got, wanted))
    assert torch.equal(sums[:, 3], counted[:, 3]) and torch.equal(sums[:, COUNTS], counted[:, COUNTS])
    torch.testing.assert_close(sums[:, :3], counted[:, :3], rtol=1e-5, atol=0)
    torch.testing.assert_close(got.row_errors.double().cpu(), wanted.row_errors.double(), rtol=1e-5, atol=0)
    assert_same_row(got.row(), wanted.row())


@pytest.mark.parametrize("text", KERNELS)
def test_statistics_of_the_kernel_are_those_of_the_reference(text):
    x, format = draw("heavy", 208, 272), parse(text)
    options = {"rowwise_key": KEY, "columnwise_key": KEY, "statistics": True}
    ours, theirs = (quantize(x, format, format, backend=b, **options) for b in ("kernel", "reference"))
    for direction in ("rowwise", "columnwise"):
        got, wanted = (getattr(result, f"{direction}_statistics") for result in (ours, theirs))
        assert_same_statistics(got, wanted)


def member_arguments(x, offsets, **changes):
    arguments = {"rowwise": "mxfp8", "columnwise": "mxfp8", "dequantized": False}
    arguments |= {"rowwise_exact": False, "columnwise_exact": False, "rowwise_key": NO_KEY, "columnwise_key": NO_KEY}
    arguments |= {"rowwise_amax": None, "columnwise_amax": None, "statistics": False, "offsets": offsets}
    arguments |= {"sizes": None, "rowwise_keys": None, "columnwise_keys": None, "by_rows": False}
    return (x, *(arguments | changes).values())


@pytest.mark.parametrize(
    ("message", "offsets", "changes"),
    [
        ("expert 1 has rows 32 to 16 of 48", [0, 32, 16, 48], {}),
        ("offsets begin with 16, must begin with 0", [16, 48], {}),
        ("expert 0 has rows 0 to -16 of 48", [0, -16, 48], {}),
        ("expert 1 has rows 16 to 64 of 48", [0, 16, 64], {}),
        ("expert 0: the contracted axis has 8 elements, must be a multiple of 16", [0, 8], {"columnwise": "nvfp4"}),
        (r"offsets are torch.int32 \(2,\) on cpu; they take int64", torch.tensor([0, 48], dtype=torch.int32), {}),
        (r"2 sizes of 48 rows for 1 members", [0, 48], {"sizes": [16, 32]}),
        (r"1 sizes of 32 rows for 1 members and a matrix of shape \(48, 32\)", [0, 48], {"sizes": [32]}),
        (r"keys are torch.int64 \(1, 2\) on cpu", [0, 48], {"rowwise_keys": torch.zeros(1, 2, dtype=torch.int64)}),
    ],
)
def test_wrong_offsets_sizes_and_keys(message, offsets, changes):
    offsets = offsets if isinstance(offsets, torch.Tensor) else torch.tensor(offsets)
    with pytest.raises(ValueError, match=message):
        torch.ops.hqsweep.quantize(*member_arguments(torch.zeros(48, 32), offsets, **changes))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"buffer q is torch.uint8 \(16,\) on cpu; it takes 1024 or more", {"buffers": [torch.zeros(16).byte()] * 2}),
        (r"buffer s is torch.float32 \(32,\) on cpu; it takes 32 or more contiguous torch.uint8",
         {"buffers": [torch.zeros(1024).byte(), torch.zeros(32)]}),
        ("buffer q is .*, not contiguous on cpu", {"buffers": [torch.zeros(32, 64).byte()[:, ::2]] * 2}),
        ("4 buffers for mxfp8; it has 2: q, s", {"buffers": [torch.zeros(1024).byte()] * 4}),
        ("there are no buffers", {"buffers": [], "offsets": torch.tensor([0, 32])}),
        ("there are no buffers", {"buffers": []}),
        (r"cannot have the shape \(-1, 32\)", {"rows": -1}),
        ("dtype is torch.float64; values are decoded to", {"dtype": torch.float64}),
        ("bf16 has no kernel", {"format": "bf16"}),
        ("columns are those of members", {"columnwise": True}),
    ],
)  # fmt: skip
def test_decoding_refuses_what_it_cannot_read(message, change):
    buffers = [torch.zeros(1024).byte(), torch.zeros(32).byte()]
    right = {"buffers": buffers, "format": "mxfp8", "rows": 32, "cols": 32, "exact": False, "dtype": torch.float32}
    assert decode(*right.values()).shape == (32, 32)
    with pytest.raises(ValueError, match=message):
        torch.ops.hqsweep.dequantize(*{**right, "offsets": None, "columnwise": False, **change}.values())


@pytest.mark.parametrize(
    ("message", "x", "change"),
    [
        ("x is torch.int32 .* it takes float32, bfloat16 or float16 with two axes", torch.zeros(32, 32).int(), {}),
        (r"x is torch.float32 \(32,\) on cpu", torch.zeros(32), {}),
        (r"a key is \[1, 2\]; it takes two words of 32 bits", None, {"rowwise_key": [1, 2]}),
        (r"a key is \[0, 0, 0, 0\]", None, {"columnwise_key": [0] * 4}),
        (r"a key is \[0, 0, -1\]", None, {"rowwise_key": [0, 0, -1]}),
        ("a word of the key is 4294967296, must have 32 bits", None, {"rowwise_key": [2**32, 0, 0]}),
        ("tables of keys are those of members", None, {"rowwise_keys": torch.zeros(1, 2, dtype=torch.int32)}),
        ("fp32 has no kernel", None, {"columnwise": "fp32"}),
        ("fp8_delayed takes its scale from the amaxes of earlier steps", None, {"rowwise": "fp8_delayed"}),
    ],
)
def test_quantizing_refuses_what_it_cannot_read(message, x, change):
    with pytest.raises(ValueError, match=message):
        operators.quantize(*member_arguments(torch.zeros(32, 32) if x is None else x, None, **change))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"offsets are \[0, 17, 48\] for members of \[32, 16\] rows", {"sizes": [32, 16]}),
        (r"keys are torch.int32 \(2, 2\), not contiguous on cpu",
         {"rowwise_keys": torch.zeros(2, 2, dtype=torch.int32).t()}),
    ],
)  # fmt: skip
def test_members_that_would_not_fit_their_outputs_are_refused(message, change):
    with pytest.raises(ValueError, match=message):
        operators.quantize(*member_arguments(torch.zeros(48, 32), torch.tensor([0, 17, 48]), **change))


def test_packed_buffers_have_an_entry_for_every_block_of_every_member():
    """Members of 1 row and of 47 take three blocks of 32, and one of 48 would take two."""
    offsets, codes = torch.tensor([0, 1, 48]), torch.zeros(48 * 32).byte()
    call = ("mxfp8", 48, 32, False, torch.float32, offsets, True)
    assert decode([codes, torch.zeros(3 * 32).byte()], *call).shape == (48 * 32,)
    with pytest.raises(ValueError, match=r"buffer s .* it takes 96 or more"):
        decode([codes, torch.zeros(2 * 32).byte()], *call)


def test_a_format_without_a_global_amax_has_none_to_find():
    with pytest.raises(ValueError, match="mxfp8 has no global amax"):
        find_amax_(torch.zeros(32, 32), "mxfp8", "", False, NO_KEY, None, torch.zeros(1), None)


@pytest.mark.feature("A28")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_beyond_the_last_member_are_left_out(device):
    x = draw("heavy", 96, 128, dtype=torch.bfloat16).to(device)
    operands = torch.ops.hqsweep.quantize(*member_arguments(x, torch.tensor([0, 32, 80], device=device)))
    alone = [quantize(part, parse("mxfp8"), parse("mxfp8")) for part in (x[:32], x[32:80])]
    pairs = [[getattr(each, d)[name] for each in alone] for d in ("rowwise", "columnwise") for name in "qs"]
    for got, members in zip(operands, pairs, strict=True):
        wanted = torch.cat([member.reshape(-1) for member in members])
        assert torch.equal(got[: wanted.numel()], wanted)


@pytest.mark.parametrize("sizes", [None, [16, 0, 80]])
@pytest.mark.parametrize("exact", [False, True])
def test_operators_on_members_keep_the_rules_of_torch_library(sizes, exact):
    x, offsets = draw("heavy", 96, 64), torch.tensor([0, 16, 16, 96])
    changes = {"sizes": sizes, "rowwise_exact": exact, "columnwise_exact": exact, "columnwise": "fp8_current"}
    arguments = member_arguments(x, offsets, **changes)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")  # unwritten bytes differ by run
    torch.library.opcheck(torch.ops.hqsweep.quantize.default, arguments, test_utils=utilities)
    buffers = [x.new_zeros(96 * 64, dtype=torch.uint8), x.new_zeros(64 * 4, dtype=torch.uint8)]
    arguments = (buffers, "mxfp8", 96, 64, exact, torch.float32, offsets, True)
    torch.library.opcheck(torch.ops.hqsweep.dequantize.default, arguments, test_utils=utilities)
    amaxes = (None, torch.zeros(2), torch.zeros(2))
    arguments = (torch.ones(48, 32), "fp8_delayed", "fp8_current", False, NO_KEY, *amaxes, torch.tensor([0, 16, 48]))
    torch.library.opcheck(torch.ops.hqsweep.find_amax_.default, arguments, test_utils=utilities)
    torch.library.opcheck(torch.ops.hqsweep.split_offsets.default, (torch.tensor([3, 4]), [1, 32], [5, 6], False))


# ---- CUDA ------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(
    ("message", "product", "factor", "dtype"),
    [
        ("product is torch.float16", torch.ones(4, 8).half(), torch.ones(1, 1), torch.float32),
        ("product is .*, not contiguous", torch.ones(8, 4).t(), torch.ones(1, 1), torch.float32),
        (r"factor is torch.float32 \(1, 4\)", torch.ones(4, 8), torch.ones(1, 4), torch.float32),
        ("factor is torch.bfloat16", torch.ones(4, 8), torch.ones(1, 8).bfloat16(), torch.float32),
        ("dtype is torch.float64", torch.ones(4, 8), torch.ones(1, 8), torch.float64),
    ],
)
def test_the_epilogue_refuses_what_it_cannot_read(message, product, factor, dtype):
    with pytest.raises(ValueError, match=message):
        scale_product(product.cuda(), factor.cuda(), dtype, 1.0)


@gpu
@pairs
def test_a_cuda_graph_replays_on_new_data(pair):
    """Capture fails at a synchronisation and at work on another stream."""
    row, column = (parse(text) for text in pair)
    x, other = draw("heavy", 256, 384).cuda(), draw("normal", 256, 384, 1).cuda()
    both_and_back(x, row, column)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = both_and_back(x, row, column)
    x.copy_(other)
    graph.replay()
    expected = both_and_back(other, row, column)
    for a, b in zip(outputs[0] + outputs[1], expected[0] + expected[1], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@gpu
def test_nothing_waits_for_the_device():
    x = draw("heavy", 256, 384).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row, column in FEW_KERNEL_PAIRS:
            both_and_back(x, parse(row), parse(column))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "fp8_block+2d"])
def test_more_elements_than_32_bits_count(text):
    """The last rows of a matrix of more than 2^31 elements, in both directions, against the same rows alone."""
    rows, cols, format = 2**16 + 256, 2**15, parse(text)
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-128:] = draw("heavy", 128, cols).cuda()
    grid = {"g": format.grid(x[-128:])["g"]} if text == "nvfp4" else None
    operands = quantize(x, format, format, rowwise_grid=grid, columnwise_grid=grid, backend="kernel")
    alone = quantize(x[-128:].cpu(), format, format, **_given(grid))
    assert torch.equal(operands.rowwise["q"][-128:].cpu(), alone.rowwise["q"])
    last = alone.columnwise["q"].shape[1]
    assert torch.equal(operands.columnwise["q"][:, -last:].cpu(), alone.columnwise["q"])


def _given(grid):
    if grid is None:
        return {}
    cpu = {name: tensor.cpu() for name, tensor in grid.items()}
    return {"rowwise_grid": cpu, "columnwise_grid": cpu}


@gpu
def test_another_gpu_than_the_current_one_is_used():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = draw("heavy", 64, 160)
    on_second = quantize(x.to("cuda:1"), parse("mxfp8"), parse("nvfp4"))
    assert on_second.rowwise["q"].device.index == 1 and has_kernels("cuda")
    assert torch.equal(on_second.rowwise["q"].cpu(), quantize(x, parse("mxfp8"), None).rowwise["q"])
