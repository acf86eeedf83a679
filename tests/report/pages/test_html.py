"""The HTML page: complete, self-contained, and deaf to what configs try to inject."""

import itertools
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pandas as pd
import pytest
import yaml

from hqsweep.config.jobs import TABLES
from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.notes import headline
from hqsweep.report.figures import heatmaps, lines, look, svg
from hqsweep.report.pages import html
from hqsweep.report.pages.folder import report_markdown
from hqsweep.report.pages.panels import panels

pytestmark = pytest.mark.slow

NASTY = "</script><script>alert('arm')</script><img src=x onerror=alert(1)> & \"q\""


class Tags(HTMLParser):
    """Collects start tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.raw = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.raw = tag in ("script", "style")

    def handle_endtag(self, tag):
        self.raw = False

    def handle_data(self, data):
        if not self.raw:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def rendered(comparison) -> str:
    return html.render(comparison, panels(comparison))


@pytest.fixture
def comparison(make_sweep, fake):
    runs = [*fake.three_arms(), fake.Run(arm=NASTY, state="failed", reason="boom <b onclick=x>", steps=80)]
    return compare(make_sweep(runs), "bf16")


def test_every_section_is_there(comparison):
    page = Tags(rendered(comparison))
    for words in (
        "sweep: 3 arms against bf16", "Runs without a result", "failed (boom <b onclick=x>)", "Gap to bf16 over steps",
        "Gap of the final validation loss, in % of the loss of bf16", "Validation loss",
        "Training loss, rolling mean of 5 rows", "Result in numbers", "Quantization error", "Underflow by layer",
        "Gradient cosine by layer", "Throughput", "the margin of 0.25 % of the final loss", "GEMM output error",
        "Config: where the arms differ", "GEMM plans", "All runs", "Provenance", "-O3 -ffp-contract=off",
        *comparison.arms["sentence"], *comparison.notes,
    ):  # fmt: skip
        assert words in page.text
    drawn = [tag for tag, attributes in page.tags if attributes.get("class") == "chart"]
    sampled = 3  # arms that got as far as a sampled step, each with a heatmap of SQNR and one of underflow
    assert len(drawn) == 2 + 2 + 2 * sampled + 2  # losses, gaps, heatmaps, gradients
    assert "Growth of the gap" not in page.text and "Gap at each fork point" not in page.text


def test_a_fork_study_shows_growth_and_points_instead_of_gaps_over_steps(make_sweep, fake):
    comparison = compare(make_sweep(fake.fork_study({"mxfp8": 0.004, "null": 0.0001})))
    text = Tags(rendered(comparison)).text
    for words in (
        "Gap of the training loss over the decay, in % of the loss of bf16", "mean over trunks", "one trunk",
        "Growth of the training gap: all fork points together", "Growth of the training gap: forks at step 40",
        "forks at step 80", "Gap at each fork point", "mean over the trunks", "A fork does not see damage",
        "gap, intervals and p are of the training loss over the decay", *comparison.notes,
    ):  # fmt: skip
        assert words in text
    assert "over steps" not in text
    assert text.index("A fork does not see") < text.index("Loss") < text.index("Growth of the training gap")


def test_verdicts_and_the_forest_plot_come_first(comparison):
    page = Tags(rendered(comparison))
    order = [headline(comparison), "Gap of the final validation loss", "one seed", comparison.arms["sentence"][0],
             "Validation loss", "Result in numbers", "Config: where the arms differ",
             "Training: tokens to loss"]  # fmt: skip
    body = page.text[page.text.rindex("Runs without a result") :]  # after the links to the sections
    places = [page.text.index(words) for words in order[:4]] + [
        len(page.text) + body.index(words) for words in order[4:]
    ]
    assert places == sorted(places)
    coloured = [attributes["class"] for tag, attributes in page.tags if tag == "b" and "class" in attributes]
    assert set(coloured) == set(comparison.arms["verdict"])
    heads = [attributes for tag, attributes in page.tags if tag == "table" and attributes.get("class") == "forest"]
    assert len(heads) == 1


def test_headings_go_down_by_one_and_everything_is_in_the_main_part(comparison):
    tags = [tag for tag, _ in Tags(rendered(comparison)).tags]
    levels = [int(tag[1]) for tag in tags if tag in ("h1", "h2", "h3")]
    assert tags.count("main") == tags.count("h1") == 1 and levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert tags.index("body") + 1 == tags.index("main")


def test_many_verdicts_leave_room_for_the_plot(make_sweep, fake):
    arms = ["bf16", *(f"arm{place}" for place in range(10))]
    page = Tags(rendered(compare(make_sweep([fake.Run(arm=arm) for arm in arms]), "bf16")))
    (listed,) = [each for tag, each in page.tags if tag == "ul"]
    assert listed["class"] == "verdicts many" and listed["tabindex"] == "0"


def test_names_from_configs_stay_text(comparison):
    page = rendered(comparison)
    tags = Tags(page)
    assert NASTY in tags.text
    assert "img" not in [tag for tag, _ in tags.tags] and not any(
        "onclick" in attributes for _, attributes in tags.tags
    )
    assert "<script>alert" not in page and "<img src=x" not in page


def test_nothing_is_fetched(comparison):
    tags = Tags(rendered(comparison)).tags
    assert not [attributes for _, attributes in tags if attributes.get("src")]
    icon, *links = [attributes["href"] for _, attributes in tags if "href" in attributes]
    assert icon == "data:," and all(re.fullmatch(r"#s\d+|(figures/)?\w+\.(csv|svg|html)", link) for link in links)
    policy = next(attributes["content"] for _, attributes in tags if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and not re.search(r"https?:", policy)


def test_a_page_is_small_and_links_the_figures_that_it_has_no_room_for(comparison, monkeypatch):
    assert len(rendered(comparison)) < 400_000
    monkeypatch.setattr(html, "PAGE_BYTES", 100_000)
    page = rendered(comparison)
    assert len(page) < 101_000 and 0 < page.count('class="chart"') < 13 and "figures/gradients.svg" in page


def test_a_chart_has_the_values_of_its_picture_in_the_order_of_its_elements(comparison):
    (group, *_) = [group for group in panels(comparison).drawings.values() if group[0].panel.name == "val_loss_gap"]
    chart = str(svg.chart(group[0]))
    values = json.loads(re.search(r'<script type="application/json">(.+?)</script>', chart)[1])
    assert chart.count('class="trace"') == len(values["traces"]) and chart.count('class="shape"') == len(
        values["shapes"]
    )
    last = comparison.finals.groupby("arm")["gap"].mean()["nvfp4"]
    (line,) = [trace for trace in values["traces"] if trace["name"] == "nvfp4"]
    assert line["x"][-1] == 200 and line["y"][-1] == pytest.approx(last, rel=0.1) and line["hover"]
    assert [trace["fill"] for trace in values["traces"]].count(True) == 2, "a band an arm"
    assert values["shapes"][0][:2] == [None, None] and values["shapes"][0][2] == -values["shapes"][0][3]


def test_the_light_page_has_every_section_without_a_script_in_300_kb(comparison):
    drawn = panels(comparison)
    whole, light = Tags(html.render(comparison, drawn)), Tags(page := html.render_light(comparison, drawn))
    assert len(page.encode()) < 300_000 and "script" not in {tag for tag, _ in light.tags}
    headings = [attributes["href"] for tag, attributes in light.tags if attributes.get("href", "").startswith("#")]
    assert len(headings) == len([tag for tag, _ in whole.tags if tag == "h2"]) > 10
    assert len([tag for tag, attributes in light.tags if attributes.get("class") == "picture"]) == len(drawn.every())
    for words in (headline(comparison), *comparison.arms["sentence"], *comparison.notes, "Result in numbers"):
        assert words in light.text


def test_a_light_page_stays_light_and_says_what_it_leaves_out(make_sweep, fake, monkeypatch):
    comparison = compare(make_sweep([*fake.three_arms(), fake.Run(seed=9)]), "bf16")
    drawn = panels(comparison)
    monkeypatch.setattr(html, "LIGHT_BYTES", 45_000)
    monkeypatch.setattr(html, "LIGHT_ROWS", 5)
    page = Tags(html.render_light(comparison, drawn))
    shown = [tag for tag, attributes in page.tags if attributes.get("class") == "picture"]
    files = {each["href"] for tag, each in page.tags if tag == "a" and each.get("href", "").endswith(".svg")}
    assert 0 < len(shown) < len(drawn.every()) and "figures/gradients.svg" in files
    assert "The first 5 of 10 rows; report.html has them all." in page.text


def test_curves_hold_the_finished_seeds_and_mark_the_broken_run(comparison, fake):
    fig = lines.loss_curves(comparison, "Validation loss", "val_loss").figure
    by_name = {trace.name: trace for trace in fig.data if trace.name}
    rows = comparison.frames.metrics
    last = rows[(rows["metric"] == "val_loss") & (rows["arm"] == "nvfp4") & (rows["step"] == fake.steps)]["value"]
    assert by_name["nvfp4"].y[-1] == pytest.approx(last.mean())
    crosses = [trace for trace in fig.data if trace.marker.symbol == "x"]
    assert len(crosses) == 1 and list(crosses[0].x) == [80]
    bands = [trace for trace in fig.data if trace.fill == "tonexty"]
    assert len(bands) == 3


def test_heatmap_shows_infinite_sqnr_as_exact_and_keeps_one_scale(comparison):
    maps = {panel.heading: panel.figure for panel in heatmaps.sqnr_heatmaps(comparison)}
    assert {cell for row in maps["bf16"].data[0].text for cell in row} == {"∞"}
    assert len({(fig.data[0].zmin, fig.data[0].zmax) for fig in maps.values()}) == 1
    nvfp4 = maps["nvfp4"].data[0]
    assert len(nvfp4.y) == 8 and len(nvfp4.x[0]) == 6 and 18 < nvfp4.z[0][0] < 23


def test_arms_whose_cells_are_equal_share_a_heatmap(make_sweep, fake):
    null = [fake.Run(arm="null", seed=seed, init_noise=0.01, sqnr_db=99.0, fmt="bf16") for seed in range(3)]
    comparison = compare(make_sweep([*fake.three_arms(), *null]), "bf16")
    maps = [panel.heading for panel in heatmaps.sqnr_heatmaps(comparison)]
    assert maps == ["bf16, null", "mxfp8", "nvfp4"]


def test_long_lines_are_thinned_with_both_ends_kept(comparison):
    rows = look.thin(pd.DataFrame({"step": range(10_000)}))
    assert len(rows) == look.MAX_POINTS and rows["step"].iloc[0] == 0 and rows["step"].iloc[-1] == 9999


def test_keys_that_say_the_same_share_a_column(comparison):
    tags = Tags(rendered(comparison))
    assert "recipe.linear.grad_output, recipe.linear.input, recipe.linear.weight" in tags.text
    same = [attributes["class"] for tag, attributes in tags.tags if attributes.get("class") in ("same", "other")]
    assert same == ["same", "other", "other", "other"]  # bf16 itself, mxfp8, nvfp4, and the broken arm's mxfp8


def test_the_band_of_gap_curves_is_the_margin_in_nats(make_sweep, fake):
    comparison = compare(make_sweep(fake.three_arms()), margin="0.5%")
    loss = comparison.arms.set_index("arm").at["bf16", "final_loss"]
    band, *_ = lines.gap_curves(comparison, "Gap", "val_loss").figure.layout.shapes
    assert (band.type, band.y0, band.y1) == ("rect", pytest.approx(-0.005 * loss), pytest.approx(0.005 * loss))


def test_loss_lines_of_forks_break_between_points_and_the_trunks_are_behind_them(make_sweep, fake):
    comparison = compare(make_sweep(fake.fork_study({"mxfp8": 0.004})))
    panel = lines.loss_curves(comparison, "Training loss", "train_loss")
    trunk, *arms = panel.figure.data
    assert trunk.name == "trunk" and len(trunk.x) == fake.steps and {line.name for line in arms} == {"bf16", "mxfp8"}
    steps = [[40, 50, 60, 70, 80], [80, 90, 100, 110, 120]]
    for line in arms:
        assert list(line.x[:5]) == steps[0] and math.isnan(line.x[5]) and list(line.x[6:]) == steps[1]
        assert [line.y[0], line.y[6]] == [trunk.y[39], trunk.y[79]], "a fork goes on where its trunk stands"
    counts = panel.rows["arm"].value_counts()
    assert counts.to_dict() == {"trunk": fake.steps, "bf16": 8, "mxfp8": 8}


def test_the_axes_of_a_loss_show_every_step_of_the_arms_and_the_trunk_beside_them(make_sweep, fake):
    forks = compare(make_sweep(fake.fork_study({"mxfp8": 0.004}), "forks"))
    figure = lines.loss_curves(forks, "Training loss", "train_loss").figure
    (first, last), (low, high) = figure.layout.xaxis.range, figure.layout.yaxis.range
    trunk = next(line for line in figure.data if line.name == "trunk")
    assert 5 < first < 40 - 80 / 3 and 120 < last < 130, "from a third before the first fork, 40, to the last step, 120"
    assert all(low < loss < high for step, loss in zip(trunk.x, trunk.y, strict=True) if first < step < last)
    whole = compare(make_sweep(fake.three_arms(), "whole"))
    ends = whole.frames.metrics[whole.frames.metrics["step"] == fake.steps]
    once = replace(whole, frames=replace(whole.frames, metrics=ends))
    assert lines.loss_curves(once, "Validation loss", "val_loss") is None, "one value of a run is no curve"


def test_gradient_cosines_by_layer_in_forward_order(comparison):
    dgrad, wgrad = lines.gradient_cosines(comparison)
    assert dgrad.figure.layout.yaxis.categoryarray[0] == "layers.0.attn.qkv" and len(dgrad.rows) == 3 * 8 * 2
    line = next(line for line in wgrad.figure.data if line.name == "nvfp4")
    assert list(line.x) == pytest.approx([1 - 0.998] * 8) and wgrad.figure.layout.xaxis.type == "log"


def test_arms_differ_by_more_than_colour_and_text_by_contrast(make_sweep, fake):
    arms = ["bf16", *(f"arm{place}" for place in range(30))]
    comparison = compare(make_sweep([fake.Run(arm=arm) for arm in arms]), "bf16")
    style = look.styles(comparison.arms)
    assert len({(line["color"], line["dash"]) for line in style.values()}) == 31
    assert style["bf16"]["color"] == look.BASELINE_COLOUR
    assert all(style[a]["dash"] != style[b]["dash"] for a, b in itertools.pairwise(arms[1:]))


def test_the_parity_matrix_is_there_when_a_parity_run_is_among_the_runs(make_sweep, fake):
    runs = make_sweep([fake.Run(), fake.Run(arm="nvfp4", seed=0, gap=0.1)])
    parity = make_sweep([fake.Run(arm="parity")], name="parity")[0]
    config = parity.config() | {"job": "parity"}
    parity.config_path.write_text(yaml.safe_dump(config))
    row = dict.fromkeys(TABLES["parity"])
    row |= {"check": "kernel", "case": "normal", "subject": "mxfp8", "status": "PASS"}
    wrong = row | {"subject": "<b>", "status": "FAIL", "mismatches": 3, "total": 9, "first_index": "[0, 1]"}
    rows = [row, wrong, row | {"check": "routing", "subject": "mxfp8|nvfp4"}]
    parity.jsonl("parity").write_text("".join(json.dumps(each) + "\n" for each in rows))
    fake.seal_again(parity)
    comparison = compare([*runs, parity], "bf16")
    text = Tags(rendered(comparison)).text
    assert "Parity matrix (2 passed, 1 failed, 0 skipped)" in text and "FAIL 1/1 at [0, 1]" in text
    assert "Parity matrix of routing: row format by column format" in text and "3 of 9 differ" in text
    assert "Parity matrix" not in Tags(rendered(compare(runs, "bf16"))).text
    assert "| &lt;b&gt; | FAIL 1/1 at \\[0, 1\\] |" in report_markdown(comparison)
