"""The forest plot: one line for each arm with its gap to the baseline, two intervals, its replicates, and the margin.

Places on a line are in % of its width, so that one drawing (forest.html.j2) fits the page, a phone, paper and an SVG
file without a script. The axis is linear; where a gap is far larger than the margin it is asinh(gap / margin): linear
within the margin and logarithmic beyond, so that a broken arm does not flatten the others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import FORK
from hqsweep.report.compare.verdict import FEWEST_TRUNKS, PLAIN, spec
from hqsweep.report.figures.look import MOST_LETTERS, even_ticks, listed, styles
from hqsweep.report.pages.text import number

BENT_FROM = 20
"""The number of margins from which on an axis is bent."""
TICKS = 7
SPACE = 7
"""The least distance of labels on a bent axis, in % of the width."""
ALL_ARMS = "of all arms together"
WIDE = 1.0
"""Intervals may lengthen the axis by this share on either side, relative to gaps, replicates and margin."""


VERDICT_COLOURS = {"worse": "#a3320b", "better": "#00568a", "equivalent": "#00664b", "undecided": "#6b5300"}
"""The colours of verdicts, as on the page: legible on white, and distinct also for readers who do not see red or green.
The word stands there as well."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis of gaps from `low` to `high`; `margin` on both sides of 0 is the band; `bent`: asinh, not linear."""

    low: float
    high: float
    margin: float
    bent: bool = False

    def at(self, value: float) -> float:
        """The place of a gap in % of the width, 0 to 100; a gap beyond an end is placed at that end."""
        low, high, place = (math.asinh(x / self.margin) if self.bent else x for x in (self.low, self.high, value))
        return round(100 * min(max((place - low) / (high - low), 0.0), 1.0), 3)

    def beyond(self, value: float) -> bool:
        """Whether a gap lies outside of the axis."""
        return not self.low <= value <= self.high

    def ticks(self) -> list[tuple[float, str]]:
        """(place, label) of the ticks, 0 among them."""
        values = self._bent_ticks() if self.bent else even_ticks(self.low, self.high, TICKS)
        return [(self.at(value), f"{value:+.4g}" if value else "0") for value in values]

    def _bent_ticks(self) -> list[float]:
        """The ticks of a bent axis: 0, the margin, and 1 and 3 of every power of ten beyond it, the large ones first,
        where there is room."""
        decades = range(math.floor(math.log10(self.margin)), math.ceil(math.log10(max(-self.low, self.high))) + 1)
        sizes = [lead * 10.0**decade for decade in reversed(decades) for lead in (3, 1)]
        ticks = [0.0]
        for value in [sign * size for size in (self.margin, *sizes) for sign in (1, -1)]:
            apart = all(abs(self.at(value) - self.at(other)) >= SPACE for other in ticks)
            if apart and not self.beyond(value) and abs(value) >= self.margin:
                ticks.append(value)
        return sorted(ticks)


@dataclass(frozen=True, kw_only=True)
class Line:
    """The drawing and the words of one arm. Places are in % of the width; None: nothing to draw."""

    arm: str
    colour: str
    null: bool
    verdict: str
    within: bool
    gap: str
    interval: str
    says: str
    mean: float | None
    joint: tuple[float, float] | None
    open_ends: tuple[bool, bool]
    equivalence: tuple[float, float] | None
    dots: tuple[tuple[float, str], ...]

    @property
    def words(self) -> str:
        """The verdict, and what else holds."""
        return self.verdict + (", inside the margin" if self.within else "")

    @property
    def verdict_colour(self) -> str:
        return VERDICT_COLOURS.get(self.verdict, "#555")


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """The gaps of a plot. axis: their name; unit: what stands after each, " %" or "" for the metric's own; lower:
    whether low ones are good."""

    axis: str = "gap in % of the baseline's loss"
    unit: str = " %"
    lower: bool = True


@dataclass(frozen=True, kw_only=True)
class Forest:
    """A forest plot: its lines from the best gap to the worst, the null arm last; `rows` are the data that it draws."""

    heading: str
    lines: tuple[Line, ...]
    scale: Scale
    replicate: str
    covers: str
    gaps: "Gaps"
    rows: pd.DataFrame

    @property
    def margin(self) -> tuple[float, float]:
        """Both ends of the margin band, in % of the width."""
        return self.scale.at(-self.scale.margin), self.scale.at(self.scale.margin)

    @property
    def name_width(self) -> int:
        """The characters that the longest name may take in a line of its own."""
        return min(MOST_LETTERS, max(len(line.arm) for line in self.lines))

    @property
    def says(self) -> str:
        """The figure in words."""
        return f"{self.heading}. " + "; ".join(line.says for line in self.lines) + "."


def forest(
    arms: pd.DataFrame,
    singles: pd.DataFrame,
    colours: Mapping[str, str],
    *,
    heading: str,
    replicate: str = "seed",
    covers: str = ALL_ARMS,
    gaps: Gaps = Gaps(),
) -> Forest | None:
    """The forest plot of `arms`, None where no arm has a gap.

    arms: one row per arm under test and for the null arm, with arm, gap_pct, ci_low_pct, ci_high_pct (95 %, joint),
    eq_low_pct, eq_high_pct (90 %), margin_pct, verdict, within_margin, null and n. singles: arm, replicate, gap_pct,
    one row per replicate. All gaps are in the unit of `gaps`; NaN is not drawn. `replicate` says what one is, `covers`
    what the 95 % intervals are of.
    """
    if not arms["gap_pct"].notna().any():
        return None
    arms = arms.sort_values(["null", "gap_pct"], ascending=[True, gaps.lower], kind="stable", na_position="last")
    scale = scale_of(arms, singles)
    lines = tuple(
        _line(row, scale, colours[row.arm], singles[singles["arm"] == row.arm], gaps.unit) for row in arms.itertuples()
    )
    columns = ["arm", "verdict", "within_margin", "null", "n", "gap_pct", "ci_low_pct", "ci_high_pct"]
    means = arms[[*columns, "eq_low_pct", "eq_high_pct", "margin_pct"]].assign(replicate="mean")
    single = singles[singles["arm"].isin(arms["arm"])][["arm", "replicate", "gap_pct"]]
    rows = pd.concat([means, single], ignore_index=True)
    named = {"heading": heading, "replicate": replicate, "covers": covers, "gaps": gaps}
    return Forest(lines=lines, scale=scale, rows=rows, **named)


