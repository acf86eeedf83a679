"""Runs of a fork study in the store: what a fork starts from, what is reused, and a study from words to results."""

from pathlib import Path

import pytest
from support.sweep.fake_worker import keep_state

from hqsweep.errors import UserError
from hqsweep.sweep.engine.launch import SweepPlan, plan
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

pytestmark = pytest.mark.slow

WORDS = ["conf=convergence", "fork.steps=6", "fork.decay=4", "track=none", "model.dim=32", "train.batch=2",
         "train.context=32", "train.eval_batches=1", "train.log_every=5", "data=markov", "stats=off",
         "data.markov.length=20000", "engine.workers=1"]  # fmt: skip


def planned(root: Path, *words: str) -> SweepPlan:
    keys = {word.partition("=")[0] for word in words}
    defaults = [word for word in (*WORDS, "recipe=bf16,mxfp8") if word.partition("=")[0] not in keys]
    return plan([*defaults, f"runs_dir={root}", *words])


def create(sweep_plan: SweepPlan) -> dict[str, RunDir]:
    """Arm, and point of a fork -> run."""
    study = sweep_plan.study.model_dump(mode="json")
    runs = RunStore(Path(sweep_plan.first.runs_dir)).create(
        sweep="f", conf="c", overrides=[], runs=sweep_plan.points, study=study
    )
    return {f"{run.manifest()['arm']} {run.manifest().get('point', '')}".strip(): run for run in runs}


def finish(run: RunDir) -> None:
    """Leave a trunk as if it had run, with all of its checkpoints."""
    if run.fork().is_trunk:
        for at in run.fork().at:
            keep_state(run, at)
    run.write_status(state="finished", exit_code=0, seconds=2.0)


def states(runs: dict[str, RunDir]) -> dict[str, str]:
    return {name: run.written_status()["state"] for name, run in runs.items()}


def test_a_fork_names_its_trunk_and_the_file_that_it_starts_from(tmp_path: Path) -> None:
    runs = create(planned(tmp_path, "fork.at=10,20"))
    trunk, fork = runs["trunk"], runs["mxfp8 20"]
    assert fork.trunk() == trunk and fork.trunk_state() == trunk.checkpoint / "step_20.pt"
    over = create(planned(tmp_path, "fork.at=10,20", "train.parallel.dp_shard=2"))
    assert over["mxfp8 20"].trunk_state() == over["trunk"].checkpoint / "step_20"  # the folder that ranks write
    assert trunk.trunk() is None and trunk.trunk_state() is None and trunk.fork().is_trunk
    assert fork.manifest()["trunk"] == trunk.name and fork.manifest()["point"] == 20
    entry = RunStore(tmp_path).facts("f")
    assert entry["arms"] == ["bf16", "mxfp8"] and entry["runs"][0] == trunk.name
    assert entry["study"]["fork"]["at"] == [10, 20]
    fork.reset()
    assert fork.manifest()["trunk"] == trunk.name
    whole = create(plan(["conf=convergence", "recipe=bf16", f"runs_dir={tmp_path}", "track=none"]))["bf16"]
    assert whole.trunk() is None and whole.trunk_state() is None and whole.fork() is None


def test_another_arm_leaves_everything_that_is_there_alone(tmp_path: Path) -> None:
    runs = create(planned(tmp_path, "fork.at=10,20"))
    for run in runs.values():
        finish(run)
    before = {path: path.stat().st_mtime_ns for run in runs.values() for path in run.path.rglob("*") if path.is_file()}
    more = create(planned(tmp_path, "fork.at=10,20", "recipe=bf16,mxfp8,nvfp4", "fork.warmup=30", "stats.every=3"))
    assert states(more) == {"trunk": "finished", **dict.fromkeys(("bf16 10", "bf16 20"), "pending")} | {
        f"{arm} {at}": "pending" for arm in ("mxfp8", "nvfp4") for at in (10, 20)
    }  # the cadence of statistics is part of a fork's id, and not of a trunk's
    more = create(planned(tmp_path, "fork.at=10,20", "recipe=bf16,mxfp8,nvfp4"))
    assert [name for name, state in states(more).items() if state == "pending"] == ["nvfp4 10", "nvfp4 20"]
    locks = {path for path in before if path.name == ".lock"}
    assert {path: path.stat().st_mtime_ns for path in before.keys() - locks} == {
        path: time for path, time in before.items() if path not in locks
    }


