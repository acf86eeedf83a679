"""Readers of folders of runs: TensorBoard's event files, W&B's offline runs, and hqsweep's own sweeps.

A folder of event files is a run, called by its path within the logs. A run of W&B has its name, group and config. A
step that was logged twice has its last value: a resumed run goes back and repeats steps. A run of hqsweep counts when
it has finished; any other is left out by name.
"""

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.foreign_logs.values import Columns
from hqsweep.report.compare.left_out import stranger
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import known, runs_in

EVENTS, WANDB = "*tfevents*", "*.wandb"
"""The files of a run that TensorBoard and W&B write."""
BLOCK, HEADER, FULL, FIRST, LAST = 32768, 7, 1, 2, 4
"""The framing of a .wandb file: the size of a block and of a chunk's header, and the kinds of chunks."""
Curves = dict[str, dict[float, float]]
"""Metric -> step -> value."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a tracker. facts: columns that have one value in it; curve: the values of a metric by step."""

    facts: Mapping[str, Any]
    metrics: Collection[str]
    curve: Callable[[str], Mapping[float, float]]


class Runs:
    """A source of runs, of which one at a time is read; left_out: sentences on runs that are none of them."""

    open_ended = False

    def __init__(self, where: str, runs: Sequence[Run], step: str, left_out: tuple[str, ...] = ()) -> None:
        self.where, self._runs, self.known, self.left_out = where, runs, {}, left_out
        for run in runs:
            self.known |= {name: type(value) in (int, float) for name, value in run.facts.items()}
            self.known |= {step: True, **dict.fromkeys(run.metrics, True)}

    def pieces(self, columns: Columns) -> Iterator[pd.DataFrame]:
        for run in self._runs:
            curve = run.curve(columns.metric)
            frame = pd.DataFrame({"step": np.array([*curve], float), "value": np.array([*curve.values()], float)})
            for name, column in columns.keys.items():
                frame.insert(0, name, [run.facts.get(column)] * len(frame))
            yield frame


def held(facts: Mapping[str, Any], curves: Curves) -> Run:
    """A run whose curves are in memory."""
    return Run(facts=facts, metrics=list(curves), curve=lambda metric: curves.get(metric, {}))


def read_tensorboard(folder: Path) -> Runs:
    """The scalars of the event files below a folder."""
    _check_installed("tensorboard", folder)
    runs: dict[Path, Curves] = {}
    for path in sorted(folder.rglob(EVENTS)):
        _add_events(path, runs.setdefault(path.parent, {}))
    named = [held({"run": _name(folder, place)}, curves) for place, curves in runs.items()]
    return Runs(str(folder), named, "step")


def _name(folder: Path, place: Path) -> str:
    return folder.name if place == folder else str(place.relative_to(folder))


def _add_events(path: Path, curves: Curves) -> None:
    """Add the scalars of a file; a start at a step drops what earlier files have from there on, as TensorBoard does."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    try:
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                for curve in curves.values():
                    for step in [step for step in curve if step >= event.step]:
                        del curve[step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    curves.setdefault(value.tag, {})[event.step] = value.simple_value
                elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("", "scalars"):
                    array = make_ndarray(value.tensor)
                    if array.ndim == 0 and array.dtype.kind in "fiu":
                        curves.setdefault(value.tag, {})[event.step] = float(array)
    except Exception as error:  # of the loader, which has no class of its own for a damaged file
        raise UserError(f"{path}: is no file of events ({str(error)[:200]})") from None


def read_wandb(folder: Path) -> Runs:
    """The runs of the .wandb files below a folder; a run that was resumed has several."""
    _check_installed("wandb", folder)
    runs: dict[str, tuple[dict[str, Any], Curves]] = {}
    for path in sorted(folder.rglob(WANDB)):
        _add_wandb(path, runs)
    drop_lone_group([facts for facts, _ in runs.values()])
    return Runs(str(folder), [held(*run) for run in runs.values()], "_step")


def drop_lone_group(facts: Sequence[dict[str, Any]]) -> None:
    """Take the group out of the facts of all runs if it tells no runs apart."""
    if len({each.get("group") for each in facts}) < 2:
        for each in facts:
            each.pop("group", None)


def _add_wandb(path: Path, runs: dict[str, tuple[dict[str, Any], Curves]]) -> None:
    facts, curves = {}, {}
    try:
        for record in records(path.read_bytes()):
            match record.WhichOneof("record_type"):
                case "run":
                    named = {"name": record.run.display_name or record.run.run_id, "group": record.run.run_group}
                    facts, curves = runs.setdefault(record.run.run_id, ({}, {}))
                    facts |= {name: text for name, text in named.items() if text}
                    facts |= plain(items(record.run.config.update))
                case "config":
                    facts |= plain(items(record.config.update))
                case "history":
                    _add_history(items(record.history.item), curves)
    except Exception as error:  # protobuf and JSON, each with errors of its own
        raise UserError(f"{path}: is no file of W&B ({str(error)[:200]})") from None


def records(data: bytes) -> Iterator[Any]:
    """The records of a .wandb file, protobuf in LevelDB's log framing, up to the end or to a torn tail."""
    from wandb.proto import wandb_internal_pb2 as pb

    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        chunk = data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind == 0 or len(chunk) < length:
            return
        parts = chunk if kind in (FULL, FIRST) else parts + chunk
        if kind in (FULL, LAST):
            yield pb.Record.FromString(parts)


