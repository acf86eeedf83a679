"""`hqsweep compare`: verdicts for people and for programs, and margins that it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app
from hqsweep.verdicts.estimate import VERDICTS
from tests.report.conftest import FakeRun, fork_study, three_arms, write_sweep

pytestmark = pytest.mark.slow


def compare(*words: str) -> Result:
    return CliRunner().invoke(app, ["compare", *words])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study():
    def gap(*nats):
        return lambda trunk, point: nats[trunk] + 0.0002 * (point == 80)

    gaps = {
        "null": gap(0, 1e-5, 0, -1e-5),
        "mxfp8": gap(0.0001, 0.0003, -0.0002, 0),
        "nvfp4": gap(0.03, 0.026, 0.03, 0.028),
    }
    return [
        *fork_study(gaps),
        *fork_study({"broken": gap(1, 1, 1, 1)}, state="failed", reason="loss is nan at step 50")[12:],
    ]


def test_json_has_a_verdict_of_four_for_every_arm(folder):
    write_sweep(folder / "runs/study", study())
    done = compare("study", "--margin", "0.3%", "--json")
    page = json.loads(done.stdout)
    arms = {arm["arm"]: arm for arm in page["arms"]}
    assert done.exit_code == 0 and page["unit"] == "% of the baseline's loss" and page["margin"] == 0.3
    assert {name: arm["verdict"] for name, arm in arms.items()} == {
        "null": "equivalent", "mxfp8": "equivalent", "nvfp4": "worse", "broken": "undecided",
    }  # fmt: skip
    for arm in arms.values():
        assert {"arm", "verdict", "gap", "ci_low", "ci_high", "margin", "n"} <= set(arm) and arm["verdict"] in VERDICTS
    nvfp4 = arms["nvfp4"]
    assert (nvfp4["gap"], nvfp4["n"], nvfp4["margin"]) == (pytest.approx(1.43), 4, 0.3)
    assert nvfp4["ci_low"] < 1.43 < nvfp4["ci_high"] and nvfp4["gap_nats"] == pytest.approx(0.0286)
    assert arms["broken"]["apart"] == "diverged" and arms["broken"]["gap"] is None and nvfp4["apart"] is None
    assert [row["arm"] for row in page["baselines"]] == ["bf16"] and page["design"] == "fork"
    assert any("A fork does not see damage" in note for note in page["notes"])
    assert (page["baseline"], page["baseline_why"]) == ("bf16", "it is not quantized")
    assert "baseline: mxfp8 (as asked for)" in compare("study", "--baseline", "mxfp8").stdout


def test_the_terminal_says_the_verdict_and_its_size(folder):
    write_sweep(folder / "runs/study", study())
    shown = " ".join(compare("study").stdout.split())
    assert "nvfp4: worse than 'bf16' by 1.43 % (95 % interval" in shown
    assert "over 4 trunks, 40 steps after the fork." in shown
    assert "mxfp8: equivalent to 'bf16' within 0.25 %: +0.00" in shown and "report: reports/study/report.html" in shown


@pytest.mark.parametrize("margin", ["0", "0%", "100.1%", "-0.1", "some"])
def test_a_margin_that_is_none_is_one_sentence_and_no_report(folder, margin):
    write_sweep(folder / "runs/study", three_arms())
    done = compare("study", f"--margin={margin}")
    assert done.exit_code == 2 and not (folder / "reports").exists()
    assert done.stderr.count("\n") == 1 and f"margin: got '{margin}'" in done.stderr and "at most 100" in done.stderr


def test_whole_runs_and_forks_are_not_compared_with_each_other(folder):
    write_sweep(folder / "runs/forks", fork_study({"mxfp8": 0.001}, trunks=2))
    write_sweep(folder / "runs/whole", three_arms())
    done = compare("forks", "whole")
    assert done.exit_code == 2
    assert "runs: whole runs and forks among them (came: 9 whole runs, 8 forks, 2 trunks)" in done.stderr
    write_sweep(folder / "runs/trunks", [FakeRun(arm="trunk", recipe="bf16", trunk="")])
    assert "nothing but trunks among them (came: 1 trunk)" in compare("trunks").stderr


def test_no_tracker_hears_of_a_comparison_unless_asked(folder, monkeypatch):
    asked = []
    monkeypatch.setattr("hqsweep.track.open.mirror_report", lambda runs, report, arms: bool(asked.append(arms)))
    write_sweep(folder / "runs/study", study())
    assert compare("study").exit_code == 0 and asked == []
    done = compare("study", "--track")
    assert len(asked) == 1 and "no tracker has taken the report" in done.stdout


def test_figures_and_tables_for_paper(folder):
    write_sweep(folder / "runs/study", three_arms())
    done = compare("study", "--figures", "svg", "--latex", "--json")
    paper = [Path(path) for path in json.loads(done.stdout)["paper"]]
    assert done.exit_code == 0 and {path.parent for path in paper} == {Path("reports/study/paper")}
    assert {"forest.svg", "val_loss.svg", "arms.tex"} <= {path.name for path in paper if path.is_file()}
    other = compare("study", "--figures", "pgn", "--out", "elsewhere")
    assert other.exit_code == 2 and not (folder / "elsewhere").exists()
    assert "figures: 'pgn' (did you mean 'png'?); they are written as svg or png" in other.stderr
