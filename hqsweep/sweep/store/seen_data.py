"""The data of runs, by the hash of their content: it is read once a sweep, before anything starts, and becomes a part
of the id of each run. A run of an earlier version, which did without, keeps its id, and its manifest has the hash.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hqsweep.config.job import Config, ConvergenceConfig
from hqsweep.config.train import DataConfig, FactoryDataConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.sweep.store.names import data_seen, run_id, without_data_hash
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.train import data
from hqsweep.train.corpus import SHOWN_DIGITS, where
from hqsweep.train.record import ID_DIGITS

FEW_RUNS = 3
"""The number of runs up to which a line names them."""


def hashed(configs: Sequence[Config]) -> list[Config]:
    """The configs with the hashes of their data, which are read once for each section `data`.

    UserError for data that cannot be read, or are others than the config says.
    """
    hashes: dict[Any, str] = {}
    done = []
    for config in configs:
        if not isinstance(config, ConvergenceConfig):
            done.append(config)
            continue
        if isinstance(config.data, FactoryDataConfig) and not config.data.is_imported:
            done.append(config)
            continue
        plain = config.data.model_copy(update={"hash": None})
        if plain not in hashes:
            hashes[plain] = data.load(plain).hash
        found, stated = hashes[plain], config.data.hash
        if stated not in (None, found):
            raise UserError(
                f"data.hash: {stated[:SHOWN_DIGITS]} is given, but {where(plain).partition(': ')[2]} have"
                f" {found[:SHOWN_DIGITS]}; give the data that belong to it, or leave it out"
            )
        done.append(config.model_copy(update={"data": plain.model_copy(update={"hash": found})}))
    return done


def of_before(config: Config, there: Iterable[str]) -> Config:
    """Return the config without the hash of its data, if the sweep has this run from before hashes were part of ids.

    there: the ends of the names of its runs (RunStore.ids).
    """
    if not (isinstance(config, ConvergenceConfig) and there):
        return config
    dump = config.model_dump(mode="json")
    if run_id(dump)[:ID_DIGITS] in there or run_id(without_data_hash(dump))[:ID_DIGITS] not in there:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"hash": None})})


def settings_of(section: Mapping[str, Any]) -> str:
    """The entries of a section `data`, without path and hash."""
    return json.dumps({key: value for key, value in section.items() if key not in ("path", "hash")}, sort_keys=True)


def check_data(store: RunStore, sweep: str, configs: Iterable[Config]) -> None:
    """Raise UserError if a run of the sweep has read other data than these configs lead to now (hashed()).

    Runs and configs are matched by equal settings.
    """
    now: dict[str, dict[str, ConvergenceConfig]] = {}
    for config in configs:
        if isinstance(config, ConvergenceConfig):
            now.setdefault(settings_of(config.data.model_dump(mode="json")), {})[config.data.hash] = config
    hashes = {known for of_settings in now.values() for known in of_settings}
    for run in _listed(store, sweep):
        with suppress(Damaged):  # which is repeated, or named by whoever reads it
            manifest = run.manifest()
            if not now or manifest["job"] != "convergence" or manifest.get("data_hash") in hashes:
                continue
            config = run.config()
            seen, wanted = data_seen(config, manifest), now.get(settings_of(config.get("data") or {}))
            if wanted and seen is not None and seen not in wanted:
                found, first = next(iter(wanted.items()))
                raise UserError(
                    f"{where(first.data)} have other content (hash {found[:SHOWN_DIGITS]}) than runs of the sweep"
                    f" '{sweep}' have read (hash {seen[:SHOWN_DIGITS]}, {run.name}), and no sweep mixes data; give"
                    " another sweep=NAME, or put the old data back"
                )


def _listed(store: RunStore, sweep: str) -> list[RunDir]:
    try:
        return store.runs(sweep)
    except Damaged:  # a list that the next run makes again
        return []


@dataclass(frozen=True, kw_only=True)
class SeenData:
    """Data that runs have read: their source, their path, their hash at that time, and their present state.

    hash: None if no manifest has it. state: "same", "changed" (`now` has the new hash), "gone", "unreadable" (`why` has
    the reason), or "unknown".
    """

    source: str
    path: str | None
    hash: str | None
    state: str
    now: str | None = None
    why: str | None = None
    runs: tuple[str, ...]

    @property
    def line(self) -> str:
        """A line such as: text corpus, hash 1f2e3d4c5b, was read by 4 runs, and is there as it was."""
        place = f"{self.source} {self.path}" if self.path else self.source
        known = f"hash {self.hash[:SHOWN_DIGITS]}" if self.hash else "of unknown content, as no manifest has its hash"
        count = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        few = f" ({', '.join(self.runs)})" if len(self.runs) <= FEW_RUNS else ""
        ends = {
            "same": "and is there as it was", "gone": "and is not there any more", "unreadable": f"and now: {self.why}",
            "changed": f"and has other content now (hash {(self.now or '')[:SHOWN_DIGITS]})",
            "unknown": f"and has hash {(self.now or '')[:SHOWN_DIGITS]} now",
        }  # fmt: skip
        return f"data {place}, {known}, read by {count}{few}, {ends[self.state]}"


def seen_by(runs: Iterable[RunDir]) -> list[SeenData]:
    """The data that these runs have read, or are to read. The present data are read once for each section `data`. Runs
    with unreadable files are left out here."""
    readers: dict[tuple[str, str | None], list[str]] = {}
    for run in runs:
        with suppress(Damaged, UserError):
            config = run.config()
            if config["job"] == "convergence" and isinstance(section := config.get("data"), dict):
                plain = json.dumps({key: value for key, value in section.items() if key != "hash"}, sort_keys=True)
                seen = data_seen(config, run.manifest())
                readers.setdefault((plain, seen), []).append(f"{run.sweep}/{run.name}")
    now: dict[str, dict[str, Any]] = {}
    found = []
    for (plain, seen), names in readers.items():
        there = now.get(plain) or now.setdefault(plain, _now(json.loads(plain)))
        if "now" in there:
            there = there | {"state": "unknown" if seen is None else "same" if seen == there["now"] else "changed"}
        section = json.loads(plain)
        place = {"source": section.get("source", "stdlib"), "path": section.get("path")}
        found.append(SeenData(**place, hash=seen, runs=tuple(names), **there))
    return found


def _now(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the present hash of the data of a section `data`, or the state that prevents one."""
    path = section.get("path")
    if section.get("source") == "factory":
        return {
            "state": "unreadable",
            "why": f"{section.get('target')} is a Python function, which is not imported here",
        }
    if path is not None and not Path(path).exists():
        return {"state": "gone"}
    try:
        return {"now": data.load(DataConfig.model_validate(section)).hash}
    except (UserError, Damaged, ValidationError, OSError) as error:
        return {"state": "unreadable", "why": " ".join(str(error).split())}
