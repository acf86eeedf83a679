"""docs/notebook.ipynb: its cells are those of the script, ran well, and run."""

import json
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
from docs.generate import notebook

PAGE = json.loads(notebook.PAGE.read_text(encoding="utf-8"))
TINY = [
    "recipe=bf16,mxfp8", "train.steps=8", "fork.at=[8]", "fork.steps=4", "fork.decay=4", "fork.warmup=1",
    "seed=range(3)", "data=markov", "data.markov.length=4096", "data.max_bytes=4096", "model.dim=32", "model.layers=1",
    "train.batch=2", "train.context=32", "train.eval_batches=1", "train.device=cpu", "stats.every=4", "track=none",
]  # fmt: skip


def failed(cells: list) -> list:
    return [out for cell in cells for out in cell.get("outputs", ()) if out["output_type"] == "error"]


def test_the_page_has_the_scripts_cells_and_they_ran() -> None:
    assert ["".join(cell["source"]) for cell in PAGE["cells"]] == [cell["source"] for cell in notebook.cells()]
    assert all(cell["outputs"] for cell in PAGE["cells"] if cell["cell_type"] == "code") and not failed(PAGE["cells"])


def test_the_page_names_no_machine() -> None:
    text = notebook.PAGE.read_text(encoding="utf-8")
    assert len(text) < 400_000 and not [word for word in ("/tmp", "/home", "/root", "site-packages") if word in text]


@pytest.mark.slow
def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = notebook.executed(TINY, tmp_path)
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code) and not failed(code)
    assert "12 runs, 12 finished" in code[0].outputs[0].data["text/plain"]
    assert (tmp_path / "figures/forest.svg").is_file()
