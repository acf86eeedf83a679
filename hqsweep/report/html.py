"""The report as one HTML file that needs nothing else: plotly.js is inlined once, and the page forbids itself every
network request.

The template (report.html.j2) escapes everything that comes from configs, manifests and reasons.
"""

from collections.abc import Iterable
from pathlib import Path

import plotly.graph_objects as go
import plotly.io as pio
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from hqsweep.report import experts, figures, tables
from hqsweep.report.arms import Comparison

PLOT_CONFIG = {"responsive": True, "displayModeBar": False}


def render(comparison: Comparison) -> str:
    """The whole page, about 5 MB, nearly all of it plotly.js."""
    runs, smooth = comparison.frames.runs, figures.smoothing(comparison)
    return fill(
        "report.html.j2",
        title=tables.title(comparison),
        baseline=comparison.baseline,
        window=_window_text(comparison.window),
        arms=list(zip(tables.arms_table(comparison).rows, comparison.arms.itertuples(), strict=True)),
        arms_table=tables.arms_table(comparison),
        unfinished=tables.unfinished_table(comparison),
        curves=blocks(_curves(comparison, smooth)),
        gaps=blocks(_gaps(comparison, smooth)),
        loads=blocks(experts.load_heatmaps(comparison)),
        sqnr=blocks(figures.sqnr_heatmaps(comparison)),
        sections=[
            ("Training: tokens to loss, spikes, divergence", tables.training_table(comparison)),
            ("GEMM output error against FP32", tables.gemm_errors(comparison.frames.stats)),
            ("Config: where the arms differ", tables.config_diff(runs)),
            ("GEMM plans", tables.gemm_plans(runs)),
            ("All runs", tables.runs_table(comparison)),
            ("Provenance", tables.provenance(runs)),
        ],
    )


def fill(template: str, **values: object) -> str:
    """A page of a template beside this module, with plotly.js in it."""
    templates = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return pages.get_template(template).render(plotly_js=Markup(get_plotlyjs()), **values)


def _curves(comparison: Comparison, smooth: int) -> list[tuple[str, go.Figure | None]]:
    return [
        ("Validation loss", figures.loss_curves(comparison, "val_loss")),
        (f"Training loss{_rolling(smooth)}", figures.loss_curves(comparison, "train_loss", smooth)),
    ]


def _gaps(comparison: Comparison, smooth: int) -> list[tuple[str, go.Figure | None]]:
    return [
        ("Final gap", figures.final_gaps(comparison)),
        ("Validation gap over steps", figures.gap_curves(comparison, "val_loss")),
        (f"Training gap over steps{_rolling(smooth)}", figures.gap_curves(comparison, "train_loss", smooth)),
    ]


def _rolling(smooth: int) -> str:
    return f", rolling mean of {smooth} rows" if smooth > 1 else ""


def _window_text(window: float) -> str:
    return f"{window:g} steps" if window >= 1 else f"{100 * window:g} % of the steps"


def blocks(titled: Iterable[tuple[str, go.Figure | None]]) -> list[tuple[str, Markup]]:
    """(heading, div with its script) of each figure that there is. In the script, plotly writes < > / as escapes."""
    divs = (
        (heading, fig and pio.to_html(fig, include_plotlyjs=False, full_html=False, config=PLOT_CONFIG))
        for heading, fig in titled
    )
    return [(heading, Markup(div)) for heading, div in divs if div]
