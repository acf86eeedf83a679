"""The look that all figures of a report share: the panel of a figure with its rows and its words, and heatmaps.

Colours are Okabe and Ito's (safe for colour-blind readers), black for the baseline and grey for the null arm; no two of
30 arms have the same colour and dash, so that they differ in grey print too. Labels are escaped, because plotly reads
HTML in them.
"""

import html
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

BASELINE_COLOUR, NULL_COLOUR = "#000000", "#767676"
MARGIN_BAND, MARGIN_EDGE = "rgba(60,80,110,0.11)", {"color": "#3c506e", "width": 1, "dash": "dot"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "triangle-up", "cross", "star")
MARKERS = {
    "circle": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "square": "M-4.5-4.5h9v9h-9z",
    "triangle-up": "M0-5.5L5 4h-10z",
    "cross": "M-1.7-5h3.4v3.3H5v3.4H1.7V5h-3.4V1.7H-5v-3.4h3.3z",
    "star": "M0-5.5L1.3-1.8 5.2-1.7 2.1.7 3.2 4.5 0 2.3-3.2 4.5-2.1.7-5.2-1.7-1.3-1.8z",
    "x": "M-5-3l2-2 3 3 3-3 2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3z",
}
"""Plotly's symbols as paths around 0, 10 across."""
DASH_ARRAYS = {
    "solid": "none", "dash": "8 5", "dashdot": "8 4 2 4", "longdash": "14 5", "longdashdot": "14 4 2 4", "dot": "2 3",
}  # fmt: skip
"""Plotly's line styles -> SVG's."""
MAX_POINTS = 400  # per line: more cannot be seen and make the file large
FEW_POINTS = 12  # which are marked, as a line may be no more than one of them
MOST_LETTERS = 24  # of a name beside a line; a longer one goes on below
MAX_SAID = 8  # arms in the words that stand for a figure
SHORT = {"grad_output": "grad", "rowwise": "row", "columnwise": "col"}
WRITTEN, WRITTEN_COLUMNS = 60, 20
"""The most lines, and columns, of a heatmap with numbers in its cells: more are too low, or too narrow, to write in."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number that a heatmap shows: its unit, the text of a cell, and colours that are dark where it is bad."""

    unit: str
    cell: Callable[[float], str]
    colours: str


