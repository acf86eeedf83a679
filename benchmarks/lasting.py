"""Do forks of several ages say what a whole run costs? Forks that end together, held against runs from scratch.

python -m benchmarks.lasting [--params 1e5 | 1e6 | 3e6] [--rate R] [--until 8m] [--workers N] [--runs-dir DIR]
                             [--page-only]

Trains two sweeps of one model: forks that leave their trunks at several steps and end together, and runs from scratch
of as many steps on the same schedule. 1e5 is conf=fork's model, an hour on two cores; 1e6 and 3e6 are for a GPU, with
20 tokens a parameter. What is there is not trained again, so the same command goes on after a stop; --until ends it
whole. Seeds come one after another, so finished ones can be read. Writes reports/lasting: the study's rows as
CSV, its figure, and its table in lasting.md. Gaps are of train_loss over the decay, in % of bf16's.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.frames import Frames, load
from hqsweep.report.pages.folder import write
from hqsweep.sweep.engine.task import Until
from hqsweep.sweep.store.store import RunStore
from hqsweep.verdicts.judging import weights

WARMUP = 30
FOLDER = Path("reports/lasting")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Forks and whole runs of `end` steps, whose rate falls to 0 over the last `decay`; `words`: other overrides."""

    name: str
    end: int
    decay: int
    ages: tuple[int, ...]
    trunks: int
    seeds: int
    words: tuple[str, ...]
    rate: str = ""

    def commands(self, options: list[str]) -> dict[str, list[str]]:
        """Sweep -> the words of `hqsweep run` that train it; seeds come first, so that runs start seed by seed."""
        points = sorted(self.end - age for age in self.ages)
        forks = [f"fork.at={','.join(map(str, points))}", f"fork.end={self.end}", f"fork.decay={self.decay}",
                 f"train.steps={points[-1]}", f"seed=range({self.trunks})"]  # fmt: skip
        whole = ["fork=null", f"train.steps={self.end}", f"train.warmup={WARMUP / self.end}",
                 f"train.decay={self.decay / self.end}", "train.min_lr_fraction=0.0",
                 f"seed=range({self.seeds})"]  # fmt: skip
        names = self.sweeps
        return {
            name: ["conf=fork", *own, *self.words, *self._rate, *options, f"sweep={name}"]
            for name, own in zip(names, (forks, whole), strict=True)
        }

    @property
    def _rate(self) -> list[str]:
        stated = self.rate or ("1e-3" if "train.device=cuda" in self.words else "")
        return [f"train.lr={stated}"] if stated else []

    @property
    def key(self) -> str:
        """The study in names of files and sweeps: its parameters, and its rate where that is not the usual one."""
        return f"{self.name}_lr{self.rate}" if self.rate else self.name

    @property
    def title(self) -> str:
        """The heading of its section."""
        rate = f", rate {self.rate}" if self.rate else ""
        return f"{float(self.name):,.0f} parameters, {self.end:,} steps{rate}"

    @property
    def sweeps(self) -> tuple[str, str]:
        """The names of the sweeps: forks, whole runs."""
        return f"lasting_{self.key}", f"lasting_{self.key}_whole"


GPU = ("recipe=bf16,nvfp4,mxfp4,mxfp8,nvfp4_fwd_mxfp8_bwd_dequantized", "null_arm=true", "data=site",
       "train.context=256", "train.log_every=10", "train.eval_every=1000", "train.eval_batches=16",
       "train.checkpoint_every=1000", "train.device=cuda", "engine.threads=null")  # fmt: skip
STUDIES = {
    study.name: study
    for study in (
        Study(
            name="1e5", end=680, decay=80, ages=(100, 160, 400), trunks=4, seeds=4,
            words=("recipe=bf16,nvfp4,mxfp4", "null_arm=false"),
        ),
        Study(
            name="1e6", end=1240, decay=120, ages=(240, 440, 920), trunks=4, seeds=6,
            words=("model.dim=160", "model.layers=3", "model.heads=5", "data.max_bytes=40000000", "train.batch=64",
                   *GPU),
        ),
        Study(
            name="3e6", end=2000, decay=200, ages=(400, 1200), trunks=4, seeds=6,
            words=("model.dim=256", "model.layers=4", "model.heads=4", "data.max_bytes=null", "train.batch=128", *GPU),
        ),
    )
}  # fmt: skip


def train(study: Study, options: list[str], until: Until | None) -> None:
    """Train what is missing of both sweeps, forks first. Runs that fail, or that no time is left for, stay out."""
    for words in study.commands(options).values():
        if until is None:
            subprocess.run([sys.executable, "-m", "hqsweep", "run", *words], check=True)
        elif until.left >= 1:
            limit = ["--until", f"{until.left:.0f}s"]
            code = subprocess.run([sys.executable, "-m", "hqsweep", "run", *words, *limit]).returncode
            if code not in (0, 3):
                sys.exit(code)


