"""loss_parts and shared_cross_entropy_: losses and gradients of float64, whatever part of the vocabulary a rank has."""

import pytest
import torch
import torch.nn.functional as F
from support.ops.loss_inputs import INFINITY, devices, inputs, one

from hqsweep.ops import vocabulary as module
from hqsweep.ops.vocabulary import Boxes, cross_entropy_, joint_cross_entropy_, loss_parts, shared_cross_entropy_


def shared(logits, targets, sizes, scale, gradient=True):
    """What ranks with so many entries of the vocabulary compute: losses of each, and the gradient of all logits."""
    pieces = [piece.clone(memory_format=torch.contiguous_format) for piece in logits.split(sizes, 1)]
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    parts = torch.stack([loss_parts(x, targets, first) for x, first in zip(pieces, starts, strict=True)])
    losses = [
        shared_cross_entropy_(x, targets, parts, first, one(scale, x), gradient=gradient)
        for x, first in zip(pieces, starts, strict=True)
    ]
    assert all(torch.equal(own.view(torch.int32), losses[0].view(torch.int32)) for own in losses)
    return losses[0], torch.cat(pieces, 1)


def torchs(logits, targets, dtype=torch.float64):
    x = logits.to(dtype).requires_grad_()
    losses = F.cross_entropy(x, targets, reduction="none")
    losses.sum().backward()
    return losses.detach(), x.grad


@devices
@pytest.mark.parametrize(
    "sizes", [(8,), (8, 8), (48, 56), (256, 128, 640), (2048,) * 4, (25152, 25152), (65536, 65536)]
)
@pytest.mark.parametrize("rows", [1, 5])
def test_losses_and_gradients_are_those_of_float64(rows, sizes, device):
    logits, targets = inputs(rows, sum(sizes), device)
    losses, gradients = torchs(logits, targets)
    ours, got = shared(logits, targets, sizes, 1 / 64)
    torch.testing.assert_close(ours.double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.double(), gradients / 64, rtol=2**-8 + 1e-4, atol=2e-7 / 64)
    again, untouched = shared(logits, targets, sizes, 1 / 64, gradient=False)
    assert torch.equal(again, ours) and torch.equal(untouched, logits)


@devices
@pytest.mark.parametrize("vocabulary", [256, 4096])
def test_one_rank_has_the_bits_of_the_loss_of_the_whole(vocabulary, device):
    """On a GPU; torch's operators add in another order."""
    logits, targets = inputs(9, vocabulary, device)
    ours, got = shared(logits, targets, [vocabulary], 0.125)
    expected = logits.clone()
    losses = cross_entropy_(expected, targets, one(0.125, expected), gradient=True)
    if device == "cuda":
        assert torch.equal(ours, losses) and torch.equal(got, expected)
    torch.testing.assert_close(ours, losses, rtol=1e-6, atol=1e-6)


@devices
def test_a_row_by_hand(device):
    """Two logits of 0 on each rank, all others -inf: four exponentials of 1; the target is the second."""
    row = torch.full((1, 16), -INFINITY)
    row[0, 0], row[0, 1], row[0, 8], row[0, 9] = 0.0, 0.0, 0.0, 0.0
    logits, targets = row.bfloat16().to(device), torch.tensor([1], device=device)
    parts = loss_parts(logits[:, :8].contiguous(), targets, 0), loss_parts(logits[:, 8:].contiguous(), targets, 8)
    assert [part.tolist() for part in parts] == [[[0.0, 2.0, 0.0, 1.0]], [[0.0, 2.0, 0.0, 0.0]]]
    losses, gradient = shared(logits, targets, (8, 8), 1.0)
    assert losses.item() == pytest.approx(torch.tensor(4.0).log().item())
    assert gradient[0, [0, 1, 2, 8, 9]].tolist() == [0.25, -0.75, 0.0, 0.25, 0.25]


