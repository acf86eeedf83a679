"""examples/real_model in its small form, with a tiny GGUF in place of the download."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.models.tiny_gguf import write_gguf
from typer.testing import CliRunner

from hqsweep.cli.main import app

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/real_model/real_model.py"
PAGE = (ROOT / "docs/real_model.md").read_text()


def inside(words: list[str], check: bool) -> SimpleNamespace:
    """subprocess.run of `python -m hqsweep`, in this process."""
    assert words[:3] == [sys.executable, "-m", "hqsweep"]
    ran = CliRunner().invoke(app, words[3:])
    assert ran.exit_code == 0, ran.output
    return SimpleNamespace(returncode=ran.exit_code)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_the_small_form_goes_from_a_gguf_file_to_a_report(tmp_path, monkeypatch, capsys) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out" / "text").mkdir(parents=True)
    for number in range(40):
        text = "".join(chr(33 + (place * (number + 3)) % 90) for place in range(2000))
        (tmp_path / "out" / "text" / f"{number}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HQSWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "run", inside)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "out", "--model", "tiny.gguf", "--small"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    said = re.findall(r"^\$ hqsweep (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert said == ["data", "probe", "run", "compare"]
    assert said == re.findall(r"^hqsweep (\w+)", PAGE, re.MULTILINE)[:4], "the page has the commands of the script"
    report = tmp_path / "reports" / "real_model" / "report.html"
    assert report.is_file() and "nvfp4_fc2_8bit" in report.read_text()
    config = json.loads((tmp_path / "out/model/config.json").read_text())
    assert config["num_hidden_layers"] == 2, "the tiny model has no more layers than two"
