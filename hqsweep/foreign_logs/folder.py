"""Reports of a judgement: its figures, and the folder of its pages.

Pages have the parts of `hqsweep compare`, as far as logs of other programs carry. Figures are the forest plot, the
metric over steps, and the paired gap over steps.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from hqsweep.foreign_logs.judge import Judgement
from hqsweep.foreign_logs.table import arms_table, headline, title
from hqsweep.foreign_logs.values import means
from hqsweep.report.compare.curves import intervals
from hqsweep.report.compare.frames import FORK
from hqsweep.report.figures import svg
from hqsweep.report.figures.forest import Forest, Gaps, forest
from hqsweep.report.figures.look import (
    BASELINE_COLOUR,
    Panel,
    figure,
    label,
    line_with_band,
    listed,
    margin_band,
    padded,
    styles,
    thin,
)
from hqsweep.report.pages import html
from hqsweep.report.pages.folder import write_csv
from hqsweep.report.pages.text import TextTable, legal, markdown, markdown_text, number

FIRST = 0.05
"""The share of the steps, the first ones, that do not set the range of an axis."""


def forest_of(judgement: Judgement) -> Forest | None:
    """The forest plot; None where no arm has a gap."""
    arms = judgement.arms[judgement.arms["arm"] != judgement.baseline]
    colours = {arm: style["color"] for arm, style in styles(judgement.arms).items()}
    relative = judgement.unit == "%"
    axis = f"gap in % of the mean of {judgement.baseline}" if relative else f"gap in {judgement.metric}"
    heading = f"Gap of {judgement.metric} to {judgement.baseline}" + ", in % of its mean" * relative
    gaps = Gaps(axis=axis, unit=" %" if relative else "", lower=judgement.lower)
    replicate = "trunk" if judgement.design == FORK else "seed"
    return forest(arms, judgement.gaps, colours, heading=heading, replicate=replicate, gaps=gaps)


def panels(judgement: Judgement) -> list[Panel]:
    """The figures over steps; [] for a log without steps."""
    rows = judgement.curves
    if rows["step"].nunique() < 2:
        return []
    drawn = (_metric(judgement, rows), _gap(judgement, rows))
    return [panel for panel in drawn if panel]


def _metric(judgement: Judgement, rows: pd.DataFrame) -> Panel | None:
    """The mean over the runs of each arm, with a band from the lowest to the highest."""
    look, name = styles(judgement.arms), judgement.metric
    shown = means(rows, list(look))
    if shown.empty:
        return None
    fig = figure(label(name))
    for arm, line in look.items():
        line_with_band(fig, arm, line, thin(shown[shown["arm"] == arm]), ("mean", "lowest", "highest"))
    late = shown[shown["step"] >= shown["step"].min() + FIRST * np.ptp(shown["step"])]
    fig.update_yaxes(range=padded(late[["lowest", "highest"]].to_numpy()))
    says = f"{name} over steps. {_ends(shown, 'mean')}"
    return Panel(heading=f"{name} over steps", figure=fig, name="metric", rows=shown, says=says, zoomed=True)


def _gap(judgement: Judgement, rows: pd.DataFrame) -> Panel | None:
    """The gap to the baseline's run of the same seed, or fork: its mean and 95 % interval over seeds or trunks."""
    look, baseline = styles(judgement.arms), judgement.baseline
    shown = paired(rows, baseline)
    if shown.empty:
        return None
    fig = figure(f"gap of {label(judgement.metric)}")
    margin_band(fig, _margin(judgement))
    fig.add_hline(y=0, line={"color": BASELINE_COLOUR, "width": 1})
    for arm, line in look.items():
        line_with_band(fig, arm, line, thin(shown[shown["arm"] == arm]), ("gap", "low", "high"))
    late = shown[shown["step"] >= shown["step"].min() + FIRST * np.ptp(shown["step"])]
    fig.update_yaxes(range=padded(late[["gap", "low", "high"]].to_numpy()), tickformat="+.4~g")
    heading = f"Paired gap of {judgement.metric} over steps"
    says = f"{heading}: the arm minus '{baseline}', with 95 % intervals. {_ends(shown, 'gap')}"
    return Panel(heading=heading, figure=fig, name="metric_gap", rows=shown, says=says, zoomed=True)


