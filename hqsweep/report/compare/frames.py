"""Run folders to tidy pandas frames: the one place where the report reads files.

runs     one row per run: run, sweep, arm, recipe, seed, job, design, trunk, point, draw, state, reason, diverged, step,
         steps, seconds, tokens_per_s, run_id, config_id, data_seen, path, every leaf of the resolved config
         (`config.train.lr`) and of the manifest (`manifest.device`); diverged: a loss of the run is NaN or infinite;
         config_id: the run_id without the hash of the data; data_seen: that hash, None where nothing says it
metrics  long: run, arm, seed, step, metric, value (float64; NaN and inf as they came)
stats    long: run, arm, seed, then the columns of stats.jsonl (SQNR in dB, underflow and saturation in %;
         tokens and load, over the mean of all, where layer is an expert and tensor is routed)
what_if  the same for the formats of stats.what_if
parity   the rows of parity.jsonl, as dicts, of all runs that have some

design is "whole run" (from scratch), "trunk" or "fork". trunk names the replicate: a fork's trunk, a trunk itself,
"seed 0" of a whole run. point is the step at which a fork leaves its trunk, 0 otherwise; draw is the point as text,
with the seed where one trunk is forked with several.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hqsweep.config.jobs import TABLES
from hqsweep.errors import Damaged, UserError
from hqsweep.report.compare.left_out import LeftOut, damaged, stranger
from hqsweep.sweep.store.documents import Trained, check_document
from hqsweep.sweep.store.files import REPAIRED
from hqsweep.sweep.store.names import NOT_IN_ID, data_seen, run_id, without_data_hash
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.seal import SMALL, Files
from hqsweep.sweep.store.store import known as listed
from hqsweep.train.corpus import SHOWN_DIGITS

WHOLE, TRUNK, FORK = "whole run", "trunk", "fork"
DECIDES = {"whole run": "val", "fork": "train"}
"""Design -> the loss whose gap decides: final val_loss, or train_loss over the decay (the same fresh batches in every
arm, and the quieter one)."""
LOSSES = {"val": "final_loss", "train": "train_loss"}
"""Loss -> its column in the rows of curves.measures."""
REPLICATE = ("trunk", "seed", "point")
"""The columns that are equal in the runs of two arms that saw the same weights and batches."""
PLACE = ("config.fork.at", "config.fork.trunk", "config.fork.trunk_hash")
"""The keys that say where a fork leaves which trunk; they make no other arm, as the seed does not."""
DATA, DATA_PLACES = "data_seen", ("config.data.path", "config.data.hash")
"""The column of the hash of the data, and the keys that stand for it where it is known."""
ENERGY = "manifest.system.joules_per_token"
"""The column of the energy of GPUs, in J a token, where it was measured."""
FORK_STEPS = "config.train.steps"
"""The key of a fork's steps, which follow from where it leaves its trunk."""
FORK_CONSTANT, FORK_DECAY = "config.fork.steps", "config.fork.decay"


