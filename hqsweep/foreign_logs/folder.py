"""The report folder of a judgement: the pages of `hqsweep compare`, as far as logs of other programs carry."""

from pathlib import Path
from typing import Any

from hqsweep.foreign_logs.figures import forest_of, panels
from hqsweep.foreign_logs.judge import Judgement
from hqsweep.foreign_logs.table import arms_table, headline, title
from hqsweep.report.compare.frames import FORK
from hqsweep.report.figures import svg
from hqsweep.report.pages import html
from hqsweep.report.pages.folder import write_csv
from hqsweep.report.pages.text import TextTable, legal, markdown, markdown_text, number

PAGE = "judgement.html.j2"


def write(judgement: Judgement, folder: Path) -> Path:
    """Write report.html, report_light.html, report.md, compare.csv (a row for each arm), points.csv (each gap),
    runs.csv (each value), and under figures/ the rows of every figure as CSV, and pictures; returns the path of
    report.html."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    plot, drawn = forest_of(judgement), panels(judgement)
    pictures = {"curves": [svg.drawing(panel) for panel in drawn]} if drawn else {}
    files = {"forest": html.forest_svg(plot)} if plot else {}
    files |= {name: svg.sheet(group) for name, group in pictures.items()}
    values = _values(judgement) | {"forest": plot, "panels": drawn, "pictured": list(files)}
    texts = {f"figures/{name}.svg": legal(picture) for name, picture in files.items()} | {
        "report.html": html.fill(PAGE, pictures, **values),
        "report_light.html": html.fill(PAGE, pictures, light=True, **values),
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