def test_a_finished_trunk_goes_on_for_a_point_that_it_lacks(tmp_path: Path) -> None:
    runs = create(planned(tmp_path, "fork.at=10,20"))
    for run in runs.values():
        finish(run)
    more = create(planned(tmp_path, "fork.at=15,30"))
    assert states(more)["trunk"] == "pending" and more["trunk"] == runs["trunk"]
    config = more["trunk"].config()
    assert config["fork"]["at"] == [10, 15, 20, 30] and config["train"]["steps"] == 30
    assert more["trunk"].written_status()["seconds"] == 2.0
    for run in more.values():
        finish(run)
    (runs["trunk"].checkpoint / "step_15.pt").unlink()
    assert states(create(planned(tmp_path, "fork.at=15,30")))["trunk"] == "finished"  # no fork needs it any more
    assert states(create(planned(tmp_path, "fork.at=15", "recipe=bf16,nvfp4")))["trunk"] == "pending"


def test_a_trunk_of_an_earlier_run_is_taken_by_its_hash(tmp_path: Path) -> None:
    trunk = create(planned(tmp_path / "a", "fork.at=10,20"))["trunk"]
    finish(trunk)
    keep_state(trunk, 20, "20")
    words = [f"fork.trunk={trunk.path}", "fork.at=10,20"]
    runs = create(planned(tmp_path / "b", *words))
    assert list(runs) == ["bf16 10", "bf16 20", "mxfp8 10", "mxfp8 20"]
    fork = runs["mxfp8 20"]
    assert fork.trunk() is None and fork.trunk_state() == trunk.checkpoint / "step_20.pt"
    assert fork.manifest()["trunk"] == trunk.name
    file = create(planned(tmp_path / "b", f"fork.trunk={trunk.checkpoint / 'step_20.pt'}"))
    assert list(file) == ["bf16 20", "mxfp8 20"] and file["mxfp8 20"] == fork
    (trunk.checkpoint / "step_20.pt").write_text("20?")
    with pytest.raises(
        UserError, match=r"^fork.trunk: '.*': checkpoint/step_20.pt: it has 3 bytes, and 2 were written"
    ):
        planned(tmp_path / "b", *words)
    keep_state(trunk, 20, "20")
    (tmp_path / "moved").mkdir()
    moved = trunk.path.rename(tmp_path / "moved" / trunk.name)
    assert create(planned(tmp_path / "b", f"fork.trunk={moved}", "fork.at=20"))["mxfp8 20"] == fork
    keep_state(RunDir(moved), 20, "21")
    assert create(planned(tmp_path / "b", f"fork.trunk={moved}", "fork.at=20"))["mxfp8 20"] != fork


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fork.at=30"], "fork.at: '.*' has no checkpoint of step 30; it has those of 10, 20"),
        (["fork.at=10", "model.dim=64"], "was trained with model.dim=32, but its forks have model.dim=64"),
        (["fork.at=10", "model.experts=2"], "was trained with model.experts=0, but its forks have model.experts=2"),
        (["fork.at=10", "data.markov.vocab=8"], "was trained with data.markov.vocab=16, but .* data.markov.vocab=8"),
        (["fork.at=10", "data=stdlib"], "was trained with data.source=markov, but its forks have data.source=stdlib"),
        (["fork.at=10", "train.dtype=fp32"], "was trained with train.dtype=bf16, but its forks have train.dtype=fp32"),
        (["fork.at=10", "train.lr=1"], "was trained with train.lr=0.001, but its forks have train.lr=1"),
        (["fork.at=10", "data.val_fraction=0.2"], "was trained with data.val_fraction=0.1"),
    ],
)
def test_a_trunk_of_something_else_is_refused(words: list[str], says: str, tmp_path: Path) -> None:
    trunk = create(planned(tmp_path, "fork.at=10,20"))["trunk"]
    finish(trunk)
    with pytest.raises(UserError, match=says):
        planned(tmp_path, f"fork.trunk={trunk.path}", *words)


def test_a_trunk_without_a_config_or_on_other_data_is_refused(tmp_path: Path) -> None:
    trunk = create(planned(tmp_path, "fork.at=10"))["trunk"]
    trunk.update_manifest(data_hash="0" * 64)
    finish(trunk)
    words = [f"fork.trunk={trunk.checkpoint / 'step_10.pt'}"]
    with pytest.raises(UserError, match="was trained on other data"):
        planned(tmp_path, *words)
    trunk.config_path.unlink()
    with pytest.raises(UserError, match=r"has no config.yaml"):
        planned(tmp_path, *words)
