"""Splits and their offsets."""

from types import SimpleNamespace

import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.ops.splits import Splits, splits_to_offsets


@pytest.mark.feature("F138", "F139", "A30")
@pytest.mark.parametrize("count", [0, 1, 2, 4, 17, 255, 256, 257, 513, 1024, 100_000])
@pytest.mark.parametrize("stride", [1, 7, 128])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_offsets_are_sums_times_the_stride(count, stride, device):
    sizes = torch.randint(-50, 1000, (count,), generator=torch.Generator().manual_seed(count))
    expected = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(sizes, 0)]) * stride
    for m_splits in (sizes.to(device), sizes.int().to(device), sizes.tolist()):
        offsets = splits_to_offsets(m_splits, stride)
        assert offsets.dtype == torch.int64 and torch.equal(offsets.cpu(), expected)


@pytest.mark.feature("F138", "F139")
def test_offsets_beyond_int64_are_refused():
    assert splits_to_offsets([2**62, 2**62 - 1]).tolist() == [0, 2**62, 2**63 - 1]
    for sizes, stride in (([2**62, 2**62], 1), ([2**62], 2), ([-(2**62), -(2**62) - 1], 1), ([2**40, 0], 2**30)):
        with pytest.raises(UserError, match="leave the range of int64"):
            splits_to_offsets(torch.tensor(sizes), stride)


def test_splits_know_spans_and_offsets():
    splits = Splits.of(torch.tensor([3, 0, 5], dtype=torch.int32), 8)
    assert splits.sizes == (3, 0, 5) and splits.spans == [(0, 3), (3, 3), (3, 8)]
    assert splits.offsets(torch.device("cpu")).tolist() == [0, 3, 3, 8]
    assert Splits.of(splits, 8) is splits and Splits.uniform(3, 4).spans[2] == (8, 12)


@pytest.mark.feature("H31")
def test_splits_of_one_size_are_known_to_be():
    """On the host, and where there are rows at all."""
    for sizes, expected in (((4, 4, 4), 4), ((7,), 7), ((4, 4, 3), 0), ((0, 0), 0), ((), 0), ((0, 8), 0)):
        assert Splits.of(sizes, sum(sizes)).equal == expected
    on_device = Splits(rows=8, count=2, sizes=None, device_sizes=torch.tensor([4, 4]))
    assert on_device.equal == 0 and "host" not in vars(on_device)


@pytest.mark.parametrize(
    ("sizes", "message"), [([9, -1], "m_splits has -1 for expert 1"), ([3, 6], "m_splits adds up to 9 rows, .* has 8")]
)
def test_sizes_that_were_waited_for_are_checked(sizes, message):
    splits = Splits(rows=8, count=2, sizes=None, device_sizes=torch.tensor(sizes))
    with pytest.raises(UserError, match=message):
        _ = splits.spans


def test_a_graph_cannot_wait_for_sizes(monkeypatch):
    """The error is what the run says of steps that are no graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert Splits.of([4, 4], 8).host == (4, 4)
    with pytest.raises(RuntimeError, match="a product for each expert needs the host to know its rows"):
        _ = Splits(rows=8, count=2, sizes=None, device_sizes=SimpleNamespace(is_cuda=True)).host


@pytest.mark.gpu
def test_splits_of_a_device_are_read_when_they_must_be():
    splits = Splits.of(torch.tensor([3, 0, 5], device="cuda"), 8)
    assert splits.sizes is None and splits.offsets(torch.device("cuda")).tolist() == [0, 3, 3, 8]
    assert splits.host == (3, 0, 5)
    with pytest.raises(UserError, match="negative"):
        _ = Splits.of(torch.tensor([9, -1], device="cuda"), 8).host


@pytest.mark.gpu
def test_a_gpu_says_that_offsets_leave_int64_only_where_it_is_asked():
    huge = torch.tensor([2**62, 2**62], device="cuda")
    with pytest.raises(UserError, match="leave the range of int64"):
        splits_to_offsets(huge, check=True)
    assert splits_to_offsets(huge).tolist() == [0, 2**62, -(2**63)]
