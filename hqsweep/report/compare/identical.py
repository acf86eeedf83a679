"""Arms that repeat their baseline: their products had the same operands, as the manifests say, and their losses are
equal in every digit. The loss of such an arm says nothing about its recipe, so it gets no statistics.

Manifests hold the plans of the GEMMs alone. Where these are all in high precision, and the configs differ in nothing
else that a recipe can do, rows may even differ: then it is the machine that does not repeat itself.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from hqsweep.formats.spec import NAMES
from hqsweep.recipe.roles import IN_HIGH_PRECISION
from hqsweep.report.compare.curves import curve_hash
from hqsweep.report.compare.frames import REPLICATE, Frames, config_leaves

NOTHING, SAME = "nothing was quantized", "the same operands"
"""Why an arm is identical to its baseline: both are in high precision, or both are quantized alike."""
TABLES = ("embedding", "norm")
"""The parts of a recipe that no plan of a GEMM shows."""

Operands = tuple[str, bool]
"""The plans of a run as text, and whether all of them are in high precision."""


@dataclass(frozen=True)
class Known:
    """What tells runs apart. operands: run -> its operands, where its manifest has plans. hashes: run -> the hash of
    its losses, filled on demand."""

    metrics: pd.DataFrame
    operands: Mapping[str, Operands]
    hashes: dict[str, str] = field(default_factory=dict)

    def alike(self, a: str, b: str) -> bool:
        """Whether two runs had the same operands."""
        return a in self.operands and self.operands[a] == self.operands.get(b)

    def equal(self, a: str, b: str) -> bool:
        """Whether the losses of two runs are equal in every digit."""
        return self._hash(a) == self._hash(b)

    def _hash(self, run: str) -> str:
        if run not in self.hashes:
            self.hashes[run] = curve_hash(self.metrics[self.metrics["run"] == run])
        return self.hashes[run]


def identical_arms(
    frames: Frames, baseline_of: Mapping[str, str], nulls: Iterable[str]
) -> tuple[dict[str, str], list[list[str]]]:
    """(arm -> NOTHING or SAME, for arms that are identical to their baseline in all replicates that both have finished;
    groups of other arms that are identical to each other). Null arms are not meant."""
    runs = frames.runs[(frames.runs["state"] == "finished") & ~frames.runs["arm"].isin(set(nulls))]
    known = _known(frames, runs)
    by_arm = {arm: part.set_index(list(REPLICATE)) for arm, part in runs.groupby("arm", sort=False)}
    found = {}
    for arm, own in by_arm.items():
        other = by_arm.get(baseline_of[arm])
        if other is not None and arm != baseline_of[arm] and (why := _why(own, other, known)):
            found[arm] = why
    alike: list[list[str]] = []
    for arm, own in by_arm.items():
        if arm not in found and arm != baseline_of[arm]:
            group = next((group for group in alike if _why(own, by_arm[group[0]], known)), None)
            alike.append([arm]) if group is None else group.append(arm)
    return found, [group for group in alike if len(group) > 1]


def _known(frames: Frames, runs: pd.DataFrame) -> Known:
    if "manifest.gemm_plan" not in runs:
        return Known(frames.metrics, {})
    plans = zip(runs["run"], runs["manifest.gemm_plan"], runs["manifest.recipe_schedule"], strict=True)
    found = {run: _operands(*texts) for run, *texts in plans}
    return Known(frames.metrics, {run: operands for run, operands in found.items() if operands is not None})


def _operands(plan: str, schedule: str) -> Operands | None:
    """None where the manifest states no plan."""
    first = json.loads(plan)
    changes = [change for change in json.loads(schedule) if change["gemm_plan"]]
    plans = (first, *(change["gemm_plan"] for change in changes))
    names = {
        name
        for modules in plans
        for gemms in modules.values()
        for how in gemms.values()
        for name in how.partition(": ")[0].split(" x ")
    }
    high = all(name in NAMES and NAMES[name].scaling is None for name in names)
    return (json.dumps([first, changes], sort_keys=True), high) if names else None


def _why(own: pd.DataFrame, other: pd.DataFrame, known: Known) -> str | None:
    """Why two arms are one: NOTHING, SAME, or None, as they are not."""
    pairs = [(own.loc[key], other.loc[key]) for key in own.index.intersection(other.index)]
    if not pairs or not all(known.alike(a["run"], b["run"]) for a, b in pairs):
        return None
    high = all(known.operands[a["run"]][1] for a, _ in pairs)
    if all(known.equal(a["run"], b["run"]) for a, b in pairs):
        return NOTHING if high else SAME
    leaves = _leaves(own.reset_index())
    return NOTHING if high and all(_settings(a, leaves) == _settings(b, leaves) for a, b in pairs) else None


def _leaves(runs: pd.DataFrame) -> list[str]:
    """The keys that can change a number of a run whose products are all in high precision."""
    tables = {f"config.recipe.{part}" for part in TABLES}
    return [name for name in config_leaves(runs) if not name.startswith("config.recipe.") or name in tables]


def _settings(run: Any, leaves: Iterable[str]) -> list[str]:
    usual = {f"config.recipe.{part}": IN_HIGH_PRECISION[part] for part in TABLES}
    return [str(usual.get(name) if pd.isna(value) else value) for name, value in ((n, run[n]) for n in leaves)]
