"""Figures and tables of mixtures of experts: how evenly tokens went to the experts, and how well each is quantized."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import by_module
from hqsweep.report.figures.look import (
    DECIBEL,
    PERCENT,
    SHORT,
    WRITTEN,
    WRITTEN_COLUMNS,
    Measure,
    Panel,
    colour_range,
    figure,
    heatmap,
    label,
    listed,
    medians,
)
from hqsweep.report.pages.text import TextTable, number, text

SLOT = ["arm", "module", "tensor", "direction", "expert"]
TENSORS = ("input", "weight", "grad_output")


def load_heatmaps(comparison: Comparison) -> Iterator[Panel]:
    """Figures, for each arm with experts, of the median load over steps and seeds, layer by expert, with one colour
    scale. A load is the tokens of an expert over the mean of its layer: 1 where all are equal."""
    rows = load_rows(comparison)
    for arm in comparison.arms["arm"]:
        own = rows[rows["arm"] == arm]
        if own.empty:
            continue
        grid = own.pivot(index="layer", columns="expert", values="load").reindex(own["layer"].unique())
        written = len(grid) <= WRITTEN and len(grid.columns) <= WRITTEN_COLUMNS
        fig = figure(
            "",
            "expert",
            height=110 + 22 * len(grid),
            y={"autorange": "reversed", "showgrid": False, "ticks": ""},
            x={"showgrid": False, "ticks": "", "type": "category"},
        )
        fig.add_heatmap(
            z=grid.to_numpy(),
            y=[label(name) for name in grid.index],
            x=[str(e) for e in grid.columns],
            text=[["" if np.isnan(load) else f"{load:.2f}" for load in row] for row in grid.to_numpy()],
            texttemplate="%{text}" if written else None,
            zmin=0,
            zmax=max(2.0, float(rows["load"].max())),
            colorscale="Viridis",
            xgap=1,
            ygap=1,
            showscale=not written,
            hovertemplate="%{y}, expert %{x}<br>load %{z:.3f}<extra></extra>",
        )
        most = own.sort_values("load", ascending=False).head(3).itertuples()
        busiest = listed(f"{row.layer} expert {row.expert} {row.load:.3g}" for row in most)
        says = f"Median load of the experts of {arm} by layer; highest: {busiest}."
        yield Panel(heading=arm, figure=fig, name="expert_load", rows=rows, says=says)


def load_rows(comparison: Comparison) -> pd.DataFrame:
    """arm, layer (of the mixture), expert, tokens of a sampled step, load: medians over sampled steps and seeds."""
    rows = by_module(comparison.frames.stats)
    rows = rows[rows["tensor"].eq("routed")].astype({"expert": int}).drop(columns="layer")
    loads = rows.groupby(["arm", "module", "expert"], sort=False)[["tokens", "load"]].median().reset_index()
    return loads.rename(columns={"module": "layer"})


def load_table(comparison: Comparison) -> TextTable:
    """Return a row for each arm with experts: the busiest and the idlest expert of any run at any sampled step.

    A number means another expert in the next seed, so medians over seeds would hide an idle one.
    """
    routed, rows = by_module(comparison.frames.stats), []
    routed = routed[routed["tensor"].eq("routed")].dropna(subset="load").sort_values("load", kind="stable")
    for arm in comparison.arms["arm"]:
        own = routed[routed["arm"] == arm]
        if len(own):
            ends = (own.iloc[-1], own.iloc[0])
            rows.append((arm, *(cell for end in ends for cell in _load_cells(end))))
    header = (
        "arm",
        "highest load",
        "tokens",
        "of expert",
        "seed, step",
        "lowest load",
        "tokens",
        "of expert",
        "seed, step",
    )
    return TextTable(header=header, rows=tuple(rows), numeric=frozenset({1, 2, 5, 6}))


def _load_cells(row: pd.Series) -> tuple[str, str, str, str]:
    return (
        number(row["load"], ".2f"),
        number(row["tokens"], ".0f"),
        row["layer"],
        f"{text(row['seed'])}, {text(row['step'])}",
    )


def sqnr_heatmaps(comparison: Comparison) -> Iterator[Panel]:
    """Figures, for each arm that quantizes its experts, of SQNR in dB, median over steps and seeds: grouped linear,
    tensor and direction by expert, with one colour scale."""
    rows = error_rows(comparison)
    return _panels(rows, "sqnr_db", colour_range(rows["sqnr_db"].to_numpy()), DECIBEL, "SQNR in dB", "lowest")


def underflow_heatmaps(comparison: Comparison) -> Iterator[Panel]:
    """The same figures of underflow in %, for arms where some values underflow."""
    rows = error_rows(comparison)
    highest = rows.groupby("arm")["underflow_pct"].transform("max")
    return _panels(rows[highest > 0], "underflow_pct", (0.0, highest.max()), PERCENT, "underflow in %", "highest")


def error_rows(comparison: Comparison) -> pd.DataFrame:
    """Return medians over sampled steps and seeds, for arms that quantize experts.

    Columns: arm, module (a grouped linear), tensor, direction, expert, format, sqnr_db, underflow_pct, and the expert's
    tokens and load in the mixture.
    """
    rows = by_module(comparison.frames.stats).dropna(subset="expert").astype({"expert": int})
    errors = medians(rows, SLOT, comparison.arms["arm"])
    quantized = np.isfinite(errors["sqnr_db"]).groupby(errors["arm"]).transform("any").astype(bool)
    errors = errors.assign(layer=errors["module"].str.replace(r"\.\w+$", "", regex=True))[quantized]
    errors = errors.merge(load_rows(comparison), on=["arm", "layer", "expert"], how="left")
    arms, modules, tensors = errors["arm"].unique(), errors["module"].unique(), list(TENSORS)
    places = (
        errors["arm"].map(list(arms).index),
        errors["module"].map(list(modules).index),
        errors["tensor"].map(tensors.index),
    )
    return errors.iloc[np.lexsort([place.to_numpy(dtype=int) for place in reversed(places)])].drop(columns="layer")


def _panels(
    rows: pd.DataFrame, column: str, scale: tuple[float, float], measure: Measure, what: str, worst: str
) -> Iterator[Panel]:
    line = ["module", "tensor", "direction"]
    for arm, own in rows.groupby("arm", sort=False):
        lines = pd.MultiIndex.from_frame(own[line].drop_duplicates())
        wide = own.pivot(index=line, columns="expert", values=[column, "format"]).reindex(lines)
        names = [" ".join(SHORT.get(word, word) for word in slot) for slot in lines]
        grids = wide[column].astype(float).set_axis(names), wide["format"].set_axis(names)
        known = own.dropna(subset=column).sort_values(column, ascending=worst == "lowest", kind="stable").head(3)
        slots = (
            f"{row.module} expert {row.expert} {row.tensor} {row.direction} {getattr(row, column):.3g}"
            for row in known.itertuples()
        )
        yield Panel(
            heading=arm,
            figure=heatmap(*grids, scale, measure, "expert"),
            name="expert_error",
            rows=rows,
            says=f"Median {what} of the experts of {arm}; {worst}: {listed(slots)}.",
        )


def worst_experts(comparison: Comparison) -> TextTable:
    """Return a row for each arm that quantizes its experts, and each tensor, on two experts.

    The expert with the lowest SQNR comes with its tokens and load, and the median of all experts in the same direction.
    The other one has the highest underflow.
    """
    rows, cells = error_rows(comparison), []
    typical = rows.groupby(["arm", "tensor", "direction"])["sqnr_db"].transform("median")
    names = [f"{module}.{expert}" for module, expert in zip(rows["module"], rows["expert"], strict=True)]
    rows = rows.assign(typical=typical, name=names)
    for (arm, tensor), own in rows.dropna(subset="sqnr_db").groupby(["arm", "tensor"], sort=False):
        if np.isposinf(own["sqnr_db"]).all():
            continue
        worst = own.loc[own["sqnr_db"].idxmin()]
        under = own.loc[own["underflow_pct"].fillna(0).idxmax()]
        cells.append(
            (
                arm,
                tensor,
                number(worst["sqnr_db"], ".1f"),
                worst["name"],
                worst["direction"],
                worst["format"],
                number(worst["typical"], ".1f"),
                number(worst["tokens"], ".0f"),
                number(worst["load"], ".2f"),
                number(under["underflow_pct"], ".2f"),
                under["name"],
                under["direction"],
            )
        )
    header = (
        "arm",
        "tensor",
        "lowest SQNR (dB)",
        "of expert",
        "direction",
        "format",
        "median expert (dB)",
        "tokens",
        "load",
        "highest underflow %",
        "of expert",
        "direction",
    )
    return TextTable(header=header, rows=tuple(cells), numeric=frozenset({2, 6, 7, 8, 9}))