DECIBEL = Measure(unit="dB", cell=lambda db: "∞" if np.isposinf(db) else f"{db:.0f}", colours="Viridis")
PERCENT = Measure(
    unit="%", cell=lambda share: f"{share:.2g}" if share >= 0.1 or share == 0 else "<.1", colours="Viridis_r"
)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure and the texts and data beside it.

    heading  over the figure
    figure   of plotly
    name     of the CSV file that holds its rows; panels with the same name have the same rows
    rows     all drawn rows, and rows that were left out because too many points cannot be seen
    says     the figure in words, for readers who cannot see it
    zoomed   whether the y axis leaves rows out, which the page then offers to show
    """

    heading: str
    figure: go.Figure
    name: str
    rows: pd.DataFrame
    says: str
    zoomed: bool = False


def label(name: str) -> str:
    """The name, escaped, so that plotly shows it as it is."""
    return html.escape(name, quote=False)


def styles(arms: pd.DataFrame) -> dict[str, dict]:
    """arm -> line style, the same in every figure. arms: Comparison.arms."""
    looks = zip(itertools.cycle(COLOURS), itertools.cycle(DASHES), strict=False)
    black, colours = itertools.cycle(DASHES), {}
    for row in arms[["arm", "baseline", "null"]].itertuples():
        if row.arm == row.baseline:
            colours[row.arm] = {"color": BASELINE_COLOUR, "dash": next(black)}
        elif row.null:
            colours[row.arm] = {"color": NULL_COLOUR, "dash": "solid"}
        else:
            colours[row.arm] = dict(zip(("color", "dash"), next(looks), strict=True))
    return {arm: {"width": 2, **style} for arm, style in colours.items()}


def symbol(style: dict) -> str:
    """The marker that goes with a line style, so that arms differ by more than colour."""
    return SYMBOLS[DASHES.index(style["dash"])]


def figure(
    y_title: str, x_title: str = "step", height: int = 340, x: dict | None = None, y: dict | None = None
) -> go.Figure:
    """An empty figure in the report's look: white, one thin grid; `x` and `y` are further settings of the axes. The
    page has one legend for all of them."""
    look = {"gridcolor": "#e6e6e6", "zeroline": False, "linecolor": "#888", "tickcolor": "#888", "ticks": "outside"}
    look |= {"automargin": True}
    return go.Figure(
        layout={  # at once: every later change costs plotly milliseconds
            "template": "none",
            "height": height,
            "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
            "hovermode": "closest",
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
            "showlegend": False,
            "xaxis": {"title": {"text": x_title, "standoff": 8}, **look, **(x or {})},
            "yaxis": {"title": {"text": y_title, "standoff": 8}, **look, **(y or {})},
        }
    )


def line_with_band(
    fig: go.Figure,
    arm: str,
    line: dict,
    rows: pd.DataFrame,
    columns: tuple[str, str, str],
    hover: str = "step %{x}: %{y:.5f}",
) -> None:
    """A line of an arm over rows["step"], and a band where there is one: `columns` are its value, and the low and the
    high end of the band."""
    if rows.empty:
        return
    mean, low, high = columns
    if (rows[high] > rows[low]).any():
        edge = {"x": rows["step"], "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "legendgroup": arm}
        fig.add_scatter(y=rows[high], **edge)
        fig.add_scatter(y=rows[low], fill="tonexty", fillcolor=faint(line["color"]), **edge)
    fig.add_scatter(
        x=rows["step"],
        y=rows[mean],
        mode="lines+markers" if len(rows) <= FEW_POINTS else "lines",
        line=line,
        name=label(arm),
        legendgroup=arm,
        hovertemplate=hover,
    )


def gaps_against(
    x_title: str,
    x: dict[str, Any] | None,
    margin: float,
    look: dict[str, dict],
    lines: pd.DataFrame,
    marks: pd.DataFrame,
    hovers: tuple[str, str],
) -> go.Figure:
    """A figure of gaps in % of the baseline's loss: of each arm a line with its band, and marks. `lines` has arm, step,
    gap_pct, low and high, `marks` arm, step and gap_pct, and a text for each if it has `trunk`; hovers: of both."""
    fig = figure("gap, % of the baseline's loss", x_title, y={"tickformat": "+.4~g"}, x=x or {})
    margin_band(fig, margin)
    fig.add_hline(y=0, line={"color": BASELINE_COLOUR, "width": 1})
    for arm, style in look.items():
        line_with_band(fig, arm, style, lines[lines["arm"] == arm], ("gap_pct", "low", "high"), hovers[0])
        own = marks[marks["arm"] == arm]
        fig.add_scatter(
            x=own["step"], y=own["gap_pct"], mode="markers", legendgroup=arm, text=own.get("trunk"),
            marker={"color": style["color"], "symbol": symbol(style), "size": 7},
            hovertemplate=f"{hovers[1]}: %{{y:+.4f}} %<extra></extra>",
        )  # fmt: skip
    return fig


def margin_band(fig: go.Figure, margin: float) -> None:
    """A band of 0 -+ `margin`, in the unit of the y axis, behind everything; nothing where it is NaN."""
    if np.isfinite(margin):
        fig.add_hrect(y0=-margin, y1=margin, fillcolor=MARGIN_BAND, line={"width": 0}, layer="below")
        for side in (-margin, margin):
            fig.add_hline(y=side, line=MARGIN_EDGE, layer="below")


def thin(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, thinned to at most MAX_POINTS evenly spaced ones, the first and the last among them."""
    if len(rows) <= MAX_POINTS:
        return rows
    return rows.iloc[np.unique(np.linspace(0, len(rows) - 1, MAX_POINTS).round().astype(int))]


def padded(values: np.ndarray) -> list[float] | None:
    """[low, high] of the finite values with 8 % of room on both sides; None when there are none."""
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    room = 0.08 * (values.max() - values.min()) or 1e-3
    return [float(values.min() - room), float(values.max() + room)]


