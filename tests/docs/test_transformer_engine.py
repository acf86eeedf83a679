"""The page for users of TransformerEngine names all that hqsweep.compat has, and nothing of it that is not there."""

import re
import textwrap
from pathlib import Path

import torch

from hqsweep import compat
from hqsweep.compat.ops import fuser

PAGE = (Path(__file__).parents[2] / "docs" / "transformer_engine.md").read_text()
CODE = re.findall(r"`([^`]+)`", PAGE)


def test_every_name_is_on_the_page():
    words = {word for code in CODE for word in re.findall(r"\w+", code)}
    assert sorted(set(compat.__all__) - words) == []


def test_every_class_on_the_page_is_there():
    classes = {
        code for code in CODE if re.fullmatch(r"([A-Z]\w+)(Quantizer|Tensor|Storage|Recipe|Scaling|Request)", code)
    }
    assert len(classes) > 25 and sorted(name for name in classes if not hasattr(compat, name)) == []


def test_the_examples_of_factories_run():
    start, stop = "A factory returns a quantizer for each role.", "`hqsweep recipe export NAME"
    section = PAGE[PAGE.index(start) : PAGE.index(stop)]
    blocks = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", section, re.M)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(textwrap.dedent(block), "transformer_engine.md", "exec"), names)
    assert len(blocks) == 3 and names["layer"].mlp.fc1.weight.grad is not None
    assert names["experts"].weight.grad.shape == (4, 64, 64)


def test_the_examples_of_operations_run():
    """They are those of TransformerEngine's page on its operations, in smaller sizes."""
    section = PAGE[PAGE.index("## Operations") : PAGE.index("| operation |")]
    blocks = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", section, re.M)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(textwrap.dedent(block), "transformer_engine.md", "exec"), names)
    assert len(blocks) == 4 and names["y"].shape == (32, 64) and names["residual"].shape == (32, 64)


def test_the_example_of_a_fusion_runs(monkeypatch):
    monkeypatch.setattr(fuser, "_REGISTERED", {"forward_backward": [], "forward": [], "backward": []})
    section = PAGE[PAGE.index("A registered function replaces") : PAGE.index("Without `fuser_backward`")]
    (block,) = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", section, re.M)
    names = {"te": compat, "torch": torch}
    exec(compile(textwrap.dedent(block), "transformer_engine.md", "exec"), names)
    assert [type(op).__name__ for op in names["y"].grad_fn.call.stretch.ops] == ["BasicLinear", "SiLU"]


def test_every_operation_is_on_the_page():
    words = {word for code in CODE for word in re.findall(r"\w+", code)}
    assert sorted(set(compat.ops.__all__) - words - {"GRAD_INPUT_BUFFER_KEY", "OUTPUT_BUFFER_KEY", "Sequential"}) == []
