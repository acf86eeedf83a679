"""A row of the calibrate job: a measured number of decibels beside what it should be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

STATISTICS = ("row_sqnr_db_median", "row_sqnr_db_p5", "underflow_pct")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A number of decibels, where it is from (theory, published, emulated, predicted), and what passes."""

    source: str
    expected_db: float
    low_db: float
    high_db: float

    @classmethod
    def around(cls, source: str, expected_db: float, tolerance_db: float) -> Self:
        return cls(
            source=source, expected_db=expected_db, low_db=expected_db - tolerance_db,
            high_db=expected_db + tolerance_db,
        )  # fmt: skip


def calibration_row(
    check: str,
    subject: str,
    case: str,
    measured_db: float,
    expected: Expectation | None,
    statistics: Mapping[str, float] | None = None,
) -> dict[str, object]:
    """PASS from low_db to high_db, else FAIL; SKIP where nothing is known to compare with.

    statistics: those of the matrix, of which median and 5th percentile of the rows' SQNR and the underflow are kept.
    """
    row: dict[str, object] = {"check": check, "subject": subject, "case": case, "measured_db": measured_db}
    row |= {name: statistics[name] if statistics else None for name in STATISTICS}
    if expected is None:
        nothing = dict.fromkeys(("source", "expected_db", "low_db", "high_db"))
        return row | nothing | {"status": "SKIP", "note": "no closed form and no published value"}
    good = expected.low_db <= measured_db <= expected.high_db
    note = None if good else (
        f"measured {measured_db:.2f} dB; {expected.source} {expected.expected_db:.2f} dB, which allows"
        f" {expected.low_db:.2f} to {expected.high_db:.2f}"
    )  # fmt: skip
    limits = {"expected_db": expected.expected_db, "low_db": expected.low_db, "high_db": expected.high_db}
    finite = {name: value if math.isfinite(value) else None for name, value in limits.items()}
    return row | finite | {"source": expected.source, "status": "PASS" if good else "FAIL", "note": note}
