"""The league: places, bits over operands and stages, and speed of native arms alone."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hqsweep.formats import parse
from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.league import SIDE, league
from hqsweep.report.pages.tables import rich_league
from hqsweep.sweep.grid.compose import expand, known_recipes

LEFT_OUT = {"high_precision", "nvfp4_row_scaled_fwd_mxfp8_bwd", "nvfp4_row_scaled_fwd_mxfp8_bwd_original"}
"""Packaged recipes that are another one on a dense model."""


def bits(name: str) -> float:
    return parse(name).bits_per_element(SIDE, SIDE)


def test_conf_zoo_has_every_packaged_recipe_that_differs():
    arms = {point.arm for point in expand("zoo").points}
    assert arms == {*known_recipes(), "trunk", "null"} - LEFT_OUT


@pytest.fixture
def comparison(make_sweep, fake):
    gaps = {"mxfp8": 0.002, "nvfp4": 0.03, "mxfp4": 0.05, "bad8": 0.06, "null": 0.0}
    runs = [
        replace(run, fmt=run.arm if run.arm in ("mxfp8", "nvfp4", "mxfp4") else run.fmt, seconds=20.0)
        for run in fake.fork_study(gaps)
    ]
    runs = [replace(run, gemm="native: tensor cores") if run.arm == "mxfp8" else run for run in runs]
    return compare(make_sweep(runs), "bf16")


def test_places_bits_and_speed(comparison):
    rows = league(comparison).set_index("arm")
    assert list(rows.index) == ["bf16", "mxfp8", "nvfp4", "mxfp4", "bad8"] and list(rows["place"]) == [1, 2, 3, 4, 5]
    assert rows.loc["nvfp4", "bits"] == pytest.approx(bits("nvfp4")) and bits("nvfp4") == pytest.approx(4.5, abs=1e-4)
    assert rows.loc["bf16", "bits"] == 16 and rows.loc["mxfp4", "bits"] == pytest.approx(4.25)
    assert dict(rows["front"]) == {"bf16": True, "mxfp8": True, "nvfp4": True, "mxfp4": True, "bad8": False}
    assert rows.loc["mxfp8", "speed"] == pytest.approx(8500 / 9500)
    assert rows["tokens_per_s"].isna().to_dict() == {
        "bf16": False, "mxfp8": False, "nvfp4": True, "mxfp4": True, "bad8": True
    }  # fmt: skip
    (table,) = rich_league(league(comparison))
    assert table.rows[1][:3] == ("2", "mxfp8", "worse (in margin)") or table.rows[1][1] == "mxfp8"
    assert rich_league(None) == []


def test_bits_of_a_schedule_are_means_over_the_steps(comparison):
    runs = comparison.frames.runs
    plan = {"layers.0.attn.qkv": {"fprop": "bf16 x bf16: exact"}}
    own = runs["arm"] == "nvfp4"
    runs.loc[own, "manifest.recipe_schedule"] = [
        json.dumps([{"first_step": point + 31, "gemm_plan": plan}]) for point in runs.loc[own, "point"]
    ]
    rows = league(comparison).set_index("arm")
    layers = 8
    later = (16 + (layers - 1) * bits("nvfp4")) / layers  # for the last 10 of 40 steps
    assert rows.loc["nvfp4", "bits"] == pytest.approx(0.75 * bits("nvfp4") + 0.25 * later)


def test_the_head_counts_for_nothing(comparison):
    runs, before = comparison.frames.runs, league(comparison)["bits"]
    head = {"head": {"fprop": "bf16 x bf16: exact"}, "model.head": {"dgrad": "bf16 x bf16: exact"}}
    runs["manifest.gemm_plan"] = [json.dumps(json.loads(text) | head) for text in runs["manifest.gemm_plan"]]
    assert np.array_equal(league(comparison)["bits"], before)
