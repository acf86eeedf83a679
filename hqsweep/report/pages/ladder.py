"""Tables and files of a ladder: ladder.html, ladder.md, ladder.svg, ladder.csv (predictions by size) and
measured.csv."""

import math
from pathlib import Path

from hqsweep.report.compare.ladder import Ladder, size_text
from hqsweep.report.figures import svg
from hqsweep.report.figures.ladder import ladder_panel
from hqsweep.report.pages import html
from hqsweep.report.pages.folder import write_csv
from hqsweep.report.pages.tables import COLOUR
from hqsweep.report.pages.text import Fitted, TextTable, legal, markdown, markdown_text, number, to_rich

GAUSSIAN = (
    "Gaussian %: the gap at the largest size that the error of the formats on Gaussian numbers would have predicted"
    " from the gaps of the other arms; it knows nothing of sizes, layers and outliers."
)


def predicted_table(found: Ladder) -> TextTable:
    """One row an arm: verdict, gap with its interval at the size asked for, each law's, effN, effD, the check, and the
    Gaussian gap."""
    rows = []
    for arm, one in found.predictions.items():
        held = found.held.get(arm)
        check = "-" if held is None else "covered" if held.covered else "missed"
        laws = (f"{values[0]:+.2f}" for values in one.laws.values())
        effective = (f"{median:.2f} ({low:.2f} to {high:.2f})" for median, low, high in (one.eff_n, one.eff_d))
        span = f"{one.low:+.2f} to {one.high:+.2f}"
        gaussian = number(found.gaussian.get(arm, math.nan), "+.2f")
        rows.append((arm, found.verdict(arm), f"{one.gap:+.2f}", span, *laws, *effective, check, gaussian))
    header = (
        "arm",
        "verdict",
        "gap %",
        "95 % interval",
        "parts %",
        "power %",
        "effN",
        "effD",
        "largest size",
        "Gaussian %",
    )
    return TextTable(header=header, rows=tuple(rows), numeric=frozenset({2, 4, 5, 9}))


def measured_table(found: Ladder) -> TextTable:
    """One row an arm and design, a column for each size: gap % with its standard error."""
    sizes = sorted(found.measured["params"].unique())
    rows = []
    for (arm, design), own in found.measured.groupby(["arm", "design"], sort=False):
        of_size = {row.params: f"{row.gap_pct:+.3f} ± {number(row.se_pct, '.3f')}" for row in own.itertuples()}
        rows.append((arm, design, *(of_size.get(size, "-") for size in sizes)))
    header = ("arm", "design", *map(size_text, sizes))
    return TextTable(header=header, rows=tuple(rows), numeric=frozenset(range(2, len(header))))


def rich_tables(found: Ladder) -> list[Fitted]:
    """Both tables for a terminal."""
    colours = [COLOUR.get(found.verdict(arm), "") for arm in found.predictions]
    at = f"{size_text(found.params)} parameters, {size_text(found.tokens)} tokens"
    drop = ("parts %", "power %", "effD", "effN", "Gaussian %")
    measured = to_rich(measured_table(found), "measured gaps, % of the baseline's loss")
    return [measured, to_rich(predicted_table(found), f"predicted at {at}", colours, drop)]


def write_ladder(found: Ladder, folder: Path) -> Path:
    """Write the files into a folder; returns the path of ladder.md."""
    folder.mkdir(parents=True, exist_ok=True)
    panel = ladder_panel(found)
    (folder / "ladder.svg").write_text(legal(svg.sheet([svg.drawing(panel)])), encoding="utf-8")
    write_csv(found.curves, folder / "ladder.csv")
    write_csv(found.measured, folder / "measured.csv")
    page = folder / "ladder.md"
    (folder / "ladder.html").write_text(_html(found), encoding="utf-8")
    at = f"{size_text(found.params)} parameters and {size_text(found.tokens)} tokens"
    parts = [
        f"# Gaps at {at}\n\n", f"![{panel.heading}](ladder.svg)\n\n",
        *(f"- **{markdown_text(arm)}**: {markdown_text(found.sentence(arm))}\n" for arm in found.predictions),
        "\n## Measured\n\n", markdown(measured_table(found)), "\n## Predicted\n\n", markdown(predicted_table(found)),
        f"\n{markdown_text(GAUSSIAN)}\n",
    ]  # fmt: skip
    page.write_text("".join(parts), encoding="utf-8")
    return page


def _html(found: Ladder) -> str:
    """The page that needs no network."""
    panel = ladder_panel(found)
    return html.fill(
        "ladder.html.j2",
        title=f"Gaps at {size_text(found.params)} parameters and {size_text(found.tokens)} tokens",
        chart=svg.chart(svg.drawing(panel)),
        says=panel.says,
        sentences=[(arm, found.sentence(arm)) for arm in found.predictions],
        predicted=predicted_table(found),
        note=GAUSSIAN,
        measured=measured_table(found),
    )
