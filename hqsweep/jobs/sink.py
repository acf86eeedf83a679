"""Sinks take a job's rows. The worker's sink writes the run folder; tests use a sink that keeps lists."""

import json
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Protocol

from hqsweep.config.jobs import TABLES
from hqsweep.train.record import Mark, mark_of, misfit


class Diverged(Exception):
    """The loss is NaN or infinite, so the run has failed. began: where NaN or inf came first, as the end of a
    sentence."""

    def __init__(self, step: int, loss: float, lr: float, began: str = "") -> None:
        super().__init__(
            f"loss is {loss} at step {step}{began}; a repeat would say the same: lower train.lr ({lr:g}), make"
            " train.warmup longer, or leave this recipe, where bf16 trains well with the same"
        )


class Sink(Protocol):
    """Takes the reports of a job. Rows are tidy and written at once, so that a killed job loses no row."""

    @property
    def run_id(self) -> str:
        """The id of the run, which stands in the records of its files."""

    def metric(self, step: int, values: dict[str, float]) -> None:
        """Take a row for each name, such as train_loss, val_loss (nats a token), grad_norm and lr."""

    def rows(self, table: str, rows: list[dict]) -> None:
        """Take rows of a table: "stats" (rows of a Probe), "parity" or "calibrate"."""

    def phase(self, phase: str | None) -> None:
        """Take, for the display, the job's work outside of training steps; None at the first step."""

    def progress(
        self,
        step: int,
        steps: int,
        loss: float | None,
        tokens_per_s: float | None,
        *,
        part: float | None = None,
        first: int = 0,
    ) -> None:
        """Take the progress, for the display and the run's status.

        part: the share of the work that is done, from 0 to 1, where steps take unequal times; None: the share of the
        steps after `first`, the step at which a fork leaves its trunk.
        """

    def manifest(self, **fields: object) -> None:
        """Take entries of the manifest, which describe the whole run: device, data, plans."""

    def mark(self, step: int | None = None) -> dict[str, Mark]:
        """Table -> the Mark of its rows, or of its rows up to a step. The rows are on the disk when the call
        returns."""

    def fits(self, marks: Mapping[str, Mark]) -> str | None:
        """The first table whose rows differ from its mark, as a part of a sentence; None if all agree."""

    def rewind(self, marks: Mapping[str, Mark], step: int = -1) -> None:
        """Drop the rows after their marks, or all rows without marks, before a run goes on from a checkpoint of this
        step."""

    def repaired(self, sentence: str) -> None:
        """Print, and keep in the manifest, which file was damaged and how the run continued."""


class QuietSink:
    """Drops everything: the sink of a rank whose rows another rank writes."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    def metric(self, step: int, values: dict[str, float]) -> None:
        pass

    def rows(self, table: str, rows: list[dict]) -> None:
        pass

    def phase(self, phase: str | None) -> None:
        pass

    def progress(
        self,
        step: int,
        steps: int,
        loss: float | None,
        tokens_per_s: float | None,
        *,
        part: float | None = None,
        first: int = 0,
    ) -> None:
        pass

    def manifest(self, **fields: object) -> None:
        pass

    def mark(self, step: int | None = None) -> dict[str, Mark]:
        return {}

    def fits(self, marks: Mapping[str, Mark]) -> str | None:
        return None

    def rewind(self, marks: Mapping[str, Mark], step: int = -1) -> None:
        pass

    def repaired(self, sentence: str) -> None:
        pass

    def write_parquet(self) -> None:
        pass

    def close(self) -> None:
        pass


class ListSink(QuietSink):
    """Keeps everything in memory."""

    def __init__(self) -> None:
        super().__init__("")
        self.tables: dict[str, list[dict]] = {name: [] for name in TABLES}
        self.facts: dict[str, object] = {}

    def metric(self, step: int, values: dict[str, float]) -> None:
        self.tables["metrics"] += [{"step": step, "metric": name, "value": value} for name, value in values.items()]

    def rows(self, table: str, rows: list[dict]) -> None:
        self.tables[table] += rows

    def manifest(self, **fields: object) -> None:
        self.facts |= fields

    def mark(self, step: int | None = None) -> dict[str, Mark]:
        return {table: mark_of(_encoded(rows_until(rows, step))) for table, rows in self.tables.items()}

    def fits(self, marks: Mapping[str, Mark]) -> str | None:
        faults = (misfit(table, _encoded(self.tables[table]), mark) for table, mark in marks.items())
        return next(filter(None, faults), None)

    def rewind(self, marks: Mapping[str, Mark], step: int = -1) -> None:
        for table, rows in self.tables.items():
            del rows[marks[table]["rows"] if table in marks else 0 :]

    def repaired(self, sentence: str) -> None:
        self.facts["repairs"] = [*self.facts.get("repairs", []), sentence]

    @property
    def metrics(self) -> list[dict]:
        """The rows of the table "metrics"."""
        return self.tables["metrics"]


def rows_until(rows: Iterable[dict], step: int | None) -> list[dict]:
    """The rows before the first row of a later step; all rows for None."""
    return list(rows if step is None else takewhile(lambda row: row["step"] <= step, rows))


def _encoded(rows: Iterable[dict]) -> bytes:
    return "".join(json.dumps(row, default=float) + "\n" for row in rows).encode()
