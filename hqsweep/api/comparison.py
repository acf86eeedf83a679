"""hqsweep.compare: verdicts, tables and figures of `hqsweep compare`, for Python, notebooks and paper.

hqsweep.query: questions about runs in SQL, answered as DataFrames.
"""

import base64
from collections.abc import Iterable, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Protocol

import pandas as pd
import plotly.graph_objects as go

from hqsweep.api.judgement import Judgement
from hqsweep.errors import UserError
from hqsweep.foreign_logs.logs import is_of_commands, judge_runs
from hqsweep.queries.index import Tables
from hqsweep.queries.sql import ask
from hqsweep.report.compare import arms
from hqsweep.report.compare.compare import compare as judge
from hqsweep.report.compare.league import league
from hqsweep.report.compare.left_out import LeftOut, rows
from hqsweep.report.compare.notes import headline
from hqsweep.report.figures.forest import forest_of
from hqsweep.report.pages import html, tables
from hqsweep.report.pages.folder import write
from hqsweep.report.pages.paper import latex, paper_tables, plots, write_figures, write_latex
from hqsweep.report.pages.text import legal
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore


class OfRuns(Protocol):
    """A Sweep or a Run."""

    @property
    def folders(self) -> list[RunDir]: ...


def folders_of(caller: str, words: Sequence[str | Path | OfRuns], runs_dir: str | Path) -> list[RunDir]:
    """The folders of the runs that words name, and of Sweep and Run objects; UserError for anything else. caller: the
    function's name, for the sentence."""
    other = next((word for word in words if not isinstance(word, str | Path) and not hasattr(word, "folders")), None)
    if other is not None:
        raise UserError(f"{caller}: takes names, folders, sweeps and runs, not {type(other).__name__}")
    paths = [[str(run.path) for run in word.folders] if hasattr(word, "folders") else [str(word)] for word in words]
    return RunStore(Path(runs_dir)).resolve([path for of_word in paths for path in of_word])


def compare(
    *words: str | Path | OfRuns,
    baseline: str | None = None,
    window: float | None = None,
    margin: float | str | None = None,
    runs_dir: str | Path = "runs",
) -> "Comparison | Judgement":
    """Compare the arms of runs: which are worse, better or equivalent.

    words     sweeps, runs, beginnings of runs' names, or folders; also a Sweep or Run
    baseline  arm, or recipe, that the others are measured against; None: the sweep's, else bf16
    window    of whole runs: last steps (50), or last part of a run (0.1), over which losses are averaged; None: 0.1
    margin    the largest gap that counts as none, in % of the baseline's loss (0.25, "0.25%"); None: the sweep's
    runs_dir  folder of the sweeps, for names

    Runs of a command, or of hqsweep.track, give what hqsweep.judge gives for their metric.

    Raises UserError as `hqsweep compare` does: no convergence run, whole runs beside forks, an unknown baseline, a
    margin or window that is none. Runs that cannot be used are in Comparison.left_out; no number is taken from them.
    """
    return comparison_of(folders_of("compare", words, runs_dir), baseline, window, margin)


def comparison_of(
    run_dirs: Sequence[RunDir],
    baseline: str | None = None,
    window: float | None = None,
    margin: float | str | None = None,
    *,
    keep: bool = True,
) -> "Comparison | Judgement":
    """The comparison of runs of hqsweep's trainer; the judgement of runs of a command."""
    if is_of_commands(run_dirs):
        return Judgement(judge_runs(run_dirs, baseline, window, margin))
    return Comparison(compared(run_dirs, baseline, 0.1 if window is None else window, margin, keep=keep))


def compared(
    run_dirs: Iterable[RunDir],
    baseline: str | None = None,
    window: float = 0.1,
    margin: float | str | None = None,
    *,
    keep: bool = True,
) -> arms.Comparison:
    """Return the comparison of `hqsweep compare`. keep: whether its estimates of noise are kept for later plans."""
    runs = list(run_dirs)
    comparison = judge(runs, baseline, window, margin)
    if keep:
        from hqsweep.study import noise  # which imports torch

        noise.record(comparison, runs[0].sweep_path.parent)
    return comparison


