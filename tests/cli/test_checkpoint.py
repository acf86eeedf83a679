"""`hqsweep checkpoint`: what is in one, and one sentence for what is none."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app
from hqsweep.config.job import parse
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink


def checkpoint(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of two layers, with moments."""
    weights = {f"layers.{layer}.w": torch.zeros(4, 3, dtype=torch.bfloat16) for layer in range(2)}
    moments = {"state": {0: {"exp_avg": torch.zeros(4, 3)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": weights | {"head": torch.zeros(5)}, "optimizer": moments, "step": 7}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_show_folds_layers(file: Path) -> None:
    shown = checkpoint("show", file)
    assert shown.exit_code == 0
    assert "29 parameters" in shown.stdout
    assert [line.split() for line in shown.stdout.splitlines() if "float" in line] == [
        ["layers.N.w", "2", "4", "x", "3", "bfloat16"],
        ["head", "1", "5", "float32"],
    ]
    assert f"torch, step 7, moments by index: {file}" in shown.stdout


def test_show_as_json(file: Path) -> None:
    document = json.loads(checkpoint("show", file, "--json").stdout)
    assert document["tensors"]["layers.1.w"] == {"shape": [4, 3], "dtype": "bfloat16"}
    assert {key: document[key] for key in ("kind", "step", "optimizer", "parameters", "problems")} == {
        "kind": "torch", "step": 7, "optimizer": "indexed", "parameters": 29, "problems": [],
    }  # fmt: skip


def test_show_ends_with_one_sentence_for_half_a_checkpoint(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])
    for words in ([file], [file, "--json"]):
        shown = checkpoint("show", *words)
        assert shown.exit_code == 2
        assert shown.stderr == f"hqsweep: {file}: it is cut short, or no file of torch.save; copy it again\n"
    assert json.loads(shown.stdout)["problems"]
    missing = checkpoint("show", file.with_name("b.pt"))
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "b.pt' is not there; give a Hugging Face folder" in missing.stderr


def test_no_name_of_a_checkpoint_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    torch.save({"\x1b[31mred": torch.zeros(1), "w": torch.zeros(1)}, tmp_path / "a.pt")
    assert "\x1b" not in checkpoint("show", tmp_path / "a.pt").stdout


def test_export(tmp_path: Path) -> None:
    config = parse(
        {
            "job": "convergence", "sweep": "t", "seed": 1, "recipe": {"name": "r", "linear": "bf16"},
            "model": {"dim": 32, "layers": 1, "heads": 2}, "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 1, "batch": 2, "context": 16, "eval_batches": 1, "device": "cpu"}, "stats": {"every": 0},
        }
    )  # fmt: skip
    run = tmp_path / "t/run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    convergence.run(config, ListSink(), run)
    out = tmp_path / "out.safetensors"
    done = checkpoint("export", run, out)
    assert (done.exit_code, done.stdout) == (0, f"wrote the weights of run at step 1 to {out}\n")
    assert checkpoint("show", out).exit_code == 0
    again = checkpoint("export", run, out)
    assert (again.exit_code, again.stderr) == (
        2,
        f"hqsweep: '{out}' is there already; give another name, or remove it\n",
    )
    assert "it has no checkpoint of step 5" in checkpoint("export", run, tmp_path / "b", "--step", 5).stderr
