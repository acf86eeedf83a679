"""Compare the arms of any set of runs with a baseline arm, and write the report folder.

comparison = compare(RunStore(Path("runs")).resolve(["quickstart"]), baseline="bf16")
write(comparison, Path("reports/quickstart"))
"""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from hqsweep.errors import UserError
from hqsweep.report import html, tables
from hqsweep.report.arms import Comparison, arm_row, baselines, final_losses, paired
from hqsweep.report.frames import load
from hqsweep.sweep.store import RunDir


def compare(run_dirs: Iterable[RunDir], baseline: str, window: float = 0.1) -> Comparison:
    """Every arm of the convergence runs in `run_dirs` against the arm (or the recipe) called `baseline`.

    The final loss of a run is its last val_loss. `window` is the trailing part of train_loss that is averaged for the
    second, finer gap: a number of steps, or a fraction of the run below 1. Raises UserError for no convergence run,
    an unknown baseline, or window <= 0.
    """
    if not window > 0:
        raise UserError(f"window: {window} steps; give a number of steps (50) or a fraction of the run (0.1)")
    frames = load(run_dirs).of_job("convergence")
    baseline_of = baselines(frames.runs, baseline)
    finals = final_losses(frames, window)
    finals["gap"] = paired(finals, "final_loss", baseline_of)
    finals["train_gap"] = paired(finals, "train_loss", baseline_of)
    means = finals.groupby("arm")["final_loss"].mean()
    rows = [
        arm_row(arm, baseline_of[arm], finals[finals["arm"] == arm], runs, means[baseline_of[arm]])
        for arm, runs in frames.runs.groupby("arm", sort=False)
    ]
    rows.sort(key=lambda row: row["arm"] != row["baseline"])
    return Comparison(
        frames=frames, baseline=baseline, baseline_of=baseline_of, window=window, arms=pd.DataFrame(rows), finals=finals
    )


def write(comparison: Comparison, out_dir: Path) -> Path:
    """Write report.html, report.md, compare.csv, runs.csv, metrics.parquet and stats.parquet under `out_dir`; returns
    the HTML's path."""
    out_dir.mkdir(parents=True, exist_ok=True)
    frames = comparison.frames
    page = out_dir / "report.html"
    page.write_text(html.render(comparison), encoding="utf-8")
    (out_dir / "report.md").write_text(tables.report_markdown(comparison), encoding="utf-8")
    comparison.arms.to_csv(out_dir / "compare.csv", index=False)
    frames.runs.merge(comparison.finals.drop(columns=["arm", "seed", "state"]), on="run").to_csv(
        out_dir / "runs.csv", index=False
    )
    frames.metrics.to_parquet(out_dir / "metrics.parquet", index=False)
    frames.stats.to_parquet(out_dir / "stats.parquet", index=False)
    return page
