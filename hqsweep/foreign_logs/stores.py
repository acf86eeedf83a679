"""Readers of the stores of MLflow and trackio, without either package: MLflow's folder mlruns, and SQLite files.

    mlruns/EXPERIMENT/RUN/meta.yaml, params/NAME (a text), metrics/NAME (a line for each value: time, value, step)
    SQLite of MLflow (mlflow.db): tables runs, params, metrics
    SQLite of trackio (PROJECT.db): tables metrics (a JSON object for each step) and configs

A run has its name, its parameters or its config, and, of trackio, its group. A step that was logged twice has its last
value. Deleted runs are left out.
"""

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hqsweep.config.safe import loads, parse_yaml
from hqsweep.errors import UserError
from hqsweep.foreign_logs.trackers import Run, Runs, drop_lone_group, number_of, plain

MLFLOW = "meta.yaml"
"""The file that each run and each experiment of MLflow's folder has."""
SQLITE = (".db", ".sqlite", ".sqlite3")
"""The ends of names of SQLite files."""
DELETED = "deleted"
OUR_KEYS = "_"
"""How trackio's own keys of a config begin."""


def is_mlflow(folder: Path) -> bool:
    """Whether runs of MLflow are in a folder, or below it."""
    return any(place.with_name("metrics").is_dir() for place in folder.rglob(MLFLOW))


def read_mlflow(folder: Path) -> Runs:
    """The runs of MLflow's folder mlruns, of one experiment in it, or of a folder above."""
    runs = [run for place in sorted(folder.rglob(MLFLOW)) if (run := _mlflow_run(place)) is not None]
    return Runs(str(folder), runs, "step")


