"""The league of a study's recipes: what each costs in loss, in bits, and, where it runs natively, in time."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.config.safe import loads
from hqsweep.memo import memo
from hqsweep.recipe.roles import HEAD
from hqsweep.report.compare.arms import Comparison

SIDE = 4096
"""The rows and columns of the matrix whose bits per element count."""
GEMMS = ("fprop", "dgrad", "wgrad")
COLUMNS = ["place", "arm", "verdict", "gap_pct", "ci_low_pct", "ci_high_pct", "slowdown_pct", "bits", "front",
           "tokens_per_s", "speed"]  # fmt: skip


def league(comparison: Comparison) -> pd.DataFrame:
    """One row an arm, the smallest gap first, arms without a gap last; the baseline is among them with a gap of 0.

    place        from 1; NaN without a gap
    bits         mean bits of an element, codes and scales, over the operands of the GEMMs of linears and experts
                 (without the head), and over the steps of the run where the recipe changes
    front        whether no other arm has both fewer bits and a smaller gap
    tokens_per_s, speed   tokens a second, and these over the baseline's, of arms whose quantized GEMMs all ran on
                 tensor cores of their formats; NaN for others, whose emulation says nothing of speed

    Other columns are as in Comparison.arms. The null arm is left out.
    """
    arms = comparison.arms[~comparison.arms["null"]].copy()
    runs = {arm: rows for arm, rows in comparison.frames.runs.groupby("arm", sort=False)}
    arms["bits"] = [_bits(runs[arm]) for arm in arms["arm"]]
    baseline = arms["arm"] == arms["baseline"]
    arms.loc[baseline, ["gap_pct", "slowdown_pct"]] = 0.0
    native = np.array([_is_native(runs[arm]) for arm in arms["arm"]], dtype=bool) | baseline.to_numpy()
    arms["tokens_per_s"] = arms["tokens_per_s"].where(native)
    arms["speed"] = arms["tokens_per_s"] / arms["baseline"].map(arms.set_index("arm")["tokens_per_s"])
    arms["front"] = [_is_front(arms, row) for row in arms.itertuples()]
    arms = arms.sort_values("gap_pct", kind="stable", ignore_index=True)
    arms["place"] = arms["gap_pct"].rank(method="first")
    return arms[COLUMNS]


def _is_front(arms: pd.DataFrame, row: Any) -> bool:
    better = (arms["bits"] <= row.bits) & (arms["gap_pct"] <= row.gap_pct)
    strictly = (arms["bits"] < row.bits) | (arms["gap_pct"] < row.gap_pct)
    return not math.isnan(row.gap_pct) and not (better & strictly).any()


def _plans(run: Mapping[str, Any]) -> list[tuple[float, dict[str, dict[str, str]]]]:
    """(share of the steps, module -> GEMM -> plan) of each stage of a run's recipe."""
    plans, schedule = loads(run["manifest.gemm_plan"]), loads(run["manifest.recipe_schedule"])
    fork = run.get("point") or 0
    steps = run["config.train.steps"] - fork
    starts = [0, *(change["first_step"] - 1 - fork for change in schedule), steps]
    stages = [plans]
    for change in schedule:
        stages.append(stages[-1] | change["gemm_plan"])
    return [((end - start) / steps, stage) for stage, start, end in zip(stages, starts, starts[1:], strict=False)]


def _bits(runs: pd.DataFrame) -> float:
    """Mean bits of an operand of an arm's first run that has started; NaN for none."""
    for run in runs.to_dict("records"):
        means = [(share, [bits for text in _texts(stage) for bits in _of_gemm(text)]) for share, stage in _plans(run)]
        if all(bits for _, bits in means):
            return sum(share * float(np.mean(bits)) for share, bits in means)
    return math.nan


def _texts(stage: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The plans of the GEMMs of linears and experts."""
    linears = (gemms for name, gemms in stage.items() if name.rpartition(".")[2] != HEAD)
    return [gemms[gemm] for gemms in linears for gemm in GEMMS if gemm in gemms]


def _of_gemm(text: str) -> list[float]:
    """The bits of both operands of "a x b: plan"."""
    return [_bits_of(name) for name in text.partition(": ")[0].split(" x ")]


@memo
def _bits_of(name: str) -> float:
    from hqsweep.formats import parse  # with torch, which a comparison does without

    return parse(name).bits_per_element(SIDE, SIDE)


def _is_native(runs: pd.DataFrame) -> bool:
    """Whether every GEMM with a quantized operand ran on tensor cores of its formats, and there is one."""
    texts = [text for run in runs.to_dict("records") for _, stage in _plans(run) for text in _texts(stage)]
    quantized = [text for text in texts if any(bits < 16 for bits in _of_gemm(text))]
    return bool(quantized) and all(text.partition(": ")[2].startswith("native") for text in quantized)
