"""The content of data is a part of what a run is, whatever source it has: other content is refused before anything
starts, and runs of earlier versions, whose ids do not have it, are known by their manifests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.shards.written import write_llm_c, write_megatron, write_ours
from typer.testing import CliRunner

import hqsweep
from hqsweep import worker
from hqsweep.cli.main import app
from hqsweep.errors import UserError
from hqsweep.sweep.engine import launch
from hqsweep.sweep.store.names import data_seen, run_id
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.verify import verify
from hqsweep.train import corpus
from hqsweep.train.record import checkpoints, read_record

pytestmark = pytest.mark.slow

TINY = ("conf=convergence", "model.dim=32", "model.layers=1", "model.heads=2", "train.batch=2",
        "train.context=16", "train.steps=4", "train.eval_batches=1", "train.device=cpu", "stats.every=0", "track=none",
        "engine.workers=1", "engine.threads=1")  # fmt: skip
TEXT = "".join(f"hello world, this is line {number} of a text\n" for number in range(400))
WORDS = ("data=text", "data.path=t")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_text(text: str = TEXT, name: str = "a.txt") -> None:
    Path("t").mkdir(exist_ok=True)
    Path("t", name).write_text(text)


def numbers(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 64, count).tolist()


def write_tokens(train: int = 0, val: int = 0) -> None:
    Path("t").mkdir(exist_ok=True)
    for name, seed in (("train", train), ("val", val)):
        Path("t", f"{name}.bin").write_bytes(np.array(numbers(4000, seed), "<u2").tobytes())


def write_shards(seed: int = 0) -> None:
    write_ours(Path("t"), {"train": [numbers(900, seed), numbers(900, 1)], "val": [numbers(400, 2)]})


def write_packages(version: str = "1", body: str = TEXT) -> None:
    shutil.rmtree("site-packages", ignore_errors=True)
    for name in ("one", "two"):
        Path("site-packages", name).mkdir(parents=True, exist_ok=True)
        Path("site-packages", name, "a.py").write_text(body)
        facts = Path("site-packages", f"{name}-{version}.dist-info")
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (facts / "RECORD").write_text(f"{name}/a.py,,\n")


def write_library(body: str = TEXT) -> None:
    Path("lib").mkdir(exist_ok=True)
    for name in ("a", "b"):
        Path("lib", f"{name}.py").write_text(body)


OTHER = TEXT.replace("hello", "jolly")
CASES: dict[str, tuple[str, Callable[[], object], Callable[[], object]]] = {
    "text": ("data=text data.path=t", write_text, lambda: write_text(OTHER)),
    "a file of text": ("data=text data.path=t/a.txt", write_text, lambda: write_text(OTHER)),
    "a text more": ("data=text data.path=t", write_text, lambda: write_text(OTHER, "b.txt")),
    "tokens": ("data=tokens data.path=t", write_tokens, lambda: write_tokens(train=1)),
    "tokens to validate on": ("data=tokens data.path=t", write_tokens, lambda: write_tokens(val=1)),
    "the vocabulary": (
        "data=tokens data.path=t", write_tokens, lambda: Path("t/meta.json").write_text('{"vocab_size": 99}')
    ),
    "shards": ("data=shards data.path=t", write_shards, lambda: write_shards(7)),
    "llm.c": (
        "data=shards data.path=t", lambda: (Path("t").mkdir(), write_llm_c(Path("t/a.bin"), numbers(3000))),
        lambda: write_llm_c(Path("t/a.bin"), numbers(3000, 1)),
    ),
    "a shard more": (
        "data=shards data.path=t", lambda: (Path("t").mkdir(), write_megatron(Path("t/a.bin"), [numbers(3000)])),
        lambda: write_megatron(Path("t/b.bin"), [numbers(300)]),
    ),
    "site": ("data=site", write_packages, lambda: write_packages("2", OTHER)),
    "stdlib": ("data=stdlib", write_library, lambda: write_library(OTHER)),
}  # fmt: skip


@pytest.fixture
def own_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python whose library and packages are those of this folder."""
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(folder / "lib"))
    found = corpus.distributions
    monkeypatch.setattr(corpus, "distributions", lambda path: found(path=[str(folder / "site-packages")]))


