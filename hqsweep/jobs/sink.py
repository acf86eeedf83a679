"""Where a job's rows go. The worker gives a sink that writes the run folder; tests give one that keeps lists."""

from typing import Protocol

from hqsweep.track.tables import TABLES


class Diverged(Exception):
    """The loss is NaN or infinite: the run has failed, whatever it would do next."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"loss is {loss} at step {step}")


class Sink(Protocol):
    """Rows are tidy and are written at once; a killed job loses none that it was given."""

    def metric(self, step: int, values: dict[str, float]) -> None:
        """One row for each name: train_loss, val_loss (nats a token), grad_norm, lr."""

    def rows(self, table: str, rows: list[dict]) -> None:
        """Rows of the table "stats" (those of a Probe), "parity" or "calibrate"."""

    def phase(self, phase: str | None) -> None:
        """What the job is at where that is no step of training, for the display; None at the first step."""

    def progress(
        self, step: int, steps: int, loss: float | None, tokens_per_s: float | None, *, part: float | None = None
    ) -> None:
        """For the display and the run's status. part: how much of the work is done, from 0 to 1, where steps take
        unequal times; None: step / steps."""

    def manifest(self, **facts: object) -> None:
        """Facts about the run that are no rows: device, data, plans."""

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps, before a run goes on from its checkpoint."""


class ListSink:
    """Keeps everything in memory."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict]] = {name: [] for name in TABLES}
        self.facts: dict[str, object] = {}

    def metric(self, step: int, values: dict[str, float]) -> None:
        self.tables["metrics"] += [{"step": step, "metric": name, "value": value} for name, value in values.items()]

    def rows(self, table: str, rows: list[dict]) -> None:
        self.tables[table] += rows

    def phase(self, phase: str | None) -> None:
        pass

    def progress(
        self, step: int, steps: int, loss: float | None, tokens_per_s: float | None, *, part: float | None = None
    ) -> None:
        pass

    def manifest(self, **facts: object) -> None:
        self.facts |= facts

    def rewind(self, step: int) -> None:
        for table in ("metrics", "stats"):
            self.tables[table] = [row for row in self.tables[table] if row["step"] <= step]

    @property
    def metrics(self) -> list[dict]:
        """Rows of the table "metrics"."""
        return self.tables["metrics"]
