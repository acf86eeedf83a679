"""csrc/{cpu/offsets.cpp,cuda/offsets.cu}: offsets of splits under several rules at once."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from hqsweep import _C

SIZES = (0, 1, 2, 4, 17, 255, 256, 257, 513, 1024, 4095, 4097, 100_000)
RULES = {1: 7, 0: 3, 32: 128, 2: 1}  # divisor -> stride
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def offsets(splits: np.ndarray, rules: dict[int, int], device: str, *, check: bool = False) -> np.ndarray:
    there, out = torch.from_numpy(splits).to(device), torch.full((len(rules), len(splits) + 1), -7, device=device)
    call = (
        there.data_ptr(),
        splits.dtype == np.int64,
        len(splits),
        list(rules),
        list(rules.values()),
        out.data_ptr(),
    )
    if device == "cpu":
        _C.offsets_cpu(*call)
        return out.numpy()
    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    _C.offsets_cuda(*call, overflow.data_ptr() if check else 0, torch.cuda.current_stream().cuda_stream)
    if overflow.item():
        raise OverflowError("does not fit in 64 bits")
    return out.cpu().numpy()


def expected(splits: np.ndarray, rules: dict[int, int]) -> np.ndarray:
    """The offsets by Python's integers."""
    rows = []
    for divisor, stride in rules.items():
        units = [-(-int(split) // divisor) if divisor else 1 for split in splits]
        rows.append([stride * total for total in accumulate(units, initial=0)])
    return np.array(rows, np.int64)


@pytest.mark.feature("F138", "F139")
@devices
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("size", SIZES)
def test_offsets_are_sums_of_units_times_strides(size, dtype, device):
    splits = np.random.default_rng(size).integers(-50, 1000, size).astype(dtype)
    for check in (False, True):
        assert np.array_equal(offsets(splits, RULES, device, check=check), expected(splits, RULES))


@pytest.mark.feature("A30")
@devices
def test_the_largest_and_the_smallest_offsets_fit(device):
    for splits in ([2**62, 2**62 - 1, 0], [-(2**62), -(2**62), 1], [2**63 - 1, -(2**63 - 1), -(2**63 - 1)]):
        splits = np.array(splits, np.int64)
        assert np.array_equal(offsets(splits, {1: 1}, device, check=True), expected(splits, {1: 1}))


@pytest.mark.feature("F138", "F139", "A30")
@devices
@pytest.mark.parametrize(
    ("splits", "stride"),
    [([2**62, 2**62], 1), ([2**62], 2), ([-(2**62), -(2**62) - 1], 1), ([0] * 5000 + [2**40, 0], 2**30),
     ([2**63 - 1] * 9, 1), ([-(2**63)], -1)],
)  # fmt: skip
def test_offsets_beyond_64_bits_are_refused(splits, stride, device):
    with pytest.raises(OverflowError, match="does not fit in 64 bits"):
        offsets(np.array(splits, np.int64), {1: stride}, device, check=True)


@pytest.mark.parametrize(
    ("message", "rules"),
    {
        "divisor is -1, must be >= 0": ([-1], [1]),
        "got 1 divisors and 2 strides": ([1], [1, 2]),
        "got 9 divisors and 9 strides, must be as many of both and at most 8": ([1] * 9, [1] * 9),
    }.items(),
)
def test_wrong_rules_say_what_is_allowed(message, rules):
    out = np.zeros((9, 1), np.int64)
    with pytest.raises(ValueError, match=message):
        _C.offsets_cpu(0, True, 0, *rules, out.ctypes.data)
