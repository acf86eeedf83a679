"""A reader who follows one call of the package meets few files: bounds on four walks. A walk that gets longer than its
bound is a reason to look at the structure; one that gets shorter lowers the bound."""

from functools import partial

import pytest
import torch
from support.ranks import run_ranks
from support.walk import Walk, held_weight, walk

import hqsweep
from hqsweep.nn import Linear
from hqsweep.report.compare.compare import compare
from hqsweep.report.pages.folder import write
from hqsweep.sweep.engine import launch
from hqsweep.sweep.store.run_dir import RunDir
from tests.report.conftest import three_arms, write_sweep

pytestmark = pytest.mark.slow


def within(measured: Walk, bound: Walk) -> None:
    longer = {name: (came, most) for name, came, most in zip(Walk._fields, measured, bound, strict=True) if came > most}
    assert not longer, f"(measured, bound): {longer}"


def test_a_step_of_a_linear():
    linear, x = Linear(64, 64, name="fc", recipe=hqsweep.recipe("mxfp8")), torch.ones(64, 64, requires_grad=True)

    def step():
        linear(x).sum().backward()

    step()
    within(walk(step), Walk(calls=185, functions=80, files=26, changes=120))


def test_an_override_to_a_checked_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["conf=convergence", "recipe=bf16,mxfp8", "recipe.linear.input=nvfp4|mxfp8", "data=markov", "seed=0,1,2"]
    launch.plan(words)
    within(walk(partial(launch.plan, words)), Walk(calls=10500, functions=245, files=37, changes=940))


def test_rows_to_a_report(tmp_path):
    runs = [RunDir(path) for path in write_sweep(tmp_path / "runs" / "walk", three_arms()[::3])]
    write(compare(runs), tmp_path / "first")
    within(
        walk(lambda: write(compare(runs), tmp_path / "report")),
        Walk(calls=26000, functions=620, files=55, changes=5450),
    )


def test_a_held_weight_to_its_first_gather():
    for measured in run_ranks(2, held_weight):
        within(measured, Walk(calls=2750, functions=365, files=59, changes=800))
