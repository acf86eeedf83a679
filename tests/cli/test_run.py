"""`hqsweep plan`: replicates and minutes of both designs as a table and as JSON; wrong input in one sentence."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app
from hqsweep.study import forecast
from hqsweep.study.noise import parameters
from hqsweep.sweep.engine import launch
from hqsweep.sweep.store.files import encode_rows

WORDS = ["conf=convergence", "recipe=bf16,mxfp8", "null_arm=true", "track=none"]


def hqsweep(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forecast, "PACKAGED", tmp_path / "package")
    return tmp_path


def measured(folder: Path, **changes: object) -> None:
    """A registry of one row: of conf=convergence from scratch, three arms in 300 seconds a replicate."""
    config = launch.plan(WORDS).first
    row = {
        "model": config.model.model_dump(mode="json"), "params": parameters(config),
        "data": config.data.model_dump(mode="json"), "data_hash": config.data.hash,
        "tokens": 409600, "design": "whole run",
        "points": 1, "baseline": "bf16", "sd": 0.02, "sd_pct": 1.0, "arms": {"null": {"sd_pct": 1.0, "null": True}},
        "replicates": 4, "run_tokens": 409600, "trunk_tokens": 0, "seconds": 300.0, "arms_run": 3, "trained": True,
        "device": "cpu",
        "date": "2026-11-22", "sweeps": ["mine"], "runs": "0",
    }  # fmt: skip
    (folder / "runs").mkdir()
    (folder / "runs/noise.jsonl").write_bytes(encode_rows([row | changes]))


@pytest.mark.slow
def test_a_plan_is_a_table_and_a_document(folder: Path) -> None:
    measured(folder)
    document = json.loads(hqsweep(*WORDS, "--resolve", "1.5%", "--json").stdout)
    (whole,) = document["designs"]
    assert (document["resolve_pct"], document["cheaper"]) == (1.5, "whole runs")
    assert whole["minutes"] == pytest.approx(5 * whole["replicates"])
    shown = hqsweep(*WORDS, "--resolve", "1.5").stdout
    assert "a gap of 1.5 % found in 4 of 5 studies of 1 arm" in shown
    assert f"{whole['replicates']:.0f} " in shown and f" {whole['minutes']:.0f} " in shown
    assert "whole runs: mine (4 seeds on cpu, 2026-11-22): the same model and data" in shown
    assert "forks: no comparable study has measured its noise yet" in shown
    grown = hqsweep(*WORDS, "seeds.until=decided", "seeds.max=4", "--resolve", "1.5").stdout
    assert "whole runs: more than seeds.max=4" in grown and "seeds.max" not in shown
    assert not [path for path in (folder / "runs").iterdir() if path.is_dir()]


def test_a_gap_that_is_out_of_reach_is_said(folder: Path) -> None:
    measured(folder)
    shown = hqsweep(*WORDS, "--resolve", "0.01").stdout
    assert "over 1000" in shown and "no design finds this gap with 1000 replicates" in shown
    assert json.loads(hqsweep(*WORDS, "--resolve", "0.01", "--json").stdout)["designs"][0]["replicates"] is None


WRONG = [
    (("--resolve", "1%"), "no study has measured its noise yet (runs/noise.jsonl is not there); `hqsweep run conf="),
    (("--resolve", "0"), "--resolve: got '0'; it takes a part of the baseline's loss in %, above 0 and at most 100"),
    (("--resolve", "101%"), "--resolve: got '101%'"),
    (("train.stesp=3", "--resolve", "1"), "did you mean 'train.steps'?"),
    ((), "Missing option '--resolve'"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_input_is_one_sentence_and_exit_2(words: tuple[str, ...], message: str) -> None:
    result = hqsweep(*WORDS, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1
