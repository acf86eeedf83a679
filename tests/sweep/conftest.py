"""A run store, and sweeps of fake runs that do what their config's `do` says."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hqsweep.sweep.store.names import run_name
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore


def plan(do: str = "quick", seed: int = 0, recipe: str = "mxfp8", **extra: object) -> SimpleNamespace:
    """One planned run; fork=... is that section of its config."""
    config = {"job": "convergence", "sweep": "fakes", "runs_dir": "runs", "seed": seed, "recipe": {"name": recipe},
              "engine": {"workers": 1}, "track": {"kind": "none"}, "do": do, "train": {}, **extra}  # fmt: skip
    return SimpleNamespace(config=config, arm=recipe, overrides=[f"seed={seed}"])


@pytest.fixture
def planned() -> Callable[..., SimpleNamespace]:
    return plan


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


@pytest.fixture
def make_runs(store: RunStore) -> Callable[..., list[RunDir]]:
    """make_runs("quick", "segv", ...) -> run folders of the sweep "fakes", seed 0, 1, ..."""

    def make(*does: str, **how: object) -> list[RunDir]:
        runs = [plan(do, seed) for seed, do in enumerate(does)]
        return store.create(sweep="fakes", conf="fakes", overrides=[], runs=runs, **how)

    return make


@pytest.fixture
def make_forks(store: RunStore) -> Callable[..., list[RunDir]]:
    """make_forks("trunk", "quick", ..., seeds=1) -> for every seed a trunk with points 1 and 2, which does the first
    word, and for each further word a fork at either point: trunks first, then the forks of seed 0."""

    def make(trunk: str, *does: str, seeds: int = 1) -> list[RunDir]:
        section = {"at": [1, 2], "steps": 1, "decay": 1, "warmup": 0, "trunk": None}
        trunks = [plan(trunk, seed, "trunk", fork=section) for seed in range(seeds)]
        forks = [
            plan(do, each.config["seed"], f"arm{i}", fork=section | {"at": [at], "trunk": run_name(each.config)})
            for each in trunks for i, do in enumerate(does) for at in (1, 2)
        ]  # fmt: skip
        return store.create(sweep="fakes", conf="fakes", overrides=[], runs=[*trunks, *forks])

    return make
