"""Names of runs: each ends in the hash of everything in the resolved config that can change a number."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqsweep.config.jobs import COMPARED

NOT_IN_ID = ("sweep", "runs_dir", "engine", "track", "judge")
"""Top-level config keys that cannot change a number, so they do not make another run."""

ONE_RANK = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "ep": 1, "pp": 1, "stages_per_rank": 1}
NOT_IN_ID_AT = {
    "train": {
        "compile": "auto",
        "parallel": ONE_RANK,
        "optimizer": "adamw",
        "momentum": 0.95,
        "moments": "fp32",
    },
    "fork": {"source": None, "source_hash": None},
    "data": {"hash": None},
    "model": {"architecture": "causal", "loss": None, "router": "free"},
    "parity": {"ranks": []},
    "stats": {"what_if": []},
    "recipe": {"comm": None},
}
"""Section -> key -> the value with which it does not count for the id: runs from before the key existed keep their
ids."""

NOT_IN_TRUNK_ID = {
    "train": ("steps", "log_every", "eval_every", "eval_batches", "checkpoint_every"),
    "fork": ("at", "steps", "decay", "source"),
}  # fmt: skip
"""Section -> the keys that cannot change a number of a trunk's forks, so that other points, or another cadence, make no
other trunk; nor does `stats`."""


def fork_of(config: Mapping[str, Any]) -> Any:
    """The section fork of a run's config, a ForkConfig; None where the run is from scratch to its end."""
    section = config.get("fork")
    if section is None:
        return None
    from hqsweep.config.study import ForkConfig  # with pydantic, for which completion cannot wait

    return ForkConfig.model_validate(section)


def trunk_path(config: Mapping[str, Any], folder: Path) -> Path | None:
    """The checkpoint that the fork in this run's folder starts from, whether it exists or not; None for all other
    runs."""
    fork = fork_of(config)
    return fork and fork.state_path(folder, ranks_of(config))


def ranks_of(config: Mapping[str, Any]) -> int:
    """The number of processes of a run."""
    train = config.get("train") if config["job"] == "convergence" else None
    dims = (train or {}).get("parallel")
    if not dims:
        return 1
    from hqsweep.config.train import ParallelConfig  # with pydantic

    return ParallelConfig.model_validate(dims).world


def without_data_hash(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as in an earlier version, where the id of a run did not count the hash of its data."""
    data = config.get("data")
    return {**config, "data": {**data, "hash": None}} if isinstance(data, Mapping) else dict(config)


def data_seen(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str | None:
    """The hash of the data of a run, from its manifest or its config; None for a run of an early version without
    either."""
    section = config.get("data")
    return manifest.get("data_hash") or (section.get("hash") if isinstance(section, Mapping) else None)


def run_id(config: Mapping[str, Any]) -> str:
    """The hex sha256 of the canonical JSON (sorted keys, no spaces) of the resolved config without NOT_IN_ID and what
    NOT_IN_ID_AT names; for a trunk also without NOT_IN_TRUNK_ID. Data and models count by their hashes, where these are
    known, and not by their paths."""
    content = {key: value for key, value in config.items() if key not in NOT_IN_ID}
    dims = (content.get("train") or {}).get("parallel")
    if dims:
        dims = {key: value for key, value in dims.items() if (key, value) != ("expert_room", None)}
        content["train"] = {**content["train"], "parallel": dims}
    for name, values in NOT_IN_ID_AT.items():
        if content.get(name):
            content[name] = {key: v for key, v in content[name].items() if key not in values or v != values[key]}
    model = content.get("model")
    if isinstance(model, Mapping) and model.get("hash"):
        content["model"] = {**model, "path": None}  # wherever the folder lies
    data = content.get("data")
    if isinstance(data, Mapping) and data.get("hash"):
        content["data"] = {**data, "path": None}
    fork = fork_of(config)
    if fork is None:
        content.pop("fork", None)
    elif fork.is_trunk:
        content.pop("stats", None)
        for name, keys in NOT_IN_TRUNK_ID.items():
            content[name] = {key: value for key, value in content[name].items() if key not in keys}
    elif fork.trunk_hash:
        content["fork"] = content["fork"] | {"trunk": None}  # wherever the file lies
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def run_name(config: Mapping[str, Any], arm: str | None = None) -> str:
    """Return `<arm>-s<seed>-<first 10 hex digits of the run id>`.

    A parity run is called parity, a trunk trunk. A fork has its point before the id: nvfp4-s0-at400-1f2e3d4c5b. arm:
    None is the recipe's name.
    """
    label = (arm or config["recipe"]["name"]) if config["job"] in COMPARED else config["job"]
    fork = fork_of(config)
    label = "trunk" if fork and fork.is_trunk else re.sub(r"[^A-Za-z0-9._+-]", "_", label)
    point = f"-at{fork.start}" if fork and not fork.is_trunk else ""
    return f"{label}-s{config['seed']}{point}-{run_id(config)[:10]}"


def id_in(name: str) -> str:
    """The digits of the run id at the end of a run's name, by which a run is found again whatever its arm is called."""
    return name.rpartition("-")[2]
