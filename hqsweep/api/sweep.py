"""hqsweep.run, which runs a sweep, and hqsweep.Sweep: the runs of a sweep as DataFrames, read once and never changed.

    sweep = hqsweep.Sweep("runs/quickstart")
    sweep.runs[["arm", "seed", "val_loss"]]
    sweep.metrics.query("metric == 'val_loss'").pivot_table(index="step", columns="arm", values="value")
    sweep[0].config["train"]["lr"]

Nothing is sampled: `metrics` and `stats` have every row. Make another Sweep to read a sweep again that has gone on.
"""

import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from hqsweep.api.comparison import Comparison, OfRuns, comparison_of, folders_of
from hqsweep.api.judgement import Judgement
from hqsweep.config.jobs import CHECKED_TABLES
from hqsweep.errors import UserError, nearest, visible
from hqsweep.report.compare.frames import DATA, FORK, TRUNK, Frames, load
from hqsweep.report.compare.left_out import LeftOut
from hqsweep.sweep.alerts import Alerts
from hqsweep.sweep.engine.task import Until
from hqsweep.sweep.grid.overrides import quoted
from hqsweep.sweep.grid.run_words import read, with_seeds
from hqsweep.sweep.store.run_dir import RunDir

FACTS = ("run", "arm", "recipe", "seed", "design", "trunk", "point", "state", "reason", "diverged", "step", "steps",
         "seconds", "tokens_per_s")  # fmt: skip
"""The columns of Sweep.runs that every sweep has, except the columns of forks."""
OF_FORKS = ("design", "trunk", "point")
APART = ("config.seed", "config.data.hash")
"""The keys of the config that have columns of their own."""
SHOWN_ROWS = 20
"""The number of rows of the table that a notebook shows of a sweep."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep; its folder is read at each access."""

    folder: RunDir

    @property
    def name(self) -> str:
        """The name of its folder: arm, seed, and the run's id."""
        return self.folder.name

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def folders(self) -> list[RunDir]:
        """A list with its folder, for functions that take sweeps and runs."""
        return [self.folder]

    @property
    def state(self) -> str:
        """pending, running, finished, failed, interrupted; damaged or missing."""
        return self.folder.seen()["state"]

    @property
    def reason(self) -> str | None:
        """Why it is in that state, if there is more to say."""
        return self.folder.seen()["reason"]

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config, every leaf of it. Raises Damaged, as all properties below do."""
        return self.folder.config()

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest: versions, commit, device, threads, hash of the data, plans of the GEMMs."""
        return self.folder.manifest()

    @property
    def metrics(self) -> pd.DataFrame:
        """Every row: step, metric, value."""
        return pd.DataFrame(self.folder.rows("metrics"), columns=["step", "metric", "value"])

    @property
    def stats(self) -> pd.DataFrame:
        """Every row of the sampled errors; docs/reference/statistics.md describes the columns."""
        return pd.DataFrame(self.folder.rows("stats"))

    @property
    def log(self) -> str:
        """The output of its process."""
        return self.folder.log.read_text(encoding="utf-8", errors="replace") if self.folder.log.is_file() else ""

    def __repr__(self) -> str:
        return f"<Run {self.folder.sweep}/{self.name}: {self.state}>"


