"""A page for each run of a report, under runs/: its state, its losses, its curves, its config and its manifest."""

import re
from pathlib import Path
from typing import Any

import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import FORK
from hqsweep.report.figures import svg
from hqsweep.report.figures.look import Panel, figure, line_with_band, styles, thin
from hqsweep.report.pages import html
from hqsweep.report.pages.setup import prose
from hqsweep.report.pages.tables import TRAINED
from hqsweep.report.pages.text import TextTable, number, text

MOST = 200
"""The runs of a report that get a page, the first ones."""
FIRST = ("val_loss", "train_loss")
METRICS = 8
"""The metrics of a page, FIRST before the others."""
TRUNK_STYLE = {"color": "#767676", "dash": "solid", "width": 2}


def file_names(comparison: Comparison) -> dict[str, str]:
    """SWEEP/RUN -> the path of its page below the report's folder, for the first MOST runs and their trunks."""
    runs = pd.concat([comparison.frames.runs["run"], comparison.trunks.runs["run"]])[:MOST]
    one = runs.str.partition("/")[0].nunique() < 2
    found: dict[str, str] = {}
    for run in runs:
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", run.partition("/")[2] if one else run)
        while f"runs/{name}.html" in found.values():
            name += "_"
        found[run] = f"runs/{name}.html"
    return found


def write_run_pages(comparison: Comparison, files: dict[str, str], folder: Path) -> None:
    """Write the page of each run of `files` (from file_names) into `folder`."""
    if files:
        (folder / "runs").mkdir(exist_ok=True)
    said, looks = prose(comparison), styles(comparison.arms)
    finals = comparison.finals.set_index("run")
    for frames in (comparison.frames, comparison.trunks):
        rows = dict(iter(frames.metrics.groupby("run", sort=False)))
        for run in frames.runs.to_dict("records"):
            if run["run"] in files:
                style = looks.get(run["arm"], TRUNK_STYLE) if frames is comparison.frames else TRUNK_STYLE
                drawn = _panels(rows.get(run["run"], frames.metrics.iloc[:0]), run["arm"], style)
                page = html.fill(
                    "run.html.j2",
                    {"curves": [svg.drawing(panel) for panel in drawn]},
                    title=run["run"],
                    setup=_facts(run, finals, comparison.design == FORK),
                    note=said.get(run["run"], ""),
                    drawn=drawn,
                    leaves=[(name, _leaves(run, prefix)) for name, prefix in LEAVES],
                )
                (folder / files[run["run"]]).write_text(page, encoding="utf-8")


LEAVES = (("Config", "config."), ("Manifest", "manifest."))


def _facts(run: dict[str, Any], finals: pd.DataFrame, forked: bool) -> TextTable:
    facts = {
        "arm": run["arm"],
        "seed": str(run["seed"]),
        "state": run["state"] + (f" ({run['reason']})" if run["reason"] else ""),
        "steps": f"{number(run['step'], ',.0f')} of {number(run['steps'], ',.0f')}",
        "took": f"{number(run['seconds'], ',.0f')} s, {number(run['tokens_per_s'], ',.0f')} tokens/s",
        "folder": run["path"],
    }
    if forked and run["point"]:
        facts |= {"trunk": run["trunk"], "forked at": f"step {run['point']:,}"}
    if run["run"] in finals.index:
        own = finals.loc[run["run"]]
        facts |= {"final val loss": number(own["final_loss"], ".6f")}
        facts |= {TRAINED: number(own["train_loss"], ".6f")} if forked else {}
        facts |= {f"{'train' if forked else 'val'} gap": f"{number(own['gap'], '+.6f')} nats"}
    return TextTable(header=("fact", "value"), rows=tuple(facts.items()))


def _panels(rows: pd.DataFrame, arm: str, style: dict) -> list[Panel]:
    """A figure for each metric that the run has logged more than once."""
    names = sorted(rows["metric"].unique(), key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    drawn = []
    for name in names[:METRICS]:
        own = rows[rows["metric"] == name].sort_values("step")
        if own["step"].nunique() > 1 and own["value"].notna().any():
            fig = figure(name)
            line_with_band(fig, arm, style, thin(own), ("value",) * 3)
            last = own["value"].iloc[-1]
            says = f"{name} over {len(own)} steps; at the last step, {own['step'].iloc[-1]}: {last:.6g}."
            drawn.append(Panel(heading=name, figure=fig, name=name, rows=own, says=says))
    return drawn


def _leaves(run: dict[str, Any], prefix: str) -> TextTable:
    rows = tuple(
        (name.removeprefix(prefix), text(value))
        for name, value in run.items()
        if name.startswith(prefix) and value is not None and value == value
    )
    return TextTable(header=("key", "value"), rows=rows)
