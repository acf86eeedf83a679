"""How often the gate and the comparison raise a false alarm: 200 sweeps of a tiny model without any real difference.

    nice python -m benchmarks.null_sweeps --out rows.jsonl [--sweeps 200]

A sweep has three seeds and three arms: the stored baseline, and two that differ from it by harmless noise on the
initial weights alone (1 and 0.5 %). It is judged as `hqsweep gate` judges sweeps of another machine, and as `hqsweep
compare` claims differences. Sweeps that are in --out already are not trained again. Rows of section "sweep" hold final
val_losses in nats, and those of section "rate" the share of sweeps with an alarm, its 95 % interval (Clopper and
Pearson), and the stated level. Floor: a rate cannot be told from the level more finely than that interval.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from benchmarks.rows import Row, Writer
from hqsweep.config.job import parse
from hqsweep.report.gate import ALARM_LEVEL, decide
from hqsweep.report.paired import LEVEL, holm, p_value
from hqsweep.train import data
from hqsweep.train.loop import Trainer

NOISES = {"baseline": 0.0, "noise 1 %": 0.01, "noise 0.5 %": 0.005}
SEEDS = 3
COLUMNS = ("case", "seeds", *NOISES, "sweeps", "alarms", "rate", "low", "high", "level")
CONFIG = {
    "job": "convergence", "sweep": "null", "recipe": {"name": "fp32", "linear": "fp32"},
    "data": {"source": "markov", "markov": {"length": 100_000}}, "stats": {"every": 0},
    "train": {"steps": 24, "batch": 8, "context": 32, "lr": 1e-2, "log_every": 24, "eval_every": 24, "eval_batches": 4,
              "dtype": "fp32", "device": "cpu"},
}  # fmt: skip


def train(dataset: data.Dataset, seed: int, noise: float) -> float:
    """The final val_loss in nats of one run."""
    model = {"dim": 32, "layers": 1, "heads": 2, "init_noise": noise}
    config = parse(CONFIG | {"seed": seed, "model": model})
    *_, last = Trainer(config, dataset, config.recipe.build(), torch.device("cpu")).steps()
    return last.metrics["val_loss"]


def sweep(dataset: data.Dataset, number: int) -> Row:
    """The row of one sweep, on seeds of its own."""
    seeds = [SEEDS * number + i for i in range(SEEDS)]
    return {"seeds": seeds} | {arm: [train(dataset, seed, noise) for seed in seeds] for arm, noise in NOISES.items()}


def rates(sweeps: list[Row]) -> list[Row]:
    """The rows of section "rate"."""
    gaps = [{arm: np.subtract(row[arm], row["baseline"]) for arm in NOISES if arm != "baseline"} for row in sweeps]
    gated = {limit: [decide(each, limit).values() for each in gaps] for limit in (0.0, 0.01)}
    claims = [holm({arm: p_value(values) for arm, values in each.items()}).values() for each in gaps]
    return [
        rate("gate, max_gap 0: regression", ["regression" in each for each in gated[0.0]], ALARM_LEVEL),
        rate("gate, max_gap 0.01: regression", ["regression" in each for each in gated[0.01]], ALARM_LEVEL),
        rate("gate, max_gap 0.01: inconclusive", ["inconclusive" in each for each in gated[0.01]], None),
        rate("compare: worse or better", [min(each) < LEVEL for each in claims], LEVEL),
    ]


def rate(case: str, alarms: list[bool], level: float | None) -> Row:
    """How many sweeps have at least one such arm; `level` is the largest rate that is promised, None for none."""
    test = stats.binomtest(sum(alarms), len(alarms))
    span = test.proportion_ci(0.95, "exact")
    row = {"section": "rate", "case": case, "sweeps": len(alarms), "alarms": sum(alarms), "rate": test.statistic}
    return row | {"low": round(span.low, 4), "high": round(span.high, 4), "level": level}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="append rows to this JSONL file")
    parser.add_argument("--sweeps", type=int, default=200)
    parser.add_argument("--commit", help="of a copy of the tree that has no history")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    sweeps = {row["case"]: row for row in map(json.loads, lines) if row["section"] == "sweep"}
    writer = Writer("null_sweeps", "cpu", args)
    dataset = data.load(parse(CONFIG | {"model": {"dim": 32, "heads": 2}}).data)
    for number in range(args.sweeps):
        if number not in sweeps:
            sweeps[number] = {"section": "sweep", "case": number} | sweep(dataset, number)
            writer.add(sweeps[number])
    for row in rates(list(sweeps.values())):
        writer.add(row)


if __name__ == "__main__":
    main()
