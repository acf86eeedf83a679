"""Compare the arms of any set of runs with a baseline arm, and write the report folder.

comparison = compare(RunStore(Path("runs")).resolve(["quickstart"]), baseline="bf16")
write(comparison, Path("reports/quickstart"))
"""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from hqsweep.errors import UserError
from hqsweep.report import html, tables
from hqsweep.report.arms import Comparison, arm_row, baselines, judge, null_arms, paired, partners
from hqsweep.report.curves import measures, overheads
from hqsweep.report.frames import load
from hqsweep.sweep.store import RunDir


def compare(
    run_dirs: Iterable[RunDir], baseline: str, window: float = 0.1, target_gap: float | None = None
) -> Comparison:
    """Every arm of the convergence runs in `run_dirs` against the arm (or the recipe) called `baseline`.

    The losses of a run are the means of val_loss and of train_loss over `window`, its trailing part: a number of steps,
    or a fraction of the run below 1, and at least the last value. `target_gap` is the gap in nats for which the seeds
    needed are told (None: each arm's own). Raises UserError for no convergence run, an unknown baseline, window <= 0,
    or target_gap <= 0.
    """
    if not window > 0:
        raise UserError(f"window: {window} steps; give a number of steps (50) or a fraction of the run (0.1)")
    if target_gap is not None and not target_gap > 0:
        raise UserError(f"target_gap: {target_gap} nats; give the size of the gap to resolve, such as 0.01")
    frames = load(run_dirs).of_job("convergence")
    baseline_of = baselines(frames.runs, baseline)
    finals = measures(frames, window)
    finals["gap"] = paired(finals, "final_loss", baseline_of)
    finals["train_gap"] = paired(finals, "train_loss", baseline_of)
    finals["overhead_pct"] = overheads(frames, finals, partners(finals, baseline_of))
    means = finals.groupby("arm")["final_loss"].mean()
    rows = [
        arm_row(arm, baseline_of[arm], finals[finals["arm"] == arm], runs, means[baseline_of[arm]])
        for arm, runs in frames.runs.groupby("arm", sort=False)
    ]
    judge(rows, null_arms(frames.runs, baseline_of), finals, frames.runs, target_gap)
    rows.sort(key=lambda row: row["arm"] != row["baseline"])
    return Comparison(
        frames=frames, baseline=baseline, baseline_of=baseline_of, window=window, arms=pd.DataFrame(rows), finals=finals
    )


def write(comparison: Comparison, out_dir: Path) -> Path:
    """Write report.html, report.md, compare.csv, runs.csv, metrics.parquet, stats.parquet, and figures/*.csv with the
    rows of every figure, under `out_dir`; returns the HTML's path."""
    (out_dir / "figures").mkdir(parents=True, exist_ok=True)
    frames, drawn = comparison.frames, html.panels(comparison)
    for name, rows in {panel.name: panel.rows for panel in drawn.every()}.items():
        rows.to_csv(out_dir / "figures" / f"{name}.csv", index=False)
    page = out_dir / "report.html"
    page.write_text(html.render(comparison, drawn), encoding="utf-8")
    (out_dir / "report.md").write_text(tables.report_markdown(comparison), encoding="utf-8")
    comparison.arms.to_csv(out_dir / "compare.csv", index=False)
    frames.runs.merge(comparison.finals.drop(columns=["arm", "seed", "state"]), on="run").to_csv(
        out_dir / "runs.csv", index=False
    )
    frames.metrics.to_parquet(out_dir / "metrics.parquet", index=False)
    frames.stats.to_parquet(out_dir / "stats.parquet", index=False)
    return page
