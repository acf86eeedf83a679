"""Splits that a device fills up by itself."""

import pickle

import pytest
import torch

from hqsweep.ops.splits import PaddedSplits, Splits

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def padded(sizes, multiple, device="cpu", dtype=torch.int32):
    on_device = torch.tensor(sizes, dtype=dtype, device=device)
    base = Splits(rows=sum(sizes), count=len(sizes), sizes=None, device_sizes=on_device)
    return PaddedSplits.over(base, multiple, on_device.device)


@pytest.mark.feature("H27")
@devices
@pytest.mark.parametrize("multiple", [2, 16, 32])
@pytest.mark.parametrize("kernel", [False, True])
def test_places_are_the_rows_of_whole_blocks(device, multiple, kernel, monkeypatch):
    """And the matrix has room for the worst splits of so many rows, in whole blocks."""
    if not kernel:
        monkeypatch.setattr("hqsweep.ops.splits.has_kernels", lambda _: False)
    generator = torch.Generator().manual_seed(multiple)
    drawn = [torch.randint(-4, 40, (9,), generator=generator).clamp(0).tolist() for _ in range(20)]
    for sizes in (*drawn, [1] * 9, [0, 0, 3], [multiple] * 3, [multiple + 1] * 4, [5]):
        for dtype in (torch.int32, torch.int64):
            splits = padded(sizes, multiple, device, dtype)
            whole = [-(-size // multiple) * multiple for size in sizes]
            starts = [sum(whole[:e]) for e in range(len(whole))]
            expected = [start + i for start, size in zip(starts, sizes, strict=True) for i in range(size)]
            assert splits.places.tolist() == expected and splits.on(splits.starts.device).tolist() == whole
            assert splits.offsets(splits.starts.device).tolist() == [*starts, sum(whole)]
            assert splits.ends(splits.starts.device).tolist() == [*starts[1:], sum(whole)]
            assert splits.rows % multiple == 0 and 0 <= splits.rows - sum(whole) < len(sizes) * multiple
            owners = [e for e, size in enumerate(whole) for _ in range(size)]
            spread = splits.spread(torch.arange(len(sizes), device=device)).tolist()
            assert spread[: len(owners)] == owners and set(spread[len(owners) :]) <= {len(sizes) - 1}
            assert splits.sizes is None and "host" not in vars(splits.base)
            assert splits.host == tuple(whole) and splits.spans[-1][1] == sum(whole)


def test_as_many_rows_as_the_worst_splits_need():
    """One row in each expert but the last fills every block with one row; more experts than rows have none."""
    assert padded([1, 1, 1, 1], 16).rows == 64 and padded([1, 0, 0, 0], 16).rows == 16
    assert padded([17, 1], 16).rows == 48 and padded([32, 16], 16).rows == 78 // 16 * 16


def test_what_splits_say_is_made_once_and_copied():
    splits = padded([3, 0, 5], 4)
    assert PaddedSplits.over(splits.base, 4, torch.device("cpu")) is splits
    assert PaddedSplits.over(splits.base, 2, torch.device("cpu")) is not splits
    copied = pickle.loads(pickle.dumps(splits))
    assert torch.equal(copied.places, splits.places) and copied.host == (4, 0, 8)


@devices
def test_each_row_has_what_its_expert_has(device):
    """The host knows the splits, whether equal or not, or it does not."""
    values = torch.arange(6.0, device=device).view(3, 2)
    for sizes in ((2, 2, 2), (1, 0, 4), (0, 0, 0)):
        hidden = Splits(rows=sum(sizes), count=3, sizes=None, device_sizes=torch.tensor(sizes, device=device))
        for splits in (Splits.of(sizes, sum(sizes)), hidden):
            assert torch.equal(splits.spread(values), values.repeat_interleave(torch.tensor(sizes, device=device), 0))
