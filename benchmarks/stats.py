"""Cost of sampling error statistics: a sampled training step beside a plain one, on the quickstart's model, as JSON.

    python benchmarks/stats.py [--threads 1] [--steps 12] [--device cpu]

Each row: recipe, median ms of a plain and of a sampled step (alternated), and the share of a run's time that sampling
takes at stats.every = 100, the default. Floor: a sampled step quantizes each tensor a second time in both directions
and adds three FP32 GEMMs a linear.
"""

import argparse
import json
import platform
import statistics
import time

import torch

from hqsweep.config.job import parse
from hqsweep.sweep.engine.launch import plan
from hqsweep.train import data
from hqsweep.train.build import pick_device
from hqsweep.train.loop import Trainer

RECIPES = ("bf16", "mxfp8", "nvfp4", "nvfp4_fwd_mxfp8_bwd_dequantized", "float8_block_scaling")
EVERY = 100


def measure(recipe: str, steps: int, device: torch.device) -> dict[str, object]:
    overrides = [
        f"recipe={recipe}",
        f"train.steps={4 * steps}",
        "train.eval_every=1000000",
        "stats.every=2",
        "track=none",
    ]
    point = plan(["conf=convergence", "model.dim=64", "model.heads=2", "data.max_bytes=4194304", *overrides]).points[0]
    config = parse(point.config)
    trainer = Trainer(config, data.load(config.data), config.recipe.build(), device)
    times: dict[bool, list[float]] = {False: [], True: []}
    start = time.perf_counter()
    for done in trainer.steps():
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if 4 < done.step < 4 * steps:  # the first steps warm up, the last one evaluates
            times[bool(done.stats)].append(now - start)
        start = now
    plain, sampled = (statistics.median(times[kind]) for kind in (False, True))
    return {
        "recipe": recipe, "plain_ms": round(1e3 * plain, 1), "sampled_ms": round(1e3 * sampled, 1),
        "share_pct": round(100 * (sampled - plain) / (EVERY * plain), 2), "device": str(device),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "machine": platform.machine(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12, help="sampled steps")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for recipe in RECIPES:
        print(json.dumps(measure(recipe, arguments.steps, pick_device(arguments.device))), flush=True)


if __name__ == "__main__":
    main()
