"""benchmarks.lasting: its two sweeps end together on one schedule, and its table says what rows say."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmarks.lasting import STUDIES, gaps, placed, table
from hqsweep.sweep.grid.run_words import read

STUDY = STUDIES["1e5"]


def frames(design_ages, seeds=3, decay=STUDY.decay, end=STUDY.end):
    """Finished runs of bf16 at 2 nats over the decay, and of nvfp4 1 % + 0.5 % per 100 steps of age above it; before
    the decay all losses are 9. The last seed of nvfp4 has not finished."""
    runs, rows = [], []
    for arm in ("bf16", "nvfp4"):
        for seed in range(seeds):
            for age in design_ages:
                run = f"{arm}-{seed}-{age}"
                open_ = arm == "nvfp4" and seed == seeds - 1
                state = "running" if open_ else "finished"
                runs.append({"run": run, "arm": arm, "seed": seed, "point": end - age, "state": state})
                loss = 2.0 * (1 + (0.01 + 5e-5 * age) * (arm == "nvfp4"))
                rows += [(run, end - decay, 9.0), (run, end - decay + 5, loss - 0.1), (run, end, loss + 0.1)]
    metrics = pd.DataFrame(rows, columns=["run", "step", "value"]).assign(metric="train_loss")
    return SimpleNamespace(runs=pd.DataFrame(runs), metrics=metrics)


def test_gaps_are_of_the_decay_alone_and_of_finished_runs():
    found = gaps(frames(STUDY.ages), STUDY)
    assert sorted(found["seed"].unique()) == [0, 1] and set(found["arm"]) == {"nvfp4"}
    assert found.groupby("age")["gap_pct"].mean().to_dict() == pytest.approx({100: 1.5, 160: 1.8, 400: 3.0})


def test_a_study_without_a_finished_run_has_no_gap():
    begun = frames(STUDY.ages)
    begun.runs["state"] = "running"
    begun.metrics = begun.metrics.iloc[:0]
    assert gaps(begun, STUDY).empty


def test_the_table_forecasts_what_whole_runs_have_where_gaps_lie_on_a_line():
    found = pd.concat([gaps(frames(STUDY.ages), STUDY), gaps(frames([STUDY.end]), STUDY)])
    found["gap_pct"] += np.where(found["seed"] == 0, 0.1, -0.1)
    lines = dict(line.strip("| ").split(" | ") for line in table(found, STUDY)[2:])
    assert lines["fork of 400 steps"].startswith("+3.00 (")
    whole = [cell for name, cell in lines.items() if "whole run" in name]
    assert len(whole) == 3 and all(cell.startswith("+4.40 (") for cell in whole)


def test_a_table_takes_the_place_of_the_one_before():
    page = placed("# Page\n\ntext\n", STUDY, "old")
    again = placed(page, STUDY, "new")
    assert "## 100,000 parameters, 680 steps" in page and "old" not in again
    assert again == page.replace("old", "new") and again.startswith("# Page\n\ntext\n")


@pytest.mark.parametrize("name", STUDIES)
def test_forks_and_whole_runs_end_at_one_step_at_one_rate(name):
    study = STUDIES[name]
    forks, whole = (read(words).grid for words in study.commands(["runs_dir=nowhere"]).values())
    fork = forks.study.fork
    assert fork.end == study.end and [fork.end - at for at in fork.at] == sorted(study.ages, reverse=True)
    train = whole.points[0].config["train"]
    assert train["steps"] == study.end and whole.study.fork is None
    assert [train[key] * study.end for key in ("decay", "warmup")] == pytest.approx([fork.decay, fork.warmup])
    recipes = len({point.arm for point in whole.points} - {"null"})
    assert [point.config["seed"] for point in whole.points][: recipes + 1] == [0] * recipes + [1]
