"""The jobs that check, parity and calibrate: their rows as tables for a terminal."""

import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from hqsweep.config.jobs import JOBS


def job_tables(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[RenderableType]:
    """Tables for a terminal of the rows of each job's table that has any."""
    printers = {kind.table: kind.printer for kind in JOBS.values()}
    return [pkgutil.resolve_name(printers[table])(part) for table, part in rows.items() if part]
