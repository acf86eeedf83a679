"""TensorBoard as a mirror of the rows, in `<run>/tensorboard/`, by torch's own writer: never the death of a run.

A resumed run writes a file of its own that begins with the step from which it goes on, and TensorBoard drops what
earlier files have of that step and later ones, so that no point is there twice. Files reach the disk every second.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from hqsweep.config.jobs import VERDICT_COLUMNS
from hqsweep.errors import visible
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.tracker import HarmlessTracker, Tracker, harmless, one_line, verdict_scalars

FLUSH_S = 1
TEXT_ROWS = 500
"""The number of rows of a table that are mirrored as text."""


def open_tensorboard(run: RunDir, config: Mapping[str, Any]) -> Tracker:
    """The mirror of a run."""
    return TensorBoardTracker(tensorboard_folder(run), config)


def tensorboard_folder(run: RunDir) -> Path:
    """The folder of a run's mirror."""
    return run.path / "tensorboard"


class TensorBoardTracker(HarmlessTracker):
    """Tracker over a SummaryWriter, which is opened by the first call."""

    who = "tensorboard"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._folder, self._config = folder, config
        self._writer: SummaryWriter | None = None

    @harmless
    def rewind(self, step: int) -> None:
        self._close()
        if step < 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        resumed = any(self._folder.glob("events.*"))
        self._open(purge_step=step + 1 if resumed else None)

    @harmless
    def log(self, step: int, values: Mapping[str, float]) -> None:
        writer = self._open()
        for name, value in values.items():
            writer.add_scalar(visible(name), value, step)

    @harmless
    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        if rows and name != "stats":  # its curves are there
            self._open().add_text(name, markdown_table(rows))

    @harmless
    def finish(self, exit_code: int) -> None:
        if exit_code == 0:
            self._open().file_writer.add_summary(self._hparams()[2])
        self._close()

    def _open(self, purge_step: int | None = None) -> SummaryWriter:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=FLUSH_S)
            if purge_step is None:
                self._writer.add_text("config", f"```yaml\n{yaml.safe_dump(self._config, sort_keys=False)}```")
                for summary in self._hparams()[:2]:
                    self._writer.file_writer.add_summary(summary)
        return self._writer

    def _close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _hparams(self) -> tuple[Any, Any, Any]:
        """The summaries of the plugin HParams: its columns, the start of a session and its successful end."""
        metrics = {"val_loss": 0.0} if self._config.get("job") == "convergence" else {}
        return hparams(dict(leaves(self._config)), metrics)


def leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int | float | str]]:
    """(key path, value) for every leaf of a config that has a value; values other than numbers and texts are JSON."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")
        elif value is not None:
            yield f"{path}{key}", value if type(value) in (int, float, str) else json.dumps(value)


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows with equal columns as Markdown: the first TEXT_ROWS, and the number of others."""
    cells = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows[:TEXT_ROWS])]
    lines = ["| " + " | ".join(map(_cell, line)) + " |" for line in cells]
    if len(rows) > TEXT_ROWS:
        lines += ["", f"and {len(rows) - TEXT_ROWS} more rows, which are in the run's folder"]
    return "\n".join(lines)


def _cell(value: object) -> str:
    """The text of a value, escaped so that it ends no cell and no row, and begins no HTML."""
    text = visible(" ".join(str("" if value is None else value).split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


WIDTH = 61
"""Characters of the forest plot's axis."""


def log_report(sweep_path: Path, report: Path, arms: Sequence[Mapping[str, Any]]) -> bool:
    """The texts `verdicts` and `forest` and the scalars verdict_scalars() of `arms` (of `hqsweep compare --json`) in
    SWEEP/tensorboard/REPORT, in place of an earlier comparison. Returns whether they are kept; never raises."""
    folder = sweep_path / "tensorboard" / report.name
    try:
        if not folder.parent.is_symlink():  # nothing behind a link is deleted
            shutil.rmtree(folder, ignore_errors=True)
        with SummaryWriter(str(folder)) as writer:
            writer.add_text("verdicts", markdown_table([{name: arm[name] for name in VERDICT_COLUMNS} for arm in arms]))
            writer.add_text("forest", f"```text\n{forest_text(arms)}\n```")
            for arm in arms:
                for tag, value in verdict_scalars(arm).items():
                    writer.add_scalar(f"{tag}/{visible(arm['arm'])}", value, 0)
    except Exception as error:
        print(f"tensorboard: report: {one_line(error)}; it is in {report}", flush=True)
        return False
    return True


def forest_text(arms: Sequence[Mapping[str, Any]]) -> str:
    """One line for each arm that has a gap, from the lowest to the highest: o at the gap, - over its interval, | at 0,
    : at both ends of the margin, then the verdict. Gaps are in % of the baseline's loss."""
    drawn = sorted((arm for arm in arms if arm["gap"] is not None), key=lambda arm: arm["gap"])
    if not drawn:
        return "no arm has a gap"
    ends = [value for arm in drawn for value in _interval(arm)] + [
        sign * arm["margin"] for arm in drawn for sign in (-1, 1)
    ]
    low, high = min(ends), max(ends)

    def at(value: float) -> int:
        return round((value - low) / (high - low) * (WIDTH - 1))

    names = [visible(arm["arm"]).replace("`", "'") for arm in drawn]  # it stands in a block of code
    name_width = max(map(len, names))
    lines = [f"{'':{name_width}}  {f'{low:+.3g} %':<{WIDTH // 2}}{f'{high:+.3g} %':>{WIDTH - WIDTH // 2}}"]
    for arm, name in zip(drawn, names, strict=True):
        line = [" "] * WIDTH
        first, last = map(at, _interval(arm))
        line[first : last + 1] = "-" * (last + 1 - first)
        for value, mark in ((-arm["margin"], ":"), (arm["margin"], ":"), (0, "|"), (arm["gap"], "o")):
            line[at(value)] = mark
        lines.append(f"{name:{name_width}}  {''.join(line)}  {arm['verdict']}")
    return "\n".join(lines)


def _interval(arm: Mapping[str, Any]) -> tuple[float, float]:
    """Ends of the interval, or the gap where there is none."""
    return tuple(arm["gap"] if arm[end] is None else arm[end] for end in ("ci_low", "ci_high"))
