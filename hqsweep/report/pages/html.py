"""The report as HTML pages that forbid themselves every network request: an interactive one, into which plotly.js is
written once, and a light one of the same sections, whose figures are pictures and which runs no script.

The template (report.html.j2) escapes everything that comes from configs, manifests and reasons. Beside the pages stand
the files that they link to, under figures/: the rows of each figure as CSV, and pictures of each section.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import FORK
from hqsweep.report.compare.notes import headline
from hqsweep.report.figures import svg
from hqsweep.report.figures.forest import Forest
from hqsweep.report.figures.look import DASH_ARRAYS, Panel, styles
from hqsweep.report.pages import checks, tables
from hqsweep.report.pages.panels import Panels
from hqsweep.report.pages.text import legal

PAGE = "report.html.j2"
PLOT_CONFIG = {"responsive": True, "displayModeBar": False}
LIGHT_BYTES = 290_000
"""The size of a light page, in bytes. Pictures beyond it are linked."""
LIGHT_ROWS, LIGHT_ARMS = 60, 30
"""The rows of a table on a light page, and the arms whose throughput it draws."""


def pictures(drawn: Panels) -> dict[str, str]:
    """The name of a file -> its SVG: one file for each section, the forest plot and the throughput."""
    named = {name: svg.sheet(group) for name, group in drawn.drawings.items()}
    if drawn.forest:
        named["forest"] = forest_svg(drawn.forest)
    if drawn.speed:
        named["speed"] = _template("speed.svg.j2").render(speed=drawn.speed)
    return {name: legal(picture) for name, picture in named.items()}


def render(comparison: Comparison, drawn: Panels) -> str:
    """The interactive page, about 5 MB, nearly all of it plotly.js."""
    return fill(PAGE, draw=lambda panel: div(panel.figure), **_values(comparison, drawn))


def render_light(comparison: Comparison, drawn: Panels) -> str:
    """The page without scripts, smaller than 300 kB up to eighty arms; its long tables end early, and name the file
    with the rest."""
    values, pictures = _values(comparison, drawn), {id(panel): Markup("") for panel in drawn.every()}
    room = LIGHT_BYTES - len(fill(PAGE, draw=lambda panel: pictures[id(panel)], light=True, **values).encode())
    for section, drawings in drawn.drawings.items():
        for drawing in drawings:
            picture = svg.picture(drawing)
            if len(picture.encode()) > room:
                said = (
                    '<p class="note">Too large for this page: <a href="figures/{}.svg">this figure as a file</a>.</p>'
                )
                picture = Markup(said).format(section)
            pictures[id(drawing.panel)] = picture
            room -= len(picture.encode())
    return fill(PAGE, draw=lambda panel: pictures[id(panel)], light=True, **values)


def _values(comparison: Comparison, drawn: Panels) -> dict[str, Any]:
    """The values that the template names."""
    frames, arms_table = comparison.frames, tables.arms_table(comparison).without("tokens/s")
    return dict(
        title=tables.title(comparison),
        headline=headline(comparison),
        baseline=comparison.baseline,
        window=_window_text(comparison.window),
        margin=comparison.margin_pct,
        notes=comparison.notes,
        forked=comparison.design == FORK,
        arms=list(tables.by_gap(comparison).sort_values("null", kind="stable").itertuples()),
        fork_points=tables.points_table(comparison),
        diff=tables.arm_by_key(comparison),
        arms_table=arms_table,
        left_out=tables.left_out_table(comparison),
        unfinished=tables.unfinished_table(comparison),
        training=tables.training_table(comparison),
        panels=drawn,
        lines=legend(comparison.arms),
        comparison=comparison,
        parity=checks.text_tables(frames.parity),
        sections=[
            ("GEMM plans", tables.gemm_plans(frames.runs)),
            ("Provenance", tables.provenance(frames.runs)),
            ("All runs", tables.runs_table(comparison)),
        ],
    )


def legend(arms: pd.DataFrame) -> list[dict[str, str]]:
    """The arm, colour and dash of every line, for the legend of the page; arms: Comparison.arms."""
    return [
        {"arm": arm, "colour": style["color"], "dash": DASH_ARRAYS[style["dash"]]}
        for arm, style in styles(arms).items()
    ]


def fill(template: str, *, draw: Callable[[Panel], Markup] | None = None, light: bool = False, **values: Any) -> str:
    """A page from a template beside this module: with plotly.js in it, or `light`, without any script. `draw` makes the
    figure of a panel."""
    page = _template(template, draw=draw or (lambda panel: div(panel.figure)), light=light).render(**values)
    head, body = page.split("</head>", 1)
    script = "" if light else f"<script>{get_plotlyjs()}</script>\n"
    return f"{head}{script}</head>{_with_contents(body)}"


def _with_contents(body: str) -> str:
    """Give every <h2> an id, and <nav> the links to them."""
    headings = re.findall(r"<h2>(.*?)</h2>", body, re.DOTALL)
    links = "".join(f'<a href="#s{n}">{re.split(":| by | against ", text)[0]}</a>' for n, text in enumerate(headings))
    for place in range(len(headings)):
        body = body.replace("<h2>", f'<h2 id="s{place}">', 1)
    return body.replace("</nav>", f"{links}</nav>", 1)


def forest_svg(drawn: Forest) -> str:
    """The forest plot as a file of its own, which a Markdown page or W&B can show: SVG without scripts and links."""
    return _template("forest.svg.j2").render(forest=drawn)


def _template(name: str, **names: Any) -> Template:
    """The template, which escapes all values; `names` are known in macros too."""
    templates = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters |= {"div": div, "breakable": breakable}
    pages.globals |= {"light_rows": LIGHT_ROWS, "light_arms": LIGHT_ARMS, **names}
    return pages.get_template(name)


def div(figure: go.Figure) -> Markup:
    """The figure as a div with its script. In the script, plotly writes < > / as escapes."""
    return Markup(pio.to_html(figure, include_plotlyjs=False, full_html=False, config=PLOT_CONFIG))


def breakable(key: str) -> Markup:
    """A dotted key, escaped, that may break after a dot, an underscore or a comma."""
    return Markup("<wbr>").join(re.split(r"(?<=[._,])", key))


def _window_text(window: float) -> str:
    return f"{window:g} steps" if window >= 1 else f"{100 * window:g} % of the steps"