@devices
def test_specials_are_those_of_torch(device):
    """A NaN, infinities, rows of -inf on one rank, or on both."""
    logits, targets = inputs(10, 512, device)
    for row, (value, place) in enumerate(
        [(torch.nan, 0), (torch.nan, 511), (INFINITY, 17), (INFINITY, 300), (-INFINITY, 33), (-INFINITY, slice(None)),
         (-INFINITY, slice(0, 256)), (-INFINITY, slice(256, None)), (-INFINITY, slice(1, None)), (3e38, 5)]
    ):  # fmt: skip
        logits[row, place] = value
    targets[4], targets[6], targets[7], targets[8] = 33, 300, 20, 0
    losses, gradients = torchs(logits, targets, torch.float32)
    ours, got = shared(logits, targets, (256, 256), 1.0)
    torch.testing.assert_close(ours, losses, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(got.float(), gradients, rtol=2**-8 + 1e-4, atol=2e-7, equal_nan=True)


@devices
def test_a_target_that_no_rank_has_gives_nan(device):
    logits, _ = inputs(3, 64, device)
    losses, gradient = shared(logits, torch.tensor([-1, 64, 5], device=device), (32, 32), 1.0)
    assert losses.isnan().tolist() == gradient.isnan().all(1).tolist() == [True, True, False]
    assert not gradient[2].isnan().any()


@devices
@pytest.mark.parametrize("sizes", [(8, 8), (7, 13), (256, 128, 640)])
def test_a_row_without_a_target_has_no_loss_and_no_gradient(sizes, device):
    logits, targets = inputs(6, sum(sizes), device)
    targets[1], targets[4] = -100, -100
    losses, gradients = torchs(logits, targets)
    ours, got = shared(logits, targets, sizes, 1 / 64)
    torch.testing.assert_close(ours.double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.double(), gradients / 64, rtol=2**-8 + 1e-4, atol=2e-7 / 64)
    _, none = shared(logits, torch.full_like(targets, -100), sizes, INFINITY)
    assert none.count_nonzero() == 0


@devices
def test_no_rows(device):
    logits, targets = torch.empty(0, 64, dtype=torch.bfloat16, device=device), torch.empty(0, dtype=torch.long)
    assert shared(logits, targets.to(device), (32, 32), 1.0)[0].shape == (0,)


@devices
@pytest.mark.usefixtures("deterministic")
def test_what_the_kernels_do_not_take_is_computed_by_torch(device):
    for dtype, sizes in ((torch.float32, (8, 8)), (torch.bfloat16, (7, 13))):
        logits, targets = inputs(4, sum(sizes), device)
        losses, _ = torchs(logits, targets)
        ours, _ = shared(logits.to(dtype), targets, sizes, 1.0)
        torch.testing.assert_close(ours.double(), losses, rtol=1e-6, atol=1e-6)


def test_the_kernels_get_nothing_else():
    logits, targets = torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="V a multiple of 8"):
        module._loss_parts.__wrapped__(logits[:, :12].contiguous(), targets, 0)
    for parts in (torch.zeros(2, 2, 3), torch.zeros(0, 2, 4), torch.zeros(2, 4), torch.zeros(1, 2, 4).double()):
        with pytest.raises(ValueError, match=r"parts are .*; they are float32 \[ranks, 2, 4\], contiguous, on cpu"):
            module._shared.__wrapped__(logits, targets, parts, 0, torch.ones(()), True)


def test_traced_graphs_know_the_shapes():
    logits, targets = torch.empty(3, 16, dtype=torch.bfloat16, device="meta"), torch.empty(3, device="meta").long()
    parts = torch.ops.hqsweep.loss_parts(logits, targets, 0)
    assert parts.shape == (3, 4) and parts.dtype == torch.float32
    losses = torch.ops.hqsweep.shared_cross_entropy_(logits, targets, parts[None], 0, one(1.0, logits), True)
    assert losses.shape == (3,) and losses.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(8, 8), (48, 48, 48), (2048, 2048), (25152, 25152)])
def test_kernels_that_tell_each_other_their_parts_have_the_same_bits(sizes):
    """Ranks are streams here, which one GPU runs together, as it has room for all of their blocks."""
    rows, room, ranks = 40, 64, len(sizes)
    boxes = [torch.full((2 * ranks * room * 16,), 0xFF, dtype=torch.uint8, device="cuda") for _ in sizes]
    addresses = torch.tensor([box.data_ptr() for box in boxes], device="cuda")
    states = [torch.zeros(3, dtype=torch.uint32, device="cuda") for _ in sizes]
    streams = [torch.cuda.Stream() for _ in sizes]
    for turn in range(5):
        logits, targets = inputs(rows, sum(sizes), "cuda", spread=1.0 + turn)
        targets[turn], scale = -100, one(1 / 64, logits)
        losses, gradients = shared(logits, targets, sizes, 1 / 64)
        pieces = [piece.clone(memory_format=torch.contiguous_format) for piece in logits.split(sizes, 1)]
        torch.cuda.synchronize()
        results = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                told = Boxes(addresses.data_ptr(), states[rank], room, ranks, rank)
                results.append(joint_cross_entropy_(pieces[rank], targets, told, scale))
        torch.cuda.synchronize()
        assert torch.equal(torch.cat(pieces, 1).view(torch.int16), gradients.view(torch.int16)), turn
        assert all(torch.equal(own.view(torch.int32), losses.view(torch.int32)) for own in results), turn
    assert all(bool((box == 0xFF).all()) for box in boxes)  # ready for others