def paired(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """arm, step, gap (mean over seeds or trunks), low, high (the arm's own 95 % interval) and n, at the steps that
    both runs of a pair have."""
    keys = ["replicate", "draw", "step"]
    finite = rows[np.isfinite(rows["value"])]
    reference = finite[finite["arm"] == baseline].rename(columns={"value": "reference"}).drop(columns="arm")
    both = finite[finite["arm"] != baseline].merge(reference, on=keys)
    both["gap"] = both["value"] - both["reference"]
    single = both.groupby(["arm", "step", "replicate"], sort=False)["gap"].mean()
    frame = intervals(single.groupby(["arm", "step"])).reset_index().rename(columns={"mean": "gap"})
    most = frame.groupby("arm")["n"].transform("max")
    return frame[frame["n"] == most].reset_index(drop=True)


def _margin(judgement: Judgement) -> float:
    """The margin in the metric's unit."""
    if judgement.unit != "%":
        return judgement.margin
    return judgement.margin / 100 * abs(float(judgement.arms["mean"].iloc[0]))


def _ends(rows: pd.DataFrame, column: str) -> str:
    last: Mapping[str, float] = rows.groupby("arm", sort=False)[column].last().to_dict()
    return "At the last step: " + listed(f"{arm} {value:.5g}" for arm, value in last.items()) + "."


PAGE = "judgement.html.j2"


def write(judgement: Judgement, folder: Path) -> Path:
    """Write report.html, report_light.html, report.md, compare.csv (a row for each arm), points.csv (each gap),
    runs.csv (each value), and under figures/ the rows of every figure as CSV, and pictures; returns the path of
    report.html."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    plot, drawn = forest_of(judgement), panels(judgement)
    pictures = {panel.name: svg.drawing(panel) for panel in drawn}
    files = {"forest": html.forest_svg(plot)} if plot else {}
    files |= {"curves": svg.sheet([*pictures.values()])} if pictures else {}
    values = _values(judgement) | {"forest": plot, "panels": drawn, "pictured": list(files)}
    light: Callable[[Panel], Markup] = lambda panel: svg.picture(pictures[panel.name])  # noqa: E731
    texts = {f"figures/{name}.svg": legal(picture) for name, picture in files.items()} | {
        "report.html": html.fill(PAGE, **values),
        "report_light.html": html.fill(PAGE, draw=light, light=True, **values),
        "report.md": _markdown(judgement, list(files)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, rows in {panel.name: panel.rows for panel in drawn}.items():
        write_csv(rows, folder / "figures" / f"{name}.csv")
    if plot:
        write_csv(plot.rows, folder / "figures/forest.csv")
    write_csv(judgement.arms, folder / "compare.csv")
    write_csv(judgement.gaps, folder / "points.csv")
    write_csv(judgement.runs, folder / "runs.csv")
    return folder / "report.html"


def _values(judgement: Judgement) -> dict[str, Any]:
    """The values that the template names."""
    return {
        "title": title(judgement),
        "headline": headline(judgement),
        "baseline": judgement.baseline,
        "metric": judgement.metric,
        "relative": judgement.unit == "%",
        "margin": f"{judgement.margin:g}" + (" %" if judgement.unit == "%" else ""),
        "arms": list(judgement.arms.itertuples()),
        "arms_table": arms_table(judgement),
        "left_out": judgement.left_out,
        "notes": judgement.notes,
        "lines": html.legend(judgement.arms),
        "runs": runs_table(judgement),
    }


def runs_table(judgement: Judgement) -> TextTable:
    """One row for each run of the log: its value, or the end that is none."""
    unit = "trunk" if judgement.design == FORK else "seed"
    rows = tuple(
        (run.arm, run.replicate, run.draw, number(run.value, ".6g") if run.value == run.value else f"{run.last:g}")
        for run in judgement.runs.itertuples()
    )
    table = TextTable(header=("arm", unit, "point", judgement.metric), rows=rows, numeric=frozenset({3}))
    return table if judgement.design == FORK else table.without("point")


def _markdown(judgement: Judgement, pictures: list[str]) -> str:
    """The page for a repository's own pages."""
    plots = [f"![{name}](figures/{name}.svg)\n\n" for name in pictures]
    parts = [
        f"# {markdown_text(title(judgement))}\n\n**{markdown_text(headline(judgement))}**\n\n",
        *plots[:1],
        *(f"- **{markdown_text(row.arm)}**: {markdown_text(row.sentence)}\n" for row in judgement.arms.itertuples()),
        "\n",
        *(f"Left out: {markdown_text(text)}\n\n" for text in judgement.left_out),
        *(f"{markdown_text(note)}\n\n" for note in judgement.notes),
        f"## Result\n\n{markdown(arms_table(judgement))}\n",
        *plots[1:],
        f"## Runs\n\n{markdown(runs_table(judgement))}",
    ]
    return "".join(parts).rstrip("\n") + "\n"
