"""Figures and tables as files for a paper."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import pytest

from hqsweep.errors import UserError
from hqsweep.report.compare.compare import compare
from hqsweep.report.figures.forest import forest_of
from hqsweep.report.pages import paper
from hqsweep.report.pages.paper import forest_plot, plots
from hqsweep.report.pages.tables import arms_table
from hqsweep.report.pages.text import TextTable

pytestmark = pytest.mark.slow


@pytest.fixture
def comparison(make_sweep, fake):
    return compare(make_sweep(fake.three_arms()))


def test_every_figure_is_a_picture_of_its_own(comparison, tmp_path: Path) -> None:
    files = {path.name: path for path in paper.write_figures(comparison, "svg", tmp_path / "new")}
    names = {"forest", "speed", "val_loss", "val_loss_gap", "sqnr_mxfp8", "underflow_mxfp8"}
    assert {f"{name}.svg" for name in names} <= set(files)
    for path in files.values():
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "Median SQNR in dB: mxfp8" in files["sqnr_mxfp8.svg"].read_text()
    assert "nvfp4" in files["val_loss.svg"].read_text()  # the key


def test_png_has_the_pictures_size_and_its_text(comparison, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    try:
        paper._rasterizer()
    except UserError as error:
        pytest.skip(str(error))
    files = paper.write_figures(comparison, "png", tmp_path)
    forest = next(path for path in files if path.stem == "forest").read_bytes()
    assert forest[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(forest[16:20]) == 3 * 840
    blank = paper._rasterizer()(paper.LETTER_SVG.format(""))
    assert paper._rasterizer()(paper.LETTER_SVG.format("M")) != blank


def test_png_without_fonts_says_what_to_do(comparison, tmp_path: Path, monkeypatch) -> None:
    resvg = pytest.importorskip("resvg_py")
    monkeypatch.setattr(resvg, "svg_to_bytes", partial(resvg.svg_to_bytes, skip_system_fonts=True))
    with pytest.raises(UserError, match=r"none of the fonts DejaVu Sans, .*; install one, or write them as svg"):
        paper.write_figures(comparison, "png", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_png_without_its_library_says_what_to_do(comparison, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UserError, match=r"pip install 'hqsweep\[figures\]'"):
        paper.write_figures(comparison, "png", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_table_is_latex_that_shows_its_cells(comparison) -> None:
    table = TextTable(
        header=("arm", "gap %", "95 % of it", "95 % of it"),
        rows=(("a_b&c\\{}~^#$%", "-0.25", "-0.5 to -0.1", "\x1b"),),
        numeric=frozenset({1}),
    )
    text = paper.latex({"one": table}, "one")
    assert r"\begin{tabular}{lrll}" in text and r"\toprule" in text and r"gap \%" in text
    assert r"a\_b\&c\textbackslash \{\}\textasciitilde \textasciicircum \#\$\%" in text
    assert r"& $-$0.25 & $-$0.5 to $-$0.1 & \textbackslash x1b \\" in text
    with pytest.raises(UserError, match=r"table 'two'.*this comparison has one"):
        paper.latex({"one": table}, "two")


def test_a_long_table_goes_over_pages() -> None:
    table = TextTable(header=("arm",), rows=tuple((f"arm {n}",) for n in range(paper.LONG)))
    text = paper.latex({"long": table}, "long")
    assert r"\begin{longtable}{l}" in text and r"\usepackage{longtable}" in text and "arm 39" in text


def test_every_table_with_rows_is_a_file(comparison, tmp_path: Path) -> None:
    names = {path.stem for path in paper.write_latex(comparison, tmp_path)}
    assert names == set(paper.paper_tables(comparison)) and "points" not in names and "left_out" not in names
    arms = (tmp_path / "arms.tex").read_text()
    assert all(row[0] in arms for row in arms_table(comparison).rows)


def test_the_page_does_not_import_resvg() -> None:
    code = "import hqsweep.report.pages.paper, sys; sys.exit('resvg_py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_forest_plot_has_the_rows_of_the_pages(make_sweep, fake) -> None:
    comparison = compare(make_sweep(fake.three_arms()))
    fig, arms = forest_plot(forest_of(comparison)), comparison.arms.set_index("arm")
    means = {trace.name: trace for trace in fig.data if trace.error_x.array is not None}
    assert set(means) == {"mxfp8", "nvfp4"} and len(fig.data) == 4
    for arm, trace in means.items():
        assert trace.x[0] == arms.loc[arm, "gap_pct"]
        assert trace.x[0] + trace.error_x.array[0] == pytest.approx(arms.loc[arm, "ci_high_pct"])
        assert trace.x[0] - trace.error_x.arrayminus[0] == pytest.approx(arms.loc[arm, "ci_low_pct"])
    singles = next(trace for trace in fig.data if trace.error_x.array is None)
    assert len(singles.x) == 3 and fig.layout.shapes[0].x1 == 0.25


def test_bands_have_no_line_in_the_legend(make_sweep, fake) -> None:
    figures = plots(compare(make_sweep(fake.three_arms())))
    bands = [trace for trace in figures["val_loss"].data if not trace.name]
    assert next(iter(figures)) == "forest" and bands and not any(trace.showlegend is not False for trace in bands)
