"""Copies in words have the elements of torch's copies."""

import pytest
import torch

from hqsweep.parallel.wire import memory

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn]


def strided(dtype, columns, offset=0):
    """uint8 numbers as [3, 5, columns] of a dtype, of which axes are swapped."""
    memory = torch.arange(offset + 15 * columns * dtype.itemsize + 64, dtype=torch.int64).to(torch.uint8)
    start = offset * dtype.itemsize
    return memory[start : start + 15 * columns * dtype.itemsize].view(dtype).view(3, 5, columns).transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 6, 7, 16, 64])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_what_is_copied_is_equal(dtype, columns, offset):
    x = strided(dtype, columns, offset)
    ordered = memory.in_order(x)
    assert ordered.is_contiguous() and ordered.dtype == dtype
    assert torch.equal(ordered.view(torch.uint8), x.contiguous().view(torch.uint8))
    target = torch.zeros(3, 5, columns, dtype=torch.uint8).to(dtype).transpose(0, 1)
    memory.copy_(target, x)
    assert torch.equal(target.contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))


def test_the_widest_words_are_taken():
    assert memory.as_words(strided(torch.bfloat16, 64))[0].dtype == torch.complex128
    assert memory.as_words(strided(torch.bfloat16, 6))[0].dtype == torch.int32
    assert memory.as_words(strided(torch.bfloat16, 7))[0].dtype == torch.bfloat16
    assert memory.as_words(strided(torch.uint8, 64, offset=8))[0].dtype == torch.int64
    assert memory.as_words(strided(torch.uint8, 64).transpose(0, 2))[0].dtype == torch.uint8
    assert {x.dtype for x in memory.as_words(strided(torch.uint8, 64), strided(torch.uint8, 64, offset=8))} == {
        torch.int64
    }


def test_what_lies_in_order_is_not_copied():
    x = torch.ones(3, 4)
    assert memory.in_order(x) is x and memory.in_order(x[:0].t()).shape == (4, 0)