def gaps(frames: Frames, study: Study) -> pd.DataFrame:
    """arm, seed, age, gap_pct of every finished run but bf16's that has a run of bf16 beside it: the mean train_loss of
    its last `decay` steps."""
    runs = frames.runs[frames.runs["state"] == "finished"]
    rows = frames.metrics[frames.metrics["metric"] == "train_loss"]
    rows = rows[rows["step"] > study.end - study.decay]
    losses = runs["run"].map(rows.groupby("run")["value"].mean()).astype(float)
    own = runs.assign(loss=losses, age=study.end - runs["point"])
    bf16 = own[own["arm"] == "bf16"].set_index(["seed", "point"])["loss"]
    other = own[own["arm"] != "bf16"]
    base = bf16.reindex(pd.MultiIndex.from_frame(other[["seed", "point"]])).to_numpy()
    found = other.assign(gap_pct=100 * (other["loss"] / base - 1))[["arm", "seed", "age", "gap_pct"]]
    return found.dropna().sort_values(["arm", "age", "seed"], ignore_index=True)


def interval(values: np.ndarray) -> str:
    """ "+5.34 (4.29 to 6.38)": the mean and its 95 % interval over seeds; the mean alone of one, "-" of none."""
    if len(values) < 2:
        return f"{values.mean():+.2f}" if len(values) else "-"
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():+.2f} ({values.mean() - half:.2f} to {values.mean() + half:.2f})"


def table(found: pd.DataFrame, study: Study) -> list[str]:
    """The rows of lasting.md: each age, the forecasts of a whole run by two and by all ages, and the whole runs."""
    arms = list(found["arm"].unique())
    lines = [f"| | {' | '.join(arms)} |", "|---|" + "---|" * len(arms)]
    by_age = {
        arm: own.pivot_table(index="seed", columns="age", values="gap_pct").reindex(columns=[*study.ages, study.end])
        for arm, own in found.groupby("arm")
    }
    cells = {f"fork of {age} steps": [by_age[arm][age] for arm in arms] for age in study.ages}
    for known in dict.fromkeys((study.ages[-2:], study.ages)):
        name = f"forecast of a whole run by the ages {', '.join(map(str, known))}"
        cells[name] = [by_age[arm][list(known)].dropna() @ weights(known, study.end).whole for arm in arms]
    cells[f"**whole runs of {study.end} steps**"] = [by_age[arm][study.end] for arm in arms]
    for name, columns in cells.items():
        lines.append(f"| {name} | {' | '.join(interval(column.dropna().to_numpy()) for column in columns)} |")
    return lines


def placed(page: str, study: Study, body: str) -> str:
    """The page with the study's table between its marks, or with a section of its own at the end."""
    start, end = f"<!-- table {study.key} -->", f"<!-- end {study.key} -->"
    if start not in page:
        page = f"{page.rstrip()}\n\n## {study.title}\n\n{start}\n{end}\n"
    head, tail = page.partition(start)[0], page.partition(end)[2]
    return f"{head}{start}\n{body}\n{end}{tail}"


def report(study: Study, store: RunStore) -> str:
    """Write the page, the rows and the figure of what has finished; returns the table and the verdicts."""
    there = [name for name in study.sweeps if store.runs(name)]
    frames = {name: load(store.resolve([name])).of_job("convergence").of_design()[0] for name in there}
    found = pd.concat([gaps(own, study) for own in frames.values()], ignore_index=True)
    if found.empty:
        return "no two runs of one seed have finished; the same command goes on"
    forks = compare(store.resolve([study.sweeps[0]]), "bf16")
    said = [f"- **{row.arm}**: {row.sentence}" for row in forks.arms.itertuples() if row.arm != row.baseline]
    FOLDER.mkdir(parents=True, exist_ok=True)
    found.round(4).to_csv(FOLDER / f"gaps_{study.key}.csv", index=False)
    with tempfile.TemporaryDirectory() as folder:
        write(forks, Path(folder))
        picture = Path(folder) / "figures/ages.svg"
        if picture.is_file():
            (FOLDER / f"ages_{study.key}.svg").write_bytes(picture.read_bytes())
    body = "\n".join([*table(found, study), "", *said])
    page = FOLDER / "lasting.md"
    page.write_text(placed(page.read_text() if page.is_file() else "# What of a gap lasts\n", study, body))
    return body


def main() -> None:
    """Train what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=[*STUDIES], default="1e5")
    parser.add_argument("--rate", default="", help="peak learning rate, as 3e-3; default: the study's")
    parser.add_argument("--until", help="start no run that would end later than this: 8m")
    parser.add_argument("--workers", type=int, help="runs at a time; default: 2 on a CPU, 12 on a GPU")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--page-only", action="store_true", help="train nothing")
    options = parser.parse_args()
    study, until = replace(STUDIES[options.params], rate=options.rate), Until(options.until) if options.until else None
    words = [f"runs_dir={options.runs_dir}", "track=none"]
    workers = options.workers or (12 if "train.device=cuda" in study.words else None)
    words += [f"engine.workers={workers}"] if workers else []
    if not options.page_only:
        train(study, words, until)
    print(report(study, RunStore(options.runs_dir)))


if __name__ == "__main__":
    main()