@pytest.mark.parametrize("case", CASES)
def test_other_content_is_refused_whatever_the_source(case: str, own_python: None) -> None:
    words, write, change = CASES[case]
    write()
    before = launch.plan([*TINY, *words.split()])
    launch.check(before)
    runs = launch.folders(before)
    launch.check(launch.plan([*TINY, *words.split()]))
    change()
    after = launch.plan([*TINY, "recipe=bf16,mxfp8", *words.split()])
    hashes = [plan.first.data.hash[:10] for plan in (before, after)]
    with pytest.raises(UserError) as refused:
        launch.check(after)
    said = str(refused.value)
    assert hashes[0] in said and hashes[1] in said and runs[0].name in said and "give another sweep=NAME" in said
    shutil.rmtree("t", ignore_errors=True)
    write()
    again = launch.plan([*TINY, "recipe=bf16,mxfp8", *words.split()])
    launch.check(again)
    assert launch.folders(again)[0] == runs[0]


def test_the_hash_makes_the_id_and_the_place_does_not() -> None:
    write_text()
    first = launch.plan([*TINY, *WORDS]).points[0].config
    Path("t").rename("elsewhere")
    moved = launch.plan([*TINY, "data=text", "data.path=elsewhere"]).points[0].config
    assert run_id(moved) == run_id(first)
    write_text(OTHER)
    assert run_id(launch.plan([*TINY, *WORDS]).points[0].config) != run_id(first)


def test_a_hash_that_is_given_must_be_that_of_the_data() -> None:
    write_text()
    known = launch.plan([*TINY, *WORDS]).first.data.hash
    assert launch.plan([*TINY, *WORDS, f"data.hash={known}"]).first.data.hash == known
    with pytest.raises(UserError, match=rf"data.hash: abc is given, but the data in 't' have {known[:10]}; give the"):
        launch.plan([*TINY, *WORDS, "data.hash=abc"])


def test_a_sweep_over_data_has_several_and_other_settings_are_no_other_content() -> None:
    write_text()
    Path("u.txt").write_text(OTHER)
    both = [*TINY, "data=text", "data.path=t,u.txt"]
    launch.folders(launch.plan(both))
    launch.check(launch.plan(both))
    launch.check(launch.plan([*TINY, *WORDS, "data.max_bytes=9000"]))
    with pytest.raises(UserError, match=r"'u\.txt' have other content"):  # alone it stands for the text of before
        launch.check(launch.plan([*TINY, "data=text", "data.path=u.txt"]))


def test_the_command_its_dry_run_more_steps_and_python_refuse_alike() -> None:
    write_text()
    launch.folders(launch.plan([*TINY, *WORDS]))
    write_text(OTHER)
    for options in ((), ("--dry-run",), ("--more-steps", "4"), ("--force",)):
        refused = CliRunner().invoke(app, ["run", *TINY, *WORDS, *options])
        assert refused.exit_code == 2 and "give another sweep=NAME" in refused.stderr, options
    with pytest.raises(UserError, match="have other content"):
        hqsweep.run("convergence", [*TINY[1:], *WORDS], quiet=True)
    assert not list(Path("runs").rglob("log.txt"))


def of_before(*words: str, seen: str | None) -> tuple[launch.SweepPlan, list[RunDir]]:
    """A plan, and its runs as an earlier version left them: no hash in configs and ids, `seen` in their manifests."""
    plan = launch.plan([*TINY, *words])
    configs = [json.loads(json.dumps(point.config)) for point in plan.points]
    for config in configs:
        del config["data"]["hash"]
    points = [SimpleNamespace(config=config, arm="bf16", overrides=[]) for config in configs]
    runs = launch.RunStore(Path("runs")).create(sweep="convergence", conf="c", overrides=[], runs=points)
    for run in runs:
        run.update_manifest(data_hash=seen and plan.first.data.hash)
        run.write_status(state="finished")
    return plan, runs


@pytest.mark.parametrize("seen", [True, None], ids=["known", "unknown"])
def test_runs_of_earlier_versions_keep_their_ids(seen: bool | None) -> None:
    write_text()
    before, runs = of_before(*WORDS, "seed=0,1", seen=seen)
    plan = launch.plan([*TINY, *WORDS, "recipe=bf16,mxfp8", "seed=0,1"])
    launch.check(plan)
    there = launch.folders(plan)
    assert there[:2] == runs and there[0].has_finished() and len(there) == 4
    assert data_seen(there[2].config(), there[2].manifest()) == before.first.data.hash
    assert data_seen(there[0].config(), there[0].manifest()) == (before.first.data.hash if seen else None)
    assert not verify([Path("runs/convergence")], done=lambda *numbers: None).faults
    write_text(OTHER)
    other = launch.plan([*TINY, *WORDS, "seed=0,1"])
    with pytest.raises(UserError, match="have other content"):
        launch.check(other)


