"""The report as one HTML page: plotly.js is inlined once, and the page forbids itself every network request.

The template (report.html.j2) escapes everything that comes from configs, manifests and reasons. Beside the page stand
the files that it links to, under figures/: the rows of each figure as CSV.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from hqsweep.report import experts, figures, heatmaps, parity, points, tables
from hqsweep.report.arms import Comparison
from hqsweep.report.forest import Forest, forest_of
from hqsweep.report.frames import FORK
from hqsweep.report.growth import growth_of
from hqsweep.report.headline import headline
from hqsweep.report.look import Panel, styles

PLOT_CONFIG = {"responsive": True, "displayModeBar": False}
DASH_ARRAYS = {"solid": "none", "dash": "8 5", "dashdot": "8 4 2 4", "longdash": "14 5", "longdashdot": "14 4 2 4"}
"""The line styles of plotly as the legend draws them."""


@dataclass(frozen=True, kw_only=True)
class Panels:
    """The figures of a report, by section: the forest plot, and those that plotly draws."""

    forest: Forest | None
    growth: list[Panel]
    gaps: list[Panel]
    curves: list[Panel]
    sqnr: list[Panel]
    underflow: list[Panel]
    gradients: list[Panel]
    expert_sqnr: list[Panel]
    expert_underflow: list[Panel]
    loads: list[Panel]
    balance: list[Panel]
    speed: list[Panel]

    def every(self) -> list[Panel]:
        """Those of plotly."""
        return [panel for group in vars(self).values() if isinstance(group, list) for panel in group]


def panels(comparison: Comparison) -> Panels:
    """Every figure that has something to draw."""
    smooth = figures.smoothing(comparison)
    rolling = f", rolling mean of {smooth} rows" if smooth > 1 else ""
    gaps = [
        figures.gap_curves(comparison, "Validation gap over steps", "val_loss"),
        figures.gap_curves(comparison, f"Training gap over steps{rolling}", "train_loss", smooth),
    ]
    curves = [
        figures.loss_curves(comparison, "Validation loss", "val_loss"),
        figures.loss_curves(comparison, f"Training loss{rolling}", "train_loss", smooth),
    ]
    balance = [
        figures.loss_curves(comparison, f"Greatest load of any expert{rolling}", "expert_load_max", smooth, unit=""),
        figures.loss_curves(comparison, f"Load-balance loss{rolling}", "aux_loss", smooth, unit=""),
    ]
    expert_sqnr, expert_underflow = experts.error_heatmaps(comparison)
    forked = comparison.design == FORK
    return Panels(
        forest=forest_of(comparison),
        growth=growth_of(comparison, smooth) if forked else [],
        gaps=[panel for panel in gaps if panel and not forked],
        curves=[panel for panel in curves if panel],
        sqnr=list(heatmaps.sqnr_heatmaps(comparison)),
        underflow=list(heatmaps.underflow_heatmaps(comparison)),
        gradients=points.gradient_cosines(comparison),
        expert_sqnr=expert_sqnr,
        expert_underflow=expert_underflow,
        loads=list(experts.load_heatmaps(comparison)),
        balance=[panel for panel in balance if panel],
        speed=[panel for panel in [points.throughput(comparison, "Tokens a second")] if panel],
    )


def render(comparison: Comparison, drawn: Panels) -> str:
    """The whole page, about 5 MB, nearly all of it plotly.js."""
    frames, arms_table = comparison.frames, tables.arms_table(comparison).without("tokens/s")
    return fill(
        "report.html.j2",
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
        unfinished=tables.unfinished_table(comparison),
        training=tables.training_table(comparison),
        panels=drawn,
        lines=legend(comparison),
        gemm_errors=tables.gemm_errors(frames.stats),
        worst_experts=experts.worst_experts(comparison),
        load_table=experts.load_table(comparison),
        parity=parity.text_tables(frames.parity),
        sections=[
            ("GEMM plans", tables.gemm_plans(frames.runs)),
            ("Provenance", tables.provenance(frames.runs)),
            ("All runs", tables.runs_table(comparison)),
        ],
    )


def legend(comparison: Comparison) -> list[dict[str, str]]:
    """arm, colour and dash of every line, for the legend of the page."""
    return [
        {"arm": arm, "colour": style["color"], "dash": DASH_ARRAYS[style["dash"]]}
        for arm, style in styles(comparison).items()
    ]


def fill(template: str, **values: Any) -> str:
    """A page of a template beside this module, with plotly.js in it."""
    return _template(template).render(plotly_js=Markup(get_plotlyjs()), **values)


def forest_svg(drawn: Forest) -> str:
    """The forest plot as a file of its own, which a Markdown page or W&B can show: SVG without scripts and links."""
    return _template("forest.svg.j2").render(forest=drawn)


def _template(name: str) -> Template:
    """It escapes all values."""
    templates = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters |= {"div": div, "breakable": breakable}
    return pages.get_template(name)


def div(figure: go.Figure) -> Markup:
    """The figure as a div with its script. In the script, plotly writes < > / as escapes."""
    return Markup(pio.to_html(figure, include_plotlyjs=False, full_html=False, config=PLOT_CONFIG))


def breakable(key: str) -> Markup:
    """A dotted key, escaped, that may go on in the next line after a dot, an underscore or a comma."""
    return Markup("<wbr>").join(re.split(r"(?<=[._,])", key))


def _window_text(window: float) -> str:
    return f"{window:g} steps" if window >= 1 else f"{100 * window:g} % of the steps"
