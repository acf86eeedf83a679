"""Quantization errors as heatmaps: SQNR and the share that a format rounds to zero, by layer, tensor and direction; and
the SQNR that other formats would have had on the same tensors."""

from collections.abc import Iterator

import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import by_module
from hqsweep.report.figures.look import DECIBEL, PERCENT, Measure, Panel, colour_range, heatmap, label, listed, medians

SLOT = ["arm", "layer", "tensor", "direction"]
OWN = "own format"


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
    return medians(rows.assign(layer=rows["module"]), SLOT, comparison.arms["arm"])


def what_if_heatmaps(comparison: Comparison) -> Iterator[Panel]:
    """Figures, for each arm that ran with stats.what_if, of the median SQNR in dB over layers, steps and seeds: a line
    for each tensor and direction, a column for the arm's own format and for each other one. One colour scale."""
    rows = what_if_rows(comparison)
    scale = colour_range(rows["sqnr_db"].to_numpy())
    for arm, part in rows.groupby("arm", sort=False):
        part = part.assign(
            line=part["tensor"] + " " + part["direction"] + ", " + part["own"].map(label),
            column=part["format"].map(label).where(part["format"] != part["own"], OWN),
        )
        wide = part.pivot(index="line", columns="column", values=["sqnr_db", "format"])
        columns = [OWN, *(name for name in part["column"].unique() if name != OWN)]
        wide = wide.reindex(index=part["line"].unique())
        grid, formats = (wide[name].reindex(columns=columns) for name in ("sqnr_db", "format"))
        highest = part.sort_values("sqnr_db", ascending=False).drop_duplicates("line")
        slots = (f"{row.line}: {row.format} {row.sqnr_db:.3g}" for row in highest.itertuples())
        says = f"Median SQNR in dB of {arm} in its own format and in others; highest: {listed(slots)}."
        yield Panel(
            heading=arm, figure=heatmap(grid.astype(float), formats, scale), name="what_if", rows=rows, says=says
        )


def what_if_rows(comparison: Comparison) -> pd.DataFrame:
    """arm, tensor, direction, own, format, sqnr_db: medians over layers, sampled steps and seeds. own is the arm's
    format there; format is that one, or one of stats.what_if."""
    others, key = comparison.frames.what_if, ["arm", "tensor", "direction", "own", "format"]
    if others.empty:
        return pd.DataFrame(columns=[*key, "sqnr_db"]).astype({"sqnr_db": float})
    own = comparison.frames.stats
    own = own[own["run"].isin(others["run"].unique()) & (own["direction"] != "output")]
    slot = ["run", "step", "layer", "tensor", "direction"]
    names = own[[*slot, "format"]].rename(columns={"format": "own"}).drop_duplicates(slot)
    columns = ["arm", *slot, "format", "sqnr_db"]
    both = pd.concat([own[columns], others[columns]]).merge(names, on=slot)
    rows = both.groupby(key, sort=False)["sqnr_db"].median().reset_index()
    places = {arm: place for place, arm in enumerate(comparison.arms["arm"])}
    return rows.sort_values("arm", key=lambda arms: arms.map(places), kind="stable", ignore_index=True)


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
