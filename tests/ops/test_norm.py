"""The norms' kernels against torch in float64; the sum against torch's addition, to the bit."""

import pytest
import torch
import torch.nn.functional as F

from hqsweep.formats.hadamard import hadamard
from hqsweep.ops import norm

DEVICE = "cuda"
EPSILON = 1e-5
F32, BF16 = torch.float32, torch.bfloat16
WIDTHS = [4, 36, 384, 768, 1000, 2048, 4096, 6144]
ROWS = (1, 3, 77, 700)
MEASURED = (16, 48, 1024)
TYPES = [
    (F32, BF16, BF16),
    (F32, None, BF16),
    (F32, None, F32),
    (BF16, BF16, BF16),
    (BF16, F32, F32),
    (BF16, None, BF16),
]


def inputs(rows, cols, x_dtype, branch_dtype, centred, lead=()):
    """x, branch, gain and bias, whose rows differ in size and place."""
    g = torch.Generator().manual_seed(rows * 10007 + cols)
    spread = torch.logspace(-2, 2, rows)[:, None]
    x = ((torch.randn(rows, cols, generator=g) + 0.3) * spread).to(x_dtype)
    branch = None if branch_dtype is None else (torch.randn(rows, cols, generator=g) * spread).to(branch_dtype)
    gain = torch.randn(cols, generator=g) + 1
    bias = torch.randn(cols, generator=g) if centred else None
    return [None if t is None else t.to(DEVICE) for t in (x, branch, gain, bias)]


def reference(total, gain, bias):
    if bias is None:
        return F.rms_norm(total, total.shape[-1:], gain, EPSILON)
    return F.layer_norm(total, total.shape[-1:], gain, bias, EPSILON)


def tolerance(dtype):
    return {"rtol": 2**-8, "atol": 1e-5} if dtype is BF16 else {"rtol": 2e-5, "atol": 2e-5}


def summands(whole, ranks, rank):
    """[W - 1, ...] of other ranks and the own summand of a sum, and all; float32 sums of them depend on their order."""
    every = torch.randn(ranks, *whole.shape, device=DEVICE) * torch.logspace(-2, 2, ranks).to(DEVICE)[:, None, None]
    every = every.to(whole.dtype)
    return torch.cat([every[:rank], every[rank + 1 :]]), every[rank], every


