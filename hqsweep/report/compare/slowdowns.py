"""The slowdown of every arm of a family: how many more tokens it needs for the baseline's loss; and the gap that a
margin in tokens stands for.

The slope of the baseline's loss is measured on its own train_loss at the constant learning rate: over the second half,
in tokens, of all steps before the decay, with the steps of a fork's trunk.
"""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from hqsweep.config.study import margin_in_tokens
from hqsweep.report.compare.curves import loss_slope
from hqsweep.report.compare.families import Family
from hqsweep.report.compare.frames import DECIDES, FORK, FORK_CONSTANT, FORK_DECAY, LOSSES, REPLICATE, Frames
from hqsweep.verdicts.course import Slowdown, slowdown
from hqsweep.verdicts.estimate import Estimate

STEPS = "config.train.steps"


def baseline_curves(frames: Frames, trunks: Frames, baselines: Iterable[str]) -> pd.DataFrame:
    """One row per run of these arms: run, arm, trunk, seed, point, slope (nats a doubling of tokens) and since (the
    steps of the run, of a fork those since its trunk)."""
    runs = frames.runs[frames.runs["arm"].isin(set(baselines))]
    losses = frames.metrics[frames.metrics["metric"] == "train_loss"].sort_values("step")
    own = dict(iter(losses[losses["run"].isin(runs["run"])].groupby("run")))
    before = trunks.metrics[trunks.metrics["metric"] == "train_loss"].sort_values("step")
    of_trunk = {row.trunk: before[before["run"] == row.run] for row in trunks.runs[["trunk", "run"]].itertuples()}
    nothing = losses.iloc[:0]
    rows = []
    for run in runs.to_dict("records"):
        fork = run["design"] == FORK
        end = run["point"] + run[FORK_CONSTANT] if fork else _constant_steps(run)
        trunk = of_trunk.get(run["trunk"], nothing) if fork else nothing
        curve = pd.concat([trunk[trunk["step"] <= run["point"]], own.get(run["run"], nothing)])
        rows.append({
            **{key: run[key] for key in ("run", "arm", *REPLICATE)},
            "slope": loss_slope(curve["step"].to_numpy(), curve["value"].to_numpy(), end),
            "since": run[FORK_CONSTANT] + run[FORK_DECAY] if fork else run[STEPS],
        })  # fmt: skip
    return pd.DataFrame(rows, columns=["run", "arm", *REPLICATE, "slope", "since"])


def _constant_steps(run: dict) -> float:
    """The last step of a run from scratch at the constant rate."""
    decay = run.get("config.train.decay")
    return run[STEPS] * (1 - (decay if isinstance(decay, float) and math.isfinite(decay) else 0))


def slowdowns(family: Family, curves: pd.DataFrame, finals: pd.DataFrame) -> dict[str, Slowdown]:
    """arm -> its slowdown, for the arms with an estimate. `curves`: rows of baseline_curves; `finals`: of
    curves.measures."""
    if not family.estimates:
        return {}
    baseline = _in_percent(family, curves, finals)
    return {
        arm: _of_arm(family.points[family.points["arm"] == arm], baseline, estimate, family.design)
        for arm, estimate in family.estimates.items()
    }


def _in_percent(family: Family, curves: pd.DataFrame, finals: pd.DataFrame) -> pd.DataFrame:
    """The baseline's rows by replicate: slope in % of its loss. Runs from scratch have one mean loss."""
    own = curves[curves["arm"] == family.baseline].set_index([*REPLICATE])
    losses = finals[finals["arm"] == family.baseline].set_index([*REPLICATE])[LOSSES[DECIDES[family.design]]]
    scale = losses.reindex(own.index) if family.design == FORK else family.losses[family.baseline]
    return (100 * own["slope"] / scale).rename("slope").to_frame()


def _of_arm(points: pd.DataFrame, baseline: pd.DataFrame, estimate: Estimate, design: str) -> Slowdown:
    rows = points.join(baseline, on=[*REPLICATE])
    slopes = rows.groupby("trunk", sort=False)["slope"].mean()
    if not np.isfinite(slopes).all():
        return Slowdown()
    gaps = (rows["gap_pct"] * rows["weight"]).groupby(rows["trunk"], sort=False).sum()
    halves = estimate.ci_high - estimate.gap, estimate.eq_high - estimate.gap
    critical, equivalence = (half / estimate.se if estimate.se > 0 else math.nan for half in halves)
    return slowdown(gaps, slopes, critical, equivalence, math.nan if design == FORK else estimate.se)


def cells_of(found: Slowdown) -> dict[str, float]:
    """The cells of a row of Comparison.arms."""
    return {f"slowdown_{name}": value for name, value in vars(found).items()}


NO_SLOPE_MARGIN = 0.25
"""The margin, in % of the loss, in the place of one in tokens where the baseline's loss has no slope."""


def in_loss(margin: float | str, baseline: str, curves: pd.DataFrame, finals: pd.DataFrame, design: str) -> float:
    """A margin of config.study.parse_margin in % of the baseline's loss: the gap at the end of these runs that an arm
    has which needs so many more tokens."""
    tokens = margin_in_tokens(margin)
    if math.isnan(tokens):
        return float(margin)
    losses = finals.set_index("run")[LOSSES[DECIDES[design]]]
    own = curves[curves["arm"] == baseline]
    own = own.assign(loss=own["run"].map(losses).astype(float)).dropna(subset=["slope", "loss"])
    scale = own["loss"] if design == FORK else own["loss"].mean()
    gap = float((100 * own["slope"] / scale).mean() * np.log2(1 + tokens / 100)) if len(own) else 0.0
    return gap if gap > 0 else NO_SLOPE_MARGIN


def slope_notes(margin: float | str, curves: pd.DataFrame) -> list[str]:
    """A sentence where a margin in tokens has no meaning."""
    mean = curves.groupby("arm")["slope"].mean()
    flat = [arm for arm, slope in mean.items() if not slope > 0]
    if not flat or math.isnan(margin_in_tokens(margin)):
        return []
    return [
        f"The loss of {', '.join(map(repr, flat))} does not fall with tokens (or fewer than three rows of train_loss"
        f" show it), so there is no slowdown, and the margin is {NO_SLOPE_MARGIN:g} % of the loss."
    ]
