"""The plans that computed the GEMMs, as the manifests of runs have them: gemm_plan, and where recipes change
recipe_schedule (first_step, and the gemm_plan of the modules that differ from there on).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Runs = Any
"""A pandas DataFrame, as Frames.runs; this name spares `hqsweep ls` the 0.4 s of importing pandas."""

GemmPlans = Mapping[str, Mapping[str, str]]
"""Module -> GEMM -> how it is computed: "a x b: plan"."""


def plan_lines(plans: GemmPlans, schedule: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """ "fprop", or "fprop from step 3" after a change of recipe -> its plans, each with the number of modules."""
    lines = _counted(plans)
    for change in schedule:
        later = _counted(change["gemm_plan"])
        lines |= {f"{gemm} from step {change['first_step']}": how for gemm, how in later.items()}
    return lines


def arm_lines(runs: Runs) -> list[tuple[str, str]]:
    """The items of plan_lines of the runs (rows of Frames.runs) of one arm, each once."""
    return list(
        dict.fromkeys(line for plans, schedule in _manifests(runs) for line in plan_lines(plans, schedule).items())
    )


def computed_by(runs: Runs) -> str:
    """The plans alone, each once: "exact: bf16 operands, float32 GEMM"; "-" where no run has started."""
    texts = {}
    for plans, schedule in _manifests(runs):
        for stage in (plans, *(change["gemm_plan"] for change in schedule)):
            texts |= {how.partition(": ")[2]: None for gemms in stage.values() for how in gemms.values()}
    return "; ".join(texts) or "-"


def _counted(plans: GemmPlans) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for gemms in plans.values():
        for gemm, how in gemms.items():
            counts.setdefault(gemm, Counter())[how] += 1
    return {gemm: "; ".join(f"{how} ({times})" for how, times in ways.items()) for gemm, ways in counts.items()}


def _manifests(runs: Runs) -> Iterator[tuple[GemmPlans, list[Mapping[str, Any]]]]:
    """The gemm_plan and recipe_schedule of every run."""
    columns = (runs[f"manifest.{key}"].map(json.loads) for key in ("gemm_plan", "recipe_schedule"))
    return zip(*columns, strict=True)
