"""`python -m docs.generate.notebook` writes docs/notebook.ipynb: its cells stand here, and are run anew.

That takes two minutes on two cores, so that `make docs` leaves it out; tests/docs/test_notebook.py holds that the cells
of the page are these, and runs them on less.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PAGE = Path(__file__).parents[1] / "notebook.ipynb"
OVERRIDES = [
    "recipe=bf16,mxfp8,nvfp4,nvfp4_fwd_mxfp8_bwd_original", "train.steps=200", "fork.at=[200]", "stats.every=30",
    "seed=range(3)",
]  # fmt: skip
TIMEOUT_S = 1800

CELLS = [
    ("markdown", """# Which recipe can I trust?

A sweep from start to end in a notebook. `docs/generate/notebook.py` wrote this page and ran it.
[From Python](python.md) says more about each call.

The study is the packaged sweep `quickstart`: trunks in bf16 on the sources of Python's standard library, and from each
of them a fork for every recipe, and for the null arm, which is bf16 with noise in its weights. `hq.run` does what
`hqsweep run` does, and goes on where it was interrupted."""),
    ("code", """import hqsweep as hq

overrides = {overrides}
sweep = hq.run("quickstart", overrides, quiet=True)
sweep"""),
    ("markdown", """A sweep is a sequence of its runs, and has tables of them all. `runs` has one row a run, with the
last value of every metric, and with the keys of the config that differ."""),
    ("code", """sweep.runs[["arm", "trunk", "point", "state", "train_loss", "val_loss"]].tail(8)"""),
    ("markdown", """Every row that was logged is in `metrics`. The errors that were sampled inside of the runs are in
`stats`: here the median signal-to-noise ratio of each tensor, in dB."""),
    ("code", """errors = sweep.stats[sweep.stats["direction"] != "output"]
errors.pivot_table(index="tensor", columns="arm", values="sqnr_db", aggfunc="median").round(1)"""),
    ("markdown", """Verdicts pair each fork with the baseline's fork of the same trunk, which saw the same batches. A
gap is in % of the baseline's loss; the band is the margin, within which an arm counts as equivalent."""),
    ("code", """comparison = sweep.compare()
comparison"""),
    ("code", """comparison.verdicts[["arm", "verdict", "gap_pct", "ci_low_pct", "ci_high_pct", "n"]].round(3)"""),
    ("markdown", """`figures` has plotly's figures, which a viewer without plotly does not show. `save` writes all of
them as SVG or PNG, and the tables as LaTeX."""),
    ("code", """import plotly.io

plotly.io.renderers.default = "plotly_mimetype"
comparison.figures["forest"]"""),
    ("code", """from IPython.display import SVG

files = comparison.save("svg", "figures")
SVG(filename="figures/val_loss.svg")"""),
    ("code", """print(comparison.latex("arms"))"""),
    ("markdown", """Recipes work on your own model, too: every linear that is taken computes by the recipe from then on,
and `hq.revert` undoes it."""),
    ("code", """import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
conversion = hq.convert(model, "nvfp4|mxfp8")
model(torch.randn(32, 64)).square().mean().backward()
conversion"""),
]  # fmt: skip
"""Kind and text of each cell."""


def cells(overrides: Sequence[str] = OVERRIDES) -> list[nbformat.NotebookNode]:
    """The cells without outputs, the sweep under these overrides."""
    listed = "[\n" + "".join(f'    "{text}",\n' for text in overrides) + "]"
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    return [
        make[kind](text.replace("{overrides}", listed), id=f"cell-{place}") for place, (kind, text) in enumerate(CELLS)
    ]


def executed(overrides: Sequence[str], folder: Path) -> nbformat.NotebookNode:
    """The notebook after its cells ran in `folder`. Raises nbclient's CellExecutionError for one that fails."""
    notebook = nbformat.v4.new_notebook(cells=cells(overrides))
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    options = {"timeout": TIMEOUT_S, "kernel_name": "python3", "record_timing": False}
    return NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, **options).execute()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(nbformat.writes(executed(OVERRIDES, Path(folder))) + "\n", encoding="utf-8")
    print(f"docs/{PAGE.name}: {PAGE.stat().st_size:,} bytes")
