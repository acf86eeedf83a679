"""The byte comparison of tensors that the rows of the parity job hold, and the type of its checks."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hqsweep.config.job import ParityConfig

Rows = Iterator[dict[str, object]]
Check = Callable[[ParityConfig, torch.device], Rows]
"""A check of the parity job: config -> rows."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def row(check: str, subject: str, case: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, object]:
    """A row for named (expected, actual) pairs, with PASS where every bit of every pair is equal.

    A mismatch gives the first differing index, the bits of both sides in hex, and the count over all pairs.
    """
    out = {"check": check, "subject": subject, "case": case, "status": "PASS", "mismatches": 0, "total": 0}
    out |= {"first_index": None, "got": None, "expected": None, "note": None}
    for name, (expected, actual) in pairs.items():
        out["total"] += expected.numel()
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            shapes = [f"{tuple(t.shape)} {t.dtype}" for t in (expected, actual)]
            return out | {
                "status": "FAIL",
                "first_index": name,
                "expected": shapes[0],
                "got": shapes[1],
                "mismatches": 1,
            }
        different = _bits(expected) != _bits(actual)
        count = int(different.sum())
        if count and out["status"] == "PASS":
            index = tuple(different.nonzero()[0].tolist())
            out |= {"status": "FAIL", "first_index": f"{name}{list(index)}"}
            out |= {"expected": _hex(expected[index]), "got": _hex(actual[index])}
        out["mismatches"] += count
    return out


def skip(check: str, subject: str, case: str, note: str) -> dict[str, object]:
    """A row that says why something was not compared."""
    return row(check, subject, case, {}) | {"status": "SKIP", "note": note}


def named_pairs(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs for row(), one for every expected name."""
    return {name: (expected[name], actual[name]) for name in expected}


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(_BITS[x.element_size()])


def _hex(x: Tensor) -> str:
    size = x.element_size()
    return f"0x{int(_bits(x.reshape(1))) & (1 << 8 * size) - 1:0{2 * size}X}"
