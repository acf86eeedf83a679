"""`hqsweep data`: prepare and show, and a training on what they made."""

import inspect
import json
import sys
from pathlib import Path

import pytest
from support.shards.texts import byte_level, documents, write
from typer.testing import CliRunner, Result

from hqsweep.cli import data as cli_data
from hqsweep.cli.main import app
from hqsweep.shards.prepare import Options


def data(*words: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, words)])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """(folder of shards, what prepare said)."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer, source = byte_level(folder / "tokenizer.json"), write(folder / "a.jsonl", [*documents(300), ""])
    words = (
        "prepare",
        source,
        "--tokenizer",
        tokenizer,
        "--out",
        folder / "out",
        "--val-fraction",
        0.2,
        "--workers",
        1,
    )
    return folder / "out", data(*words)


def test_prepare_says_what_it_made_and_what_comes_next(prepared: tuple[Path, Result]) -> None:
    folder, result = prepared
    assert result.exit_code == 0, result.output
    assert (
        "hqsweep shards" in result.stdout
        and f"next: hqsweep run conf=convergence data=shards data.path={folder}" in (result.stdout)
    )
    assert "warning: 1 documents are empty, and were left out" in result.stderr


def test_show_prints_counts_hash_and_a_window(prepared: tuple[Path, Result]) -> None:
    document = json.loads(data("show", prepared[0], "--json").stdout)
    manifest = json.loads((prepared[0] / "manifest.json").read_text())
    assert document["hash"] == manifest["hash"] and document["train"]["documents"] + document["val"]["documents"] == 300
    assert "[<|endoftext|>]" in document["sample"] and "Document " in document["sample"]
    shown = data("show", prepared[0], "--verify")
    assert shown.exit_code == 0 and f"hash {manifest['hash']}, and every shard is as written" in shown.stdout


def test_a_changed_shard_is_named(prepared: tuple[Path, Result]) -> None:
    shard = prepared[0] / "val/00000.bin"
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[::-1])
        result = data("show", prepared[0], "--verify")
    finally:
        shard.write_bytes(content)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "val/00000.bin: is not what was written; copy the folder again, or prepare it anew" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "/nowhere"], "hqsweep: data.path: /nowhere has no shards"),
        (["prepare", "/nowhere", "--tokenizer", "/t.json", "--out", "/o"], "--tokenizer: /t.json does not exist"),
        (["prepare", "/nowhere", "--out", "/o"], "Missing option '--tokenizer'"),
    ],
)
def test_wrong_words_are_one_sentence(words: list[str], message: str) -> None:
    result = data(*words)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prepared: tuple[Path, Result]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = prepared[0] / "tokenizer.json"
    result = data("prepare", tmp_path, "--tokenizer", tokenizer, "--out", tmp_path / "o")
    assert result.exit_code == 2 and "pip install 'hqsweep[models]'" in result.stderr
    assert data("show", prepared[0]).exit_code == 0


def test_a_model_trains_on_shards(prepared: tuple[Path, Result], tmp_path: Path) -> None:
    words = ["run", "conf=convergence", "data=shards", f"data.path={prepared[0]}", "train.steps=2", "train.batch=2"]
    words += ["train.context=32", "train.eval_batches=1", "model.layers=1", "model.dim=32", "model.heads=2"]
    words += ["track=none", f"runs_dir={tmp_path}", "train.device=cpu", "recipe=mxfp8"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (manifest,) = (json.loads(path.read_text()) for path in tmp_path.glob("*/*/manifest.json"))
    stated = json.loads((prepared[0] / "manifest.json").read_text())
    assert manifest["data"]["source"] == "shards" and manifest["data"]["tokenizer"] == stated["tokenizer"]["sha256"]


def test_the_command_has_the_defaults_of_the_call() -> None:
    stated = {name: parameter.default for name, parameter in inspect.signature(cli_data.prepare).parameters.items()}
    defaults = {name: field.default for name, field in Options.model_fields.items()}
    assert {("format" if name == "read_as" else name): stated[name] for name in stated}.items() >= defaults.items()
