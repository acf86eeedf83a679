"""hqsweep probe, from the command line to the files that it writes."""

import json

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hqsweep.cli.main import app


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
    assert "heatmap" in page and "layers.0.attn.qkv.weight" in page and "predicted SQNR" in page
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
