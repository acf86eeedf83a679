"""The page of a sweep: every run and every arm, at any width, and what is wrong with it."""

import io
import shutil

import pytest
from rich.console import Console

from hqsweep.report.pages.sweep_page import show_sweep


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_arm_and_every_run_is_there_with_its_state(make_sweep, fake, width):
    runs = make_sweep([fake.Run(seed=0), fake.Run(arm="nvfp4", seed=0), fake.Run(arm="nvfp4", seed=1, state="failed",
                       reason="loss is nan at step 37", steps=120)])  # fmt: skip
    page, document = show_sweep(runs[0].sweep_path)
    console = Console(file=io.StringIO(), width=width)
    console.print(page)
    words = console.file.getvalue().split()
    assert {run.name for run in runs} <= set(words) and max(map(len, console.file.getvalue().splitlines())) <= width
    assert "loss is nan at step 37" in " ".join(words) or width < 200
    assert [(row["run"], row["arm"], row["state"]) for row in document["runs"]] == [
        (runs[0].name, "bf16", "finished"), (runs[1].name, "nvfp4", "finished"), (runs[2].name, "nvfp4", "failed"),
    ]  # fmt: skip
    assert "2 finished, 1 failed" in " ".join(words) and document["faults"] == []


def test_a_run_that_is_gone_is_named(make_sweep, fake):
    runs = make_sweep([fake.Run(seed=0), fake.Run(seed=1)])
    shutil.rmtree(runs[1].path)
    _, document = show_sweep(runs[0].sweep_path)
    assert [row["state"] for row in document["runs"]] == ["finished", "missing"]
    assert len(document["faults"]) == 1 and runs[1].name in document["faults"][0]
