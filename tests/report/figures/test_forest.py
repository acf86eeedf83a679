"""The forest plot: where its marks stand, what it says, and that its SVG is well-formed and escapes names."""

import itertools
import math
from xml.etree import ElementTree

import pandas as pd
import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.figures.forest import Scale, forest, forest_of, scale_of, speed_of
from hqsweep.report.pages.html import forest_svg

NASTY = "<script>alert('arm')</script> & \"q\""
COLUMNS = ("arm", "gap_pct", "ci", "eq", "verdict", "within_margin", "null", "n")


def arms_of(*rows) -> pd.DataFrame:
    """Rows of COLUMNS, where ci and eq are half-widths."""
    arms = pd.DataFrame(rows, columns=COLUMNS)
    for name in ("ci", "eq"):
        half = arms.pop(name)
        arms[f"{name}_low_pct"], arms[f"{name}_high_pct"] = arms["gap_pct"] - half, arms["gap_pct"] + half
    return arms.assign(margin_pct=0.25)


ARMS = arms_of(
    ("nvfp4", 1.7, 0.3, 0.15, "worse", False, False, 4),
    ("null", 0.0, 0.01, 0.005, "equivalent", True, True, 4),
    ("mxfp8", 0.12, 0.06, 0.03, "worse", True, False, 4),
    ("failed", math.nan, math.nan, math.nan, "failed", False, False, 0),
)
SINGLES = pd.DataFrame({"arm": ["nvfp4", "nvfp4", "mxfp8"], "replicate": ["a", "b", "a"], "gap_pct": [1.5, 1.9, 0.12]})
COLOURS = dict.fromkeys(("nvfp4", "null", "mxfp8", "failed", NASTY), "#0072B2")


def drawn(arms=ARMS, singles=SINGLES):
    return forest(arms, singles, COLOURS, heading="Gap in %", replicate="trunk")


def test_arms_are_sorted_by_gap_the_null_arm_and_arms_without_a_gap_after_them():
    plot = drawn()
    assert [line.arm for line in plot.lines] == ["mxfp8", "nvfp4", "failed", "null"]
    assert [line.words for line in plot.lines] == ["worse, inside the margin", "worse", "failed", "equivalent"]
    assert [line.gap for line in plot.lines] == ["+0.120 %", "+1.70 %", "-", "+0.000 %"]
    assert [line.interval for line in plot.lines[:3]] == ["+0.060 to +0.180", "+1.40 to +2.00", "-"]
    assert plot.says.startswith("Gap in %. mxfp8: worse, inside the margin, +0.120 % (+0.060 to +0.180); nvfp4: worse")
    assert drawn(ARMS[ARMS["gap_pct"].isna()]) is None


def test_marks_stand_where_their_values_are():
    plot = drawn()
    scale, nvfp4 = plot.scale, plot.lines[1]

    def place(value):
        return pytest.approx(100 * (value - scale.low) / (scale.high - scale.low), abs=1e-3)

    assert not scale.bent and nvfp4.mean == place(1.7)
    assert nvfp4.joint == (place(1.4), place(2.0)) and nvfp4.equivalence == (place(1.55), place(1.85))
    assert nvfp4.dots == ((place(1.5), "a: +1.50 %"), (place(1.9), "b: +1.90 %"))
    assert plot.margin == (place(-0.25), place(0.25)) and plot.lines[3].null
    failed = plot.lines[2]
    assert (failed.mean, failed.joint, failed.equivalence, failed.dots) == (None, None, None, ())


def test_rows_of_the_file_hold_means_and_replicates():
    rows = drawn().rows
    assert list(rows["replicate"]) == ["mean"] * 4 + ["a", "b", "a"]
    assert rows.loc[rows["arm"].eq("mxfp8"), "gap_pct"].tolist() == [0.12, 0.12]


def test_one_wide_interval_does_not_flatten_the_others():
    wide = arms_of(("a", 0.2, 30.0, 5.0, "undecided", False, False, 2), ("b", 0.4, 0.1, 0.1, "worse", False, False, 2))
    plot = forest(wide, SINGLES.iloc[:0], dict.fromkeys("ab", "#000"), heading="Gap")
    assert plot.scale.high < 1.5 and plot.lines[0].open_ends == (True, True) and plot.lines[1].open_ends == (False,) * 2
    low, high = plot.lines[0].joint
    assert (low, high) == (0, 100)
    assert plot.lines[0].interval == "-29.80 to +30.20"  # said in full, where the line ends in arrows


