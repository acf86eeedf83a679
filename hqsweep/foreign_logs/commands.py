"""Verdicts on runs of commands and of hqsweep.track, whose rows hqsweep keeps.

Metric, direction, margin and window are those of their config (judge); the baseline, and how long a study may grow,
those of the sweep.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hqsweep.config.jobs import COMMAND
from hqsweep.config.study import StudyConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.foreign_logs.judge import Judgement, Question
from hqsweep.foreign_logs.logs import Log, Reading, judge_log, read_sources
from hqsweep.foreign_logs.runs import source
from hqsweep.sweep.store import sweep_file
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore


def is_of_commands(runs: Sequence[RunDir]) -> bool:
    """Whether all runs that can be read are of commands, and there is one. UserError for some beside others."""
    jobs = set()
    for run in runs:
        with suppress(Damaged):
            jobs.add(run.config()["job"])
    if COMMAND in jobs and len(jobs) > 1:
        raise UserError(
            f"runs: of a command and of {', '.join(sorted(jobs - {COMMAND}))}; compare the one or the other"
        )
    return jobs == {COMMAND}


def judge_runs(
    runs: Sequence[RunDir],
    baseline: str | None = None,
    window: float | None = None,
    margin: float | str | None = None,
    metric: str | None = None,
) -> Judgement:
    """The judgement of runs of commands; None: what their configs and their sweep say."""
    return judge_log(log_of(runs, metric=metric, baseline=baseline, window=window, margin=margin))


def log_of(runs: Sequence[RunDir], **asked: Any) -> Log:
    """The values of runs of commands, and the question that they state. asked: metric, baseline, window, margin."""
    config, study = runs[0].config(), _study(runs[0])
    stated = config.get("judge") or {}
    asked = {name: value for name, value in asked.items() if value is not None}
    margin = asked.get("margin", stated.get("margin") or f"{study.margin:g}%")
    question = Question(
        metric=asked.get("metric") or stated.get("metric") or "", margin=margin, lower=stated.get("lower_is_better"),
        baseline=asked.get("baseline") or study.baseline, null_arm=stated.get("null_arm"),
        maximum=study.seeds.max if study.seeds.until == "decided" else None,
    )  # fmt: skip
    reading = Reading(columns={}, window=asked.get("window") or stated.get("window"))
    where = "+".join(dict.fromkeys(str(run.sweep_path) for run in runs))
    return read_sources([source(runs, where)], question, reading)


def _study(run: RunDir) -> StudyConfig:
    """What the run's sweep says as a whole."""
    keys = RunStore(run.sweep_path.parent).facts(run.sweep)["study"] if sweep_file.is_sweep(run.sweep_path) else {}
    return StudyConfig.model_validate({name: value for name, value in keys.items() if name in StudyConfig.model_fields})