def _mlflow_run(place: Path) -> Run | None:
    """The run of a meta.yaml; None for an experiment, and for a deleted run."""
    metrics = place.with_name("metrics")
    if not metrics.is_dir():
        return None
    try:
        meta = parse_yaml(place.read_bytes())
        if not isinstance(meta, Mapping):
            raise UserError("no mapping of keys")
        params = {_below(file, place.with_name("params")): file.read_text("utf-8").strip() for file in _files(place)}
    except (UserError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{place}: is no run of MLflow ({str(error)[:200]})") from None
    if meta.get("lifecycle_stage") == DELETED or meta.get("deleted_time"):
        return None
    files = {_below(file, metrics): file for file in sorted(metrics.rglob("*")) if file.is_file()}
    facts = {"name": str(meta.get("run_name") or meta.get("run_id") or place.parent.name)}
    return Run(facts=facts | params, metrics=list(files), curve=partial(_mlflow_curve, files))


def _files(place: Path) -> list[Path]:
    return [file for file in sorted(place.with_name("params").rglob("*")) if file.is_file()]


def _below(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _mlflow_curve(files: Mapping[str, Path], metric: str) -> dict[float, float]:
    """Step -> the last value there. Early versions of MLflow wrote no step."""
    curve: dict[float, float] = {}
    if metric not in files:
        return curve
    number = 0
    try:
        with files[metric].open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if words := line.split():
                    curve[float(words[2]) if len(words) > 2 else 0.0] = float(words[1])
    except (ValueError, IndexError):
        raise UserError(f"{files[metric]}: line {number} is no value of MLflow, as in 1700000000000 2.31 100") from None
    return curve


def read_sqlite(path: Path) -> Runs:
    """The runs of a SQLite file of MLflow or trackio. Raises UserError for any other file."""
    with _reading(path) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if {"runs", "params", "metrics"} <= tables:
            return Runs(str(path), _mlflow_rows(path, database), "step")
        if {"metrics", "configs"} <= tables:
            return Runs(str(path), _trackio_rows(path, database), "step")
        known = ", ".join(sorted(tables)[:12]) or "none"
    raise UserError(
        f"{path}: is no file of MLflow or trackio, with tables metrics and configs or params; it has {known}"
    )


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, opened to be read alone."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            yield database
    except sqlite3.Error as error:
        raise UserError(f"{path}: is no SQLite file that can be read ({error})") from None


def _mlflow_rows(path: Path, database: sqlite3.Connection) -> list[Run]:
    """The runs of MLflow's database."""
    params: dict[str, dict[str, str]] = {}
    for run, key, value in database.execute("SELECT run_uuid, key, value FROM params"):
        params.setdefault(run, {})[key] = value
    names = database.execute("SELECT run_uuid, name, lifecycle_stage FROM runs ORDER BY start_time, run_uuid")
    named = {run: {"name": name or run} for run, name, stage in names if stage != DELETED}
    metrics: dict[str, list[str]] = {}
    for run, key in database.execute("SELECT DISTINCT run_uuid, key FROM metrics"):
        metrics.setdefault(run, []).append(key)
    rows = (
        "SELECT step, CASE WHEN is_nan THEN 'NaN' ELSE value END FROM metrics WHERE run_uuid = ? AND key = ?"
        " ORDER BY timestamp"
    )
    return [
        Run(
            facts=facts | params.get(run, {}), metrics=metrics.get(run, []),
            curve=_asked(path, lambda metric, run=run: (rows, (run, metric))),
        )
        for run, facts in named.items()
    ]  # fmt: skip


def _trackio_rows(path: Path, database: sqlite3.Connection) -> list[Run]:
    """The runs of trackio's database; early versions tell them apart by name."""
    columns = {row[1] for row in database.execute("PRAGMA table_info(metrics)")}
    key = "run_id" if "run_id" in columns else "run_name"
    named = dict(database.execute(f"SELECT {key}, MAX(run_name) FROM metrics GROUP BY {key} ORDER BY MIN(id)"))
    facts: dict[str, dict[str, Any]] = {run: {"name": name} for run, name in named.items()}
    for run, config in database.execute(f"SELECT {key}, config FROM configs"):
        if run in facts:
            facts[run] |= _trackio_config(path, config)
    drop_lone_group(list(facts.values()))
    cells = "json_each(CAST(metrics.metrics AS TEXT)) AS cell"
    metrics: dict[str, list[str]] = {}
    number = "cell.type IN ('integer', 'real') OR cell.value IN ('NaN', 'Infinity', '-Infinity')"
    for run, name in database.execute(f"SELECT DISTINCT {key}, cell.key FROM metrics, {cells} WHERE {number}"):
        metrics.setdefault(run, []).append(name)
    rows = f"SELECT step, cell.value FROM metrics, {cells} WHERE {key} = ? AND cell.key = ? ORDER BY metrics.id"
    return [
        Run(
            facts=own, metrics=metrics.get(run, []),
            curve=_asked(path, lambda metric, run=run: (rows, (run, metric))),
        )
        for run, own in facts.items()
    ]  # fmt: skip


def _trackio_config(path: Path, text: str | bytes) -> dict[str, Any]:
    try:
        config = loads(text)
    except ValueError as error:
        raise UserError(f"{path}: the config of a run is no JSON ({error})") from None
    config = config if isinstance(config, Mapping) else {}
    own = {key: value for key, value in config.items() if not key.startswith(OUR_KEYS)}
    return plain(own) | ({"group": config["_Group"]} if isinstance(config.get("_Group"), str) else {})


Question = tuple[str, tuple[str, str]]
"""SQL that gives step and value, and its parameters."""


def _asked(path: Path, question: Callable[[str], Question]) -> Callable[[str], Mapping[float, float]]:
    """The curve of a run, by the question for a metric."""

    def curve(metric: str) -> Mapping[float, float]:
        sql, parameters = question(metric)
        with _reading(path) as database:
            rows = database.execute(sql, parameters)
            numbers = ((step, number_of(value)) for step, value in rows)
            return {float(step): value for step, value in numbers if value is not None and step is not None}

    return curve
