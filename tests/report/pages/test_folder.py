"""What is written comes back from pandas.read_csv with its defaults, every name as text."""

import csv
import re

import pandas as pd
import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.notes import headline
from hqsweep.report.pages.folder import READ_AS_MISSING, read_csv, report_markdown, write, write_csv

NUMBER = re.compile(r"[+-][\d.e-]+")


@pytest.mark.parametrize("word", sorted(READ_AS_MISSING))
def test_a_name_that_pandas_takes_for_missing_is_written_as_text(tmp_path, word):
    path = tmp_path / "rows.csv"
    pd.DataFrame({"arm": [word], "gap": [1.0]}).to_csv(path, index=False)
    assert pd.read_csv(path)["arm"].isna().all()
    write_csv(pd.DataFrame({"arm": [word, "bf16"], "gap": [1.0, None], "note": [None, "x"]}), path)
    read = pd.read_csv(path)
    assert read["arm"].tolist() == [f"'{word}" if word[0] == "-" else f"{word} arm", "bf16"]
    assert read["gap"].isna().tolist() == [False, True]
    assert read["note"].isna().tolist() == [True, False]


FORMULAS = ['=HYPERLINK("http://x")', "+1+cmd|' /C'!A0", "-2+3", "a\r=1", "@SUM(1)", "\t=1", "\r=1", "\n=1", " =1"]


@pytest.mark.parametrize("cell", [*FORMULAS, "'quoted", "''"])
def test_no_cell_and_no_heading_is_a_formula_and_the_reader_gives_it_back(tmp_path, cell):
    path = tmp_path / "rows.csv"
    rows = pd.DataFrame({"arm": [cell, "bf16"], "gap": [-1.0, None], cell: ["-0.5", "+1e-3"], "mixed": [-1.5, cell]})
    write_csv(rows, path)
    with path.open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row if not NUMBER.fullmatch(cell)]
    assert not [text for text in cells if text.lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"))]
    read = read_csv(path)
    assert list(read) == list(rows) and read["arm"].tolist() == [cell, "bf16"]
    assert read["gap"].tolist()[0] == -1.0 and read[cell].tolist() == [-0.5, 0.001] and read["mixed"][1] == cell


@pytest.mark.slow
def test_the_null_arm_has_its_name_in_every_csv_of_a_report(make_sweep, fake, tmp_path):
    folder = write(compare(make_sweep(fake.fork_study({"null": 1e-5, "mxfp8": 1e-3}))), tmp_path / "out").parent
    files = {path.relative_to(folder).as_posix(): pd.read_csv(path) for path in folder.rglob("*.csv")}
    assert {"compare.csv", "points.csv", "runs.csv", "figures/train_loss.csv"} <= set(files)
    for name, rows in files.items():
        assert "null arm" in set(rows["arm"]) and rows["arm"].notna().all(), name
    assert set(files["compare.csv"]["arm"]) == {"bf16", "mxfp8", "null arm"}
    assert files["runs.csv"]["recipe"].notna().all() and "trunk" in set(files["runs.csv"]["arm"])


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
