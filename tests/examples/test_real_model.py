"""examples/real_model in its small form, with a tiny GGUF in place of the download."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.models.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/real_model/real_model.py"
PAGE = (ROOT / "docs/real_model.md").read_text()


@pytest.mark.slow
def test_the_small_form_goes_from_a_gguf_file_to_a_report(tmp_path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out" / "text").mkdir(parents=True)
    for number in range(40):
        text = "".join(chr(33 + (place * (number + 3)) % 90) for place in range(2000))
        (tmp_path / "out" / "text" / f"{number}.txt").write_text(text)
    env = {**os.environ, "HQSWEEP_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "out", "--model", "tiny.gguf", "--small"]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = re.findall(r"^\$ hqsweep (\w+)", ran.stdout, re.MULTILINE)
    assert said == ["data", "probe", "run", "compare"]
    assert said == re.findall(r"^hqsweep (\w+)", PAGE, re.MULTILINE), "the page has the commands of the script"
    report = tmp_path / "reports" / "real_model" / "report.html"
    assert report.is_file() and "nvfp4_fc2_8bit" in report.read_text()
    config = json.loads((tmp_path / "out/model/config.json").read_text())
    assert config["num_hidden_layers"] == 2, "the tiny model has no more layers than two"
