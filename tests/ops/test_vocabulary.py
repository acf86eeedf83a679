"""cross_entropy_ and scale_: losses and gradients of float64, specials as torch has them, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from support.ops.loss_inputs import INFINITY, devices, inputs, one

from hqsweep.ops import vocabulary as module
from hqsweep.ops.vocabulary import cross_entropy_, scale_, takes_logits


def expected(logits, targets, scale):
    """Losses and gradients in float64."""
    x = logits.double().requires_grad_()
    losses = F.cross_entropy(x, targets, reduction="none")
    losses.sum().backward()
    return losses.detach(), x.grad * scale


def assert_right(logits, targets, scale=1 / 64):
    losses, gradients = expected(logits, targets, scale)
    alone = logits.clone()
    ours = cross_entropy_(alone, targets, one(scale, alone), gradient=False)
    assert ours.dtype == torch.float32 and torch.equal(alone.view(torch.int16), logits.view(torch.int16))
    torch.testing.assert_close(ours.double(), losses, rtol=1e-6, atol=1e-6)
    again = cross_entropy_(alone, targets, one(scale, alone), gradient=True)
    assert torch.equal(again.view(torch.int32), ours.view(torch.int32)) and alone.dtype == logits.dtype
    # one rounding to bfloat16, after float32's: softmax less one is that of numbers near one
    torch.testing.assert_close(alone.double(), gradients, rtol=2**-8 + 1e-4, atol=2e-7 * scale)


@pytest.mark.feature("H5")
@devices
@pytest.mark.parametrize("vocabulary", [8, 96, 104, 256, 1000, 2048, 16384, 50304])
@pytest.mark.parametrize("rows", [1, 5])
def test_losses_and_gradients_are_those_of_float64(rows, vocabulary, device):
    assert_right(*inputs(rows, vocabulary, device))


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [56312, 65536, 116000, 131072])
def test_rows_that_fill_shared_memory_or_do_not_fit(vocabulary):
    assert_right(*inputs(3, vocabulary, "cuda"))


@pytest.mark.gpu
def test_many_rows():
    assert_right(*inputs(70000, 256, "cuda"))


@devices
@pytest.mark.parametrize("spread", [0.0, 1e-3, 100.0, 1e30])
def test_flat_and_steep_distributions(spread, device):
    assert_right(*inputs(7, 1024, device, spread))


@devices
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("vocabulary", [1, 7, 97, 50257])
def test_what_the_kernel_does_not_take_is_computed_by_torch(vocabulary, device):
    logits, targets = inputs(3, vocabulary, device)
    assert not takes_logits(logits)
    assert_right(logits, targets)
    logits, targets = inputs(4, 64, device)
    for other in (logits.float(), logits.half(), logits.t().contiguous().t(), logits.repeat(1, 2)[:, 64:]):
        assert not takes_logits(other)
        losses, _ = expected(other, targets, 1.0)
        ours = cross_entropy_(other.clone(), targets, one(1.0, other), gradient=True)
        torch.testing.assert_close(ours.double(), losses, rtol=1e-6, atol=1e-6)


@devices
def test_specials_are_those_of_torch(device):
    """A NaN, an infinity, rows of -inf alone and in part, in every place of a warp's loads."""
    logits, targets = inputs(12, 4096, device)
    for row, (value, place) in enumerate(
        [(torch.nan, 0), (torch.nan, 4095), (INFINITY, 17), (INFINITY, 4088), (-INFINITY, 33), (-INFINITY, slice(None)),
         (-INFINITY, slice(0, 4095)), (-INFINITY, slice(1, None)), (-INFINITY, slice(0, 2048)), (3e38, 5)]
    ):  # fmt: skip
        logits[row, place] = value
    targets[6], targets[7], targets[4] = 4095, 0, 33
    x = logits.float().requires_grad_()
    losses = F.cross_entropy(x, targets, reduction="none")
    losses.sum().backward()
    ours = cross_entropy_(logits, targets, one(1.0, logits), gradient=True)
    torch.testing.assert_close(ours, losses.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(logits.float(), x.grad, rtol=2**-8 + 1e-4, atol=2e-7, equal_nan=True)


@devices
@pytest.mark.parametrize("vocabulary", [8, 256, 1024, 2048, 50304])
@pytest.mark.parametrize("spread", [0.0, 3.0, 300.0])
def test_the_amax_is_that_of_the_gradient(spread, vocabulary, device):
    """Exactly, also where every softmax is one number and zeros; NaN counts as nothing, and a larger one stays."""
    logits, targets = inputs(9, vocabulary, device, spread)
    targets[3] = logits[3].argmax()
    logits[5, 4] = torch.nan
    amax, larger = (torch.full((1, 1), start, device=device) for start in (0.0, 8.0))
    for place in (amax, larger):
        gradient = logits.clone()
        cross_entropy_(gradient, targets, one(1.0, gradient), gradient=True, amax=place)
    assert gradient[5].isnan().all()
    assert amax == gradient.float().abs().nan_to_num(0.0).max() and larger == 8.0
    sure, right = torch.full((4, vocabulary), -1000.0, device=device).bfloat16(), torch.arange(4, device=device)
    sure[right, right], sure[:, 7] = 0.0, -20.0  # a softmax of one, and one of 2e-9
    amax.zero_()
    cross_entropy_(sure, right, one(1.0, sure), gradient=True, amax=amax)
    assert amax == sure.float().abs().max() and 0 < amax < 1e-6


@devices
def test_no_rows(device):
    logits = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    targets = torch.empty(0, dtype=torch.long, device=device)
    assert cross_entropy_(logits, targets, one(1.0, logits), gradient=True).shape == (0,)


@devices
@pytest.mark.parametrize("vocabulary", [97, 256, 4096])
def test_a_row_without_a_target_has_no_loss_and_no_gradient(vocabulary, device):
    logits, targets = inputs(6, vocabulary, device)
    targets[1], targets[4] = -100, -100
    assert_right(logits, targets)
    alone, none = logits[:2].clone(), torch.full_like(targets[:2], -100)
    assert cross_entropy_(alone, none, one(INFINITY, alone), gradient=True).tolist() == [0.0, 0.0]
    assert alone.count_nonzero() == 0


@pytest.mark.gpu
def test_a_target_beyond_the_vocabulary_gives_nan_and_reads_nothing_else():
    logits, targets = inputs(4, 64, "cuda")
    targets[1], targets[2] = 64, -1
    wrong = [False, True, True, False]
    assert cross_entropy_(logits, targets, one(1.0, logits), gradient=True).isnan().tolist() == wrong
    assert logits.isnan().all(1).tolist() == wrong and logits.isnan().any(1).tolist() == wrong


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [256, 50304, 131072])
def test_bits_repeat_and_do_not_depend_on_other_rows(vocabulary):
    logits, targets = inputs(300, vocabulary, "cuda")
    first, second = logits.clone(), logits.clone()
    losses = cross_entropy_(first, targets, one(0.1, first), gradient=True)
    again = cross_entropy_(second, targets, one(0.1, second), gradient=True)
    assert torch.equal(losses, again) and torch.equal(first, second)
    part = logits[130:170].clone()
    assert torch.equal(losses[130:170], cross_entropy_(part, targets[130:170], one(0.1, part), gradient=True))
    assert torch.equal(first[130:170], part)


