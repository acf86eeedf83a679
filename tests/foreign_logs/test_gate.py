"""The gate for logs: equal values pass, a change is judged as a gap, either direction, and bad files get a sentence."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hqsweep.errors import UserError
from hqsweep.foreign_logs.gate import gate, is_stored, read_stored, store
from hqsweep.foreign_logs.judge import Question
from hqsweep.foreign_logs.logs import Reading, judge_frame
from hqsweep.verdicts import judging

READING = Reading(columns={}, window=None)


def judged(rows, question):
    return judge_frame(rows, question, READING)


def outcomes(rows, path, **changes):
    stored = read_stored(path)
    stored = replace(stored, question=replace(stored.question, **changes))
    verdicts = gate(judged(rows, stored.question), stored)
    return {arm.arm: (arm.outcome, arm.verdict) for arm in verdicts.arms}, verdicts


@pytest.fixture(params=["0.25%", "0.005"])
def stored(request, rows, tmp_path):
    question = Question(metric="val_loss", margin=request.param)
    store(judged(rows, question), question, READING, tmp_path / "b.json")
    return tmp_path / "b.json"


def moved(rows, arm, by):
    noise = 1e-4 * np.random.default_rng(1).normal(size=len(rows))
    return rows.assign(val_loss=rows["val_loss"] + noise + by * (rows["arm"] == arm))


def test_the_same_logs_pass_bit_for_bit(rows, stored):
    found, verdicts = outcomes(rows, stored)
    assert set(found.values()) == {("pass", "equivalent")} and verdicts.exit_code == 0
    assert all(arm.bitwise and arm.gap == 0 for arm in verdicts.arms)


def test_a_rise_is_a_regression_and_a_fall_a_pass(rows, stored):
    found, verdicts = outcomes(moved(rows, "mxfp8", 0.05), stored)
    assert found["mxfp8"] == ("regression", "worse") and verdicts.exit_code == 1
    assert found["bf16"] == found["nvfp4"] == ("pass", "equivalent")
    assert outcomes(moved(rows, "mxfp8", -0.05), stored)[0]["mxfp8"] == ("pass", "better")


def test_the_change_is_judged_as_a_gap_is(rows, stored):
    now = moved(rows, "mxfp8", 0.05)
    _, verdicts = outcomes(now, stored)
    old, new = (
        table[table["step"] == 200].pivot(index="seed", columns="arm", values="val_loss") for table in (rows, now)
    )
    unit = 100 / old["bf16"].mean() if verdicts.SIGN else 1.0
    change = {arm: ((new - old)[arm] * unit).to_numpy() for arm in old}
    expected = judging.judge_whole_runs(change, baseline="bf16", margin=verdicts.margin)["mxfp8"]
    arm = next(arm for arm in verdicts.arms if arm.arm == "mxfp8")
    assert (arm.gap, arm.ci_low) == pytest.approx((expected.gap, expected.ci_low), rel=1e-9)
    own = judging.judge_forks({"bf16": change["bf16"][:, None]}, margin=verdicts.margin)["bf16"]
    assert verdicts.arms[0].gap == pytest.approx(own.gap, rel=1e-9)


def test_higher_is_better(rows, tmp_path):
    rows = rows.assign(val_loss=-rows["val_loss"]).rename(columns={"val_loss": "accuracy"})
    question = Question(metric="accuracy", margin=0.005)
    store(judged(rows, question), question, READING, tmp_path / "b.json")
    worse = rows.assign(val=0, accuracy=rows["accuracy"] - 0.05 * (rows["arm"] == "mxfp8")).drop(columns="val")
    worse["accuracy"] += 1e-4 * np.random.default_rng(1).normal(size=len(rows))
    found, verdicts = outcomes(worse, tmp_path / "b.json")
    arm = next(arm for arm in verdicts.arms if arm.arm == "mxfp8")
    assert found["mxfp8"] == ("regression", "worse") and arm.gap == pytest.approx(-0.05, abs=1e-3)
    assert arm.ci_low < arm.gap < arm.ci_high < 0


def test_missing_new_and_broken_runs(rows, stored):
    fewer = rows[~(rows["arm"].eq("nvfp4") & rows["seed"].eq(2))]
    found, verdicts = outcomes(fewer.replace({"arm": {"mxfp8": "other"}}), stored)
    assert found["nvfp4"][0] == "missing" and found["mxfp8"] == ("missing", None) and found["other"][0] == "new"
    assert verdicts.exit_code == 3
    broken = rows.copy()
    broken.loc[broken["arm"].eq("mxfp8") & broken["seed"].eq(1), "val_loss"] = np.inf
    found, verdicts = outcomes(broken, stored)
    assert found["mxfp8"][0] == "regression" and any("seed 1 has no finite value" in arm.note for arm in verdicts.arms)


def test_few_seeds_are_undecided(rows, tmp_path):
    two = rows[rows["seed"] < 2]
    question = Question(metric="val_loss", margin="0.0001%")
    store(judged(two, question), question, READING, tmp_path / "b.json")
    _, verdicts = outcomes(moved(two, "mxfp8", 0.0), tmp_path / "b.json")
    assert verdicts.exit_code == 4 and "seeds would decide" in verdicts.arms[1].note


def test_what_is_not_stored(rows, tmp_path):
    question = Question(metric="val_loss")
    rows.loc[rows["arm"].eq("mxfp8") & rows["seed"].eq(1), "val_loss"] = np.nan
    rows["val_loss"] = rows["val_loss"].fillna(np.inf)
    with pytest.raises(UserError, match=r"b\.json was not written: no finite value in 'mxfp8' 1"):
        store(judged(rows, question), question, READING, tmp_path / "b.json")
    with pytest.raises(UserError, match="was not written: Seed 3 has no value in"):
        fewer = rows[~(rows["arm"].eq("nvfp4") & rows["seed"].eq(3))]
        store(judged(fewer, question), question, READING, tmp_path / "b.json")


def test_damaged_files(stored):
    document = json.loads(stored.read_text())
    document["runs"][0]["value"] = (9.0).hex()
    stored.write_text(json.dumps(document))
    with pytest.raises(
        UserError, match="contradicts its own hash, so it was edited; store it anew with `hqsweep judge"
    ):
        read_stored(stored)
    stored.write_text("[]")
    assert not is_stored(stored)
    with pytest.raises(UserError, match="not a baseline file"):
        read_stored(stored)
    with pytest.raises(UserError, match="there is no baseline file"):
        read_stored(stored.with_name("no.json"))
