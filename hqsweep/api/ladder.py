"""hqsweep.ladder: the gap at a larger size, from sweeps of several sizes."""

from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from hqsweep.api.comparison import OfRuns, folders_of
from hqsweep.config.study import parse_percent
from hqsweep.errors import UserError
from hqsweep.report.compare import ladder as ladders
from hqsweep.report.figures.ladder import ladder_panel
from hqsweep.report.pages.ladder import write_ladder


def ladder(
    *sweeps: str | Path | OfRuns,
    at: str | float | None = None,
    tokens: str | float | None = None,
    design: str | None = None,
    margin: float | str = 0.25,
    runs_dir: str | Path = "runs",
) -> "Ladder":
    """Predict the gap of every arm at a larger size, from a sweep for each size of the model.

    sweeps   names or folders of sweeps, or Sweeps; each has one size (conf=ladder)
    at       parameters of the model to predict, as a number or "124M"; None: three times the largest
    tokens   that it is trained on; None: as many for each parameter as at the largest size
    design   "fork" or "whole", of the sweeps that the laws are fitted to; None: forks, where there are some
    margin   the largest gap that counts as none, in % of the baseline's loss
    runs_dir folder of the sweeps, for names

    Raises UserError for fewer than two sizes, a sweep with several, and values that are none.
    """
    size = None if at is None else ladders.parse_size(at, "at")
    count = None if tokens is None else ladders.parse_size(tokens, "tokens")
    if not sweeps:
        raise UserError("ladder: no sweep is given; give one for each size of the model")
    folders = [folders_of("ladder", [sweep], runs_dir) for sweep in sweeps]
    return Ladder(ladders.ladder(folders, (size, count), design, parse_percent(margin, "margin")))


class Ladder:
    """What hqsweep.ladder returns. Gaps are in % of the baseline's loss."""

    def __init__(self, found: ladders.Ladder) -> None:
        self._found = found

    @property
    def predictions(self) -> pd.DataFrame:
        """One row an arm at the size asked for: arm, verdict, gap_pct, low, high (95 %, over both laws), disagree,
        eff_n, eff_d with their intervals, gaussian_pct, sizes, sentence."""
        rows = [{k: v for k, v in row.items() if k not in ("laws", "held_out")} for row in self.document["arms"]]
        return pd.DataFrame(rows)

    @property
    def measured(self) -> pd.DataFrame:
        """One row an arm and size: design, arm, params, tokens, n, gap_pct, se_pct, loss."""
        return self._found.measured.copy()

    @property
    def curves(self) -> pd.DataFrame:
        """Predictions over sizes: arm, params, gap_pct, low, high."""
        return self._found.curves.copy()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences that stand with every verdict, such as on a size too far away."""
        return self._found.warnings

    @property
    def document(self) -> dict:
        """The answer of `hqsweep ladder --json`, as a dict."""
        return ladders.document(self._found)

    @property
    def figure(self) -> go.Figure:
        """Gap against size, for plotly."""
        return ladder_panel(self._found).figure

    def report(self, folder: str | Path) -> Path:
        """Write ladder.html, ladder.md, ladder.svg, ladder.csv and measured.csv into a folder; returns the path of
        ladder.md."""
        return write_ladder(self._found, Path(folder))

    def __repr__(self) -> str:
        return "\n".join(f"{arm}: {self._found.sentence(arm)}" for arm in self._found.predictions)
