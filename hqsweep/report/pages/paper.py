"""Figures and tables of a comparison one by one, as files for a paper: SVG or PNG, and LaTeX.

A figure is the picture of the light page, with its heading and its own key. resvg (the extra `figures`) makes a PNG
from that SVG with the machine's fonts.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from hqsweep.errors import UserError, nearest, visible
from hqsweep.report.compare.arms import Comparison
from hqsweep.report.figures import experts, svg
from hqsweep.report.figures.forest import Forest
from hqsweep.report.figures.look import MARGIN_BAND, Panel, figure, label
from hqsweep.report.pages import html, tables
from hqsweep.report.pages.panels import SECTIONS, Panels, panels
from hqsweep.report.pages.text import TextTable, legal

LINE = 34
"""Pixels of an arm's line in the forest plot."""


def plots(comparison: Comparison) -> dict[str, go.Figure]:
    """Name -> figure, the forest plot first."""
    found = panels(comparison)
    drawn = {"forest": forest_plot(found.forest)} if found.forest else {}
    for name, panel in named_panels(found).items():
        whole = go.Figure(panel.figure)
        legend = any(trace.type == "scatter" for trace in whole.data)
        for trace in whole.data:
            if trace.type == "scatter" and not trace.name:
                trace.showlegend = False  # the edges of bands
        whole.update_layout(title={"text": label(panel.heading)}, showlegend=legend, margin={"t": 48})
        drawn[name] = whole
    return drawn


def forest_plot(forest: Forest) -> go.Figure:
    """A line an arm: its gap with the 95 % interval, every replicate as a dot, and the margin as a band, in % of the
    baseline's loss. The axis is linear and as long as the page's; intervals may go on beyond it."""
    scale, lines = forest.scale, list(reversed(forest.lines))
    order, rows = [label(line.arm) for line in lines], forest.rows
    fig = figure("", "gap, % of the baseline's loss", height=110 + LINE * len(lines))
    fig.add_vrect(x0=-scale.margin, x1=scale.margin, fillcolor=MARGIN_BAND, line={"width": 0}, layer="below")
    fig.add_vline(x=0, line={"color": "#000", "width": 1})
    for line in lines:
        own = rows[rows["arm"] == line.arm]
        mean, single = own[own["replicate"] == "mean"].iloc[0], own[own["replicate"] != "mean"]
        place, colour = label(line.arm), line.colour
        fig.add_scatter(
            x=single["gap_pct"], y=[place] * len(single), mode="markers", text=single["replicate"], showlegend=False,
            marker={"color": colour, "size": 5, "opacity": 0.45}, hovertemplate="%{text}: %{x:+.4f} %<extra></extra>",
        )  # fmt: skip
        fig.add_scatter(
            x=[mean["gap_pct"]], y=[place], mode="markers", name=place, showlegend=False,
            marker={"color": colour, "size": 10, "symbol": "diamond"}, hovertemplate=label(line.says),
            error_x={
                "type": "data", "symmetric": False, "color": colour, "thickness": 2,
                "array": [mean["ci_high_pct"] - mean["gap_pct"]], "arrayminus": [mean["gap_pct"] - mean["ci_low_pct"]],
            },
        )  # fmt: skip
    fig.update_yaxes(categoryorder="array", categoryarray=order, showgrid=False)
    fig.update_xaxes(range=[scale.low, scale.high])
    fig.update_layout(title={"text": label(forest.heading)}, margin={"t": 48, "l": 12})
    return fig


KINDS = ("svg", "png")
ZOOM = 3
"""The pixels of a PNG for one of the SVG: 300 dots an inch where a figure of two columns is 4 inches wide."""
FONTS = ("DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica", "Segoe UI", "Open Sans", "Roboto")
"""The font families that stand for sans-serif; the first one that the machine has is used."""
LONG = 40
"""The number of rows from which on a table of LaTeX may break over pages."""
LETTER_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
    '<text x="2" y="16" font-family="sans-serif">{}</text></svg>'
)


def named_panels(drawn: Panels) -> dict[str, Panel]:
    """Name -> figure of plotly, each with a heading that stands alone. The name comes from its rows; where several have
    the same rows, it is made of the section and the heading."""
    sectioned = [(section, panel) for section in SECTIONS for panel in drawn.groups.get(section.name, ())]
    often = Counter(panel.name for _, panel in sectioned)
    named: dict[str, Panel] = {}
    for section, panel in sectioned:
        apart = f"{section.name}_{panel.heading}" if section.shows else panel.heading
        name = panel.name if often[panel.name] == 1 else file_name(apart)
        while name in named:
            name += "_"
        named[name] = replace(panel, heading=f"{section.shows}: {panel.heading}" if section.shows else panel.heading)
    return named