@dataclass(frozen=True, kw_only=True)
class Frames:
    """The rows of a set of runs; columns as the module says."""

    runs: pd.DataFrame
    metrics: pd.DataFrame
    stats: pd.DataFrame
    what_if: pd.DataFrame = field(default_factory=pd.DataFrame)
    parity: tuple[Mapping[str, Any], ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    """The runs that should have been read and are missing, damaged or no runs of their sweep, so that no rows of them
    are here."""

    def of_job(self, job: str) -> "Frames":
        """Only the runs of this job, and the parity rows of every run; raises UserError when there is none."""
        runs = self.runs[self.runs["job"] == job]
        if runs.empty:
            came = ", ".join(f"{count} {name}" for name, count in self.runs["job"].value_counts().items())
            raise UserError(f"runs: no {job} run among them (came: {came}); give runs of a {job} job")
        return self.only(runs)

    def of_design(self) -> tuple["Frames", "Frames"]:
        """(runs to compare, trunks): the runs are whole runs or forks. Raises UserError for both, or for neither."""
        counts = self.runs["design"].value_counts()
        came = ", ".join(f"{count} {design}{'s' * (count > 1)}" for design, count in counts.items())
        if not set(counts.index) - {TRUNK}:
            raise UserError(f"runs: nothing but trunks among them (came: {came}); give the forks of a fork study")
        if {WHOLE, FORK} <= set(counts.index):
            raise UserError(f"runs: whole runs and forks among them (came: {came}); compare the one or the other")
        trunk = self.runs["design"] == TRUNK
        return self.only(self.runs[~trunk]), self.only(self.runs[trunk])

    def only(self, runs: pd.DataFrame) -> "Frames":
        """The rows of some of the runs, and the parity rows of every run."""
        keep = set(runs["run"])
        return Frames(
            runs=runs.reset_index(drop=True),
            metrics=self.metrics[self.metrics["run"].isin(keep)],
            stats=self.stats[self.stats["run"].isin(keep)],
            what_if=self.what_if[self.what_if["run"].isin(keep)] if len(self.what_if) else self.what_if,
            parity=self.parity,
            left_out=self.left_out,
        )


def flatten(tree: dict, prefix: str) -> dict[str, object]:
    """Leaves of a nested dict under dotted names; a list becomes one JSON string, so that every cell is a scalar."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}"
        if isinstance(value, dict):
            leaves |= flatten(value, name)
        else:
            leaves[name] = json.dumps(value) if isinstance(value, list) else value
    return leaves


def load(run_dirs: Iterable[RunDir]) -> Frames:
    """Read runs (in this order) into frames. Of runs with one id and the same data, which differ in nothing, a finished
    one is taken. Runs whose files cannot be trusted are left out.

    Raises UserError when there is none, Damaged when none is left.
    """
    read, faults = {}, []
    runs, foreign = listed(run_dirs)
    for run in runs:
        try:
            row, *tables = _read(run)
        except Damaged as fault:
            faults.append((run, fault))
            continue
        key = row["run_id"] or row["run"], row["data_seen"]
        if key not in read or read[key][0]["state"] != "finished":
            read[key] = row, *tables
    read = _begun(read)
    if not read and faults:
        raise faults[0][1]
    if not read:
        raise UserError("runs: no run to read; give the names of runs or sweeps, as `hqsweep ls` lists them")
    runs = unique_arms(pd.DataFrame([row for row, *_ in read.values()]))
    forks = runs[runs["design"] == FORK]
    several = runs["trunk"].isin(forks.groupby("trunk")["seed"].nunique().loc[lambda seeds: seeds > 1].index)
    runs["draw"] = [
        f"{point} seed {seed}" if more else str(point)
        for point, seed, more in zip(runs["point"], runs["seed"], several, strict=True)
    ]
    runs = runs.astype(dict.fromkeys(("step", "steps", "seconds", "tokens_per_s"), "float64")).copy()  # in one piece
    metrics = _long(runs, [rows for _, rows, *_ in read.values()], "metrics")
    metrics = metrics.drop_duplicates(["run", "step", "metric"], keep="last", ignore_index=True)
    stats = _long(runs, [rows for _, _, rows, *_ in read.values()], "stats")
    what_if = _long(runs, [rows for *_, rows, _ in read.values()], "what_if")
    broken = metrics[~metrics["metric"].eq("grad_norm") & ~np.isfinite(metrics["value"])]
    diverged = runs["run"].isin(broken["run"]) | runs["reason"].astype(str).str.startswith("loss is ")
    # An insertion into a frame of over a hundred columns of text, as a config has, warns.
    runs = pd.concat([runs, diverged.rename("diverged")], axis=1)
    parity = tuple(row for *_, rows in read.values() for row in rows)
    left_out = (*(damaged(*fault) for fault in faults), *map(stranger, foreign))
    return Frames(runs=runs, metrics=metrics, stats=stats, what_if=what_if, parity=parity, left_out=left_out)


def _begun(read: Mapping[tuple[str, str | None], Any]) -> dict[tuple[str, str | None], Any]:
    """(id, data) -> a run, without copies that have read no data yet of runs that are there."""
    known = {name for name, data in read if data is not None}
    return {
        (name, data): run
        for (name, data), run in read.items()
        if data is not None or name not in known or run[0]["state"] == "finished"
    }


class SealedOnce(RunDir):
    """A run whose seal is read once, and then holds for all of its files; so are the documents of one that has
    ended."""

    def sealed(self) -> Files | None:
        return self._files

    @cached_property
    def _files(self) -> Files | None:
        return super().sealed()

    @cached_property
    def _documents(self) -> dict[str, bytes | None]:
        return {}

    def _bytes(self, path: Path) -> bytes | None:
        name, goes_on = path.name, self.__dict__.get("_files", ...) is None
        if goes_on or name not in SMALL:
            return super()._bytes(path)
        if name not in self._documents:
            self._documents[name] = super()._bytes(path)
        return self._documents[name]


def _read(folder: RunDir) -> tuple[dict, list[dict], list[dict], list[dict], list[dict]]:
    """One row of `runs`, and the run's rows of metrics, stats, what_if and parity. Raises Damaged."""
    run = SealedOnce(folder.path)
    return run_row(run), *(run.rows(table) for table in ("metrics", "stats", "what_if", "parity"))


def run_row(run: SealedOnce) -> dict[str, Any]:
    """One row of `runs`. Raises Damaged."""
    status, config, manifest = run.status(), run.config(), run.manifest()
    if run.sealed() is None and manifest["run_id"] != run_id(config):
        raise Damaged(run.config_path, "is the config of another run than the manifest beside it", REPAIRED)
    try:
        return _row(run, config, manifest, status)
    except Damaged:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise Damaged(run.config_path, "is not the config of a run", REPAIRED) from None


def _row(run: RunDir, config: dict, manifest: dict, status: dict) -> dict[str, Any]:
    """One row of `runs`."""
    progress = status["progress"] or {}
    if config["job"] == "convergence":
        check_document(run.config_path, config["train"], Trained)
    recipe = (config.get("recipe") or {}).get("name", config["job"])
    row: dict[str, Any] = {
        "run": f"{run.sweep}/{run.name}",
        "sweep": run.sweep,
        "arm": manifest.get("arm", recipe),
        "recipe": recipe,
        "seed": config["seed"],
        "job": config["job"],
        **_place(config, manifest, run.name),
        "state": status["state"],
        "reason": status["reason"],
        "step": progress.get("step"),
        "steps": progress.get("steps"),
        "seconds": status["seconds"],
        "tokens_per_s": progress.get("tokens_per_s"),
        "run_id": manifest.get("run_id"),
        "config_id": run_id(without_data_hash(config)) if _hashed(config) else manifest.get("run_id"),
        "data_seen": data_seen(config, manifest),
        "path": str(run.path),
    }
    plans = {"gemm_plan": manifest.get("gemm_plan", {}), "recipe_schedule": manifest.get("recipe_schedule", [])}
    leaves = manifest | {key: json.dumps(plan) for key, plan in plans.items()}  # one cell, not one for every GEMM
    leaves.pop("diff", None)
    return row | flatten(config, "config") | flatten(leaves, "manifest")


def _hashed(config: dict) -> bool:
    """Whether the hash of the data is a part of a run's id; it is not in runs of earlier versions."""
    return bool((config.get("data") or {}).get("hash"))


def _place(config: dict, manifest: dict, name: str) -> dict[str, Any]:
    """The cells design, trunk and point; draw is filled in when all runs are known."""
    fork = config.get("fork")
    if not fork:
        return {"design": WHOLE, "trunk": f"seed {config['seed']}", "point": 0, "draw": ""}
    if fork["trunk"] is None:
        return {"design": TRUNK, "trunk": name, "point": 0, "draw": ""}
    return {"design": FORK, "trunk": manifest.get("trunk") or fork["trunk"], "point": fork["at"][0], "draw": ""}


def _long(runs: pd.DataFrame, rows: list[list[dict]], table: str) -> pd.DataFrame:
    """The rows of all runs in one frame, led by run, arm and seed."""
    columns = TABLES[table]
    flat = [row for part in rows for row in part]
    values = pd.DataFrame({name: [row.get(name) for row in flat] for name in columns})
    whose = runs.loc[runs.index.repeat([len(part) for part in rows]), ["run", "arm", "seed"]]
    frame = pd.concat([whose.reset_index(drop=True), values], axis=1)
    numbers = [name for name, kind in columns.items() if kind is float]
    return frame.astype(dict.fromkeys(numbers, "float64") | {"step": "int64"})


def by_module(stats: pd.DataFrame) -> pd.DataFrame:
    """The rows with `module`, their layer without the number of an expert, and `expert`, that number (float64, NaN
    where there is none): layers.0.mlp.fc1.3 is expert 3 of layers.0.mlp.fc1."""
    names = pd.Series(stats["layer"].unique(), dtype=object)  # few, where rows are many
    parts = names.str.extract(r"^(.*?)(?:\.(\d+))?$").set_index(names)
    module, expert = (stats["layer"].map(parts[part]) for part in parts)
    return stats.assign(module=module.astype(object), expert=expert.astype("float64"))


def unique_arms(runs: pd.DataFrame) -> pd.DataFrame:
    """Make (arm, seed, point) unique. Where runs of one share it (a sweep repeated with another config, or two sweeps),
    labels get " key=value" for every config leaf in which the runs differ, and for their data: for leaves of the recipe
    only these arms, for others all arms."""
    meets = runs.duplicated(["arm", "seed", "point"], keep=False)
    if not meets.any():
        return runs
    leaves = [*config_leaves(runs), DATA]
    differing = [name for name in leaves if (runs[meets].groupby("arm")[name].nunique(dropna=False) > 1).any()]
    clashing = runs["arm"].isin(set(runs.loc[meets, "arm"]))
    for name in differing:
        key = "data.hash" if name == DATA else name.removeprefix("config.")
        stated = runs[name].map(_stated)
        marked = runs["arm"] + f" {key}=" + (stated.str[:SHOWN_DIGITS] if name == DATA else stated)
        runs["arm"] = marked.where(clashing | (not name.startswith("config.recipe.")), runs["arm"])
    return runs


def _stated(value: object) -> str:
    """A value as a config states it: a column of numbers has NaN for null."""
    return "null" if value is None or value != value else str(value)


def common_end(runs: pd.DataFrame) -> int | None:
    """The step at which all forks among `runs` end, if they do so together, with one decay, and begin at several steps;
    None elsewhere."""
    forks = runs[runs["design"] == FORK]
    if forks.empty or forks["point"].nunique() < 2 or forks[FORK_DECAY].nunique() > 1:
        return None
    ends = (forks["point"] + forks[FORK_CONSTANT] + forks[FORK_DECAY]).unique()
    return int(ends[0]) if len(ends) == 1 else None


def config_leaves(runs: pd.DataFrame) -> list[str]:
    """The columns of the config that can make another run of the same arm and seed."""
    apart, places = ("seed", *NOT_IN_ID), PLACE if (runs["design"] == WHOLE).any() else (*PLACE, FORK_STEPS)
    places += (FORK_CONSTANT,) if common_end(runs) else ()
    places += DATA_PLACES if runs[DATA].notna().all() else DATA_PLACES[1:]
    names = [name for name in runs.columns if name.startswith("config.") and name.split(".")[1] not in apart]
    return [name for name in names if name not in places]
