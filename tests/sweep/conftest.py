"""A run store, and sweeps of fake runs that do what their config's `do` says."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hqsweep.sweep.store import RunDir, RunStore


def plan(do: str = "quick", seed: int = 0, recipe: str = "mxfp8", **extra: object) -> SimpleNamespace:
    """One planned run."""
    config = {"job": "convergence", "sweep": "fakes", "runs_dir": "runs", "seed": seed, "recipe": {"name": recipe},
              "engine": {"workers": 1}, "track": {"kind": "none"}, "do": do, **extra}  # fmt: skip
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

    def make(*does: str) -> list[RunDir]:
        runs = [plan(do, seed) for seed, do in enumerate(does)]
        return store.create(sweep="fakes", conf="fakes", overrides=[], runs=runs)

    return make
