"""Both designs beside each other, on losses whose gaps are known by hand."""

from types import SimpleNamespace

import pandas as pd
import pytest
from scipy import stats

from benchmarks.designs import gaps, page

ARMS = {"bf16": [0.0, 0.0, 0.0], "null": [0.01, -0.01, 0.0], "good": [0.2, 0.4, 0.3], "bad": [5.0, 5.2, 4.8]}


def comparison(points, scale=1.0):
    """Losses of 2 nats and ARMS in % of them: three replicates, the same gap times 1 + point at every point."""
    rows = [
        {"arm": arm, "trunk": f"t{replicate}", "seed": replicate, "point": point,
         "final_loss": 2.0 * (1 + scale * (1 + point) * percent / 100)}
        for arm, percents in ARMS.items()
        for replicate, percent in enumerate(percents)
        for point in points
    ]  # fmt: skip
    arms = pd.DataFrame({"arm": list(ARMS), "null": [arm == "null" for arm in ARMS]})
    return SimpleNamespace(finals=pd.DataFrame(rows), baseline="bf16", arms=arms)


def test_gaps_are_percent_of_the_baseline_averaged_within_a_replicate():
    forks = comparison((1, 3))
    assert gaps(forks)["good"].tolist() == pytest.approx([0.6, 1.2, 0.9])
    assert gaps(forks, last=True)["good"].tolist() == pytest.approx([0.8, 1.6, 1.2])


def test_the_page_says_who_differs_and_how_arms_are_ordered():
    text = page(comparison((0,)), comparison((0,), scale=1.05))
    half = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5
    row = next(line for line in text.splitlines() if line.startswith("| good"))
    assert f"+0.30 ± {half:.2f}" in row and row.endswith("| yes |")
    assert "Rank correlation of the 2 arms" in text and "1.00 for all" in text
    far = page(comparison((0,)), comparison((0,), scale=3))
    assert next(line for line in far.splitlines() if line.startswith("| bad")).endswith("| no |")