def same(a, b):
    return all(torch.equal(s.view(torch.uint8), t.view(torch.uint8)) for s, t in zip(a, b, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_forward_and_backward_are_those_of_float64(types, cols, centred):
    x_dtype, branch_dtype, h_dtype = types
    for rows in ROWS:
        x, branch, gain, bias = inputs(rows, cols, x_dtype, branch_dtype, centred)
        h, statistics, *summed = norm.norm(x, branch, gain, bias, EPSILON, h_dtype)
        total = summed[0] if summed else x
        assert torch.equal(total, x if branch is None else x + branch.to(x_dtype)) and total.dtype == x_dtype
        leaves = [t.double().requires_grad_() for t in (total, gain, *(() if bias is None else (bias,)))]
        expected = reference(leaves[0], leaves[1], leaves[2] if centred else None)
        torch.testing.assert_close(h.double(), expected.detach(), **tolerance(h_dtype))
        dh, dtotal = (torch.randn(total.shape, device=DEVICE).to(dtype) for dtype in (h_dtype, x_dtype))
        expected.backward(dh.double())
        for stream in (None, dtotal):
            dx, dgain, *rest = norm.norm_backward(dh, total, stream, gain, statistics, branch_dtype)
            whole = leaves[0].grad if stream is None else leaves[0].grad + stream
            # of a row, whose terms cancel; and bfloat16 is rounded to before the stream's gradient is added, and after
            scale = statistics[0, :, None] * (dh * gain).abs().amax(dim=-1, keepdim=True) * (1 + cols**0.5)
            scale = scale + whole.abs() + (0 if stream is None else stream.abs())
            assert ((dx - whole).abs() <= (2e-6 if x_dtype is F32 else 2**-7) * scale).all()
            size = dh.double().abs().sum(dim=0) * 4
            for sums, leaf in zip(dgain, leaves[1:], strict=True):
                assert sums.dtype == F32 and ((sums - leaf.grad).abs() <= 1e-5 * size + 1e-6).all()
            if branch_dtype is not None:
                assert same(rest, [dx.to(branch_dtype)])


def results(x, branch, gain, bias, dh, dtotal):
    """All that the operators give."""
    h, statistics, *summed = norm.norm(x, branch, gain, bias, EPSILON, dh.dtype)
    total = summed[0] if summed else x
    branch_dtype = None if branch is None else branch.dtype
    return [h, statistics, *summed, *norm.norm_backward(dh, total, dtotal, gain, statistics, branch_dtype)]


def call(rows, cols, *, x_dtype=F32, centred=True):
    x, branch, gain, bias = inputs(rows, cols, x_dtype, BF16, centred)
    dh, dtotal = (torch.randn(rows, cols, device=DEVICE).to(dtype) for dtype in (BF16, x_dtype))
    return [x, branch, gain, bias, dh, dtotal]


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", [F32, BF16], ids=str)
def test_a_row_depends_on_nothing_but_itself(x_dtype):
    """Not on other rows, which may hold NaN and infinities, and not on whether the sum was made before."""
    x, branch, gain, bias, dh, dtotal = call(1000, 768, x_dtype=x_dtype)
    h, statistics, total, dx, _, dbranch = results(x, branch, gain, bias, dh, dtotal)
    again = results(total, None, gain, bias, dh, dtotal)
    assert same(again, [h, statistics, dx, again[3]])
    part = slice(300, 501)
    alone = results(*(t[part] for t in (x, branch)), gain, bias, *(t[part] for t in (dh, dtotal)))
    assert same([alone[0], alone[2], alone[3], alone[5]], [t[part] for t in (h, total, dx, dbranch)])
    x[7, 5], x[8, 9] = torch.nan, torch.inf
    outputs = results(x, branch, gain, bias, dh, dtotal)
    for before, after in zip((h, total, dx, dbranch), (outputs[i] for i in (0, 2, 3, 5)), strict=True):
        keep = [i for i in range(1000) if i not in (7, 8)]
        assert same([before[keep]], [after[keep]])
    assert outputs[0][7].isnan().all() and outputs[3][7].isnan().all() and outputs[4][0].isnan().all()
    assert outputs[0][8, 9].isnan() and outputs[3][8].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_without_rows_there_is_nothing_but_gradients_of_zero(centred):
    outputs = results(*call(0, 384, centred=centred))
    assert [len(t) for t in outputs] == [0, 1 + centred, 0, 0, 1 + centred, 0] and not outputs[4].any()


@pytest.mark.gpu
def test_strides_gaps_and_addresses_are_those_of_compact_inputs():
    arguments = call(96, 384)
    expected = results(*arguments)
    wide = [torch.cat([t, t], dim=-1)[:, : t.shape[-1]] if t.dim() == 2 else t for t in arguments]
    turned = [t.t().contiguous().t() if t.dim() == 2 else t for t in arguments]
    moved = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in arguments]
    assert moved[1].data_ptr() % 16 == 2
    for views in (wide, turned, moved):
        assert same(results(*views), expected)
    folded = [t.view(2, 3, 16, 384) if t.dim() == 2 else t for t in arguments]
    assert same([t.view(u.shape) for t, u in zip(results(*folded), expected, strict=True)], expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(33, 384), (32768, 768), (5000, 2048)])
def test_twice_the_same_and_in_a_graph(rows, cols):
    arguments = call(rows, cols, centred=False)
    expected = results(*arguments)
    assert same(results(*arguments), expected)
    static = [None if t is None else torch.zeros_like(t) for t in arguments]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = results(*static)
    for to, source in zip(static, arguments, strict=True):
        if to is not None:
            to.copy_(source)
    graph.replay()
    assert same(outputs, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_the_operators_keep_the_rules_of_torch_library(centred):
    x, branch, gain, bias, dh, dtotal = call(32, 64, centred=centred)
    checked = ("test_schema", "test_faketensor")
    for each in (branch, None):
        arguments = (x, each, gain, bias, EPSILON, BF16)
        torch.library.opcheck(torch.ops.hqsweep.norm.default, arguments, test_utils=checked)
        statistics = norm.norm(*arguments)[1]
        arguments = (dh, x, dtotal, gain, statistics, None if each is None else BF16)
        torch.library.opcheck(torch.ops.hqsweep.norm_backward.default, arguments, test_utils=checked)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"x is torch.float16 \(4, 8\).* multiple of 4 elements up to 6144", {"x": torch.ones(4, 8).half()}),
        (r"x is torch.float32 \(4, 6\)", {"x": torch.ones(4, 6)}),
        (r"x is torch.float32 \(1, 6148\)", {"x": torch.ones(1, 6148)}),
        (r"branch is torch.float32 \(4, 4\).* takes .* \(4, 8\) on cuda", {"branch": torch.ones(4, 4)}),
        (r"gain is torch.bfloat16 \(8,\)", {"gain": torch.ones(8).bfloat16()}),
        (r"bias is torch.float32 \(1, 8\)", {"bias": torch.ones(1, 8)}),
        ("dtype is torch.float16", {"dtype": torch.float16}),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(message, change):
    arguments = {"x": torch.ones(4, 8), "branch": None, "gain": torch.ones(8), "bias": None} | change
    arguments = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    with pytest.raises(ValueError, match=message):
        norm.norm(*(arguments[name] for name in ("x", "branch", "gain", "bias")), EPSILON, arguments.get("dtype", BF16))