class Sweep(Sequence[Run]):
    """The runs of one sweep, or of several: a sequence of Run, and tables of them all.

    words     a sweep's name or folder, a run's, or the beginning of runs' names, as the commands take them; also a
              Sweep or Run
    runs_dir  folder of the sweeps, for names

    sweep[0], sweep["NAME"] (the beginning of a name will do if it is one run's) and sweep[2:5] are runs. Raises
    UserError for a word that fits nothing, Damaged where no run can be trusted; runs that cannot are in left_out.
    """

    def __init__(self, *words: str | Path | OfRuns, runs_dir: str | Path = "runs") -> None:
        if not words:
            raise UserError("Sweep: give the name of a sweep or the path of its folder, as in Sweep('runs/quickstart')")
        self._folders = folders_of("Sweep", words, runs_dir)

    @property
    def folders(self) -> list[RunDir]:
        """The folders of its runs."""
        return list(self._folders)

    def __len__(self) -> int:
        return len(self._folders)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return [Run(folder) for folder in self._folders[which]]
        if isinstance(which, str):
            return Run(self._named(which))
        return Run(self._folders[which])

    def _named(self, word: str) -> RunDir:
        names = {f"{folder.sweep}/{folder.name}": folder for folder in self._folders}
        exact = [folder for name, folder in names.items() if word in (name, folder.name)]
        matches = exact or [f for name, f in names.items() if name.startswith(word) or f.name.startswith(word)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            full = len({run.name for run in matches}) < len(matches)
            listed = ", ".join(f"{run.sweep}/{run.name}" if full else run.name for run in matches)
            raise UserError(f"'{word}' means {len(matches)} runs; name one of {listed}")
        known = [folder.name for folder in self._folders]
        raise UserError(f"'{word}' is no run of {self.name}{nearest(word, known)}; .runs lists them")

    @property
    def name(self) -> str:
        """The name of the sweep, or of the sweeps."""
        return ", ".join(dict.fromkeys(folder.sweep for folder in self._folders))

    @cached_property
    def _frames(self) -> Frames:
        return load(self._folders)

    @cached_property
    def _runs(self) -> pd.DataFrame:
        frames = self._frames
        runs, forked = frames.runs, frames.runs["design"].isin((FORK, TRUNK)).any()
        columns = [name for name in FACTS if forked or name not in OF_FORKS]
        last = frames.metrics.sort_values("step", kind="stable").groupby(["run", "metric"], sort=False)["value"].last()
        finals = last.unstack("metric").reindex(runs["run"]).reset_index(drop=True).rename_axis(columns=None)
        finals = finals.drop(columns=[name for name in finals if name in columns])
        settings = {
            name.removeprefix("config."): runs[name]
            for name in runs
            if name.startswith("config.") and name not in APART and runs[name].astype(str).nunique() > 1
        }
        if runs[DATA].nunique(dropna=False) > 1:
            settings["data.hash"] = runs[DATA]
        return pd.concat([runs[columns], finals, pd.DataFrame(settings), runs[["run_id", "path"]]], axis=1)

    @property
    def runs(self) -> pd.DataFrame:
        """One row a run: run (SWEEP/NAME), arm, recipe, seed, and for forks design, trunk and point; state, reason,
        diverged, step, steps, seconds, tokens_per_s; the last value of every metric under its name (val_loss and
        train_loss in nats); every key of the config that is not the same in all runs, under its dotted name; run_id,
        path."""
        return self._runs.copy()

    @property
    def metrics(self) -> pd.DataFrame:
        """Every row that the runs logged: run, arm, seed, step, metric, value (float64, NaN and inf as they came)."""
        return self._frames.metrics.copy()

    @property
    def stats(self) -> pd.DataFrame:
        """Every row of the sampled errors: run, arm, seed, step, layer, tensor, direction, format, and the statistics
        (SQNR in dB, underflow and saturation in %)."""
        return self._frames.stats.copy()

    @property
    def checks(self) -> pd.DataFrame:
        """The rows of parity and calibrate jobs, with their run and their table; status is PASS, FAIL or SKIP."""
        rows = [
            {"run": run.name, "table": table} | row
            for run in self._folders
            for table in CHECKED_TABLES
            for row in run.rows(table)
        ]
        return pd.DataFrame(rows)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The runs whose files cannot be trusted: each with run, state, file, fault and remedy."""
        return self._frames.left_out

    @cached_property
    def _compared(self) -> Comparison | Judgement:
        return comparison_of(self._folders, keep=False)

    @property
    def verdicts(self) -> pd.DataFrame:
        """Comparison.verdicts against the sweep's baseline, within its margin."""
        return self._compared.verdicts

    def compare(
        self, baseline: str | None = None, *, window: float | None = None, margin: float | str | None = None
    ) -> Comparison | Judgement:
        """The arms against `baseline`, as hqsweep.compare."""
        return comparison_of(self._folders, baseline, window, margin)

    def __repr__(self) -> str:
        return f"<Sweep {self.name}: {self._counts()}>"

    def _counts(self) -> str:
        states = [run.seen()["state"] for run in self._folders]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"{len(states)} run{'s' * (len(states) != 1)}, {counts}"

    def _repr_html_(self) -> str:
        shown = [name for name in self._runs if name not in ("run_id", "path", "recipe", "reason", "diverged", "steps")]
        table = self._runs[shown].to_html(max_rows=SHOWN_ROWS, max_cols=SHOWN_ROWS, index=False, border=0)
        faults = "".join(f"<p>left out: {escape(entry.line)}</p>" for entry in self.left_out)
        return f"<p><b>{escape(self.name)}</b>: {escape(self._counts())}</p>{table}{faults}"


NO_IMPORT = "which no_import=True refuses; give one that is none, or leave no_import out"


def run(
    conf: str,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    force: bool = False,
    no_import: bool = False,
    quiet: bool = False,
    until: str | None = None,
    alerts: Alerts | None = None,
) -> Sweep:
    """Run the unfinished runs of a sweep's grid, and return the sweep. Call it from the main thread.

    conf        a packaged sweep, one in ./conf or config_dir, or the path of a YAML file
    overrides   KEY=VALUE and KEY=V1,V2 as the command line takes them, without a shell's quotes
    out         folder of the sweeps (runs_dir); None: what the config says, which is ./runs
    config_dir  folder of the user's configs
    force       repeat finished runs
    no_import   refuse a Python factory, instead of importing it
    quiet       print nothing; else progress and warnings go to stderr
    until       start runs for this long alone ("90s", "20m", "2h"), and none that would not be finished by then
    alerts      the notices when a run fails, and at the end

    A run that fails raises nothing: its state and reason are in Sweep.runs. The same call resumes a sweep that was
    interrupted.

    Raises:
        UserError: whatever is wrong in any point of the grid, before anything starts; what `hqsweep run` refuses.
    """
    words, limit = _words(conf, overrides, out), None if until is None else Until(until, "until")
    folder = None if config_dir is None else Path(config_dir)
    if folder is not None and not folder.is_dir():
        raise UserError(f"config_dir: {folder} is no folder; give the folder of your configs")
    if not isinstance(alerts or Alerts(), Alerts):
        raise UserError(f"alerts: takes hqsweep.Alerts(...), not {type(alerts).__name__}")
    if threading.current_thread() is not threading.main_thread():
        raise UserError("run: it stops its workers at a signal, which Python gives to the main thread; call it there")
    say = _silent if quiet else _say
    request = read(words, config_dir=folder)  # a mistyped word is refused before torch is imported
    from hqsweep.api.finish import after_failures, finish_with, warnings_of
    from hqsweep.recipe.factories import Importer
    from hqsweep.sweep.console import PlainDisplay, SafeConsole, open_display
    from hqsweep.sweep.engine import launch

    importer = Importer(say, allowed=() if no_import else None, refusal=NO_IMPORT)
    plan = launch.plan_of(request, importer)
    planned = partial(launch.plan, config_dir=folder, importer=importer)
    options = {"say": say, "look": say, "force": force, "until": limit}
    console = SafeConsole(stderr=True, quiet=quiet, force_jupyter=False)
    display = PlainDisplay(console) if quiet else open_display(console)
    try:
        finishing = partial(finish_with, alerts or Alerts(), plan, lambda seeds: planned(with_seeds(words, seeds)))
        runs = finishing(display, **options).runs
    except SystemExit as stopped:
        if stopped.code == 128 + signal.SIGINT:  # in Python, ^C and a notebook's button are this exception
            raise KeyboardInterrupt from None
        raise
    results = [launch.result(run_dir) for run_dir in runs]
    for line in [*warnings_of(results), *filter(None, [after_failures(results)])]:
        say(line)
    return Sweep(*(run_dir.path for run_dir in runs))


def _words(conf: str, overrides: Sequence[str], out: str | Path | None) -> list[str]:
    """The words of `hqsweep run` with the same meaning."""
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise UserError(f"overrides: got {overrides!r}; give a list of texts, such as ['train.steps=100', 'seed=0,1']")
    words = [f"conf={conf}", *overrides]
    if out is not None:
        words.append(f"runs_dir={quoted(str(out))}")
    return words


def _say(line: str) -> None:
    print(visible(line, keep="\n"), file=sys.stderr)


def _silent(line: str) -> None:
    """Print nothing."""
