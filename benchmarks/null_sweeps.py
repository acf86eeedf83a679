"""How often a comparison calls arms apart that are not, or equivalent at the margin: 200 sweeps of a tiny model in each
design, without any real difference.

    nice python -m benchmarks.null_sweeps --out rows.jsonl [--sweeps 200] [--design "whole runs"|forks]

A sweep has the baseline and two arms that differ from it by harmless noise on the weights alone: 1 %, the arm under
test, and 0.5 %, the null arm. Whole runs: three seeds, noise on the initial weights. Forks: four trunks forked at two
points, noise at the fork. It is judged as `hqsweep compare` judges, by hqsweep.verdicts. Sweeps that are in --out
already are not trained again. Rows of section "sweep" (whole runs) hold final val_losses in nats, those of section
"fork sweep" the training loss over the decay [trunks, points], and those of section "rate" the share of sweeps with a
verdict, its 95 % interval (Clopper and Pearson), and the stated level. Floor: a rate cannot be told from the level more
finely than that interval.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from benchmarks import forking
from benchmarks.rows import Row, Writer
from hqsweep.config.job import parse
from hqsweep.train import data
from hqsweep.verdicts import judging
from hqsweep.verdicts.estimate import LEVEL, Estimate

ARM, NULL = "noise 1 %", "noise 0.5 %"
NOISES = {"baseline": 0.0, ARM: 0.01, NULL: 0.005}
SEEDS, TRUNKS, POINTS = 3, 4, (32, 48)
MARGIN = 0.25
"""The margin, in % of the baseline's loss."""
COLUMNS = ("case", "seeds", *NOISES, "sweeps", "alarms", "rate", "low", "high", "level")
CONFIG = {
    "job": "convergence", "sweep": "null", "recipe": {"name": "fp32", "linear": "fp32"},
    "data": {"source": "markov", "markov": {"length": 100_000}}, "stats": {"every": 0},
    "train": {"steps": 24, "batch": 8, "context": 32, "lr": 1e-2, "log_every": 24, "eval_every": 24, "eval_batches": 4,
              "dtype": "fp32", "device": "cpu"},
    "model": {"dim": 32, "layers": 1, "heads": 2},
}  # fmt: skip
FORK = {"steps": 8, "decay": 8, "warmup": 8}
FORK_DATA = {"source": "markov", "markov": {"length": 100_000, "order": 1}}
"""The data of forks, which are learned within a trunk: on the plateau that CONFIG's data begins with, noise of 1 % is a
small but real change."""


def train(dataset: data.Dataset, seed: int, noise: float) -> float:
    """The final val_loss in nats of one run."""
    config = CONFIG | {"seed": seed, "model": CONFIG["model"] | {"init_noise": noise}}
    *_, last = forking.trainer(dataset, config).steps()
    return last.metrics["val_loss"]


def train_forks(dataset: data.Dataset, seed: int) -> dict[str, list[float]]:
    """The mean training loss in nats over the decay of every arm's forks [points] of one trunk."""
    config = CONFIG | {"data": FORK_DATA, "seed": seed}
    states = forking.trunk_states(dataset, config, POINTS, FORK)
    return {
        arm: [forking.decay_loss(dataset, config, state, FORK | {"noise": noise}) for state in states]
        for arm, noise in NOISES.items()
    }


def sweep(dataset: data.Dataset, number: int) -> Row:
    """The row of one sweep of whole runs, on seeds of its own."""
    seeds = [SEEDS * number + i for i in range(SEEDS)]
    losses = {arm: [train(dataset, seed, noise) for seed in seeds] for arm, noise in NOISES.items()}
    return {"section": "sweep", "case": number, "seeds": seeds} | losses


def fork_sweep(dataset: data.Dataset, number: int) -> Row:
    """The row of one fork study, on trunks of its own."""
    seeds = [TRUNKS * number + i for i in range(TRUNKS)]
    trunks = [train_forks(dataset, seed) for seed in seeds]
    losses = {arm: [trunk[arm] for trunk in trunks] for arm in NOISES}
    return {"section": "fork sweep", "case": number, "seeds": seeds} | losses


def judge(row: Row, shift: float = 0.0) -> Estimate:
    """The arm's estimate in % of the baseline's loss, when all its losses were higher by `shift` %."""
    losses = {arm: np.array(row[arm]) for arm in NOISES}
    baseline = losses["baseline"]
    if row["section"] == "sweep":
        percent = {arm: 100 * values / baseline.mean() + shift * (arm == ARM) for arm, values in losses.items()}
        return judging.judge_whole_runs(percent, baseline="baseline", null=NULL, margin=MARGIN)[ARM]
    gaps = {arm: forking.percent(losses[arm], baseline) + shift * (arm == ARM) for arm in (ARM, NULL)}
    return judging.judge_forks(gaps, null=NULL, margin=MARGIN)[ARM]


def rates(sweeps: list[Row]) -> list[Row]:
    """The rows of section "rate"."""
    return [row for design, (section, *_) in DESIGNS.items() for row in _rates(design, section, sweeps)]


def _rates(design: str, section: str, sweeps: list[Row]) -> list[Row]:
    chosen = [row for row in sweeps if row["section"] == section]
    judged, shifted = ([judge(row, shift) for row in chosen] for shift in (0.0, MARGIN))
    cases = {
        "worse or better": ([estimate.worse or estimate.better for estimate in judged], LEVEL),
        "worse": ([estimate.worse for estimate in judged], LEVEL / 2),
        "equivalent, with the arm off by the margin": ([estimate.within_margin for estimate in shifted], LEVEL),
        "equivalent, as it is": ([estimate.within_margin for estimate in judged], None),
    }
    return [rate(f"{design}: {case}", *counted) for case, counted in cases.items() if chosen]


def rate(case: str, verdicts: list[bool], level: float | None) -> Row:
    """The share of sweeps with the verdict; `level` is the largest rate that is promised, None for none."""
    test = stats.binomtest(sum(verdicts), len(verdicts))
    span = test.proportion_ci(0.95, "exact")
    row = {"section": "rate", "case": case, "sweeps": len(verdicts), "alarms": sum(verdicts), "rate": test.statistic}
    return row | {"low": round(span.low, 4), "high": round(span.high, 4), "level": level}


DESIGNS: dict[str, tuple[str, Callable[[data.Dataset, int], Row], Row]] = {
    "whole runs": ("sweep", sweep, CONFIG["data"]),
    "forks": ("fork sweep", fork_sweep, FORK_DATA),
}
"""Design -> the section of its rows, the function that trains one sweep, and the data."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="append rows to this JSONL file")
    parser.add_argument("--sweeps", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="leave out those before: processes may share the work")
    parser.add_argument("--design", choices=list(DESIGNS), help="this one alone")
    parser.add_argument("--commit", help="of a copy of the tree that has no history")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    rows = {(row["section"], row["case"]): row for row in map(json.loads, lines) if row["section"] != "rate"}
    writer = Writer("null_sweeps", "cpu", args)
    for name in [args.design] if args.design else DESIGNS:
        section, train_sweep, source = DESIGNS[name]
        dataset = data.load(parse(CONFIG | {"data": source}).data)
        for number in range(args.first, args.sweeps):
            if (section, number) not in rows:
                rows[section, number] = train_sweep(dataset, number)
                writer.add(rows[section, number])
    for row in rates(list(rows.values())):
        writer.add(row)


if __name__ == "__main__":
    main()