def test_a_broken_arm_bends_the_axis_instead_of_flattening_the_others():
    arms = arms_of(
        ("mxfp8", 0.1, 0.05, 0.03, "equivalent", True, False, 4), ("bad", 30, 2, 1, "worse", False, False, 4)
    )
    scale = scale_of(arms, SINGLES.iloc[:0])
    assert scale.bent and scale.at(0.25) - scale.at(-0.25) > 5
    assert [scale.at(x) for x in (-0.25, 0, 0.1, 1, 30)] == sorted(scale.at(x) for x in (-0.25, 0, 0.1, 1, 30))
    labels = [text for _, text in scale.ticks()]
    assert "0" in labels and "+10" in labels and "+0.25" in labels


@pytest.mark.parametrize(("low", "high"), [(-0.3, 2.0), (-0.011, 0.013), (-3, 400), (-0.33, 0.33), (-7, 0.4)])
@pytest.mark.parametrize("bent", [False, True])
def test_ticks_are_few_apart_and_inside(low, high, bent):
    scale = Scale(low=low, high=high, margin=0.01, bent=bent)
    ticks = scale.ticks()
    places = [place for place, _ in ticks]
    assert 3 <= len(ticks) <= 14 and places == sorted(places) and "0" in [text for _, text in ticks]
    assert min(b - a for a, b in itertools.pairwise(places)) >= 6.9 and places[0] >= 0 and places[-1] <= 100
    for place, text in ticks:
        assert scale.at(float(text)) == pytest.approx(place, abs=0.01)


def test_the_svg_is_well_formed_without_scripts_or_links_and_says_everything():
    arms = ARMS.assign(arm=ARMS["arm"].replace("nvfp4", NASTY))
    text = forest_svg(drawn(arms, SINGLES.assign(arm=SINGLES["arm"].replace("nvfp4", NASTY))))
    root = ElementTree.fromstring(text)
    tags = {element.tag.removeprefix("{http://www.w3.org/2000/svg}") for element in root.iter()}
    assert tags == {"svg", "rect", "line", "text", "tspan", "path", "circle", "title", "g"}
    assert not [key for element in root.iter() for key in element.attrib if key.endswith("href")]
    words = "".join(root.itertext())
    assert NASTY in words and "worse, inside the margin" in words and "(+1.40 to +2.00)" in words
    assert len([c for c in root.iter("{http://www.w3.org/2000/svg}circle")]) == 3 + 1  # dots, and the legend's


@pytest.mark.slow
def test_few_trunks_show_their_forks_and_what_these_say_alone(make_sweep, fake):
    gaps = {"mxfp8": lambda trunk, point: 0.004 + 0.001 * trunk + point / 1e5, "null": 0.0001}
    few = forest_of(compare(make_sweep(fake.fork_study(gaps, trunks=2))))
    assert (few.replicate, few.covers) == ("fork", "of these forks alone")
    mxfp8 = few.lines[0]
    assert len(mxfp8.dots) == 4 and mxfp8.dots[0][1].startswith("trunk-s0 at 40: +0.22") and not mxfp8.equivalence
    row = few.rows.set_index(["arm", "replicate"]).loc[("mxfp8", "mean")]
    assert 0 < row["ci_low_pct"] < row["gap_pct"] < row["ci_high_pct"]
    svg = forest_svg(few)
    assert "interval, of these forks alone" in svg and "90 % interval" not in svg
    full = forest_of(compare(make_sweep(fake.fork_study(gaps, trunks=3), name="full")))
    assert (full.replicate, full.covers, len(full.lines[0].dots)) == ("trunk", "of all arms together", 3)
    assert full.lines[0].equivalence and "90 % interval" in forest_svg(full)


def test_whole_runs_are_drawn_by_seed(make_sweep, fake):
    plot = forest_of(compare(make_sweep(fake.three_arms()), "bf16"))
    assert [says.split(":")[0] for _, says in plot.lines[0].dots] == ["seed 0", "seed 1", "seed 2"]
    assert plot.heading == "Gap of the final validation loss, in % of the loss of bf16"


def test_marks_stand_where_the_speeds_are_and_an_arm_without_one_has_no_line(make_sweep, fake):
    comparison = compare(make_sweep(fake.three_arms()), "bf16")
    comparison.frames.runs.loc[comparison.frames.runs["arm"] == "mxfp8", "tokens_per_s"] = float("nan")
    speed = speed_of(comparison)
    assert [(line.arm, line.value) for line in speed.lines] == [("bf16", "9,500"), ("nvfp4", "8,500")]
    bf16, nvfp4 = speed.lines
    assert bf16.mean == round(100 / 1.05, 2) and nvfp4.mean == round(100 * 8500 / 9975, 2)
    assert nvfp4.dots[0] == (nvfp4.mean, "seed 0: 8,500 tokens/s") and len(nvfp4.dots) == 3
    assert speed.ticks[0] == (0, "0") and speed.says == "Tokens a second. bf16 9,500; nvfp4 8,500."
    comparison.frames.runs["tokens_per_s"] = float("nan")
    assert speed_of(comparison) is None
