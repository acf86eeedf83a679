"""Do forks of several ages say what a whole run costs? Forks that end together, held against runs from scratch.

python -m benchmarks.lasting [--runs-dir DIR]

Trains, or reads where they are there, four sweeps of conf=fork's model on a CPU (an hour on two cores): forks that
leave their trunks 100, 160 and 400 steps before step 680, and runs of 680 steps from scratch on the same schedule.
Writes reports/lasting: gaps.csv, one row for each arm, seed and age, and lasting.md. Gaps are of train_loss over the
last 80 steps, over which the learning rate falls to 0, in % of bf16's.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.frames import Frames, load
from hqsweep.sweep.store.store import RunStore
from hqsweep.verdicts.ages import weights

END, DECAY, WARMUP = 680, 80, 30
AGES = (100, 160, 400)
ARMS = "recipe=bf16,nvfp4,mxfp4"
SEEDS = 4
FOLDER = Path("reports/lasting")


def commands(runs_dir: Path) -> dict[str, list[str]]:
    """Sweep -> the words of `hqsweep run` that train it."""
    forks = {
        f"lasting_{age}": ["conf=fork", f"fork.at={END - age}", f"fork.end={END}", f"train.steps={END - age}"]
        for age in AGES
    }
    schedule = [f"train.warmup={WARMUP / END}", f"train.decay={DECAY / END}", "train.min_lr_fraction=0.0"]
    whole = ["conf=convergence", "model.dim=64", "model.layers=2", "model.heads=2", f"train.steps={END}",
             "train.batch=16", "train.context=128", "train.lr=2e-3", "train.log_every=5", "data.max_bytes=8388608",
             "stats.every=0", "engine.workers=2", "engine.threads=1", f"seed=range({SEEDS})", *schedule]  # fmt: skip
    common = [ARMS, "null_arm=false", f"runs_dir={runs_dir}"]
    return {name: [*words, *common, f"sweep={name}"] for name, words in {**forks, "lasting_whole": whole}.items()}


def gaps(frames: Frames) -> pd.DataFrame:
    """arm, seed, age, gap_pct of every finished run but bf16's: mean train_loss of its last DECAY steps."""
    runs = frames.runs[frames.runs["state"] == "finished"]
    rows = frames.metrics[(frames.metrics["metric"] == "train_loss") & (frames.metrics["step"] > END - DECAY)]
    own = runs.assign(loss=runs["run"].map(rows.groupby("run")["value"].mean()), age=END - runs["point"])
    bf16 = own[own["arm"] == "bf16"].set_index(["seed", "point"])["loss"]
    other = own[own["arm"] != "bf16"]
    base = bf16.reindex(pd.MultiIndex.from_frame(other[["seed", "point"]])).to_numpy()
    found = other.assign(gap_pct=100 * (other["loss"] / base - 1))[["arm", "seed", "age", "gap_pct"]]
    return found.sort_values(["arm", "age", "seed"], ignore_index=True)


def interval(values: np.ndarray) -> str:
    """ "+5.34 (4.29 to 6.38)": the mean and its 95 % interval over seeds."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():+.2f} ({values.mean() - half:.2f} to {values.mean() + half:.2f})"


def table(found: pd.DataFrame) -> list[str]:
    """The rows of lasting.md: each age, the forecasts of a whole run by two and three ages, and the whole runs."""
    arms = list(found["arm"].unique())
    lines = [f"| | {' | '.join(arms)} |", "|---|" + "---|" * len(arms)]
    by_age = {arm: own.pivot_table(index="seed", columns="age", values="gap_pct") for arm, own in found.groupby("arm")}
    ages = [age for age in AGES if all(age in own for own in by_age.values())]
    cells = {f"fork of {age} steps": [by_age[arm][age] for arm in arms] for age in ages}
    for known in (ages[1:], ages):
        if len(known) > 1:
            name = f"forecast of a whole run by the ages {', '.join(map(str, known))}"
            cells[name] = [by_age[arm][known].dropna() @ weights(known, END).whole for arm in arms]
    cells[f"**whole runs of {END} steps**"] = [by_age[arm][END] for arm in arms]
    for name, columns in cells.items():
        lines.append(f"| {name} | {' | '.join(interval(column.dropna().to_numpy()) for column in columns)} |")
    return lines


def main() -> None:
    """Train what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    options = parser.parse_args()
    sweeps = commands(options.runs_dir)
    for words in sweeps.values():
        subprocess.run([sys.executable, "-m", "hqsweep", "run", *words], check=True)
    store = RunStore(options.runs_dir)
    found = pd.concat([gaps(load(store.resolve([name])).of_job("convergence").of_design()[0]) for name in sweeps])
    FOLDER.mkdir(parents=True, exist_ok=True)
    found.round(4).to_csv(FOLDER / "gaps.csv", index=False)
    together = compare(store.resolve([name for name in sweeps if name != "lasting_whole"]), "bf16")
    said = [f"- **{row.arm}**: {row.sentence}" for row in together.arms.itertuples() if row.arm != row.baseline]
    page = (FOLDER / "lasting.md").read_text()
    head, tail = page.partition("<!-- table -->")[0], page.partition("<!-- end -->")[2]
    body = "\n".join([*table(found), "", *said])
    names = [name for name in sweeps if name != "lasting_whole"]
    words = ["compare", *names, "--runs-dir", str(options.runs_dir)]
    subprocess.run([sys.executable, "-m", "hqsweep", *words], check=True)
    shutil.copy(Path("reports") / "+".join(names) / "figures/ages.svg", FOLDER)
    (FOLDER / "lasting.md").write_text(f"{head}<!-- table -->\n{body}\n<!-- end -->{tail}")
    print(body)


if __name__ == "__main__":
    main()
