"""What a TAB offers is what the commands take, and offering it imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

from hqsweep.cli.candidates import keys, names, run_or_sweep, run_word
from hqsweep.config.job import config_class
from hqsweep.config.jobs import JOBS
from hqsweep.config.section import leaves
from hqsweep.config.study import StudyConfig
from hqsweep.sweep.grid.compose import known_confs, known_recipes

PACKAGED = Path(__file__).parents[2] / "conf"


def test_names_are_those_of_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sorted(names("", [PACKAGED])) == sorted(known_confs())
    assert sorted(names("recipe", [PACKAGED])) == sorted(known_recipes())


def test_keys_are_those_of_the_typed_configs() -> None:
    offered = set(keys([PACKAGED]))
    free = ("recipe.", "calibrate.students")  # mappings, with keys of the user's
    typed = {leaf for model in (*map(config_class, JOBS), StudyConfig) for leaf in leaves(model)}
    values = {key for key in typed if not any(other.startswith(f"{key}.") for other in typed)}
    of_runs = {"sweep", "fork.trunk_hash", "fork.noise", "model.hash"}  # which the command sets
    of_runs |= {"fork.source", "fork.source_hash"}  # of fork.trunk
    of_runs |= {"model.target", "model.args", "data.target", "data.args"}
    of_runs |= {"train.optimizer.target", "train.optimizer.args"}  # _target_, and keys of the user's
    assert {key for key in values - offered if not key.startswith(free)} == of_runs
    assert {key for key in offered - typed if not key.startswith(free)} <= {"fork", "factorial", "model._target_"}
    assert {"recipe.linear.input", "recipe.dpa.qkv", "recipe.gemm"} - offered <= {"recipe.gemm"}


def test_nothing_is_offered_where_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "conf/torn.yaml": "a: [",
        "conf/model/x.yaml": "seed: !!timestamp 1",
        "runs/a/sweep.json": "3",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    assert run_word("conf=t") == ["conf=torn"]
    assert run_word("train.lr") == ["train.lr="] and run_word("train.lr=") == []
    assert run_or_sweep("", Path("runs")) == run_or_sweep("", Path("nowhere")) == []


def test_a_tab_imports_nothing_heavy() -> None:
    code = "import sys; from hqsweep.cli.candidates import run_word; run_word('train.'); print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    assert "yaml" in loaded and not loaded & {"torch", "hydra", "omegaconf", "pydantic", "pandas", "numpy", "rich"}