def test_a_fork_study_of_an_earlier_version_goes_on_from_its_trunk() -> None:
    write_text()
    words = [*WORDS, "fork.at=2", "fork.steps=1", "fork.decay=1"]
    _, runs = of_before(*words, seen=True)
    trunk = next(run for run in runs if run.name.startswith("trunk"))
    plan = launch.plan([*TINY, *words, "recipe=bf16,mxfp8", "baseline=bf16"])
    (mxfp8,) = [config for config in plan.configs if config.recipe.name == "mxfp8"]
    assert launch.folders(plan)[0].name == trunk.name
    assert mxfp8.fork.trunk == trunk.name and mxfp8.data.hash is not None


def a_run(*words: str) -> RunDir:
    return launch.folders(launch.plan([*TINY, *WORDS, *words]))[0]


def test_a_worker_refuses_data_that_changed_since_the_plan(own_signals: None) -> None:
    write_text()
    run = a_run()
    write_text(OTHER)
    assert worker.main([str(run.path)]) == 3
    status = run.status()
    assert status["state"] == "failed" and "are others than this run was planned for (hash " in status["reason"]
    assert not run.rows("metrics") and "put the old data back" in status["reason"]
    write_text()
    assert worker.main([str(run.path)]) == 0
    (last,) = checkpoints(run.checkpoint).values()
    assert read_record(last).data == run.config()["data"]["hash"] == run.manifest()["data_hash"]


def test_a_run_of_an_earlier_version_goes_on_with_the_data_that_it_has_read_alone(own_signals: None) -> None:
    write_text()
    _, (run,) = of_before(*WORDS, seen=True)
    run.write_status(state="interrupted")
    write_text(OTHER)
    assert worker.main([str(run.path)]) == 3 and "are others than" in run.status()["reason"]
    write_text()
    assert worker.main([str(run.path)]) == 0


def test_a_file_that_changes_while_a_run_reads_it_ends_the_run(
    own_signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens()
    run = launch.folders(launch.plan([*TINY, "data=tokens", "data.path=t", "train.checkpoint_every=2"]))[0]
    batch = content_changed_at_step(3)
    monkeypatch.setattr("hqsweep.train.data.Dataset.batch", batch)
    assert worker.main([str(run.path)]) == 3
    assert "were changed while the run read them" in run.status()["reason"]
    assert list(checkpoints(run.checkpoint)) == [2]


def content_changed_at_step(step: int) -> Callable:
    from hqsweep.train.data import Dataset

    real = Dataset.batch

    def batch(self, split: str, seed: int, index: int, *shape: int):
        if (split, index) == ("train", step - 1):
            with Path("t/train.bin").open("r+b") as file:  # in place: the same file
                file.write(np.array(numbers(4000, 5), "<u2").tobytes())
        return real(self, split, seed, index, *shape)

    return batch


def test_verify_says_which_data_runs_have_read_and_whether_they_are_there() -> None:
    write_text()
    of_before(*WORDS, "seed=0,1", seen=True)
    a_run("seed=2")

    def said() -> tuple[list[dict], str]:
        result = CliRunner().invoke(app, ["verify", "--json"])
        assert result.exit_code == 0
        return json.loads(result.stdout)["data"], CliRunner().invoke(app, ["verify"]).stdout

    ((data,), text) = said()
    assert (data["state"], data["source"], data["path"], len(data["runs"])) == ("same", "text", "t", 3)
    assert data["hash"] == data["now"] and "is there as it was" in text
    write_text(OTHER)
    ((data,), text) = said()
    assert data["state"] == "changed" and data["hash"] != data["now"]
    assert f"has other content now (hash {data['now'][:10]})" in " ".join(text.split())
    shutil.rmtree("t")
    ((data,), text) = said()
    assert data["state"] == "gone" and "is not there any more" in text


def test_files_are_hashed_anew_in_a_process_that_goes_on() -> None:
    write_text()
    first = launch.data.loaded(launch.plan([*TINY, *WORDS]).first.data)
    write_text(OTHER)
    assert launch.data.loaded(launch.plan([*TINY, *WORDS]).first.data).hash != first.hash
    assert corpus.stamp_of(launch.plan([*TINY, *WORDS]).first.data)


@pytest.fixture
def own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker leaves pytest's handlers of signals alone."""
    monkeypatch.setattr(worker, "_listen", lambda: None)
    monkeypatch.setattr(worker, "_deafen", lambda: None)
