"""Growth of the gap over the steps of a fork."""

import math

import pandas as pd
import pytest

from hqsweep.report.compare.courses import growth_rows
from hqsweep.report.figures.lines import TOGETHER, growth, growth_lines

ARMS = {"bf16": 0.0, "nvfp4": 0.02, "mxfp8": 0.002}
POINTS, TRUNKS, STEPS = (400, 800), (0, 1, 2), (10, 20, 30)
LOOK = {arm: {"color": "#0072B2", "dash": "solid", "width": 2} for arm in ARMS}


def study(points=POINTS, trunks=TRUNKS):
    """Metrics and runs of a study whose gap in nats is arm x (1 + trunk / 10) x steps since the fork / 10."""
    runs, metrics = [], []
    for arm, gap in ARMS.items():
        for trunk in trunks:
            for point in points:
                name = f"{arm}-s{trunk}-at{point}"
                runs.append({"run": name, "arm": arm, "trunk": f"trunk-s{trunk}", "seed": trunk, "point": point})
                for step in STEPS:
                    loss = 2.0 + trunk + gap * (1 + trunk / 10) * step / 10
                    metrics.append({"run": name, "step": point + step, "metric": "train_loss", "value": loss})
                metrics.append({"run": name, "step": point + 30, "metric": "val_loss", "value": 9.0})
    return pd.DataFrame(metrics), pd.DataFrame(runs)


def rows_of(metrics, runs):
    return growth_rows(metrics, runs, dict.fromkeys(ARMS, "bf16"))


def test_a_gap_is_paired_with_the_fork_of_the_same_trunk_and_point():
    rows = rows_of(*study())
    assert len(rows) == 2 * len(TRUNKS) * len(POINTS) * len(STEPS) and set(rows["arm"]) == {"nvfp4", "mxfp8"}
    one = rows[(rows["arm"] == "nvfp4") & (rows["seed"] == 2) & (rows["point"] == 800)]
    assert list(one["step"]) == [10, 20, 30]
    assert list(one["gap"]) == pytest.approx([0.024, 0.048, 0.072])
    assert list(one["gap_pct"]) == pytest.approx([0.6, 1.2, 1.8])  # of 4 nats


def test_a_loss_without_its_partner_and_a_broken_loss_are_left_out():
    metrics, runs = study()
    without = metrics[~((metrics["run"] == "bf16-s0-at400") & (metrics["step"] == 430))].copy()
    without.loc[without["run"].eq("nvfp4-s1-at400") & without["step"].eq(410), "value"] = math.nan
    rows = rows_of(without, runs)
    lost = len(rows_of(metrics, runs)) - len(rows)
    assert lost == 3  # both arms' step 430 of trunk 0, and nvfp4's NaN


def test_lines_of_each_point_and_of_all_together():
    metrics, runs = study()
    metrics.loc[metrics["run"].eq("mxfp8-s0-at400") & metrics["step"].eq(430), "value"] += 1
    lines = growth_lines(rows_of(metrics, runs)).set_index(["arm", "point", "step"])
    nvfp4 = lines.loc[("nvfp4", "400", 10)]
    gaps = [100 * 0.02 * (1 + t / 10) / (2 + t) for t in TRUNKS]
    assert nvfp4["gap_pct"] == pytest.approx(sum(gaps) / 3) and nvfp4["trunks"] == 3
    assert (nvfp4["low"], nvfp4["high"]) == pytest.approx((min(gaps), max(gaps)))
    raised, other = lines.loc[("mxfp8", "400", 30)], lines.loc[("mxfp8", "800", 30)]
    both = lines.loc[("mxfp8", TOGETHER, 30)]
    assert raised["gap_pct"] - other["gap_pct"] == pytest.approx(50 / 3)
    assert both["gap_pct"] == pytest.approx((raised["gap_pct"] + other["gap_pct"]) / 2)


def test_together_ends_where_a_fork_is_missing():
    metrics, runs = study()
    short = metrics[~(metrics["run"].eq("mxfp8-s0-at400") & metrics["step"].gt(410))]
    lines = growth_lines(rows_of(short, runs)).groupby(["arm", "point"])["step"].agg(list)
    assert lines[("mxfp8", TOGETHER)] == [10] and lines[("mxfp8", "400")] == [10, 20, 30]
    assert lines[("nvfp4", TOGETHER)] == [10, 20, 30]


def test_a_rolling_mean_stays_within_a_fork():
    lines = growth_lines(rows_of(*study(points=(400,), trunks=(0,))), smooth=2)
    assert list(lines[(lines["arm"] == "nvfp4") & (lines["point"] == "400")]["gap_pct"]) == pytest.approx(
        [1.0, 1.5, 2.5]
    )


def test_panels_share_an_axis_and_show_margin_and_decay():
    lines = growth_lines(rows_of(*study()))
    panels = growth(lines, LOOK, margin=0.25, decay_from=20)
    assert [panel.heading.split(": ")[1] for panel in panels] == [
        "all fork points together", "forks at step 400", "forks at step 800",
    ]  # fmt: skip
    assert len({panel.figure.layout.yaxis.range for panel in panels}) == 1
    low, high = panels[0].figure.layout.yaxis.range
    assert low < -0.25 and high > lines["high"].max()
    band = next(shape for shape in panels[0].figure.layout.shapes if shape.type == "rect")
    assert (band.y0, band.y1) == (-0.25, 0.25)
    assert [note.text for note in panels[0].figure.layout.annotations] == ["decay"]
    named = [trace.name for trace in panels[0].figure.data if trace.name]
    assert named == ["nvfp4", "mxfp8"] and len([t for t in panels[0].figure.data if t.fill == "tonexty"]) == 2
    assert "nvfp4 +" in panels[0].says


def test_one_point_needs_no_figure_of_all_together():
    panels = growth(growth_lines(rows_of(*study(points=(400,)))), LOOK, margin=0.25)
    assert [panel.heading for panel in panels] == ["Growth of the training gap: forks at step 400"]
    assert growth(growth_lines(rows_of(*study())).iloc[:0], LOOK, margin=0.25) == []
