"""What others wrote is data: no command imports a module that a recipe, a config or a run names but `run`, which says
so, and that never from the working directory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from hqsweep import cli
from hqsweep.cli.main import app
from hqsweep.config.job import parse
from hqsweep.sweep.store.store import RunStore

TINY = [
    "data=markov", "data.markov.length=4096", "model.dim=32", "model.layers=1", "model.heads=2", "train.steps=2",
    "train.batch=2", "train.context=32", "train.eval_batches=1", "stats.every=0", "track=none", "sweep=mine",
]  # fmt: skip
CODE = "from pathlib import Path\nwith Path({0!r}).open('a') as file:\n    file.write(__name__ + ' ')\n"
MAKE = "def make(role):\n    return 'mxfp8'\n"
RUN = ["run", "conf=own", "recipe=mine,bf16", *TINY]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a factory in conf/, and modules that would be imported by mistake beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("conf/recipe", "hydra_plugins", "foreign"):
        (tmp_path / name).mkdir(parents=True)
    planted = CODE.format(str(tmp_path / "planted"))
    for name in ("typer", "json", "torch", "yaml", "hydra_plugins/mine", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(planted + MAKE)
    for name in ("conf/my_factory", "foreign/other_factory"):
        (tmp_path / f"{name}.py").write_text(CODE.format(str(tmp_path / "imported")) + MAKE)
    (tmp_path / "conf/recipe/mine.yaml").write_text("name: mine\nqfactory: my_factory.make\n")
    (tmp_path / "foreign/other.yaml").write_text("name: other\n_target_: other_factory.make\n")
    (tmp_path / "conf/own.yaml").write_text("defaults: [convergence, _self_]\n")
    return tmp_path


def inside(*words: str) -> Result:
    """The command in this process, which takes a tenth of the time."""
    return CliRunner().invoke(app, list(words))


def hqsweep(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hqsweep", *words], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_nothing_that_reads_a_recipe_imports_its_factory(folder: Path):
    for words in (
        ["recipe", "ls"], ["recipe", "show", "mine"], ["recipe", "diff", "mine", "mxfp8"],
        ["recipe", "export", "mine", "--to", "json"], [*RUN, "--dry-run"], [*RUN, "--dry-run", "--no-import"],
        ["plan", *RUN[1:], "--resolve", "1%"],
    ):  # fmt: skip
        done = inside(*words)
        assert done.exit_code == 0 or words[0] == "plan", done.stderr
        assert not (folder / "imported").exists() and not (folder / "planted").exists(), words
        if words[0] == "recipe" and words[1] in ("ls", "show"):
            assert "my_factory.make" in done.stdout
    refused = inside(*RUN, "--no-import")
    assert refused.exit_code == 2 and "'my_factory.make' is a Python factory, which --no-import" in refused.stderr
    assert not (folder / "imported").exists() and not (folder / "runs").exists()


@pytest.mark.slow
def test_run_imports_what_the_own_configs_name_and_nothing_from_the_working_directory(folder: Path):
    ran = hqsweep(*RUN)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("importing my_factory for recipe.qfactory=my_factory.make") == 1
    assert (folder / "imported").read_text().split() == ["my_factory"] * 2  # the command, and one worker
    assert not (folder / "planted").exists()
    (folder / "imported").unlink()
    shutil.copytree(folder / "runs", folder / "copied")
    (mine,) = (folder / "copied/mine").glob("mine-*")
    for words in (
        ["compare", "mine"], ["show", f"runs/mine/{mine.name}"], ["status", "mine"], ["ls"], ["verify", "mine"],
        ["gate", "mine", "--baseline", "none.json"], ["show", str(mine)],
    ):  # fmt: skip
        done = inside(*words)
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert "No such command" not in done.stderr, done.stderr
        assert not (folder / "imported").exists() and not (folder / "planted").exists(), words
    (mine / "status.json").unlink()
    (mine / "seal.json").unlink()
    alone = subprocess.run([sys.executable, "-P", "-m", "hqsweep.worker", str(mine)], capture_output=True, text=True)
    assert alone.returncode == 3 and not (folder / "imported").exists()
    assert "'my_factory.make' is a Python factory, which the command that started the run did not" in alone.stderr


@pytest.mark.slow
def test_a_factory_comes_from_the_folder_of_the_file_that_was_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    named = inside("run", "conf=own", "recipe=foreign/other.yaml", "train.device=cuda", *TINY)
    assert named.exit_code == 2 and "train.device" in named.stderr, named.stderr
    assert "importing other_factory for recipe.qfactory=other_factory.make" in named.stderr
    assert (folder / "imported").read_text().split() == ["other_factory"]
    lost = inside("run", "conf=own", "recipe._target_=typer.make", *TINY)
    assert lost.exit_code == 2 and "typer has no function 'make'" in lost.stderr, lost.stderr
    lost = inside("run", "conf=own", "recipe._target_=foreign.other_factory.make", *TINY)
    assert lost.exit_code == 2 and "cannot be imported" in lost.stderr and str(folder / "conf") in lost.stderr
    assert not (folder / "planted").exists()


NASTY = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb"


@pytest.fixture
def nasty(folder: Path) -> str:
    """The path of a sweep of somebody else, whose files hold escape sequences wherever text may be."""
    config = {"job": "convergence", "sweep": "foreign", "recipe": {"name": "r", "linear": "mxfp8"}}
    config = parse(config).model_dump(mode="json")
    config["recipe"]["name"] = config["data"]["path"] = NASTY
    point = SimpleNamespace(config=config, arm=NASTY, overrides=[NASTY])
    (run,) = RunStore(folder / "runs").create(sweep="foreign", conf=NASTY, overrides=[NASTY], runs=[point])
    run.update_manifest(warnings=[NASTY], repairs=[NASTY], **{NASTY: NASTY})
    run.write_status(state="failed", reason=NASTY)
    row = {"step": 1, "metric": NASTY, "value": 1.0}
    run.jsonl("metrics").write_text(json.dumps(row) + "\n")
    return str(run.path)


@pytest.mark.parametrize("terminal", [True, False])
def test_no_escape_sequence_of_a_run_reaches_the_terminal(nasty: str, terminal: bool, monkeypatch: pytest.MonkeyPatch):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    runs = Path(nasty).parent
    for words in (
        ["ls"], ["status", "foreign"], ["show", nasty], ["show", nasty, "--all"], ["compare", "foreign"],
        ["status", str(runs)], ["gate", "foreign", "--baseline", NASTY], ["cancel", "foreign"], ["show", NASTY],
        ["recipe", "show", NASTY], ["run", f"conf={NASTY}"], ["run", "conf=own", f"{NASTY}=1"], [NASTY], ["ls", NASTY],
    ):  # fmt: skip
        done = inside(*words)
        out = done.stdout + done.stderr
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert "\x1b]" not in out and "\x1b[2J" not in out and not set("\x07\x9b\u202e") & set(out), (words, out)
        assert words[0] in ("ls", "cancel") or "owned" in out, (words, out)


def test_commands_print_by_what_shows_escape_sequences_as_text():
    """SafeConsole and say(): typer.echo is for text of our own, and for JSON and Python, which have escapes."""
    allowed = {"completion.py": 1, "main.py": 2, "output.py": 2, "recipe.py": 1}
    sources = {path.name: path.read_text() for path in Path(cli.__file__).parent.glob("*.py")}
    assert {name: count for name, text in sources.items() if (count := text.count("typer.echo("))} == allowed
    assert not [name for name, text in sources.items() if "rich.console import Console" in text]
