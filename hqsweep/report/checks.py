"""The tables of the jobs that check: parity and calibrate."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from hqsweep.report import calibrate, parity

TABLES = {"parity": parity.matrix, "calibrate": calibrate.tables}


def verdicts(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[RenderableType]:
    """What to print of the rows of each table that has any."""
    return [TABLES[table](part) for table, part in rows.items() if part]