@pytest.mark.gpu
def test_a_graph_replays_it():
    logits, targets = inputs(64, 50304, "cuda")
    eager, static, factor = logits.clone(), logits.clone(), torch.full((), 0.5, device="cuda")
    losses = cross_entropy_(eager, targets, one(0.1, eager), gradient=True)
    scale_(eager, factor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cross_entropy_(static, targets, one(0.1, static), gradient=True)
        scale_(static, factor)
    static.copy_(logits)
    graph.replay()
    assert torch.equal(captured, losses) and torch.equal(static, eager)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1003, 2**21 + 5])
@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3])
def test_values_are_scaled_in_place(factor, count, dtype, device):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(device, dtype)
    factor, before = torch.tensor(factor, device=device), values.clone()
    assert scale_(values, factor) is values
    assert torch.equal(values, (before.float() * factor).to(dtype))
    unaligned = before[1:].clone().new_zeros(count + 1)[1:] if count else before
    unaligned.copy_(before)
    assert torch.equal(scale_(unaligned, factor), values)


@pytest.mark.gpu
def test_other_layouts_are_scaled_by_torch():
    values = torch.randn(8, 16, device="cuda")
    expected = values.t() * 0.5
    assert torch.equal(scale_(values.t(), torch.tensor(0.5, device="cuda")), expected)
    half = values.half()
    assert torch.equal(scale_(half.clone(), torch.tensor(0.5, device="cuda")), half * 0.5)


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (torch.zeros(2, 12, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.long), r"V a multiple of 8"),
        (torch.zeros(2, 16), torch.zeros(2, dtype=torch.long), r"logits are torch.float32 \(2, 16\) on cpu; it takes"),
        (torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.long), r"they are int64 \[2\]"),
        (torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(2), r"targets are torch.float32 \(2,\) on cpu"),
    ],
)
def test_the_kernel_gets_nothing_else(logits, targets, message):
    with pytest.raises(ValueError, match=message):
        module._cross_entropy.__wrapped__(logits, targets, torch.ones(()), True)


def test_an_amax_and_a_scale_are_one_number():
    logits, targets = torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"amax is torch.float32 \(2,\) on cpu; it is one float32 on cpu"):
        module._cross_entropy.__wrapped__(logits, targets, torch.ones(()), True, torch.zeros(2))
    with pytest.raises(ValueError, match=r"scale is torch.float64 \(\) on cpu; it is one float32 on cpu"):
        module._cross_entropy.__wrapped__(logits, targets, torch.ones(()).double(), True)


@pytest.mark.parametrize(
    ("values", "factor", "message"),
    [
        (torch.zeros(4, dtype=torch.float16), torch.ones(()), "values are torch.float16"),
        (torch.zeros(4, 2).t(), torch.ones(()), "not contiguous on cpu; it takes float32 or bfloat16, contiguous"),
        (torch.zeros(4), torch.ones(2), r"the factor is torch.float32 \(2,\) on cpu; it is one float32 on cpu"),
    ],
)
def test_the_scaling_kernel_gets_nothing_else(values, factor, message):
    with pytest.raises(ValueError, match=message):
        module._scale_values.__wrapped__(values, factor)


def test_traced_graphs_know_the_shapes():
    logits, targets = torch.empty(3, 16, dtype=torch.bfloat16, device="meta"), torch.empty(3, dtype=torch.long)
    losses = torch.ops.hqsweep.cross_entropy_(logits, targets.to("meta"), one(1.0, logits), True)
    assert losses.shape == (3,) and losses.dtype == torch.float32
    assert torch.ops.hqsweep.scale_values_(logits, torch.ones((), device="meta")) is None
