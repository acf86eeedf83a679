"""`hqsweep run` with seeds.until=decided: a line a look, verdicts at the end, and the same as JSON."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app
from hqsweep.sweep.engine import launch
from hqsweep.sweep.engine.task import Until
from hqsweep.sweep.store.store import RunStore

GROW = [
    "run", "conf=convergence", "data=markov", "data.markov.length=4096", "model.dim=32", "model.layers=1",
    "model.heads=2", "train.steps=2", "train.batch=2", "train.context=32", "train.eval_batches=1", "train.device=cpu",
    "stats.every=0", "track=none", "recipe=bf16,mxfp8", "seeds.until=decided", "seeds.max=3", "margin=1e-7",
]  # fmt: skip


def hqsweep(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_looks_and_verdicts_are_printed_and_the_noise_is_kept(folder: Path) -> None:
    grown = hqsweep(*GROW)
    assert grown.exit_code == 0, grown.stderr
    first, second = (line for line in grown.stdout.splitlines() if line.startswith("look "))
    assert first == "look 2 of at most 3: mxfp8 undecided; adding seed 2"
    assert second == "look 3 of at most 3: mxfp8 undecided; no more than 3 were stated"
    assert "mxfp8: undecided" in grown.stdout
    assert json.loads((folder / "runs/noise.jsonl").read_text())["replicates"] == 3
    again = hqsweep(*GROW, "--json")
    document = json.loads(again.stdout)
    assert [run["seed"] for run in document["runs"]] == [0, 1, 2, 0, 1, 2] and second in again.stderr
    look = {"replicates": 3, "maximum": 3, "verdicts": {"mxfp8": "undecided"}, "added": None}
    assert document["looks"] == [look | {"half_pct": None, "margin_pct": None}]
    assert [arm["verdict"] for arm in document["arms"]] == ["undecided"]
    other = hqsweep(*GROW[:-1])
    assert other.exit_code == 2 and "margin: 0.25, but 'convergence' began to run with margin=1e-07" in other.stderr
    planned = hqsweep("plan", *GROW[1:-3], "--resolve", "1%")
    assert planned.exit_code == 2 and "no study of a comparable model" in planned.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [GROW, [word for word in GROW if not word.startswith("seeds.")]])
def test_a_study_whose_time_is_over_says_what_is_done_and_compares_it(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(plan: launch.SweepPlan, display: object, *, force: bool, until: Until) -> list:
        assert 0 < until.left <= 1200
        return RunStore(folder / "runs").create(sweep="tiny", conf="tiny", overrides=[], runs=plan.points)

    monkeypatch.setattr(launch, "start", start)
    result = hqsweep(*words, "--until", "20m")
    count = 4 if words is GROW else 2
    assert result.exit_code == 3 and f"0 of {count} runs done; the same command goes on" in result.stdout
    assert "mxfp8: 1 of 1 runs" in result.stdout or "mxfp8: 2 of 2 runs" in result.stdout
    document = json.loads(hqsweep(*words, "--until", "20m", "--json").stdout)
    assert len(document["runs"]) == count and document["arms"][0]["apart"] == "unfinished"


SETTLE = [
    *(word for word in GROW if not word.startswith(("seeds.", "margin"))), "fork.at=[2,4]", "fork.end=8",
    "fork.decay=2", "fork.warmup=1", "train.log_every=1", "fork.until=settled", "fork.max_steps=75",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_study_goes_on_until_gaps_are_known_to_the_margin(folder: Path) -> None:
    words = [word for word in SETTLE if not word.startswith("train.steps")] + ["train.steps=4", "margin=50"]
    document = json.loads(hqsweep(*words, "--json").stdout)
    (look,) = document["looks"]
    assert (look["replicates"], look["maximum"], look["added"], look["margin_pct"]) == (3, 3, None, 50)
    assert 0 < look["half_pct"]["mxfp8"] < 50
    said = hqsweep(*words).stdout
    line = "fork.until=settled: more trunks until every gap is known to the margin; 3 trunks fit into 75 steps"
    assert line in hqsweep(*words, "--dry-run").stdout
    assert "look 3 of at most 3: mxfp8 " in said and "; margin 50 %; every gap is known to the margin" in said


@pytest.mark.parametrize(("words", "message"), [
    (["fork.end=null"], "fork.until: settled, but forks that do not end together give no gap of a whole run"),
    (["fork.max_steps=7"], "fork.max_steps: 7 steps for the whole study, but one run to fork.end=8 takes more"),
    (["fork.max_steps=50"], "fork.max_steps: 50 steps, but 3 trunks with their forks, the fewest for a verdict, take"),
    (["fork.max_steps=null"], "fork.max_steps: missing; fork.until=settled adds trunks with their forks"),
    (["fork.until=fixed"], "fork.max_steps: 75 steps, but fork.until=fixed trains the seeds that are given"),
    (["seeds.until=decided"], "fork.until: settled, beside seeds.until=decided, and a study ends by one rule"),
    (["fork.at=[4]"], "fork.until: settled, but forks of one age give no gap of a whole run"),
    (["recipe=bf16"], "fork.until: settled, but the grid has one arm"),
])  # fmt: skip
def test_what_cannot_settle_is_one_sentence_and_exit_2(words: list[str], message: str) -> None:
    changed = {word.partition("=")[0] for word in words}
    rest = [word for word in SETTLE if word.partition("=")[0] not in {*changed, "train.steps"}]
    for more in (["--dry-run"], []):
        result = hqsweep(*rest, "train.steps=4", *words, *more)
        assert result.exit_code == 2
        assert [message in line for line in result.stderr.splitlines() if line.startswith("hqsweep: ")] == [True]


def test_a_time_without_a_unit_is_one_sentence_and_exit_2(folder: Path) -> None:
    result = hqsweep(*GROW, "--until", "20")
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr.count("\n") == 1
    assert "--until: got '20'; it takes a time above 0" in result.stderr


def test_a_failed_run_ends_it_with_exit_3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(plan: launch.SweepPlan, display: object, *, force: bool, until: None) -> list:
        runs = RunStore(folder / "runs").create(sweep="tiny", conf="tiny", overrides=[], runs=plan.points)
        for run in runs:
            run.write_status(state="failed", reason="out of luck")
        return runs

    monkeypatch.setattr(launch, "start", start)
    result = hqsweep(*GROW)
    assert result.exit_code == 3
    assert "4 of 4 runs failed, so no more seeds are added: bf16-s0-" in result.stdout
    assert json.loads(hqsweep(*GROW, "--json").stdout)["looks"] == []
