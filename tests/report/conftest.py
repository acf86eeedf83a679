"""Synthetic sweeps on disk: the run-folder layout that the report reads, written without training anything."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from hqsweep.sweep.store import seal, sweep_file
from hqsweep.sweep.store.names import run_id
from hqsweep.sweep.store.run_dir import RunDir

STEPS, EVAL_EVERY, VOCAB_ENTROPY = 200, 20, 3.1
LAYERS = [f"layers.{i}.{part}" for i in range(2) for part in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")]
OPERANDS = [
    (tensor, direction) for tensor in ("input", "weight", "grad_output") for direction in ("rowwise", "columnwise")
]


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """One run folder to write: `gap` nats are added to the seed's loss curve, `sqnr_db` is the level of its
    statistics."""

    arm: str = "bf16"
    recipe: str | None = None  # recipe.name, when the arm's label holds more than it
    seed: int = 0
    gap: float = 0.0
    sqnr_db: float = 30.0
    state: str = "finished"
    reason: str | None = None
    steps: int = STEPS
    nan_from: int | None = None
    fmt: str = "mxfp8"
    threads: int = 2
    gemm: str = "exact fp32"
    schedule: tuple = ()
    init_noise: float = 0.0
    overrides: tuple = ()  # recipe.overrides
    trunk: str | None = None  # of a fork: its trunk's name; "" of a trunk itself
    point: int = 0
    end: int | None = None  # of a fork: the step at which it ends; None: FORK_STEPS + FORK_DECAY after its point
    falls: float = 0.0  # nats that a doubling of steps takes off a fork's loss at the constant rate
    course: Callable[[str, int, int], float] | None = None  # of (arm, seed, steps since the fork): a gap at that rate
    noise: float = 0.0  # fork.noise
    base: float = 2.0  # loss of the baseline's fork, in nats
    val_gap: float | None = None  # of a fork's val_loss; None: gap
    final: float | None = None  # of a whole run: its last val_loss
    seconds: float = 21.0
    workers: int | None = None
    data: str | None = "9f" * 8  # manifest.data_hash


def losses(run: FakeRun) -> np.ndarray:
    """Loss in nats at steps 1 to STEPS: a power law to about 2, shifted by the seed, plus the arm's gap (with a little
    seed noise of its own)."""
    step = np.arange(1, STEPS + 1)
    wobble = np.random.default_rng([run.seed, round(abs(run.gap) * 1e6)]).normal(0, 0.05 * abs(run.gap))
    shift = np.random.default_rng(run.seed).normal(0, 0.3)
    loss = 2 + 3.5 / np.sqrt(1 + step / 8) + shift + (run.gap + wobble) * step / STEPS
    return np.where(step >= (run.nan_from or STEPS + 1), math.nan, loss)


FORK_STEPS, FORK_DECAY = 20, 20


def fork_rows(run: FakeRun) -> list[dict]:
    """A fork logs every tenth step: 9 nats at the constant rate (less `falls` a doubling, more by `course` %), then
    exactly base + gap over the decay."""
    rows = []
    last = run.end or run.point + FORK_STEPS + FORK_DECAY
    for step in range(run.point + 10, last + 1, 10):
        value = 9.0 - run.falls * math.log2(step) if step <= last - FORK_DECAY else run.base + run.gap
        if run.course and step <= last - FORK_DECAY:
            value *= 1 + run.course(run.arm, run.seed, step - run.point) / 100
        rows.append({"step": step, "metric": "train_loss", "value": value})
    val_gap = run.gap if run.val_gap is None else run.val_gap
    rows.append({"step": step, "metric": "val_loss", "value": run.base + val_gap})
    return rows if run.state == "finished" else rows[:2]


def metric_rows(run: FakeRun) -> list[dict]:
    if run.trunk:
        return fork_rows(run)
    noise = np.random.default_rng([run.seed, 7]).normal(0, 0.08, STEPS)  # the same batches in every arm
    rows = []
    for step, loss, jitter in list(zip(range(1, STEPS + 1), losses(run), noise, strict=True))[: run.steps]:
        rows.append({"step": step, "metric": "train_loss", "value": loss + jitter})
        rows.append({"step": step, "metric": "lr", "value": 1e-3})
        if step % EVAL_EVERY == 0:
            exact = run.final is not None and step == STEPS
            rows.append({"step": step, "metric": "val_loss", "value": run.final if exact else loss})
    return rows


def stats_rows(run: FakeRun) -> list[dict]:
    rng, rows = np.random.default_rng([run.seed, 11]), []
    for step in range(100, run.steps + 1, 100):
        for layer in LAYERS:
            for tensor, direction in OPERANDS:
                sqnr = math.inf if run.fmt == "bf16" else run.sqnr_db + float(rng.normal(0, 1))
                rows.append(
                    {
                        "step": step,
                        "layer": layer,
                        "tensor": tensor,
                        "direction": direction,
                        "format": run.fmt,
                        "sqnr_db": sqnr,
                        "rel_l2": 0.03,
                        "cosine": 0.999,
                        "amax": 3.0,
                        "underflow_pct": 0.1,
                        "saturation_pct": 0.0,
                        "scale_min": 0.5,
                        "scale_max": 2.0,
                        "row_sqnr_db_median": sqnr,
                        "row_sqnr_db_p5": sqnr - 1,
                    }
                )
            for gemm in ("fprop", "dgrad", "wgrad"):
                rows.append(
                    {
                        "step": step,
                        "layer": layer,
                        "tensor": gemm,
                        "direction": "output",
                        "format": run.fmt,
                        "sqnr_db": run.sqnr_db - 3,
                        "rel_l2": 0.05,
                        "cosine": 0.998,
                        "amax": 9.0,
                        "underflow_pct": None,
                        "saturation_pct": None,
                        "scale_min": None,
                        "scale_max": None,
                        "row_sqnr_db_median": None,
                        "row_sqnr_db_p5": None,
                    }
                )
    return rows


_TABLES: dict[str, dict[str, str]] = {}


def tables_of(run: FakeRun) -> dict[str, str]:
    """The contents of the files of rows, made once for all tests."""
    key = repr(run)
    if key not in _TABLES:
        tables = {"metrics": metric_rows(run), "stats": stats_rows(run)}
        _TABLES[key] = {table: "".join(json.dumps(row) + "\n" for row in rows) for table, rows in tables.items()}
    return _TABLES[key]


def fork_section(run: FakeRun) -> dict | None:
    if run.trunk is None:
        return None
    steps = FORK_STEPS if run.end is None else run.end - FORK_DECAY - run.point
    section = {"steps": steps, "decay": FORK_DECAY, "warmup": 5, "trunk_hash": None, "noise": run.noise}
    return section | {"at": [run.point] if run.trunk else [40, 80], "trunk": run.trunk or None}


def write_run(sweep: Path, run: FakeRun) -> Path:
    recipe = run.recipe or run.arm
    digest = hashlib.sha256(repr(run).encode()).hexdigest()
    name = f"{''.join(c if c.isalnum() else '-' for c in recipe)}-s{run.seed}-{digest[:10]}"
    folder = sweep / name
    folder.mkdir(parents=True)
    config = {
        "job": "convergence",
        "sweep": sweep.name,
        "seed": run.seed,
        "runs_dir": str(sweep.parent),
        "recipe": {
            "name": recipe,
            "linear": {"input": run.fmt, "weight": run.fmt, "grad_output": run.fmt},
            "overrides": list(run.overrides),
        },
        "model": {"dim": 64, "layers": 2, "init_noise": run.init_noise},
        "train": {"steps": STEPS, "lr": 0.001, "batch": 4, "context": 32},
        "fork": fork_section(run),
        "engine": {"kind": "local", "workers": run.workers},
    }
    if run.trunk:
        config["train"]["steps"] = run.end or run.point + FORK_STEPS + FORK_DECAY
    manifest = {
        "run_id": digest,  # no two fakes are one run; a seal says that config and manifest belong together
        "sweep": sweep.name,
        "arm": run.arm,
        "seed": run.seed,
        "job": "convergence",
        "overrides": [f"seed={run.seed}"],
        "versions": {"torch": "2.13.0+cpu", "hqsweep": "0.1.0"},
        "commit": "0123abcd",
        "device": "cpu",
        "threads": run.threads,
        "isa": "avx2",
        "kernel_build": "-O3 -ffp-contract=off",
        "data_hash": run.data,
        "data": {"unigram_entropy_nats": VOCAB_ENTROPY},
        "gemm_plan": {layer: {"fprop": f"{run.fmt} x {run.fmt}: {run.gemm}"} for layer in LAYERS},
        "recipe_schedule": list(run.schedule),
        "params": 98304,
    } | ({"trunk": run.trunk, "point": run.point} if run.trunk else {})
    status = {
        "state": run.state,
        "reason": run.reason,
        "exit_code": 0 if run.state == "finished" else 1,
        "pid": 1,
        "host": "box",
        "attempt": 1,
        "started": 1.7e9,
        "ended": 1.7e9 + run.seconds,
        "seconds": run.seconds,
        "progress": {
            "step": run.steps,
            "steps": STEPS,
            "loss": 2.3,
            "tokens_per_s": 9500.0 - 1000 * (run.fmt != "bf16"),
            "eta_s": 0.0,
        },
    }
    (folder / "config.yaml").write_text(yaml.dump(config, Dumper=yaml.CSafeDumper))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for table, text in tables_of(run).items():
        (folder / f"{table}.jsonl").write_text(text)
    RunDir(folder).write_status(**status)  # which seals a run that has ended
    if RunDir(folder).sealed() is None:
        RunDir(folder).update_manifest(run_id=run_id(config))
    return folder


def seal_again(run: RunDir) -> None:
    """What stands in its folder now is what the run has put out."""
    run.write_status(state=run.written_status()["state"])


def take_back(run: RunDir) -> None:
    """The run was never started."""
    for name in ("metrics.jsonl", "stats.jsonl", "status.json", seal.FILE):
        (run.path / name).unlink(missing_ok=True)
    run.update_manifest(run_id=run_id(run.config()))


def write_sweep(folder: Path, runs: Sequence[FakeRun]) -> list[Path]:
    """Write `folder` as one sweep; returns its run folders in grid order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [write_run(folder, run) for run in runs]
    document = {
        "name": folder.name,
        "conf": "synthetic",
        "overrides": [],
        "runs": [path.name for path in paths],
        "arms": list(dict.fromkeys(run.arm for run in runs)),
        "created": "2026-01-01T00:00:00",
    }
    sweep_file.write(folder, document)
    return paths


