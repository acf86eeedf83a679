"""The facts about sweeps that a comparison needs: baseline, margin and whether they grew until decided; which of their
runs have read the same data; and the minutes of one more replicate.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from hqsweep.config.factorial import FactorialStudy
from hqsweep.config.study import StudyConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.report.compare.frames import DATA, FORK, Frames
from hqsweep.report.compare.left_out import OTHER_DATA, UNKNOWN_DATA, LeftOut
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.train.corpus import SHOWN_DIGITS


@dataclass(frozen=True, kw_only=True)
class Study:
    """The statements of a study. baseline: None where nothing states one. margin: in % of the baseline's loss. maximum:
    the most replicates of a study that is looked at after each, None for one of a fixed size. factorial: the design of
    the arms, where all sweeps state one."""

    baseline: str | None
    margin: float
    maximum: int | None
    factorial: FactorialStudy | None = None


def study_of(runs: Iterable[RunDir], baseline: str | None = None, margin: float | None = None) -> Study:
    """The study of these runs; a baseline and a margin that are given have precedence. Raises UserError where the
    sweeps state different ones."""
    paths = dict.fromkeys(run.sweep_path for run in runs)
    stated = {path.name: _stated(path) for path in paths}
    chosen = baseline if baseline is not None else _agreed(stated, "baseline")
    growing = [study["seeds"]["max"] for study in stated.values() if _grows(study)]
    return Study(
        baseline=chosen,
        margin=margin if margin is not None else _agreed(stated, "margin"),
        maximum=max(growing, default=None),
        factorial=_design(list(stated.values())),
    )


def _design(stated: Sequence[Mapping[str, Any]]) -> FactorialStudy | None:
    """The design that all sweeps state; None where they state none, or several."""
    first = stated[0].get("factorial") if stated else None
    return FactorialStudy.model_validate(first) if first and all(s.get("factorial") == first for s in stated) else None


def arms_of(runs: pd.DataFrame, baseline: str | None) -> dict[str, str]:
    """arm -> the arm that its gap is measured to by `baseline` (None: bf16, or else the first recipe): the arm of the
    baseline's recipe at the same other values, or itself where there is none. `runs`: rows of Frames.runs."""
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


def _grows(study: Mapping[str, Any]) -> bool:
    """Whether a study was looked at after every replicate."""
    return study["seeds"]["until"] == "decided" or (study.get("fork") or {}).get("until") == "settled"


def _agreed(stated: dict[str, dict[str, Any]], key: str) -> Any:
    values = {sweep: study[key] for sweep, study in stated.items() if study[key] is not None}
    if len(set(values.values())) > 1:
        said = ", ".join(f"{sweep} {value}" for sweep, value in values.items())
        raise UserError(f"{key}: the sweeps state different ones ({said}); give --{key}")
    return next(iter(values.values()), None)


READ = ["run", "arm", "trunk", "state", "diverged", "path", DATA]
"""The columns of Frames.runs that are read row by row here: a row has a hundred more, of its config."""
AGAIN = "compare it with a baseline on the same data, or train it under another sweep=NAME"


def of_one_data(frames: Frames, trunks: Frames, baseline_of: Mapping[str, str]) -> tuple[Frames, Frames]:
    """(runs, trunks) without those that have read other data than the runs of their arm's baseline, which are in
    left_out then. Forks of a trunk on other data are left out with it. Raises Damaged where none is left."""
    out: dict[str, LeftOut] = {}
    wanted: set[str | None] = set()
    for baseline in dict.fromkeys(baseline_of.values()):
        family = frames.runs[frames.runs["arm"].map(baseline_of) == baseline]
        data = _data_of(family, baseline)
        wanted.add(data)
        for run in family[READ].itertuples():
            if entry := _apart(run, seen(run), data, f"'{baseline}' has read"):
                out[run.run] = entry
    first = next(iter(wanted), None)
    for trunk in trunks.runs[READ].itertuples():
        own = seen(trunk)
        if own is not None and None not in wanted and own not in wanted:
            out[trunk.run] = _entry(trunk, OTHER_DATA, own, first, "its forks have read")
            for fork in frames.runs.loc[frames.runs["trunk"] == trunk.trunk, READ].itertuples():
                out.setdefault(fork.run, _entry(fork, OTHER_DATA, seen(fork), own, "its trunk has read"))
    if not out:
        return frames, trunks
    kept = frames.only(frames.runs[~frames.runs["run"].isin(out)])
    if kept.runs.empty:
        lost = next(iter(out.values()))
        raise Damaged(lost.file, f"{lost.fault}, so no run is left to compare", lost.remedy)
    left_out = (*frames.left_out, *out.values())
    return replace(kept, left_out=left_out), trunks.only(trunks.runs[~trunks.runs["run"].isin(out)])


def other_data(run: tuple, known: str | None, whose: str) -> LeftOut:
    """The entry of a run (a row of Frames.runs) that has read other data than `known`; whose: the words before that."""
    return _entry(run, OTHER_DATA, seen(run), known, whose)


def _data_of(family: pd.DataFrame, baseline: str) -> str | None:
    """The hash of the data of most of the baseline's finished runs, of several the first; None where it is not known.
    Where none has finished, the data of most runs of the family."""
    own = family[(family["arm"] == baseline) & (family["state"] == "finished")]
    known = list(map(seen, own[READ].itertuples()))
    known = known or [data for run in family[READ].itertuples() if (data := seen(run))]
    return Counter(known).most_common(1)[0][0] if known else None


def seen(run: tuple) -> str | None:
    """The hash of the data of a row of Frames.runs."""
    data = run.data_seen
    return data if isinstance(data, str) else None


def _apart(run: tuple, own: str | None, data: str | None, whose: str) -> LeftOut | None:
    """The entry of a run that is not on the data of its baseline; None for one that is, or that has read nothing."""
    if own == data:
        return None
    if own is None:
        return _entry(run, UNKNOWN_DATA, own, data, whose) if run.state == "finished" or run.diverged else None
    return _entry(run, OTHER_DATA if data else UNKNOWN_DATA, own, data, whose)


def _entry(run: tuple, state: str, own: str | None, data: str | None, whose: str) -> LeftOut:
    says = f"says data_hash {own[:SHOWN_DIGITS]}" if own else "does not say which data it has read"
    other = f"{whose} {data[:SHOWN_DIGITS]}" if data else f"it is not known what {whose.removesuffix(' has read')} read"
    return LeftOut(
        run=run.run, state=state, file=f"{run.path}/manifest.json", fault=f"{says}, and {other}", remedy=AGAIN
    )


WORKERS, PER_GPU = "config.engine.workers", "config.engine.runs_per_gpu"


def replicate_minutes(runs: pd.DataFrame, trunks: pd.DataFrame) -> float:
    """Minutes of one more seed, or trunk with its forks, in every arm; `runs` and `trunks` are rows of Frames.runs. NaN
    before an arm has finished a run."""
    seconds = 0.0
    for _, rows in runs.groupby("arm"):
        seconds += _mean_seconds(rows) * rows.groupby("trunk").size().max()
    if (runs["design"] == FORK).any() and len(trunks):
        seconds += _mean_seconds(trunks)
    return seconds / _workers(runs) / 60


def _mean_seconds(rows: pd.DataFrame) -> float:
    return float(rows["seconds"][rows["state"] == "finished"].mean())


def _workers(runs: pd.DataFrame) -> float:
    """Runs at a time: the most that any of the runs' configs says, 1 where none does."""
    stated = [runs[name].dropna().max() for name in (WORKERS, PER_GPU) if name in runs]
    return float(next((count for count in stated if not math.isnan(count)), 1))