def items(entries: Iterable[Any]) -> dict[str, Any]:
    """Key -> value of a record's entries."""
    return {entry.key or ".".join(entry.nested_key): loads(entry.value_json) for entry in entries}


def _add_history(row: Mapping[str, Any], curves: Curves) -> None:
    step = row.get("_step", 0)
    for name, value in row.items():
        if name == "_step":
            continue
        if (number := number_of(value)) is not None:
            curves.setdefault(name, {})[step] = number


def number_of(value: Any) -> float | None:
    """The number that a cell of JSON is, by the texts of W&B and trackio for what JSON lacks; None for anything
    else."""
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value.replace("Infinity", "inf"))
    return value if type(value) in (int, float) else None


def plain(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of a config that are texts or numbers, by their dotted paths. A value is at times {"value": it}."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            value = value["value"] if set(value) == {"value", "desc"} else value
        if isinstance(value, Mapping):
            leaves |= plain(value, f"{path}{key}.")
        elif type(value) in (str, int, float):
            leaves[f"{path}{key}"] = value
    return leaves


def _check_installed(package: str, folder: Path) -> None:
    if find_spec(package) is None:
        raise UserError(f"{folder}: reading it takes the package {package}; pip install 'hqsweep[{package}]'")


def sweep_source(folder: Path) -> Runs:
    """The finished runs of a sweep as logs."""
    return runs_source(runs_in(folder), str(folder))


def runs_source(runs: Iterable[RunDir], where: str) -> Runs:
    """The finished runs as logs; left_out has a sentence on each other one. UserError where none has finished."""
    ours, strangers = known(runs)
    read, left_out = [], [stranger(run).line for run in strangers]
    for run in ours:
        status = run.seen()
        if status["state"] != "finished":
            why = f" ({status['reason']})" if status["reason"] else ""
            left_out.append(f"{run.name} is {status['state']}{why}.")
        elif (logged := _logged(run)) is not None:
            read.append(logged)
    if not read:
        raise UserError(f"{where}: no run has finished; {left_out[0] if left_out else 'there is none'}")
    return Runs(where, read, "step", tuple(left_out))


def _logged(run: RunDir) -> Run | None:
    """A finished run; None for a trunk, which is of no arm."""
    manifest, fork = run.manifest(), run.fork()
    if fork is not None and fork.is_trunk:
        return None
    rows: dict[str, dict[float, float]] = {}
    for row in run.rows("metrics"):
        rows.setdefault(row["metric"], {})[row["step"]] = row["value"]
    facts = {"arm": manifest["arm"], "seed": manifest["seed"]}
    if fork is not None:
        facts |= {"trunk": manifest["trunk"], "point": manifest["point"]}
    return Run(facts=facts, metrics=list(rows), curve=partial(_curve, rows))


def _curve(rows: Mapping[str, Mapping[float, float]], metric: str) -> Mapping[float, float]:
    return rows.get(metric, {})
