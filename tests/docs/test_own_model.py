"""docs/own_model.md is true: its Python runs, and its commands run or compose, one after the other in one folder.

```python   runs, in one namespace
```sh       runs as it stands
```sh dry   composes: `hqsweep run` gets --dry-run
"""

import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hqsweep.cli.main import app

TEXT = (Path(__file__).parents[2] / "docs/own_model.md").read_text()
BLOCKS = re.findall(r"```(\w+) ?(\w*)\n(.*?)```", TEXT, re.DOTALL)
PACKAGE = """
from torch import nn

def build(width):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 256))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With my_model, my_package and data."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained("my_model")
    Path("my_package.py").write_text(PACKAGE)


@pytest.mark.slow
def test_the_page_from_start_to_end(folder, capsys):
    names, ran = {}, 0
    for kind, how, text in BLOCKS:
        if kind == "python":
            exec(compile(text, "own_model.md", "exec"), names)
            continue
        for line in text.splitlines() if kind == "sh" else ():  # text: with files of the reader's own
            _, *words = shlex.split(line, comments=True)
            result = CliRunner().invoke(app, [*words, *(["--dry-run"] if how == "dry" else [])])
            assert result.exit_code == 0, (line, result.output)
            ran += 1
    assert ran == 6 and [kind for kind, *_ in BLOCKS].count("python") == 4
    said = "converted 14 linear, 71.4 % of the model's multiplications by weights; skipped lm_head (the output"
    assert capsys.readouterr().out.startswith(said)
    assert names["conversion"].unused() == [] and names["histories"] == {} and issubclass(names["Quantized"], object)
    assert len(names["held"].modules) == 14 and names["held"].plain == []
