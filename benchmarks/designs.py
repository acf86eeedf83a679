"""Forks held against whole runs: do both designs size and order the same arms alike?

    python -m benchmarks.designs gpu_whole gpu_forks --out reports/gpu_forks/designs.md

Takes two finished sweeps with the same arms, one of whole runs and one of forks. For every arm: the gap of the final
val_loss to the baseline's in % of it, over seeds and over trunks (mean of the points, and the last one alone), with
95 % intervals of its own (Student's t); the difference fork - whole run with Welch's 95 % interval; and over all arms
Spearman's rank correlation of both columns. Nothing is trained here.
"""

import argparse
from pathlib import Path

import pandas as pd
from scipy import stats

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.compare import compare
from hqsweep.report.pages.text import TextTable, markdown
from hqsweep.sweep.store.store import RunStore

HEADER = ("arm", "whole runs, %", "forks, %", "last point, %", "forks - whole runs, %", "alike")


def gaps(comparison: Comparison, last: bool = False) -> pd.Series:
    """(arm, replicate) -> gap of the final val_loss in % of the baseline's; forks averaged within a trunk, or only
    those of the last point."""
    finals = comparison.finals
    finals = finals[finals["point"] == finals["point"].max()] if last else finals
    own = finals.set_index(["trunk", "point"])
    loss = own[own["arm"] == comparison.baseline]["final_loss"]
    pct = 100 * (own["final_loss"] / loss.reindex(own.index).to_numpy() - 1)
    return pct.groupby([own["arm"], own.index.get_level_values("trunk")]).mean()


def spread(values: pd.Series) -> str:
    """Mean and half of the 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return f"{values.mean():+.2f} ± {half:.2f}"


def page(whole: Comparison, forks: Comparison) -> str:
    """The table, and the rank correlation, as Markdown."""
    columns = [gaps(whole), gaps(forks), gaps(forks, last=True)]
    arms = [arm for arm in forks.arms["arm"] if arm != forks.baseline and arm in set(whole.arms["arm"])]
    rows = []
    for arm in arms:
        runs, trunks, last = (column[arm] for column in columns)
        test = stats.ttest_ind(trunks, runs, equal_var=False)
        span = test.confidence_interval(0.95)
        off = f"{trunks.mean() - runs.mean():+.2f} ({span.low:+.2f} to {span.high:+.2f})"
        alike = "yes" if span.low <= 0 <= span.high else "no"
        rows.append((arm, spread(runs), spread(trunks), spread(last), off, alike))
    tested = [arm for arm in arms if not forks.arms.set_index("arm").at[arm, "null"]]
    means = [[column[arm].mean() for arm in tested] for column in columns]
    rank = [stats.spearmanr(means[0], other).statistic for other in means[1:]]
    seeds, trunks = (len(column[arms[0]]) for column in columns[:2])
    return (
        "# Forks held against whole runs\n\n"
        f"Gap of the final val_loss to `{forks.baseline}` in % of it, with 95 % intervals: {seeds} whole runs from"
        f" scratch, and {trunks} trunks with forks at {_points(forks)}.\n\n"
        + markdown(TextTable(header=HEADER, rows=tuple(rows), numeric=frozenset(range(1, 5))))
        + f"\nRank correlation of the {len(tested)} arms with whole runs (Spearman): {rank[0]:.2f} for all fork points,"
        f" {rank[1]:.2f} for the last one.\n"
    )


def _points(forks: Comparison) -> str:
    return " and ".join(str(point) for point in sorted(forks.finals["point"].unique()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whole", help="sweep of whole runs")
    parser.add_argument("forks", help="sweep of forks")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, help="write the Markdown here as well")
    args = parser.parse_args()
    store = RunStore(args.runs_dir)
    text = page(*(compare(store.resolve([sweep])) for sweep in (args.whole, args.forks)))
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
