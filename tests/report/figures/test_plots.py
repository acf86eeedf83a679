"""Figures of a comparison for plotly: the forest plot from the rows of the page's."""

import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.figures.forest import forest_of
from hqsweep.report.figures.plots import forest_plot, plots


def test_the_forest_plot_has_the_rows_of_the_pages(make_sweep, fake) -> None:
    comparison = compare(make_sweep(fake.three_arms()))
    fig, arms = forest_plot(forest_of(comparison)), comparison.arms.set_index("arm")
    means = {trace.name: trace for trace in fig.data if trace.error_x.array is not None}
    assert set(means) == {"mxfp8", "nvfp4"} and len(fig.data) == 4
    for arm, trace in means.items():
        assert trace.x[0] == arms.loc[arm, "gap_pct"]
        assert trace.x[0] + trace.error_x.array[0] == pytest.approx(arms.loc[arm, "ci_high_pct"])
        assert trace.x[0] - trace.error_x.arrayminus[0] == pytest.approx(arms.loc[arm, "ci_low_pct"])
    singles = next(trace for trace in fig.data if trace.error_x.array is None)
    assert len(singles.x) == 3 and fig.layout.shapes[0].x1 == 0.25


def test_bands_have_no_line_in_the_legend(make_sweep, fake) -> None:
    figures = plots(compare(make_sweep(fake.three_arms())))
    bands = [trace for trace in figures["val_loss"].data if not trace.name]
    assert next(iter(figures)) == "forest" and bands and not any(trace.showlegend is not False for trace in bands)
