"""The Markdown page: verdict, pictures and tables in this order, and only pictures that are there."""

import re

from hqsweep.report.compare.compare import compare, write
from hqsweep.report.compare.notes import headline
from hqsweep.report.pages.markdown_page import report_markdown


def test_the_verdict_is_first_and_every_picture_that_it_shows_is_a_file(make_sweep, fake, tmp_path):
    comparison = compare(make_sweep(fake.three_arms()), "bf16")
    folder = write(comparison, tmp_path / "out").parent
    text = (folder / "report.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\((figures/\w+\.svg)\)", text)
    assert sorted(shown) == sorted(f"figures/{path.name}" for path in (folder / "figures").glob("*.svg"))
    order = [headline(comparison).split(" (")[0], "figures/forest.svg", "- **bf16**", "## Result", "figures/gaps.svg",
             "## Config", "figures/sqnr.svg", "## GEMM plans", "## Provenance"]  # fmt: skip
    places = [text.index(words) for words in order]
    assert places == sorted(places) and places[0] < 100


def test_without_pictures_there_are_only_tables(make_sweep, fake):
    assert "![" not in report_markdown(compare(make_sweep(fake.three_arms()), "bf16"))