def file_name(text: str) -> str:
    """A file name from a text: its letters (small), digits and . _ + -, with _ for all others."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("_")[:80].lower()


def pictures(comparison: Comparison) -> dict[str, str]:
    """Name -> SVG of every figure, the forest plot and the throughput among them."""
    drawn = panels(comparison)
    single = {name: legal(svg.sheet([svg.drawing(panel)])) for name, panel in named_panels(drawn).items()}
    whole = html.pictures(drawn)
    return {name: whole[name] for name in ("forest", "speed") if name in whole} | single


def check_kind(kind: str) -> Callable[[str], bytes]:
    """The function that makes a file of this kind from SVG text.

    Raises UserError for another kind, and for PNG without resvg_py or on a machine without fonts.
    """
    if kind not in KINDS:
        raise UserError(f"figures: '{kind}'{nearest(kind, KINDS)}; they are written as {' or '.join(KINDS)}")
    return _rasterizer() if kind == "png" else str.encode


def write_figures(comparison: Comparison, kind: str, folder: Path) -> list[Path]:
    """Write every figure into `folder` as NAME.svg or NAME.png; returns the files. Raises UserError as check_kind."""
    render = check_kind(kind)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in pictures(comparison).items():
        written.append(folder / f"{name}.{kind}")
        written[-1].write_bytes(render(picture))
    return written


def _rasterizer() -> Callable[[str], bytes]:
    """A function: SVG text -> the bytes of a PNG."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise UserError("figures: PNG needs resvg_py; pip install 'hqsweep[figures]', or write them as svg") from None

    empty = bytes(svg_to_bytes(svg_string=LETTER_SVG.format("")))
    for family in FONTS:
        if bytes(svg_to_bytes(svg_string=LETTER_SVG.format("M"), sans_serif_family=family)) != empty:
            return lambda picture: bytes(svg_to_bytes(svg_string=picture, zoom=ZOOM, sans_serif_family=family))
    raise UserError(
        f"figures: this machine has none of the fonts {', '.join(FONTS)}, so that a PNG would have no text; install"
        " one, or write them as svg"
    )


def paper_tables(comparison: Comparison) -> dict[str, TextTable]:
    """Name -> table of the report, for the tables that have rows."""
    frames = comparison.frames
    tables_by_name = {
        "arms": tables.arms_table(comparison),
        "effects": tables.effects_table(comparison),
        "points": tables.points_table(comparison),
        "training": tables.training_table(comparison),
        "config": tables.arm_by_key(comparison),
        "errors": tables.gemm_errors(frames.stats),
        "experts": experts.worst_experts(comparison),
        "gemm_plans": tables.gemm_plans(frames.runs),
        "unfinished": tables.unfinished_table(comparison),
        "left_out": tables.left_out_table(comparison),
        "runs": tables.runs_table(comparison),
        "provenance": tables.provenance(frames.runs),
    }
    return {name: table for name, table in tables_by_name.items() if table and table.rows}


def latex(named: Mapping[str, TextTable], name: str) -> str:
    """A table as LaTeX: a tabular with the rules of booktabs, or a longtable. Raises UserError for an unknown name."""
    if name not in named:
        raise UserError(f"table '{name}'{nearest(name, named)}; this comparison has {', '.join(named)}")
    table = named[name]
    cells = [[visible(" ".join(cell.split())) for cell in row] for row in table.rows]
    styled = pd.DataFrame(cells, columns=[_unique(table.header, place) for place in range(len(table.header))]).style
    styled = styled.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    columns = "".join("r" if place in table.numeric else "l" for place in range(len(table.header)))
    long = "longtable" if len(table.rows) >= LONG else None
    text = styled.to_latex(hrules=True, column_format=columns, environment=long)
    packages = r"\usepackage{booktabs}" + (r", \usepackage{longtable}" if long else "")
    return f"% {packages}\n" + re.sub(r"(?<![\w.}+-])-(?=\d)", "$-$", text)


def _unique(header: tuple[str, ...], place: int) -> str:
    """A heading; one that occurs before, too, gets a space for each time, which LaTeX does not show."""
    return header[place] + " " * header[:place].count(header[place])


def write_latex(comparison: Comparison, folder: Path) -> list[Path]:
    """Write every table into `folder` as NAME.tex; returns the files."""
    tables_by_name = paper_tables(comparison)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.tex" for name in tables_by_name]
    for path in written:
        path.write_text(latex(tables_by_name, path.stem), encoding="utf-8")
    return written
