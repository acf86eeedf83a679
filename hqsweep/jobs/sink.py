"""Where a job's rows go. The worker gives a sink that writes the run folder; tests give one that keeps lists."""

from typing import Protocol


class Diverged(Exception):
    """The loss is NaN or infinite: the run has failed, whatever it would do next."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"loss is {loss} at step {step}")


class Sink(Protocol):
    """Rows are tidy and are written at once; a killed job loses none that it was given."""

    def metric(self, step: int, values: dict[str, float]) -> None:
        """One row for each name: train_loss, val_loss (nats a token), grad_norm, lr."""

    def stats(self, rows: list[dict]) -> None:
        """Rows of a Probe."""

    def parity(self, rows: list[dict]) -> None:
        """Rows of the parity job."""

    def calibrate(self, rows: list[dict]) -> None:
        """Rows of the calibrate job."""

    def progress(self, step: int, steps: int, loss: float | None, tokens_per_s: float | None) -> None:
        """For the display and the run's status."""

    def manifest(self, **facts: object) -> None:
        """Facts about the run that are no rows: device, data, plans."""

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps, before a run goes on from its checkpoint."""


class ListSink:
    """Keeps everything in memory."""

    def __init__(self) -> None:
        self.metrics: list[dict] = []
        self.stat_rows: list[dict] = []
        self.parity_rows: list[dict] = []
        self.calibrate_rows: list[dict] = []
        self.facts: dict[str, object] = {}

    def metric(self, step: int, values: dict[str, float]) -> None:
        self.metrics += [{"step": step, "metric": name, "value": value} for name, value in values.items()]

    def stats(self, rows: list[dict]) -> None:
        self.stat_rows += rows

    def parity(self, rows: list[dict]) -> None:
        self.parity_rows += rows

    def calibrate(self, rows: list[dict]) -> None:
        self.calibrate_rows += rows

    def progress(self, step: int, steps: int, loss: float | None, tokens_per_s: float | None) -> None:
        pass

    def manifest(self, **facts: object) -> None:
        self.facts |= facts

    def rewind(self, step: int) -> None:
        self.metrics = [row for row in self.metrics if row["step"] <= step]
        self.stat_rows = [row for row in self.stat_rows if row["step"] <= step]
