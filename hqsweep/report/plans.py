"""Which plan computed each GEMM, from what manifests say of it: gemm_plan (module -> GEMM -> "a x b: plan"), and
recipe_schedule (first_step, and the gemm_plan of what is different from there on) where recipes change.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd  # `hqsweep ls` does without the 0.4 s of importing it

Plan = Mapping[str, Mapping[str, str]]


def plan_lines(plan: Plan, schedule: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """ "fprop", or "fprop from step 3" after a change of recipe -> its plans, each with the number of modules."""
    lines = _counted(plan)
    for change in schedule:
        later = _counted(change["gemm_plan"])
        lines |= {f"{gemm} from step {change['first_step']}": how for gemm, how in later.items()}
    return lines


def arm_lines(runs: "pd.DataFrame") -> list[tuple[str, str]]:
    """Items of plan_lines of the runs (rows of Frames.runs) of one arm, each once."""
    return list(dict.fromkeys(line for facts in _manifests(runs) for line in plan_lines(*facts).items()))


def computed_by(runs: "pd.DataFrame") -> str:
    """The plans alone, each once: "exact: bf16 operands, float32 GEMM"; "-" where no run has started."""
    texts = {}
    for plan, schedule in _manifests(runs):
        for each in (plan, *(change["gemm_plan"] for change in schedule)):
            texts |= {how.partition(": ")[2]: None for gemms in each.values() for how in gemms.values()}
    return "; ".join(texts) or "-"


def _counted(plan: Plan) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for gemms in plan.values():
        for gemm, how in gemms.items():
            counts.setdefault(gemm, Counter())[how] += 1
    return {gemm: "; ".join(f"{how} ({times})" for how, times in ways.items()) for gemm, ways in counts.items()}


def _manifests(runs: "pd.DataFrame") -> Iterator[tuple[Plan, list[Mapping[str, Any]]]]:
    """gemm_plan and recipe_schedule of every run."""
    columns = (runs[f"manifest.{key}"].map(json.loads) for key in ("gemm_plan", "recipe_schedule"))
    return zip(*columns, strict=True)
