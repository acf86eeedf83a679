"""The jobs that check, parity and calibrate: their rows as tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from hqsweep.report import calibrate, parity

TABLES = {"parity": parity.matrix, "calibrate": calibrate.tables}


def job_tables(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[RenderableType]:
    """Tables for a terminal of the rows of each job's table that has any."""
    return [TABLES[table](part) for table, part in rows.items() if part]
