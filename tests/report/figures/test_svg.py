"""Pictures: they hold what plotly's figures hold, where the values are."""

import re
from xml.etree import ElementTree

import pandas as pd
import pytest

from hqsweep.report.figures import svg
from hqsweep.report.figures.look import Panel, figure, line_with_band, margin_band

STYLE = {"color": "#0072B2", "dash": "dash", "width": 2}


def panel_of(fig, heading="Loss") -> Panel:
    return Panel(heading=heading, figure=fig, name="loss", rows=pd.DataFrame(), says="Loss <of> all & more")


def lines(count=5) -> Panel:
    fig = figure("loss", y={"range": [0, 10]}, x={"range": [0, count - 1]})
    rows = pd.DataFrame({"step": range(count), "mean": 5.0, "low": 4.0, "high": 6.0})
    line_with_band(fig, "a <b>", STYLE, rows, ("mean", "low", "high"))
    margin_band(fig, 1.0)
    fig.add_vline(x=2, line={"color": "#888", "width": 1, "dash": "dot"})
    return panel_of(fig)


def paths(picture) -> list[dict]:
    root = ElementTree.fromstring(picture)
    return [element.attrib for element in root.iter() if element.tag.endswith("path")]


def test_a_line_a_band_a_margin_and_a_rule_stand_where_their_values_are():
    drawn = svg.picture(svg.drawing(lines()))
    curve = next(each for each in paths(drawn) if each.get("stroke") == "#0072B2" and "stroke-dasharray" in each)
    places = [tuple(map(float, point.split())) for point in re.split("[ML]", curve["d"]) if point]
    height = round(svg.SHRINK * 340)
    bottom, top = height - 34, 8
    assert len(places) == 5 and {y for _, y in places} == {round((bottom + top) / 2, 1)}
    assert places[-1][0] == svg.WIDTH - 10
    band = next(each for each in paths(drawn) if each.get("fill", "").startswith("rgba(0,114,178"))
    assert band["d"].endswith("z") and band["d"].count("L") == 9
    rect = next(e for e in ElementTree.fromstring(drawn).iter() if e.tag.endswith("rect"))
    assert float(rect.attrib["height"]) == pytest.approx((bottom - top) * 0.2, abs=0.1)
    assert len([each for each in paths(drawn) if each.get("stroke") == "#888" and "stroke-dasharray" in each]) == 1


def test_lines_break_where_a_value_is_missing_and_long_ones_are_thinned():
    fig = figure("loss", y={"range": [0, 1]}, x={"range": [0, 1000]})
    fig.add_scatter(x=[1, 2, 3, 4], y=[0.1, None, 0.3, 0.4], mode="lines", line=STYLE)
    fig.add_scatter(x=list(range(1000)), y=[0.5] * 1000, mode="lines", line=STYLE)
    broken, long = (each["d"] for each in paths(svg.picture(svg.drawing(panel_of(fig)))) if each.get("fill") == "none")
    assert broken.count("M") == 2 and long.count("L") == svg.MOST_POINTS - 1


def test_cells_have_their_shade_and_their_text():
    fig = figure("", "")
    fig.add_heatmap(
        z=[[0.0, 10.0], [None, 10.0]], x=[["in", "in"], ["row", "col"]], y=["l0", "l1"], zmin=0, zmax=10,
        text=[["0", "10"], ["", "10"]], texttemplate="%{text}", colorscale="Viridis",
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed")
    root = ElementTree.fromstring(svg.picture(svg.drawing(panel_of(fig))))
    fills = {e.attrib["fill"]: e.attrib["d"].count("M") for e in root.iter() if "d" in e.attrib and "fill" in e.attrib}
    assert fills == {"#440154": 1, "#fde725": 2}
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert words == ["l0", "l1", "row", "col", "in", "0", "10", "10"]


def test_a_sheet_holds_all_panels_and_says_once_which_line_is_which_arm():
    root = ElementTree.fromstring(svg.sheet([svg.drawing(lines())] * 3))
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert words.count("Loss") == 3 and words.count("a <b>") == 1
    assert root.attrib["aria-label"].count("Loss <of> all & more") == 3
    assert int(root.attrib["width"]) == svg.COLUMNS * svg.WIDTH
    assert ElementTree.fromstring(svg.sheet([svg.drawing(lines())])).attrib["width"] == str(svg.WIDTH)


def test_long_names_keep_their_ends_and_leave_half_of_the_width():
    fig = figure("", "x", y={"categoryarray": ["l" * 80 + ".end"], "autorange": "reversed"}, x={"range": [0, 1]})
    fig.add_scatter(
        x=[0.5], y=["l" * 80 + ".end"], mode="markers", marker={"color": "#000000", "symbol": "cross", "size": 9}
    )
    words = [
        element.text
        for element in ElementTree.fromstring(svg.picture(svg.drawing(panel_of(fig)))).iter()
        if element.text
    ]
    assert words[0].startswith("…") and words[0].endswith(".end") and len(words[0]) < 30


@pytest.mark.parametrize(
    "change", [lambda fig: fig.add_bar(y=[1]), lambda fig: fig.add_shape(type="circle", x0=0, x1=1, y0=0, y1=1)]
)
def test_what_it_does_not_know_raises(change):
    fig = figure("y", y={"range": [0, 1]}, x={"range": [0, 1]})
    change(fig)
    with pytest.raises(ValueError, match="a picture has"):
        svg.picture(svg.drawing(panel_of(fig)))
