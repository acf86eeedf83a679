"""Judgements of logs: which reader a path takes, and the rows of all logs together.

Runs of commands and of hqsweep.track are logs whose rows hqsweep keeps. Metric, direction, margin and window come from
their config (judge); the baseline, and how long a study may grow, come from the sweep.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from hqsweep.config.jobs import COMMAND
from hqsweep.config.study import StudyConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.foreign_logs.judge import Judgement, Question, judge
from hqsweep.foreign_logs.stores import SQLITE, is_mlflow, read_mlflow, read_sqlite
from hqsweep.foreign_logs.tables import Csv, Frame, JsonLines, Parquet, Source, WideCsv
from hqsweep.foreign_logs.trackers import EVENTS, WANDB, Runs, read_tensorboard, read_wandb, runs_source, sweep_source
from hqsweep.foreign_logs.values import FILE, Collector, Columns, Values, find
from hqsweep.sweep.store import sweep_file
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.sweep.store.sweep_file import is_sweep

READERS = {
    ".csv": Csv, ".tsv": Csv, ".txt": Csv, ".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonLines,
    ".parquet": Parquet, ".pq": Parquet,
}  # fmt: skip
"""The end of a file's name, before .gz -> its reader."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How logs are read.

    columns     arm, seed, step, trunk or point -> the name of its column, where it is no usual one
    window      values are means over the last steps (50), or the last part of a run (0.1); None: the last value
    any_length  runs that end at another step than most enter, too
    """

    columns: Mapping[str, str | None]
    window: float | None = None
    any_length: bool = False


def judge_files(paths: Sequence[Path], question: Question, reading: Reading) -> Judgement:
    """The judgement of all rows of some files and folders. question.metric may be "": val_loss, or the only metric.

    Raises UserError for a file that is missing, empty or of no known kind, and as `judge` and `find` do.
    """
    return judge_sources([source for path in paths for source in _open(path)], question, reading)


def judge_frame(frame: pd.DataFrame, question: Question, reading: Reading) -> Judgement:
    """The judgement of a DataFrame with a row for each run, or for each step of a run."""
    return judge_sources([Frame(frame)], question, reading)


def judge_sources(sources: Sequence[Source], question: Question, reading: Reading) -> Judgement:
    """The judgement of all rows of some logs."""
    return judge_log(read_sources(sources, question, reading))


@dataclass(frozen=True, kw_only=True)
class Log:
    """The values of the runs of some logs, and the question with the metric's name. forked: replicates are trunks;
    window: as Reading has it."""

    values: Values
    question: Question
    forked: bool
    window: float | None


def judge_log(log: Log) -> Judgement:
    """The judgement of values that are read."""
    return judge(log.values, log.question, forked=log.forked)


def read_files(paths: Sequence[Path], question: Question, reading: Reading) -> Log:
    """The values of all runs of some files and folders; errors as judge_files."""
    return read_sources([source for path in paths for source in _open(path)], question, reading)


def read_sources(sources: Sequence[Source], question: Question, reading: Reading) -> Log:
    """The values of all runs of some logs."""
    if reading.window is not None and not reading.window > 0:
        raise UserError(f"window: {reading.window} steps; give a number of steps (50) or a fraction of the run (0.1)")
    metric, read = question.metric or None, []
    for source in sources:
        named = {FILE: False} if len(sources) > 1 else {}
        known = {**named, **source.known}
        found = find(known, source.where, reading.columns, metric, open_ended=source.open_ended)
        metric = found.metric
        read.append((source, found))
    first = read[0][1]
    if odd := next((source for source, found in read if len(found.keys) != len(first.keys)), None):
        raise UserError(f"{odd.where}: it has other columns than {sources[0].where}: both have seeds, or neither has")
    where = sources[0].where if len(sources) == 1 else f"{len(sources)} files"
    collector = Collector(where, first, reading.window)
    for source, found in read:
        for rows in _pieces(source, found):
            collector.add(rows)
    values = collector.values(reading.any_length)
    left_out = [text for source in sources if isinstance(source, Runs) for text in source.left_out]
    values = replace(values, left_out=(*values.left_out, *left_out))
    named = replace(question, metric=metric)
    return Log(values=values, question=named, forked=first.trunk is not None, window=reading.window)


def _pieces(source: Source, columns: Columns) -> Iterator[pd.DataFrame]:
    """The rows of a source, which knows no column FILE."""
    if columns.arm != FILE or FILE in source.known:
        yield from source.pieces(columns)
        return
    for rows in source.pieces(replace(columns, arm=None)):
        yield rows.assign(arm=_stem(Path(source.where)))


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rpartition(".")[0]


def _open(path: Path) -> list[Source]:
    """The sources at a path."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_file():
        return [_open_file(path)]
    if is_sweep(path):
        return [sweep_source(path)]
    readers = {EVENTS: read_tensorboard, WANDB: read_wandb}
    for pattern, reader in readers.items():
        if next(path.rglob(pattern), None):
            return [reader(path)]
    if is_mlflow(path):
        return [read_mlflow(path)]
    if stores := [file for file in sorted(path.iterdir()) if file.suffix in SQLITE]:
        return [*map(read_sqlite, stores)]
    tables = [file for file in sorted(path.iterdir()) if file.is_file() and _kind(file) in READERS]
    if not tables:
        raise UserError(
            f"{path}: no file of TensorBoard, W&B, MLflow or trackio, and none that ends in {', '.join(READERS)}"
        )
    return [*map(_open_file, tables)]


def _open_file(path: Path) -> Source:
    if path.match(EVENTS) or path.match(WANDB):
        raise UserError(f"{path}: is a file of one run; give the folder of all runs")
    if path.suffix in SQLITE:
        return read_sqlite(path)
    if _kind(path) not in READERS:
        ends = ", ".join([*READERS, *SQLITE])
        raise UserError(f"{path}: is of no known kind; it takes {ends}, and folders of trackers")
    source = READERS[_kind(path)](path)
    return WideCsv(source) if isinstance(source, Csv) and WideCsv.is_one(source) else source


def _kind(path: Path) -> str:
    """The end of a file's name that says what it is."""
    name = path.name.lower()
    return "." + name.removesuffix(".gz").rpartition(".")[2]


def frame_of(values: Mapping[str, object], metric: str) -> pd.DataFrame:
    """The rows of arm -> its values of a metric by seed: a sequence, whose places are the seeds, or a mapping of
    seeds."""
    rows = []
    for arm, of_arm in values.items():
        pairs = of_arm.items() if isinstance(of_arm, Mapping | pd.Series) else enumerate(_listed(arm, of_arm))
        rows += [(str(arm), seed, value) for seed, value in pairs]
    return pd.DataFrame(rows, columns=["arm", "seed", metric])


def _listed(arm: str, values: object) -> list[object]:
    try:
        return [*values]
    except TypeError:
        raise UserError(
            f"judge: '{arm}' has a {type(values).__name__}; it takes the values of all seeds, as in [2.31, 2.29]"
        ) from None


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
    return read_sources([runs_source(runs, where)], question, reading)


def _study(run: RunDir) -> StudyConfig:
    """What the run's sweep says as a whole."""
    keys = RunStore(run.sweep_path.parent).facts(run.sweep)["study"] if sweep_file.is_sweep(run.sweep_path) else {}
    return StudyConfig.model_validate({name: value for name, value in keys.items() if name in StudyConfig.model_fields})
