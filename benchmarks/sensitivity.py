"""Which planted faults a small fork study on a CPU finds, and how large a fault it would find where it does not.

    python -m benchmarks.sensitivity --out rows.jsonl [--threads 1]

The baseline is the right arm: forward in NVFP4, backward in MXFP8 of what the forward saw, output gradients in NVFP4
with stochastic rounding. Each other arm is the same with one fault in one direction of one linear (LAYER):

- the scale of an operand off by a power of two, which makes one of the linear's three products twice as large: fprop
  (rowwise operands), dgrad (the weight columnwise), wgrad (the columnwise operands of both tensors);
- stochastic rounding off where wgrad reads the output gradient;
- the original taken where wgrad should read the dequantized input.

TRUNKS trunks in the right arm's recipe are forked at POINTS; gaps are in % of the baseline's training loss over the
decay on the same batches, judged by hqsweep.verdicts. `findable` is the smallest true gap in % that the study would
find in 4 of 5 repetitions, given the noise that the arm had. `cpu_s` is CPU time of the whole study.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import forking
from benchmarks.rows import Row, Writer
from hqsweep.config.job import parse
from hqsweep.nn.linears import Linear
from hqsweep.train import data
from hqsweep.train.model import GPT
from hqsweep.verdicts import judging, plan

LAYER = "layers.1.mlp.fc2"
FORWARD = "nvfp4|mxfp8@rowwise_dequantized"
RIGHT = {"input": FORWARD, "weight": FORWARD, "grad_output": "mxfp8|nvfp4+sr"}
TRUNKS, POINTS, MARGIN = 12, (300,), 0.25
FORK = {"steps": 16, "decay": 24, "warmup": 20}
CONFIG = {
    "job": "convergence", "sweep": "sensitivity", "recipe": {"name": "right", "linear": RIGHT}, "stats": {"every": 0},
    "data": {"source": "stdlib", "max_bytes": 4_000_000}, "model": {"dim": 64, "layers": 2, "heads": 2},
    "train": {"steps": 300, "batch": 8, "context": 64, "lr": 2e-3, "device": "cpu"},
}  # fmt: skip
COLUMNS = ("case", "gap", "low", "high", "verdict", "margin", "trunks", "findable", "cpu_s")
Plant = Callable[[GPT], None]


def _linear(model: GPT) -> Linear:
    return next(linear for linear in model.linears() if linear.name == LAYER)


def double_fprop(model: GPT) -> None:
    """Double the product of fprop, as a scale_inv twice as large in a rowwise operand would: powers of two commute with
    every rounding."""
    _linear(model).register_forward_hook(lambda module, args, output: 2 * output)


def double_dgrad(model: GPT) -> None:
    _linear(model).register_full_backward_hook(lambda module, gradients, got: (2 * gradients[0], *gradients[1:]))


def double_wgrad(model: GPT) -> None:
    _linear(model).weight.register_hook(lambda grad: 2 * grad)


def recipe(**slots: str) -> Row:
    """The right arm's recipe with other quantizers for tensors in LAYER."""
    return {"name": "faulty", "linear": RIGHT, "overrides": [{"name": LAYER, "linear": RIGHT | slots}]}


ARMS: dict[str, tuple[Row, Plant | None]] = {
    "null arm": ({"noise": 0.01}, None),
    "scale off by 2: fprop": ({}, double_fprop),
    "scale off by 2: dgrad": ({}, double_dgrad),
    "scale off by 2: wgrad": ({}, double_wgrad),
    "stochastic rounding off: wgrad": ({"recipe": recipe(grad_output="mxfp8|nvfp4")}, None),
    "original for dequantized: wgrad": ({"recipe": recipe(input="nvfp4|mxfp8")}, None),
}
"""Arm -> the keys of a fork's config that differ, and the change in its model."""


def study() -> list[Row]:
    """One row an arm."""
    start = time.process_time()
    dataset = data.load(parse(CONFIG).data)
    losses: dict[str, list[list[float]]] = {arm: [] for arm in ("right", *ARMS)}
    for seed in range(TRUNKS):
        config = CONFIG | {"seed": seed}
        states = forking.trunk_states(dataset, config, POINTS, FORK)
        for arm, (changed, plant) in {"right": ({}, None), **ARMS}.items():
            fork = FORK | {"noise": changed.get("noise", 0.0)}
            forked = config | {key: value for key, value in changed.items() if key == "recipe"}
            losses[arm].append([forking.decay_loss(dataset, forked, state, fork, plant) for state in states])
    gaps = {arm: forking.percent(losses[arm], losses["right"]) for arm in ARMS}
    return [row | {"cpu_s": round(time.process_time() - start, 1)} for row in judged(gaps)]


def judged(gaps: Row) -> list[Row]:
    """The row of every arm, from its gaps [trunks, points] in %."""
    rows = []
    for arm, estimate in judging.judge_forks(gaps, null="null arm", margin=MARGIN).items():
        arms = 1 if arm == "null arm" else len(gaps) - 1
        findable = plan.smallest_gap("forks", estimate.se * estimate.n**0.5, arms, estimate.n)
        numbers = {"gap": estimate.gap, "low": estimate.ci_low, "high": estimate.ci_high, "findable": findable}
        row = {"section": "fault", "case": arm, "verdict": estimate.verdict, "margin": MARGIN, "trunks": estimate.n}
        rows.append(row | {name: round(value, 4) for name, value in numbers.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--commit", help="of a copy of the tree that has no history")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    writer = Writer("sensitivity", "cpu", args)
    for row in study():
        writer.add(row)
        verdict = f"{row['case']}: {row['verdict']}, {row['gap']:+.3f} % ({row['low']:+.3f} to {row['high']:+.3f} %)"
        print(verdict if row["verdict"] in ("worse", "better") else f"{verdict}; found from {row['findable']:.3f} % on")


if __name__ == "__main__":
    main()
