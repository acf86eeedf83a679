"""The report folder: HTML pages, Markdown, which a repository's own pages show, pictures, and CSV.

pandas.read_csv reads a CSV file back, by its defaults, with every name as text; a spreadsheet finds no formula in it.
"""

import re
from collections.abc import Container, Iterable
from pathlib import Path

import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.notes import headline
from hqsweep.report.figures import experts
from hqsweep.report.pages import html, tables
from hqsweep.report.pages.checks import text_tables
from hqsweep.report.pages.panels import SECTIONS, SHORT, panels
from hqsweep.report.pages.run_pages import file_names, write_run_pages
from hqsweep.report.pages.setup import prose, setup
from hqsweep.report.pages.text import TextTable, markdown, markdown_text


def write(comparison: Comparison, out_dir: Path, *, each_run: bool = True) -> Path:
    """Write report.html, report_light.html, report.md, compare.csv, points.csv, runs.csv, metrics.parquet,
    stats.parquet, under figures/ the rows of every figure as CSV and a picture of every section as SVG, and under runs/
    a page for each run if `each_run`, into `out_dir`; returns the path of report.html."""
    (out_dir / "figures").mkdir(parents=True, exist_ok=True)
    frames, drawn = comparison.frames, panels(comparison)
    rows = {panel.name: panel.rows for panel in drawn.every()}
    rows |= {"forest": drawn.forest.rows} if drawn.forest else {}
    rows |= {"throughput": drawn.speed.rows} if drawn.speed else {}
    for name, own in rows.items():
        write_csv(own, out_dir / "figures" / f"{name}.csv")
    pictures = html.pictures(drawn)
    page, pages = out_dir / "report.html", file_names(comparison) if each_run else {}
    write_run_pages(comparison, pages, out_dir)
    texts = {f"figures/{name}.svg": picture for name, picture in pictures.items()} | {
        "report.html": html.render(comparison, drawn, pages),
        "report_light.html": html.render_light(comparison, drawn),
        "report.md": report_markdown(comparison, pictures),
    }
    for name, text in texts.items():
        (out_dir / name).write_text(text, encoding="utf-8")
    write_csv(comparison.arms, out_dir / "compare.csv")
    write_csv(comparison.points, out_dir / "points.csv")
    shared = [name for name in comparison.finals if name in frames.runs and name != "run"]
    runs = frames.runs.merge(comparison.finals.drop(columns=shared), on="run")
    write_csv(pd.concat([comparison.trunks.runs, runs]) if len(comparison.trunks.runs) else runs, out_dir / "runs.csv")
    frames.metrics.to_parquet(out_dir / "metrics.parquet", index=False)
    frames.stats.to_parquet(out_dir / "stats.parquet", index=False)
    return page


def report_markdown(comparison: Comparison, pictures: Container[str] = ()) -> str:
    """The page; `pictures` are the names of the SVG files under figures/ beside it."""
    runs, arms = comparison.frames.runs, tables.by_gap(comparison).itertuples()
    parts = [
        f"# {markdown_text(tables.title(comparison))}\n\n",
        f"**{markdown_text(headline(comparison))}**\n\n",
        *(f"{markdown_text(note)}\n\n" for name, note in prose(comparison).items() if "/" not in name),
        *_picture("forest", "Gap of every arm with its interval and its verdict", pictures),
        *(f"- **{markdown_text(row.arm)}**: {markdown_text(row.sentence)}\n" for row in arms),
        "\n",
        *(f"{markdown_text(note)}\n\n" for note in comparison.notes),
        *_section("Runs left out", tables.left_out_table(comparison)),
        *_section("Runs without a result", tables.unfinished_table(comparison)),
        *_section("Setup", setup(comparison)),
        "## Result\n\n",
        markdown(tables.arms_table(comparison)),
        "\n",
        *_section("Effects of the factors", tables.effects_table(comparison)),
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


READ_AS_MISSING = frozenset((
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
    "NaN", "None", "n/a", "nan", "null",
))  # fmt: skip
"""Words that pandas.read_csv takes for a missing value, in quotes too."""


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of a cell that a spreadsheet takes for a formula, four of them as wide characters.

A tab or a line break may be skipped before them.
"""
QUOTE = "'"
"""What stands before such a cell, and before one that begins with it itself."""


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """The rows as CSV without the index.

    A text that a spreadsheet would run has an apostrophe before it, "'=1+1", and so has one that begins with an
    apostrophe; read_csv takes it away. Numbers stay as they are, also those in text. A name that would be read as
    missing has " arm" after it: the arm "null" is written as "null arm".
    """
    text = frame.select_dtypes(exclude="number").columns
    written = {name: [(cell, _written(cell)) for cell in frame[name].drop_duplicates()] for name in text}
    changed = {name: {old: new for old, new in cells if new is not old} for name, cells in written.items()}
    safe = frame.assign(**{name: frame[name].replace(cells) for name, cells in changed.items() if cells})
    safe = safe.rename(columns=_written)
    cells = [new for cells in written.values() for _, new in cells]
    returns = any("\r" in cell for cell in [*safe.columns, *cells] if isinstance(cell, str))
    # a carriage return is quoted where it ends lines; else many programs take it for the end of one
    safe.to_csv(path, index=False, lineterminator="\r\n" if returns else "\n")


def read_csv(path: Path) -> pd.DataFrame:
    """What write_csv wrote, without its apostrophes."""
    frame = pd.read_csv(path).rename(columns=_read)
    text = frame.select_dtypes(exclude="number").columns
    return frame.assign(**{name: frame[name].map(_read) for name in text})


def _written(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    if cell.lstrip(" ").startswith((*FORMULA, QUOTE)) and not _is_number(cell):
        return QUOTE + cell
    return f"{cell} arm" if cell in READ_AS_MISSING else cell


def _read(cell: object) -> object:
    return cell[1:] if isinstance(cell, str) and cell.startswith(QUOTE) else cell


def _is_number(cell: str) -> bool:
    """Whether a text is a number to every program; float() alone takes "-nan", "-1_0" and "\t1"."""
    return re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", cell, re.ASCII) is not None
