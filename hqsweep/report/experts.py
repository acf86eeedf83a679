"""The figure of a report on mixtures of experts: how evenly tokens went to them."""

from collections.abc import Iterator

import plotly.graph_objects as go

from hqsweep.report.arms import Comparison
from hqsweep.report.figures import figure, label


def load_heatmaps(comparison: Comparison) -> Iterator[tuple[str, go.Figure]]:
    """(arm, figure) for each arm with experts: the median load over steps and seeds, layer by expert, one colour scale.
    A load is the tokens of an expert over the mean of its layer: 1 where all are equal."""
    rows = comparison.frames.stats
    rows = rows[rows["tensor"].eq("routed")]
    names = rows["layer"].str.rsplit(".", n=1, expand=True)
    rows = rows.assign(mixture=names.get(0), expert=names.get(1)).astype({"expert": "Int64"})
    medians = rows.groupby(["arm", "mixture", "expert"], sort=False)["load"].median()
    for arm in comparison.arms["arm"]:
        if arm in set(rows["arm"]):
            grid = medians[arm].unstack("expert").sort_index(axis=1)
            fig = figure("", "expert", height=110 + 22 * len(grid))
            fig.add_heatmap(
                z=grid.to_numpy(), y=[label(name) for name in grid.index], x=[str(e) for e in grid.columns],
                texttemplate="%{z:.2f}", zmin=0, zmax=max(2.0, float(medians.max())), colorscale="Viridis", xgap=1,
                ygap=1, showscale=False, hovertemplate="%{y}, expert %{x}<br>load %{z:.3f}<extra></extra>",
            )  # fmt: skip
            fig.update_yaxes(autorange="reversed", showgrid=False, ticks="")
            fig.update_xaxes(showgrid=False, ticks="", type="category")
            yield arm, fig
