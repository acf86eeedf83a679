"""The report as one Markdown page with pictures, which a repository's own pages show."""

from collections.abc import Container, Iterable

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.notes import headline
from hqsweep.report.figures import experts
from hqsweep.report.pages import tables
from hqsweep.report.pages.checks import text_tables
from hqsweep.report.pages.panels import SECTIONS, SHORT
from hqsweep.report.pages.text import TextTable, markdown, markdown_text


def report_markdown(comparison: Comparison, pictures: Container[str] = ()) -> str:
    """The page; `pictures` are the names of the SVG files under figures/ beside it."""
    runs, arms = comparison.frames.runs, tables.by_gap(comparison).itertuples()
    parts = [
        f"# {markdown_text(tables.title(comparison))}\n\n",
        f"**{markdown_text(headline(comparison))}**\n\n",
        *_picture("forest", "Gap of every arm with its interval and its verdict", pictures),
        *(f"- **{markdown_text(row.arm)}**: {markdown_text(row.sentence)}\n" for row in arms),
        "\n",
        *(f"{markdown_text(note)}\n\n" for note in comparison.notes),
        *_section("Runs left out", tables.left_out_table(comparison)),
        *_section("Runs without a result", tables.unfinished_table(comparison)),
        "## Result\n\n",
        markdown(tables.arms_table(comparison)),
        "\n",
        *_section("Gap at each fork point", tables.points_table(comparison)),
        *_pictured("losses", pictures),
        *_section("Config: where the arms differ", tables.arm_by_key(comparison)),
        *_section("Training: tokens to loss, spikes, divergence", tables.training_table(comparison)),
        *_pictured("errors", pictures),
        *_section("GEMM output error against FP32", tables.gemm_errors(comparison.frames.stats)),
        *_pictured("experts", pictures),
        *_section("Experts: lowest SQNR and highest underflow", experts.worst_experts(comparison)),
        *_pictured("balance", pictures),
        *_section("Experts: highest and lowest load", experts.load_table(comparison)),
        *_headed("speed", pictures),
        *(part for table in text_tables(comparison.frames.parity) for part in _section(*table)),
        *_section("GEMM plans", tables.gemm_plans(runs)),
        *_section("Provenance", tables.provenance(runs)),
    ]
    return "".join(parts).rstrip("\n") + "\n"


def _section(heading: str, table: TextTable) -> Iterable[str]:
    return (f"## {heading}\n\n", markdown(table), "\n") if table.rows else ()


def _pictured(group: str, pictures: Container[str]) -> Iterable[str]:
    return (part for section in SECTIONS if section.group == group for part in _headed(section.name, pictures))


def _headed(name: str, pictures: Container[str]) -> Iterable[str]:
    """A picture below its heading; nothing where it is not there."""
    return (f"## {SHORT[name]}\n\n", *_picture(name, SHORT[name], pictures)) if name in pictures else ()


def _picture(name: str, says: str, pictures: Container[str]) -> Iterable[str]:
    return (f"![{says}](figures/{name}.svg)\n\n",) if name in pictures else ()
