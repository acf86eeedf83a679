"""A laboratory in which runs cost nothing: real plans and run folders, and losses by a formula."""

import math
from pathlib import Path

import numpy as np
import pytest

from hqsweep.config.job import parse
from hqsweep.study import sequential
from hqsweep.study.noise import parameters
from hqsweep.sweep.engine import launch
from hqsweep.sweep.engine.launch import SweepPlan
from hqsweep.sweep.grid.run_words import with_seeds
from hqsweep.sweep.store.files import encode_rows
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

TINY = [
    "conf=convergence", "data=markov", "data.markov.length=4096", "model.dim=32", "model.layers=1", "model.heads=2",
    "train.steps=100", "train.batch=2", "train.context=32", "train.device=cpu", "stats.every=0", "track=none",
]  # fmt: skip
LOSS = 2.0
TOKENS_OF_A_STEP = 2 * 32


class Laboratory:
    """`gaps`: arm -> (mean, sd) of its gap in nats to a baseline of LOSS; `failing`, `diverging` and `late` (not
    started, as the time is over): names of runs by their beginning.
    `batches` has the seeds of the runs that were done, a list a start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gaps: dict[str, tuple[float, float]] = {}
        self.failing: set[str] = set()
        self.diverging: set[str] = set()
        self.late: set[str] = set()
        self.batches: list[list[str]] = []
        self.said: list[str] = []

    def done(self) -> set[str]:
        """All runs that were done, without their ids."""
        return {name for batch in self.batches for name in batch}

    def plan(self, *words: str) -> SweepPlan:
        """The plan of a tiny sweep; words win over those of TINY."""
        by_key = {word.partition("=")[0]: word for word in (*TINY, f"runs_dir={self.folder / 'runs'}", *words)}
        return launch.plan([*by_key.values()])

    def grow(self, *words: str, force: bool = False) -> sequential.Growth:
        return sequential.grow(
            self.plan(*words), lambda seeds: self.plan(*with_seeds(words, seeds)), self.start,
            say=self.said.append, force=force,
        )  # fmt: skip

    def start(self, plan: SweepPlan, force: bool) -> list[RunDir]:
        """launch.start with runs that are done at once."""
        runs = launch_folders(plan)
        due = [run for run in runs if force or run.status()["state"] != "finished"]
        self.batches.append([run.name.rpartition("-")[0] for run in due])
        for run in due:
            self.work(run)
        return runs

    def work(self, run: RunDir) -> None:
        if any(run.name.startswith(start) for start in self.late):
            return
        if any(run.name.startswith(start) for start in self.failing):
            run.write_status(state="failed", reason="RuntimeError: out of luck", exit_code=3)
            return
        if any(run.name.startswith(start) for start in self.diverging):
            run.jsonl("metrics").write_bytes(encode_rows([{"step": 7, "metric": "train_loss", "value": math.nan}]))
            run.write_status(state="failed", reason="loss is nan at step 7", exit_code=3)
            return
        config, manifest = run.config(), run.manifest()
        steps, (mean, sd) = config["train"]["steps"], self.gaps.get(manifest["arm"], (0.0, 0.0))
        start = parse(config).start
        noise = np.random.default_rng([config["seed"], start, *manifest["arm"].encode()]).normal()
        loss = LOSS + 0.1 * np.random.default_rng(config["seed"]).normal() + mean + sd * noise
        rows = [
            {"step": step, "metric": metric, "value": loss}
            for step in np.linspace(start, steps, 11, dtype=int)[1:].tolist()
            for metric in ("train_loss", "val_loss")
        ]
        run.jsonl("metrics").write_bytes(encode_rows(rows))
        run.update_manifest(data_hash=config["data"]["hash"], device="cpu", tokens=steps * 64, gemm_plan={})
        progress = {"step": steps, "steps": steps, "loss": loss, "tokens_per_s": 64.0, "eta_s": 0.0}
        run.write_status(state="finished", exit_code=0, seconds=(steps - start) * 1.0, progress=progress)


def launch_folders(plan: SweepPlan) -> list[RunDir]:
    """What launch.start does before its engine."""
    launch.check_stated(RunStore(Path(plan.first.runs_dir)), plan.first.sweep, plan.study)
    study = plan.study.model_dump(mode="json")
    return RunStore(Path(plan.first.runs_dir)).create(
        sweep=plan.first.sweep, conf=plan.conf, overrides=plan.words, runs=plan.points, study=study
    )


@pytest.fixture
def laboratory(tmp_path: Path) -> Laboratory:
    return Laboratory(tmp_path)


@pytest.fixture
def row(laboratory):
    """row(**changes) -> a row of the registry, of the laboratory's model and data."""

    def make(**changes):
        config = laboratory.plan("recipe=bf16,mxfp8,nvfp4", "null_arm=true", "seed=0").first
        arm = {"sd": 0.02, "gap_pct": 1.0}
        return {
            "model": config.model.model_dump(mode="json"), "params": parameters(config),
            "data": config.data.model_dump(mode="json"), "data_hash": config.data.hash,
            "tokens": 100 * TOKENS_OF_A_STEP,
            "design": "whole run", "points": 1, "baseline": "bf16", "sd": 0.02, "sd_pct": 1.0,
            "arms": {"mxfp8": {"sd_pct": 0.6, "null": False, **arm}, "nvfp4": {"sd_pct": 1.3, "null": False, **arm},
                     "null": {"sd_pct": 0.1, "null": True, **arm}},
            "replicates": 4, "run_tokens": 100 * TOKENS_OF_A_STEP, "trunk_tokens": 0, "seconds": 400.0, "arms_run": 4,
            "trained": True,
            "device": "cpu", "date": "2026-11-22", "sweeps": ["stdlib"], "runs": "0" * 64,
        } | changes  # fmt: skip

    return make
