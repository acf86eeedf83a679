"""What happened to a checkpoint without an optimizer's state while its trunks rose to their rate: the loss that it came
with, the highest after it, and whether the trunks were back before their first fork.

The trunks are back if their mean loss is not above the checkpoint's by more than the noise of this study: the upper end
t(0.95, df) * se of what chance alone does, one-sided. With several trunks se is sd / sqrt(T), sd pooled over the fork
points, df = (T - 1) * points. One trunk has no such spread; se is then the root mean square of the null arm's gaps from
the baseline, whose weights alone differ, and by noise, and df is their number. Without either, no mean loss above the
checkpoint's is back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t

from hqsweep.report.compare.frames import Frames

SOURCE, LOSS = "config.fork.source_hash", "manifest.source_val_loss"
"""The columns of a trunk that begins from a foreign checkpoint: its hash, and its loss before the first step."""
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far chance lifts the mean loss of the trunks, in nats, and the source of that number."""

    most: float
    of: str


def rewarm_notes(trunks: Frames, points: list[int], null_gaps: Sequence[float] = ()) -> tuple[str, ...]:
    """A sentence, for each checkpoint that trunks begin from, with losses in nats, and one more where they are not back
    at one of the `points` from which arms fork. null_gaps: final val_loss of the null arm's forks minus the baseline's,
    in nats."""
    if LOSS not in trunks.runs:
        return ()
    begun, notes = trunks.runs.dropna(subset=[LOSS]), []
    for _, runs in begun.groupby(SOURCE, sort=False):
        loss, first = float(runs[LOSS].mean()), runs.iloc[0]
        curves = _curves(trunks, runs)
        if curves.empty:
            continue
        mean, noise = curves.mean(axis=1), _noise(curves, points, null_gaps)
        peak, name, level = mean.idxmax(), Path(first["config.fork.source"]).name, loss + noise.most
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
            f" {100 * noise.most / loss:.2g} %, {noise.of})."
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
    """The validation losses, a column for each trunk, at the steps at which every trunk has one."""
    metrics = trunks.metrics
    rows = metrics[metrics["run"].isin(runs["run"]) & metrics["metric"].eq("val_loss")]
    return rows.pivot_table(index="step", columns="run", values="value", aggfunc="last").dropna()


def _noise(curves: pd.DataFrame, points: list[int], null_gaps: Sequence[float]) -> Noise:
    count, at = curves.shape[1], curves.loc[curves.index.isin(points)]
    if count > 1 and len(at):
        se, df = np.sqrt(at.var(axis=1, ddof=1).mean() / count), (count - 1) * len(at)
        return Noise(most=float(t.ppf(LEVEL, df) * se), of=f"the noise of {count} trunks at {_many(len(at), 'point')}")
    if len(null_gaps):
        se = np.sqrt(np.mean(np.square(null_gaps)))
        most = float(t.ppf(LEVEL, len(null_gaps)) * se)
        return Noise(most=most, of=f"the noise of {_many(len(null_gaps), 'fork')} of the null arm")
    return Noise(most=0.0, of="as one trunk without a null arm tells of no noise")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