def forest_of(comparison: Comparison) -> Forest | None:
    """The forest plot of a comparison: whole runs by seed, forks by trunk (each the mean of its fork points).

    With fewer trunks than a verdict needs it shows single forks, and the intervals that cover these forks alone: those
    of all trunks would be as wide as the page.
    """
    arms, points = comparison.arms[comparison.arms["arm"] != comparison.arms["baseline"]], comparison.points
    colours = {arm: style["color"] for arm, style in styles(comparison.arms).items()}
    if comparison.design != FORK:
        singles = points.rename(columns={"trunk": "replicate"})
        return forest(arms, singles, colours, heading=_heading(comparison, "final validation loss"))
    heading = _heading(comparison, "training loss over the decay")
    if arms["n"].max() < FEWEST_TRUNKS:
        bounds = {f"ci_{end}_pct": arms[f"these_{end}_pct"] for end in ("low", "high")}
        arms = arms.assign(**bounds, eq_low_pct=math.nan, eq_high_pct=math.nan)
        singles = points.assign(replicate=points["trunk"] + " at " + points["draw"])
        return forest(arms, singles, colours, heading=heading, replicate="fork", covers="of these forks alone")
    means = points.assign(gap_pct=points["gap_pct"] * points["weight"])
    means = means.groupby(["arm", "trunk"], sort=False)["gap_pct"].sum().reset_index()
    return forest(arms, means.rename(columns={"trunk": "replicate"}), colours, heading=heading, replicate="trunk")


def _heading(comparison: Comparison, loss: str) -> str:
    return f"Gap of the {loss}, in % of the loss of {comparison.baseline}"


def scale_of(arms: pd.DataFrame, singles: pd.DataFrame) -> Scale:
    """Return an axis that shows every gap, every replicate and the margin, and as much of the intervals as stays
    readable.

    An interval of two replicates can be a hundred times as wide as their gaps.
    """
    margin = float(arms["margin_pct"].max())
    seen = np.array([*arms["gap_pct"], *singles["gap_pct"], 1.3 * margin, -1.3 * margin])
    seen = seen[np.isfinite(seen)]
    reach = WIDE * (seen.max() - seen.min())
    ends = arms[["ci_low_pct", "ci_high_pct", "eq_low_pct", "eq_high_pct"]].to_numpy(dtype=float)
    ends = ends[np.isfinite(ends)].clip(seen.min() - reach, seen.max() + reach)
    low, high = min([seen.min(), *ends]), max([seen.max(), *ends])
    room, bent = 0.03 * (high - low), max(high, -low) > BENT_FROM * margin
    return Scale(low=float(low - room), high=float(high + room), margin=margin, bent=bent)


def _line(row: Any, scale: Scale, colour: str, singles: pd.DataFrame, unit: str) -> Line:
    places = spec({"unit": unit or PLAIN}, (row.ci_high_pct - row.ci_low_pct) / 2)
    known = math.isfinite(row.gap_pct)
    bounded = known and math.isfinite(row.ci_low_pct)
    gap = number(row.gap_pct, places) + unit if known else "-"
    interval = f"{number(row.ci_low_pct, places)} to {number(row.ci_high_pct, places)}" if bounded else "-"
    within = bool(row.within_margin) and row.verdict != "equivalent"
    words = row.verdict + (", inside the margin" if within else "")
    return Line(
        arm=row.arm,
        colour=colour,
        null=bool(row.null),
        verdict=row.verdict,
        within=within,
        gap=gap,
        interval=interval,
        says=f"{row.arm}: {words}" + (f", {gap}" if known else "") + (f" ({interval})" if bounded else ""),
        mean=scale.at(row.gap_pct) if known else None,
        joint=(scale.at(row.ci_low_pct), scale.at(row.ci_high_pct)) if bounded else None,
        open_ends=(scale.beyond(row.ci_low_pct), scale.beyond(row.ci_high_pct)),
        equivalence=(scale.at(row.eq_low_pct), scale.at(row.eq_high_pct)) if math.isfinite(row.eq_low_pct) else None,
        dots=tuple(
            (scale.at(one.gap_pct), f"{one.replicate}: {number(one.gap_pct, places)}{unit}")
            for one in singles.itertuples()
            if math.isfinite(one.gap_pct)
        ),
    )


SPEED_TICKS = 6


@dataclass(frozen=True, kw_only=True)
class SpeedLine:
    """The drawing of one arm, as a line of the forest plot without intervals. Places are in % of the width."""

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
    """Tokens a second of every run as a dot, and the mean of each arm. `ticks`: (place, label); `rows`: the drawn
    data."""

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
    most, looks = 1.05 * float(rows["tokens_per_s"].max()) or 1.0, styles(comparison.arms)
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
    ticks = tuple((round(100 * value / most, 2), f"{value:,.0f}") for value in even_ticks(0, most, SPEED_TICKS))
    return Speed(lines=lines, ticks=ticks, rows=rows)
