"""The statements of sweeps about the comparison of their arms: the baseline, the margin, and whether it grew until
decided."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hqsweep.config.study import StudyConfig
from hqsweep.errors import UserError
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore


@dataclass(frozen=True, kw_only=True)
class Study:
    """The statements of a study. baseline: None where nothing states one. margin: in % of the baseline's loss. maximum:
    the most replicates of a study that is looked at after each, None for one of a fixed size."""

    baseline: str | None
    margin: float
    maximum: int | None


def study_of(runs: Iterable[RunDir], baseline: str | None = None, margin: float | None = None) -> Study:
    """The study of these runs; a baseline and a margin that are given have precedence. Raises UserError where the
    sweeps state different ones."""
    paths = dict.fromkeys(run.sweep_path for run in runs)
    stated = {path.name: _stated(path) for path in paths}
    chosen = baseline if baseline is not None else _agreed(stated, "baseline")
    growing = [study["seeds"]["max"] for study in stated.values() if study["seeds"]["until"] == "decided"]
    return Study(
        baseline=chosen,
        margin=margin if margin is not None else _agreed(stated, "margin"),
        maximum=max(growing, default=None),
    )


def arms_of(runs: pd.DataFrame, baseline: str | None) -> dict[str, str]:
    """arm -> the arm that its gap is measured to by `baseline` (None: bf16, or else the first recipe): the arm of the
    baseline's recipe at the same other values, or itself where there is none. `runs` are those of Frames.runs."""
    recipe_of = dict(zip(runs["arm"], runs["recipe"], strict=True))
    names = [*recipe_of, *recipe_of.values()]
    baseline = baseline or ("bf16" if "bf16" in names else recipe_of[next(iter(recipe_of))])
    if baseline in recipe_of:
        return dict.fromkeys(recipe_of, baseline)
    partner = {arm: baseline + arm.removeprefix(recipe) for arm, recipe in recipe_of.items()}
    return {arm: other if other in recipe_of else arm for arm, other in partner.items()}


def _stated(sweep_path) -> dict[str, Any]:
    """The keys of StudyConfig, with defaults for those that a sweep does not state."""
    defaults = StudyConfig().model_dump(mode="json")
    if not (sweep_path / "sweep.json").is_file():
        return defaults
    return defaults | RunStore(sweep_path.parent).facts(sweep_path.name).get("study", {})


def _agreed(stated: dict[str, dict[str, Any]], key: str) -> Any:
    values = {sweep: study[key] for sweep, study in stated.items() if study[key] is not None}
    if len(set(values.values())) > 1:
        said = ", ".join(f"{sweep} {value}" for sweep, value in values.items())
        raise UserError(f"{key}: the sweeps state different ones ({said}); give --{key}")
    return next(iter(values.values()), None)
