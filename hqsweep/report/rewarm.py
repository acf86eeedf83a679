"""What became of a checkpoint without an optimizer's state while its trunks rose to their rate: the loss that it came
with, the highest after it, and whether the trunks were back before their first fork."""

from pathlib import Path

import pandas as pd

from hqsweep.config.fork import SETTLED_PCT
from hqsweep.report.frames import Frames

SOURCE, LOSS = "config.fork.source_hash", "manifest.source_val_loss"
"""Columns of a trunk that begins from a foreign checkpoint: its hash, and its loss before the first step."""


def rewarm_notes(trunks: Frames, points: list[int]) -> tuple[str, ...]:
    """For each checkpoint that trunks begin from a sentence with losses in nats, and one more where they are not back
    at one of the `points` from which arms fork."""
    if LOSS not in trunks.runs:
        return ()
    begun, notes = trunks.runs.dropna(subset=[LOSS]), []
    for _, runs in begun.groupby(SOURCE, sort=False):
        loss, first = float(runs[LOSS].mean()), runs.iloc[0]
        curves = _curves(trunks, runs)
        if curves.empty:
            continue
        mean = curves.groupby("step")["value"].mean()
        peak, name = mean.idxmax(), Path(first["config.fork.source"]).name
        level = loss * (1 + SETTLED_PCT / 100)
        back = [step for step in mean.index if step >= peak and mean[step] <= level]
        rises = (
            f"rises to {mean[peak]:.4f} at step {peak} and is "
            + (f"back after {back[0]} steps" if back else f"not back after {mean.index[-1]}")
            if mean[peak] > level
            else "never rises"
        )
        notes.append(
            f"Re-warm: val_loss of the checkpoint {name} is {loss:.4f}; over {first['config.fork.warmup']:.0f} steps of"
            f" rising rate it {rises} (mean of {len(runs)} trunk{'s' * (len(runs) > 1)}; back is within"
            f" {SETTLED_PCT:g} %)."
        )
        late = {at: mean[at] / loss - 1 for at in points if at in mean.index and mean[at] > level}
        if late:
            said = ", ".join(f"{100 * excess:.2f} % above it at step {at}" for at, excess in late.items())
            notes.append(
                f"The re-warm has not settled: the trunks are {said}, so the gaps there are those of a model that is"
                " still recovering. Fork later (fork.at), or train at a lower train.lr."
            )
    return tuple(notes)


def _curves(trunks: Frames, runs: pd.DataFrame) -> pd.DataFrame:
    """Validation losses at the steps at which every trunk has one."""
    metrics = trunks.metrics
    rows = metrics[metrics["run"].isin(runs["run"]) & metrics["metric"].eq("val_loss")]
    return rows[rows.groupby("step")["run"].transform("nunique") == len(runs)]