def three_arms(**changes) -> list[FakeRun]:
    """bf16, mxfp8 (+0.002 nats) and nvfp4 (+0.03 nats) on seeds 0, 1, 2."""
    arms = [("bf16", 0.0, 99.0, "bf16"), ("mxfp8", 0.002, 31.5, "mxfp8"), ("nvfp4", 0.03, 20.4, "nvfp4")]
    return [
        FakeRun(arm=arm, seed=seed, gap=gap, sqnr_db=db, fmt=fmt, **changes)
        for arm, gap, db, fmt in arms
        for seed in range(3)
    ]


def fork_study(gaps: dict, trunks: int = 4, points: Sequence[int] = (40, 80), **changes) -> list[FakeRun]:
    """A fork study: trunks, the baseline's forks at 2 nats, and per arm the forks with gaps[arm](trunk, point) nats
    (or one number for all); the arm "null" is the baseline with noise."""
    runs = [FakeRun(arm="trunk", recipe="bf16", fmt="bf16", seed=seed, trunk="") for seed in range(trunks)]
    for arm, gap in {"bf16": 0.0, **gaps}.items():
        fmt = "bf16" if arm in ("bf16", "null") else "mxfp8"
        runs += [
            FakeRun(
                arm=arm, fmt=fmt, seed=seed, trunk=f"trunk-s{seed}", point=point, noise=0.01 * (arm == "null"),
                gap=gap(seed, point) if callable(gap) else gap, **changes,
            )
            for seed in range(trunks)
            for point in points
        ]  # fmt: skip
    return runs


@pytest.fixture
def make_sweep(tmp_path: Path) -> Callable[..., list[RunDir]]:
    """make_sweep(runs, name="sweep") -> its RunDirs in grid order, under tmp_path / "runs"."""
    return lambda runs, name="sweep": [RunDir(path) for path in write_sweep(tmp_path / "runs" / name, runs)]


@pytest.fixture(scope="session")
def fake() -> SimpleNamespace:
    """Names with which a test describes a sweep: fake.Run(...), fake.three_arms(...); fake.write_sweep writes one."""
    functions = {
        "seal_again": seal_again,
        "take_back": take_back,
        "Run": FakeRun,
        "three_arms": three_arms,
        "fork_study": fork_study,
        "write_sweep": write_sweep,
    }
    return SimpleNamespace(**functions, entropy=VOCAB_ENTROPY, steps=STEPS)
