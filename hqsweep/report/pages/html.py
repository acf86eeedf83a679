"""The report as HTML pages that forbid themselves every network request: an interactive one, and a light one of the
same sections, which runs no script and so is dark only where the reader's system is.

The template (report.html.j2) escapes everything that comes from configs, manifests and reasons. Beside the pages stand
the files that they link to, under figures/: the rows of each figure as CSV, and pictures of each section.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.bccache import Bucket, BytecodeCache
from markupsafe import Markup

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import FORK
from hqsweep.report.compare.notes import headline
from hqsweep.report.figures import svg
from hqsweep.report.figures.forest import Forest
from hqsweep.report.figures.look import DASH_ARRAYS, styles
from hqsweep.report.figures.svg import Drawing
from hqsweep.report.pages import checks, tables
from hqsweep.report.pages.panels import Panels
from hqsweep.report.pages.setup import marked_up, prose, setup
from hqsweep.report.pages.text import legal

PAGE = "report.html.j2"
PAGE_BYTES, LIGHT_BYTES = 1_400_000, 290_000
"""The size of a page and of a light page, in bytes. Pictures beyond it are linked."""
TOO_LARGE = Markup('<p class="note">Too large for this page: <a href="figures/{}.svg">this figure as a file</a>.</p>')
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


def render(comparison: Comparison, drawn: Panels, pages: Mapping[str, str] = MappingProxyType({})) -> str:
    """The interactive page. It is as large as PAGE_BYTES where pictures fill it; the tables have all rows. `pages`:
    SWEEP/RUN -> the path of its own page."""
    return fill(PAGE, drawn.drawings, **_values(comparison, drawn) | {"pages": pages})


def render_light(comparison: Comparison, drawn: Panels) -> str:
    """The page without scripts, smaller than 300 kB up to eighty arms; its long tables end early, and name the file
    with the rest."""
    return fill(PAGE, drawn.drawings, light=True, **_values(comparison, drawn))


def _values(comparison: Comparison, drawn: Panels) -> dict[str, Any]:
    """The values that the template names."""
    frames, arms_table = comparison.frames, tables.arms_table(comparison)
    empty = [name for name in arms_table.header if arms_table.column(name) == {"-"}]
    return dict(
        title=tables.title(comparison),
        headline=headline(comparison),
        setup=setup(comparison),
        prose=prose(comparison),
        baseline=comparison.baseline,
        window=_window_text(comparison.window),
        margin=comparison.margin_pct,
        notes=comparison.notes,
        forked=comparison.design == FORK,
        arms=list(tables.by_gap(comparison).sort_values("null", kind="stable").itertuples()),
        fork_points=tables.points_table(comparison),
        diff=tables.arm_by_key(comparison),
        arms_table=arms_table.without("tokens/s", *empty),
        left_out=tables.left_out_table(comparison),
        unfinished=tables.unfinished_table(comparison),
        training=tables.training_table(comparison),
        panels=drawn,
        lines=legend(comparison.arms),
        comparison=comparison,
        pages={},
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


def fill(
    template: str,
    drawings: Mapping[str, Sequence[Drawing]] = MappingProxyType({}),
    *,
    light: bool = False,
    **values: Any,
) -> str:
    """A page from a template beside this module, interactive or `light`, without any script. `drawings`: the figures by
    the name of the file that has their picture; a figure for which the page has no room is a link to it."""
    shown = {id(drawing.panel): Markup("") for group in drawings.values() for drawing in group}
    page = _template(template, draw=lambda panel: shown[id(panel)], light=light)
    room = (LIGHT_BYTES if light else PAGE_BYTES) - len(page.render(**values).encode())
    for name, group in drawings.items():
        for drawing in group:
            figure = svg.picture(drawing) if light else svg.chart(drawing)
            if len(figure.encode()) > room:
                figure = TOO_LARGE.format(name)
            shown[id(drawing.panel)] = figure
            room -= len(figure.encode())
    head, body = page.render(**values).split("</head>", 1)
    return f"{head}</head>{_with_contents(breakable(body))}"


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


class Compiled(BytecodeCache):
    """The templates of this process, each compiled once."""

    code: ClassVar[dict[str, bytes]] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self.code:
            bucket.bytecode_from_string(self.code[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self.code[bucket.key] = bucket.bytecode_to_string()


def _template(name: str, **names: Any) -> Template:
    """The template, which escapes all values; `names` are known in macros too."""
    templates = FileSystemLoader(Path(__file__).parent)
    settings = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True}
    pages = Environment(loader=templates, bytecode_cache=Compiled(), **settings)
    pages.filters |= {"marked_up": marked_up}
    pages.globals |= {"light_rows": LIGHT_ROWS, "light_arms": LIGHT_ARMS, **names}
    return pages.get_template(name)


APART = re.compile(r"(<(script|style|pre|svg)\b.*?</\2>|<[^>]*>)", re.DOTALL)
"""Tags, and elements whose text stays as it is."""
LONG_WORD = re.compile(r"\S{12,}")
BETWEEN = re.compile(r"(?<=\w[_|+@/=-])(?<!\de[+-])(?=\w)|(?<=[a-zA-Z][.,])(?=\w)|(?<=\d[.,])(?=[a-zA-Z])")
"""The places in a name where a line may end; none is in a number."""


def breakable(body: str) -> str:
    """HTML whose long names break at their joints, and elsewhere only where a part is longer than a line."""
    parts = APART.split(body)  # text, then an element of APART, and the name of its tag
    parts[::3] = [LONG_WORD.sub(lambda word: BETWEEN.sub("<wbr>", word[0]), text) for text in parts[::3]]
    parts[2::3] = ["" for _ in parts[2::3]]
    return "".join(parts)


def _window_text(window: float) -> str:
    return f"{window:g} steps" if window >= 1 else f"{100 * window:g} % of the steps"
