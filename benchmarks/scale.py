"""Many runs: how long the commands take that look at all of them, against the time and size that they may take.

    python -m benchmarks.scale [--quick] [--only compare ls compose]

compare  `hqsweep compare` of 40 arms x 5 seeds with 2,000 logged steps each, and the size of the page
ls       `hqsweep ls` over 10,000 finished runs in 100 sweeps
compose  `hqsweep run --dry-run` of 6 recipes and the null arm x 143 seeds, 1,001 runs

A row is one command in a process of its own, start of Python included: seconds by the wall clock, cpu_seconds of its
threads (what it takes where nothing else runs), budget_s, and within, whether seconds kept it. The same ran before on a
few runs, so that Python's cache of compiled modules is full. Runs are folders as workers leave them, with the rows that
a run logs (three metrics a step, val_loss every hundredth, error statistics five times), but nothing was trained.
--quick: the same on a few runs. The published rows are held against their budgets by tests/benchmarks/test_scale.py.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rows
from hqsweep.sweep.engine import launch
from hqsweep.sweep.store.files import encode_rows
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

SECTIONS = ("compare", "ls", "compose")
COLUMNS = ("section", "case", "runs", "steps", "seconds", "cpu_seconds", "budget_s", "megabytes", "budget_mb", "within")
BUDGET_S = {"compare": 20.0, "ls": 2.0, "compose": 10.0}
BUDGET_MB = 8.0
RECIPES = ("bf16", "mxfp8", "nvfp4", "mxfp4", "mxfp6_e2m3", "float8_block_scaling", "current_scaling",
           "nvfp4_1d_weight", "nvfp4_fwd_mxfp8_bwd_original", "nvfp4_fwd_mxfp8_bwd_dequantized")  # fmt: skip
RATES = ("1e-3", "2e-3", "3e-3", "4e-3")
MODULES = [f"layers.{layer}.{part}" for layer in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
SLOTS = [(tensor, side) for tensor in ("input", "weight", "grad_output") for side in ("rowwise", "columnwise")]
PLAN = "exact: bf16 operands, float32 GEMM"


def timed(words: list[str], folder: Path) -> rows.Row:
    """seconds and cpu_seconds of `hqsweep WORDS` in `folder`; CalledProcessError when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "hqsweep", *words]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, env=environment)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}


def created(root: Path, sweep: str, words: list[str]) -> list[RunDir]:
    """The pending runs of conf=markov WORDS under `root`/runs."""
    plan = launch.plan(["conf=markov", "track=none", "null_arm=false", f"sweep={sweep}", *words])
    return RunStore(root / "runs").create(sweep=sweep, conf=plan.conf, overrides=plan.words, runs=plan.points)


def finish(run: RunDir, steps: int) -> None:
    """Write what a worker writes until its run is finished."""
    gemms = {gemm: f"bf16 x bf16: {PLAN}" for gemm in ("fprop", "dgrad", "wgrad")}
    run.update_manifest(device="cpu", commit="0" * 40, data_hash="0" * 64, gemm_plan=dict.fromkeys(MODULES, gemms))
    progress = {"step": steps, "steps": steps, "loss": 2.0, "tokens_per_s": 9000.0, "eta_s": 0.0}
    run.write_status(state="finished", exit_code=0, host="host", attempt=1, seconds=60.0, progress=progress)


def log(run: RunDir, steps: int) -> None:
    """The rows of a run whose loss falls to about 2 nats."""
    noise = np.random.default_rng(int(run.name[-10:], 16))
    losses = 2 + 4 / np.sqrt(1 + np.arange(steps)) + noise.normal(0, 0.05, steps)
    metrics: list[rows.Row] = []
    for step, loss in enumerate(losses, 1):
        values = {"train_loss": loss, "grad_norm": abs(loss) / 3, "lr": 1e-3}
        values |= {"val_loss": loss} if step % (steps // 20) == 0 else {}
        metrics += [{"step": step, "metric": name, "value": value} for name, value in values.items()]
    run.jsonl("metrics").write_bytes(encode_rows(metrics))
    run.jsonl("stats").write_bytes(encode_rows(errors(steps, noise)))


def errors(steps: int, noise: np.random.Generator) -> list[dict[str, Any]]:
    """Rows of stats.jsonl at five steps."""
    outputs = [(gemm, "output") for gemm in ("fprop", "dgrad", "wgrad")]
    stats = []
    for step in range(steps // 5, steps + 1, steps // 5):
        for layer in MODULES:
            for tensor, direction in SLOTS + outputs:
                db = 20 + noise.normal()
                slot = {"step": step, "layer": layer, "tensor": tensor, "direction": direction, "format": "nvfp4"}
                sizes = {"rel_l2": 10 ** (-db / 20), "cosine": 1 - 10 ** (-db / 10) / 2, "amax": 3.0}
                lost = {"underflow_pct": abs(noise.normal()), "saturation_pct": 0.0, "scale_min": 1.0, "scale_max": 1.0}
                stats.append(slot | {"sqnr_db": db} | sizes | lost)
    return stats


def compare(root: Path, quick: bool) -> rows.Row:
    """A report on many runs."""
    recipes, rates, seeds, steps = (RECIPES[:2], RATES[:1], 2, 40) if quick else (RECIPES, RATES, 5, 2000)
    lists = {"recipe": ",".join(recipes), "train.lr": ",".join(rates), "seed": f"range({seeds})", "train.steps": steps}
    runs = created(root, "many", [f"{key}={values}" for key, values in lists.items()])
    for run in runs:
        log(run, steps)
        finish(run, steps)
    row = timed(["compare", "many", "--baseline", "bf16"], root)
    size = (root / "reports/many/report.html").stat().st_size / 1e6
    return {"runs": len(runs), "steps": steps} | row | {"megabytes": round(size, 2), "budget_mb": BUDGET_MB}


def ls(root: Path, quick: bool) -> rows.Row:
    """A list of many sweeps."""
    sweeps, seeds = (2, 3) if quick else (100, 100)
    for number in range(sweeps):
        for run in created(root, f"sweep{number}", ["recipe=bf16", f"seed=range({seeds})"]):
            finish(run, 100)
    return {"runs": sweeps * seeds} | timed(["ls"], root)


def compose(root: Path, quick: bool) -> rows.Row:
    """A grid of many runs, checked and not started."""
    seeds = 2 if quick else 143
    words = ["run", "conf=markov", "null_arm=true", f"seed=range({seeds})", "track=none", "--dry-run"]
    return {"runs": 7 * seeds} | timed(words, root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few runs only")
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args()
    writer = rows.Writer("scale", "cpu", args)
    for section in args.only:
        with tempfile.TemporaryDirectory() as folder:
            measure = {"compare": compare, "ls": ls, "compose": compose}[section]
            (Path(folder) / "warm").mkdir()
            measure(Path(folder) / "warm", True)
            row = measure(Path(folder), args.quick) | {"budget_s": BUDGET_S[section]}
        row["within"] = row["seconds"] < row["budget_s"] and row.get("megabytes", 0) < BUDGET_MB
        writer.add({"section": section, "case": measure.__doc__.split(".")[0].lower()} | row)
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