class Comparison:
    """What hqsweep.compare returns. Losses are in nats, gaps in % of the baseline's loss unless a name says nats."""

    def __init__(self, comparison: arms.Comparison) -> None:
        self._comparison = comparison

    @property
    def baseline(self) -> str:
        """The arm that the others are measured against."""
        return self._comparison.baseline

    @property
    def headline(self) -> str:
        """The verdict of the whole study in one sentence."""
        return headline(self._comparison)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the study as a whole: the runs that entered, its coverage, and its limits."""
        return self._comparison.notes

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Runs without a result, and runs that cannot be trusted."""
        return self._comparison.left_out

    @property
    def verdicts(self) -> pd.DataFrame:
        """One row an arm, the baseline first, then by gap, as numbers: arm, verdict (better, worse, equivalent,
        undecided; baseline; or why there is none), sentence, n, gap (nats), gap_pct, ci_low_pct, ci_high_pct, p,
        margin_pct, final_loss, tokens_per_s, and more: the columns of compare.csv."""
        leading = ["arm", "verdict", "gap_pct", "ci_low_pct", "ci_high_pct", "n", "final_loss", "tokens_per_s"]
        rows = tables.by_gap(self._comparison)
        return rows[[*leading, *(name for name in rows if name not in leading)]]

    @cached_property
    def effects(self) -> pd.DataFrame:
        """One row for every effect of a factorial study (conf=factorial), main effects first, in % of the baseline's
        loss: effect, order, pct, low, high (95 %, joint), p, n, resolved, aliases. Empty for other studies."""
        return self._comparison.effects.table.copy()

    @cached_property
    def league(self) -> pd.DataFrame:
        """One row for every arm but the null arm, the smallest gap first: place, arm, verdict, gap_pct, ci_low_pct,
        ci_high_pct, slowdown_pct, bits (mean of an element over the operands of linears), front (no other arm has
        fewer bits and a smaller gap), tokens_per_s and speed (over the baseline's), NaN where formats are emulated."""
        return league(self._comparison)

    @property
    def points(self) -> pd.DataFrame:
        """One row for every paired replicate (and fork point): the columns of points.csv."""
        return self._comparison.points.copy()

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Name -> table of the report, as ready text."""
        return {
            name: pd.DataFrame(table.rows, columns=list(table.header))
            for name, table in paper_tables(self._comparison).items()
        }

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """Name -> figure of the report, for plotly."""
        return plots(self._comparison)

    def latex(self, table: str = "arms") -> str:
        """A table of `tables` as LaTeX, for the packages booktabs and (where it is long) longtable. Raises UserError
        for another name."""
        return latex(paper_tables(self._comparison), table)

    def save(self, kind: str, folder: str | Path) -> list[Path]:
        """Write every figure ("svg" or "png") or every table ("latex") as a file into a folder; returns the files.

        PNG takes the extra hqsweep[figures]. Raises UserError without it, and for another kind.
        """
        if kind == "latex":
            return write_latex(self._comparison, Path(folder))
        return write_figures(self._comparison, kind, Path(folder))

    def report(self, folder: str | Path) -> Path:
        """Write the report that `hqsweep compare` writes into a folder; returns its page."""
        return write(self._comparison, Path(folder))

    def __repr__(self) -> str:
        return f"<Comparison {tables.title(self._comparison)}: {self.headline}>"

    def _repr_html_(self) -> str:
        forest, picture = forest_of(self._comparison), ""
        if forest:
            encoded = base64.b64encode(legal(html.forest_svg(forest)).encode()).decode()
            picture = f'<p><img alt="{escape(forest.says)}" src="data:image/svg+xml;base64,{encoded}"></p>'
        table = self.tables["arms"].to_html(index=False, border=0)
        title = f"<p><b>{escape(tables.title(self._comparison))}</b></p><p>{escape(self.headline)}</p>"
        return f"{title}{picture}{table}"


def query(question: str, *words: str | Path | OfRuns, runs_dir: str | Path = "runs") -> pd.DataFrame:
    """The answer to a question in SQL about runs: one row for each row of the answer.

    question  columns and what follows them, "arm, seed, min(val_loss) where step > 100", or a whole select; tables are
              runs, metrics, stats, parity and calibrate (docs/query.md has their columns)
    words     sweeps and runs, as hqsweep.Sweep takes them; none: all sweeps of runs_dir
    runs_dir  folder of the sweeps, for names

    Losses are in nats, times in seconds, SQNR in dB. Runs whose files cannot be trusted are left out;
    `.attrs["left_out"]` of the answer has a dict for each.

    Raises:
        UserError: SQL that is wrong, a column or table that does not exist, a word that fits nothing.
        Damaged: no run can be trusted.
    """
    if not isinstance(question, str):
        raise UserError(f"query: takes a text of SQL, not {type(question).__name__}")
    folders = folders_of("query", words, runs_dir) if words else RunStore(Path(runs_dir)).all_runs()
    tables = Tables(folders, root=Path(runs_dir))
    answer = ask(question, tables).to_pandas()
    answer.attrs["left_out"] = [dict(row) for row in rows(tables.left_out)]
    return answer
