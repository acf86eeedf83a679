"""Quantization errors by layer, tensor and direction as heatmaps: SQNR, and the share that a format rounds to zero."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import by_module
from hqsweep.report.figures.look import Panel, figure, label, listed

SHORT = {"grad_output": "grad", "rowwise": "row", "columnwise": "col"}
SLOT = ["arm", "layer", "tensor", "direction"]
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


def sqnr_heatmaps(comparison: Comparison) -> Iterator[Panel]:
    """Figures, for each arm with statistics, of the median SQNR in dB over steps and seeds, layer by (tensor,
    direction), with one colour scale. Arms whose cells are all equal share a heatmap."""
    rows = error_rows(comparison)
    return _panels(rows, "sqnr_db", colour_range(rows["sqnr_db"].to_numpy()), DECIBEL, "Median SQNR in dB", "lowest")


def underflow_heatmaps(comparison: Comparison) -> Iterator[Panel]:
    """Figures of the share in % of the elements that are not 0 but become 0; only for arms where some do."""
    rows = error_rows(comparison)
    some = rows.groupby("arm")["underflow_pct"].transform("max") > 0
    highest = rows["underflow_pct"].max()
    return _panels(rows[some], "underflow_pct", (0.0, highest), PERCENT, "Median underflow in %", "highest")


def error_rows(comparison: Comparison) -> pd.DataFrame:
    """arm, layer, tensor, direction, format, sqnr_db, underflow_pct: medians over sampled steps and seeds, and over the
    experts of a grouped linear; arms in their order."""
    rows = by_module(comparison.frames.stats)
    return medians(comparison, rows.assign(layer=rows["module"]), SLOT)


def medians(comparison: Comparison, rows: pd.DataFrame, slot: list[str]) -> pd.DataFrame:
    """format, sqnr_db, underflow_pct of the operands of each `slot`, among whose columns is arm."""
    groups = rows[rows["direction"] != "output"].groupby(slot, sort=False)
    levels = groups.agg({"format": "last", "sqnr_db": "median", "underflow_pct": "median"}).reset_index()
    places = {arm: place for place, arm in enumerate(comparison.arms["arm"])}
    return levels.sort_values("arm", key=lambda arms: arms.map(places), kind="stable", ignore_index=True)


def _panels(
    rows: pd.DataFrame, column: str, scale: tuple[float, float], measure: Measure, what: str, worst: str
) -> Iterator[Panel]:
    layers, columns = rows["layer"].unique(), pd.MultiIndex.from_frame(rows[["tensor", "direction"]].drop_duplicates())
    wide = rows.pivot(index=["arm", "layer"], columns=["tensor", "direction"], values=[column, "format"])
    grids, arms_of = {}, {}
    for arm in rows["arm"].unique():
        own = wide.loc[arm].reindex(index=layers)
        grids[arm] = own[column].reindex(columns=columns).astype(float), own["format"].reindex(columns=columns)
        drawn = grids[arm][0].to_numpy().tobytes(), tuple(grids[arm][1].fillna("").to_numpy().ravel())
        arms_of.setdefault(drawn, []).append(arm)
    for arms in arms_of.values():
        part, names = rows[rows["arm"] == arms[0]], ", ".join(arms)
        known = part.dropna(subset=column).sort_values(column, ascending=worst == "lowest").head(3)
        slots = (f"{row.layer} {row.tensor} {row.direction} {getattr(row, column):.3g}" for row in known.itertuples())
        says = f"{what} of {names} by layer, tensor and direction; {worst}: {listed(slots)}."
        fig = heatmap(*grids[arms[0]], scale, measure)
        yield Panel(heading=names, figure=fig, name="quantization_error", rows=rows, says=says)


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
