"""Throughput of the arms: a line for each, its name beside the marks and not over them."""

from dataclasses import dataclass

import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.figures.axis import even_ticks
from hqsweep.report.figures.look import MOST_LETTERS, listed, styles

TICKS = 6


@dataclass(frozen=True, kw_only=True)
class SpeedLine:
    """What is drawn of one arm, as a line of the forest plot is, without intervals. Places are in % of the width."""

    arm: str
    colour: str
    value: str
    mean: float
    dots: tuple[tuple[float, str], ...]
    joint: None = None
    equivalence: None = None

    @property
    def says(self) -> str:
        return f"mean: {self.value} tokens/s"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens a second of every run as a dot, and the mean of each arm; `ticks` are (place, label), `rows` what is
    drawn."""

    lines: tuple[SpeedLine, ...]
    ticks: tuple[tuple[float, str], ...]
    rows: pd.DataFrame

    @property
    def name_width(self) -> int:
        """Characters that the longest name may take in a line of its own."""
        return min(MOST_LETTERS, max(len(line.arm) for line in self.lines))

    @property
    def says(self) -> str:
        """The figure in words."""
        return f"Tokens a second. {listed(f'{line.arm} {line.value}' for line in self.lines)}."


def speed_of(comparison: Comparison) -> Speed | None:
    """The throughput of every run that said one; None where none did."""
    rows = comparison.frames.runs[["arm", "seed", "tokens_per_s"]].dropna()
    if rows.empty:
        return None
    most, looks = 1.05 * float(rows["tokens_per_s"].max()) or 1.0, styles(comparison)
    by_arm = dict(list(rows.groupby("arm")))
    lines = tuple(
        SpeedLine(
            arm=arm,
            colour=looks[arm]["color"],
            value=f"{own['tokens_per_s'].mean():,.0f}",
            mean=round(100 * own["tokens_per_s"].mean() / most, 2),
            dots=tuple(
                (round(100 * run.tokens_per_s / most, 2), f"seed {run.seed}: {run.tokens_per_s:,.0f} tokens/s")
                for run in own.itertuples()
            ),
        )
        for arm in comparison.arms["arm"]
        if (own := by_arm.get(arm)) is not None
    )
    ticks = tuple((round(100 * value / most, 2), f"{value:,.0f}") for value in even_ticks(0, most, TICKS))
    return Speed(lines=lines, ticks=ticks, rows=rows)