def test_a_tensor_of_the_cpu_is_refused():
    with pytest.raises(ValueError, match=r"x is torch.float32 \(4, 8\) on cpu; it takes .* on a GPU"):
        norm.norm(torch.ones(4, 8), None, torch.ones(8), None, EPSILON, BF16)
    with pytest.raises(ValueError, match="on a GPU"):
        norm.norm_backward(torch.ones(4, 8), torch.ones(4, 8), None, torch.ones(8), torch.ones(1, 4), None)


@pytest.mark.gpu
@pytest.mark.parametrize("signs", [None, True, False])
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("cols", [4, 384, 768, 1000, 2048, 3072])
def test_amaxes_are_those_of_the_output_and_change_nothing_else(cols, centred, signs):
    for rows in MEASURED:
        x, branch, gain, bias = inputs(rows, cols, F32, BF16, centred)
        h, *others, own = norm.norm(x, branch, gain, bias, EPSILON, BF16, True)
        assert same([h, *others], norm.norm(x, branch, gain, bias, EPSILON, BF16))
        assert own.shape == (1, 1) and own.item() == h.abs().max().item()
        if signs is None:
            continue
        *again, transformed = norm.norm(x, branch, gain, bias, EPSILON, BF16, True, signs)
        assert same(again, [h, *others, own])
        columns = hadamard(h.t().contiguous(), signed=signs).bfloat16()
        assert transformed.item() == columns.abs().max().item()


@pytest.mark.gpu
def test_an_amax_leaves_nan_aside_and_of_nothing_it_is_zero():
    x, branch, gain, _ = inputs(64, 384, F32, BF16, False)
    x[3, 5] = torch.nan
    h, _, _, own, transformed = norm.norm(x, branch, gain, None, EPSILON, BF16, True, True)
    assert own.item() == h.nan_to_num(nan=0).abs().max().item() and transformed.isfinite().all()
    outputs = norm.norm(x[:0], branch[:0], gain, None, EPSILON, BF16, True, True)
    assert outputs[3].item() == outputs[4].item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "cols", "wanted"), [(24, 64, (True, None)), (16, 3076, (True, None)), (16, 64, (False, True))]
)
def test_amaxes_that_it_does_not_find_are_refused(rows, cols, wanted):
    x, _, gain, _ = inputs(rows, cols, F32, None, False)
    with pytest.raises(
        ValueError, match=r"amaxes of .* are wanted; they are found in bfloat16, of a multiple of 16 rows"
    ):
        norm.norm(x, None, gain, None, EPSILON, BF16, *wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("stream", [BF16, F32], ids=str)
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (5, 0), (5, 3), (5, 4)])
def test_what_ranks_sum_is_read_as_its_summands(ranks, rank, stream, centred):
    """All bits are those of a sum in the order of ranks, rounded once, that is read as one tensor."""
    for rows, cols in ((700, 384), (77, 2048), (3, 6144)):
        x, branch, gain, bias = inputs(rows, cols, stream, BF16, centred)
        received, own, every = summands(branch, ranks, rank)
        total = every[0].float()
        for summand in every[1:]:
            total = total + summand.float()
        total = total.to(BF16)
        expected = norm.norm(x, total, gain, bias, EPSILON, BF16)
        assert same(norm.norm(x, own, gain, bias, EPSILON, BF16, False, None, received, rank), expected)
        _, statistics, whole = expected
        arguments = (whole, torch.randn_like(whole), gain, statistics, BF16)
        wanted = norm.norm_backward(total, *arguments)
        assert same(norm.norm_backward(own, *arguments, received, rank), wanted)


@pytest.mark.gpu
def test_summands_that_are_no_others_are_refused():
    x, branch, gain, _ = inputs(32, 384, F32, BF16, False)
    received, own, _ = summands(branch, 2, 0)
    wrong = [(own, received[:, :16], 0), (own, received.float(), 0), (own, received, 2), (own, received[:0], 0)]
    for branch, others, rank in [*wrong, (own.float(), received, 0)]:
        with pytest.raises(ValueError, match="received of branch"):
            norm.norm(x, branch, gain, None, EPSILON, BF16, False, None, others, rank)
    with pytest.raises(ValueError, match="amaxes"):
        norm.norm(x, own, gain, None, EPSILON, BF16, True, None, received, 0)
    with pytest.raises(ValueError, match="no branch"):
        norm.norm(x, None, gain, None, EPSILON, BF16, False, None, received, 0)
