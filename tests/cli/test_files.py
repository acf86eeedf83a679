"""`hqsweep probe`, `hqsweep checkpoint` and `hqsweep data`, from the command line to the files that they write."""

import inspect
import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import save_file
from support.shards.texts import byte_level, documents, write
from typer.testing import CliRunner, Result

from hqsweep.cli import files
from hqsweep.cli.main import app
from hqsweep.config.job import parse
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.shards.prepare import Options

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{i}.{part}.weight" for i in range(2) for part in ("attn.qkv", "mlp.fc1")]
    save_file({name: torch.randn(128, 64, generator=generator) for name in names}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hqsweep(*words):
    return CliRunner().invoke(app, ["probe", *words])


def test_table_files_and_a_recipe_that_run_takes(folder):
    result = hqsweep(
        "model.safetensors", "--formats", "mxfp8,nvfp4", "--bits", "6.5", "--out", "mine.yaml", "--csv", "all.csv",
        "--html", "page.html",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "(budget 6.5), predicted SQNR" in result.stdout and "wrote mine.yaml" in result.stdout
    assert "strict pairs" in result.stdout and "for the GPT of hqsweep run: recipe=mine.yaml" in result.stdout
    assert "probe: 4 tensors of 0.0 M elements in 2 formats, about 0:0" in result.stderr
    rows = pd.read_csv("all.csv")
    assert len(rows) == 4 * 2 * 2 and rows["sqnr_db"].min() > 20
    page = (folder / "page.html").read_text()
    assert "<svg" in page and "layers.0.attn.qkv.weight" in page and "predicted SQNR" in page
    sweep = CliRunner().invoke(app, ["run", "conf=convergence", "recipe=mine.yaml", "--dry-run", "--json"])
    (run,) = json.loads(sweep.stdout)
    assert run["arm"] == "mine" and len(run["config"]["recipe"]["overrides"]) in (2, 3)


def test_names_of_a_file_are_text_while_it_runs_and_after(folder, monkeypatch):
    """Markup of rich, and an escape sequence, in the name of a tensor; on a terminal, where the bar shows it."""
    save_file({"a[/b]\x1b[2J.weight": torch.ones(64, 64), "c.weight": torch.ones(64, 64)}, folder / "odd.safetensors")
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    result = hqsweep("odd.safetensors", "--formats", "mxfp8", "--bits", "9")
    assert result.exit_code == 0, result.output
    assert "a[/b]\\x1b[2J" in result.stdout and "a[/b]\\x1b[2J" in result.stderr
    assert "\x1b[2J" not in result.stdout + result.stderr


def test_json_has_rows_recipe_and_promise(folder):
    report = json.loads(hqsweep("model.safetensors", "--formats", "mxfp8", "--bits", "9", "--json").stdout)
    assert (len(report["rows"]), report["recipe"]["linear"], report["recipe"]["overrides"]) == (8, "mxfp8", [])
    assert report["bits"] == 8.25 and 31 < report["predicted_sqnr_db"] < 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["modle.safetensors"], "did you mean 'model.safetensors'"),
        (["model.safetensors", "--formats", "nvpf4"], "did you mean 'nvfp4'"),
        (["model.safetensors", "--formats", "float8_block_scaling"],
         "'float8_block_scaling' is a recipe; give the formats of its linears, fp8_block,fp8_block+2d"),
        (["model.safetensors", "--formats", "mxfp8,nvfp4_row_scaled_fwd_mxfp8_bwd"],
         "give the formats of its linears, mxfp8,nvfp4+row_scaled|mxfp8,nvfp4|mxfp8"),
        (["model.safetensors", "--bits", "3"], "--bits 3: the cheapest formats take 4.5"),
        (["model.safetensors", "--out", "mine.yaml"], "give --bits"),
        (["model.safetensors", "--bits", "6", "--out", "mine.txt"], "must end in .yaml"),
        (["model.safetensors", "--csv", "no/such/file.csv"], "its folder does not exist"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence_and_exit_code_2(folder, words, message):
    result = hqsweep(*words)
    assert result.exit_code == 2 and message in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("hqsweep: ")


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
    stated = {name: parameter.default for name, parameter in inspect.signature(files.prepare).parameters.items()}
    defaults = {name: field.default for name, field in Options.model_fields.items()}
    assert {("format" if name == "read_as" else name): stated[name] for name in stated}.items() >= defaults.items()
