"""The figure of a report on mixtures of experts: how evenly tokens went to them."""

from collections.abc import Iterator

import pandas as pd

from hqsweep.report.arms import Comparison
from hqsweep.report.look import Panel, figure, label, listed


def load_heatmaps(comparison: Comparison) -> Iterator[Panel]:
    """For each arm with experts: the median load over steps and seeds, layer by expert, one colour scale. A load is the
    tokens of an expert over the mean of its layer: 1 where all are equal."""
    rows = load_rows(comparison)
    for arm in comparison.arms["arm"]:
        own = rows[rows["arm"] == arm]
        if own.empty:
            continue
        grid = own.pivot(index="layer", columns="expert", values="load").reindex(own["layer"].unique())
        fig = figure(
            "", "expert", height=110 + 22 * len(grid), y={"autorange": "reversed", "showgrid": False, "ticks": ""},
            x={"showgrid": False, "ticks": "", "type": "category"},
        )  # fmt: skip
        fig.add_heatmap(
            z=grid.to_numpy(), y=[label(name) for name in grid.index], x=[str(e) for e in grid.columns],
            texttemplate="%{z:.2f}", zmin=0, zmax=max(2.0, float(rows["load"].max())), colorscale="Viridis", xgap=1,
            ygap=1, showscale=False, hovertemplate="%{y}, expert %{x}<br>load %{z:.3f}<extra></extra>",
        )  # fmt: skip
        most = own.sort_values("load", ascending=False).head(3).itertuples()
        busiest = listed(f"{row.layer} expert {row.expert} {row.load:.3g}" for row in most)
        says = f"Median load of the experts of {arm} by layer; highest: {busiest}."
        yield Panel(heading=arm, figure=fig, name="expert_load", rows=rows, says=says)


def load_rows(comparison: Comparison) -> pd.DataFrame:
    """arm, layer (of the mixture), expert, load: medians over sampled steps and seeds."""
    rows = comparison.frames.stats
    rows = rows[rows["tensor"].eq("routed")]
    if rows.empty:
        return pd.DataFrame(columns=["arm", "layer", "expert", "load"])
    names = rows["layer"].str.rsplit(".", n=1, expand=True)
    rows = rows.assign(layer=names[0], expert=names[1].astype(int))
    return rows.groupby(["arm", "layer", "expert"], sort=False)["load"].median().reset_index()