def faint(colour: str) -> str:
    """A colour #rrggbb, faint, for bands."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def listed(says: Iterable[str]) -> str:
    """A text of at most MAX_SAID parts of a sentence, and the number of others."""
    parts: Sequence[str] = list(says)
    more = len(parts) - MAX_SAID
    return "; ".join([*parts[:MAX_SAID], *([f"and {more} more, in the CSV"] if more > 0 else [])])


FEW = 6
"""The approximate number of ticks of an axis of numbers."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from `low` at pixel `start` to `high` at pixel `end`; on a logarithmic axis they are powers of ten.
    `names`: of categories, whose values are 0, 1, ... in their order."""

    start: float
    end: float
    low: float
    high: float
    log: bool = False
    names: tuple[str, ...] = ()
    signed: bool = False

    def at(self, values: Iterable[Any]) -> np.ndarray:
        """The pixels of values, float64; NaN and inf are unchanged, and so is 0 on a logarithmic axis."""
        values = list(values)
        if self.names and values and isinstance(values[0], str):
            values = [self.names.index(name) for name in values]
        places = np.asarray(values, dtype=float)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                places = np.log10(places)
        return self.start + (places - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """The ticks as (pixel, label)."""
        if self.names:
            return list(zip(self.at(range(len(self.names))).tolist(), self.names, strict=True))
        if self.log:
            return [(float(self.at([value])[0]), text) for value, text in self._log_ticks()]
        values = even_ticks(self.low, self.high, FEW)
        return [(place, self._label(value)) for place, value in zip(self.at(values).tolist(), values, strict=True)]

    def _log_ticks(self) -> list[tuple[float, str]]:
        """The ticks at powers of ten; where fewer than two are there, at 2 and 5 times one as well; without any, at
        both ends."""
        powers = range(math.ceil(self.low), math.floor(self.high) + 1)
        if len(powers) > 1:
            return [(10.0**power, "10" + str(power).translate(SUPERSCRIPTS)) for power in powers]
        around = range(math.floor(self.low), math.ceil(self.high) + 1)
        steps = [lead * 10.0**power for power in around for lead in (1, 2, 5)]
        inside = [step for step in steps if self.low <= math.log10(step) <= self.high]
        return [(value, f"{value:.1g}") for value in inside or (10**self.low, 10**self.high)]

    def _label(self, value: float) -> str:
        return f"{value:+.4g}" if self.signed and value else f"{value:.6g}"


def axis_of(settings: dict[str, Any], values: list[Any], start: float, end: float, columns: bool = False) -> Axis:
    """The axis that plotly's `settings` ask for, for `values` of its traces. `columns`: the values are the names of
    columns, each a place of its own, whichever names are equal."""
    lists = [list(of_trace) for of_trace in values if of_trace is not None]
    flat = [value for of_trace in lists for value in of_trace]
    if columns or any(isinstance(of_trace[0], str) for of_trace in lists if of_trace):
        names = tuple(settings.get("categoryarray") or (flat if columns else dict.fromkeys(flat)))
        low, high = -0.5, len(names) - 0.5
        if settings.get("autorange") == "reversed":
            low, high = high, low
        return Axis(start=start, end=end, low=low, high=high, names=names)
    log = settings.get("type") == "log"
    low, high = settings.get("range") or _extent(flat)
    return Axis(start=start, end=end, low=low, high=high, log=log, signed="+" in settings.get("tickformat", ""))


def _extent(values: list[Any]) -> tuple[float, float]:
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return 0.0, 1.0
    room = 0.02 * (numbers.max() - numbers.min()) or 0.5
    return float(numbers.min() - room), float(numbers.max() + room)


def even_ticks(low: float, high: float, few: int) -> list[float]:
    """About `few` multiples of 1, 2 or 5 times a power of ten between `low` and `high`."""
    step = _round_up((high - low) / few)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _round_up(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(lead * power for lead in (1, 2, 5, 10) if lead * power >= step * (1 - 1e-9))


def medians(rows: pd.DataFrame, slot: list[str], arms: Iterable[str]) -> pd.DataFrame:
    """format, sqnr_db, underflow_pct of the operands of each `slot`, among whose columns is arm, in the order
    of the arms."""
    groups = rows[rows["direction"] != "output"].groupby(slot, sort=False)
    levels = groups.agg({"format": "last", "sqnr_db": "median", "underflow_pct": "median"}).reset_index()
    places = {arm: place for place, arm in enumerate(arms)}
    return levels.sort_values("arm", key=lambda names: names.map(places), kind="stable", ignore_index=True)


def colour_range(values: np.ndarray) -> tuple[float, float]:
    """The colour range: multiples of 5 dB around the finite values, at least 10 dB apart."""
    values = values[np.isfinite(values)] if np.isfinite(values).any() else np.array([0.0])
    low = 5 * np.floor(values.min() / 5)
    return low, max(low + 10, 5 * np.ceil(values.max() / 5))


def heatmap(
    grid: pd.DataFrame,
    formats: pd.DataFrame,
    scale: tuple[float, float],
    measure: Measure = DECIBEL,
    x_title: str | None = None,
) -> go.Figure:
    """A figure of numbers as colours, lines by columns of one level or two; formats are shown beside a value that the
    mouse is on."""
    values, (low, high) = grid.to_numpy(), scale
    cells = [["" if np.isnan(value) else measure.cell(value) for value in row] for row in values]
    written = len(grid) <= WRITTEN and len(grid.columns) <= WRITTEN_COLUMNS
    tall = 22 if len(grid) <= WRITTEN else 11
    named = [tuple(SHORT.get(name, str(name)) for name in np.atleast_1d(names)) for names in grid.columns]
    levels = [list(level) for level in zip(*named, strict=True)]
    fig = figure(
        "",
        "",
        height=80 + tall * len(grid),
        y={"autorange": "reversed", "showgrid": False, "ticks": ""},
        x={
            "showgrid": False,
            "ticks": "",
            "tickangle": 0,
            "tickfont": {"size": 11},
            "showdividers": False,
            "title": {"text": x_title, "standoff": 8},
            "type": "category" if len(levels) == 1 else "multicategory",
        },
    )
    fig.add_heatmap(
        z=np.clip(values, low, high),
        y=[label(name) for name in grid.index],
        x=levels[0] if len(levels) == 1 else levels,
        text=cells,
        texttemplate="%{text}" if written else None,
        textfont={"size": 12},
        customdata=formats.fillna("").map(label).to_numpy(),
        zmin=low,
        zmax=high,
        colorscale=measure.colours,
        xgap=1,
        ygap=1,
        hoverongaps=False,
        showscale=not written,
        colorbar={"title": {"text": measure.unit}, "thickness": 10, "outlinewidth": 0},
        hovertemplate=f"%{{y}}, %{{x}}<br>%{{z:.4g}} {measure.unit} (%{{customdata}})<extra></extra>",
    )
    return fig
