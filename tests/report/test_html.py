"""The HTML page: complete, self-contained, and deaf to what configs try to inject."""

import itertools
import json
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
import yaml

from hqsweep.report import figures, heatmaps, html, look, points
from hqsweep.report.compare import compare
from hqsweep.report.tables import report_markdown

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
    return html.render(comparison, html.panels(comparison))


@pytest.fixture
def comparison(make_sweep, fake):
    runs = [*fake.three_arms(), fake.Run(arm=NASTY, state="failed", reason="boom <b onclick=x>", steps=80)]
    return compare(make_sweep(runs), "bf16")


def test_every_section_is_there(comparison):
    page = Tags(rendered(comparison))
    for words in (
        "sweep: 3 arms against bf16", "Runs without a result", "failed (boom <b onclick=x>)", "Gap to bf16",
        "Final gap", "Validation loss", "Training loss, rolling mean of 5 rows", "Quantization error",
        "Underflow by layer", "Gradient cosine by layer", "Throughput", "Grey band: the margin",
        "GEMM output error", "Config: where the arms differ", "GEMM plans", "All runs", "Provenance",
        "-O3 -ffp-contract=off", *comparison.arms["sentence"],
    ):  # fmt: skip
        assert words in page.text
    drawn = [tag for tag, attributes in page.tags if "plotly-graph-div" in attributes.get("class", "")]
    sampled = 3  # arms that got as far as a sampled step, each with a heatmap of SQNR and one of underflow
    assert len(drawn) == 2 + 3 + 2 * sampled + 2 + 1  # losses, gaps, heatmaps, gradients, speed


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
    assert icon == "data:," and all(re.fullmatch(r"(figures/)?\w+\.csv", link) for link in links)
    policy = next(attributes["content"] for _, attributes in tags if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and not re.search(r"https?:", policy)


def test_plotly_is_inlined_once_and_dominates_the_size(comparison):
    page = rendered(comparison)
    assert page.count("plotly.js v") == 1 and len(page) < 6_000_000


def test_curves_hold_the_finished_seeds_and_mark_the_broken_run(comparison, fake):
    fig = figures.loss_curves(comparison, "Validation loss", "val_loss").figure
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


def test_long_lines_are_thinned_with_both_ends_kept(comparison):
    rows = look.thin(pd.DataFrame({"step": range(10_000)}))
    assert len(rows) == look.MAX_POINTS and rows["step"].iloc[0] == 0 and rows["step"].iloc[-1] == 9999


def test_what_differs_comes_first_and_keys_that_say_the_same_share_a_column(comparison):
    tags = Tags(rendered(comparison))
    assert tags.text.index("Config: where the arms differ") < tags.text.index("Result") < tags.text.index("Loss")
    assert "recipe.linear.grad_output, recipe.linear.input, recipe.linear.weight" in tags.text
    same = [attributes["class"] for tag, attributes in tags.tags if attributes.get("class") in ("same", "other")]
    assert same == ["same", "other", "other", "other"]  # bf16 itself, mxfp8, nvfp4, and the broken arm's mxfp8


def test_the_grey_band_is_the_margin(make_sweep, fake):
    comparison = compare(make_sweep(fake.three_arms()), margin="0.5%")
    band, *_ = points.final_gaps(comparison, "Final gap").figure.layout.shapes
    assert (band.type, band.x0, band.x1) == ("rect", -0.5, 0.5) and band.y0 < 0 and band.y1 > 1


def test_gradient_cosines_by_layer_in_forward_order(comparison):
    dgrad, wgrad = points.gradient_cosines(comparison)
    assert dgrad.figure.layout.yaxis.categoryarray[0] == "layers.0.attn.qkv" and len(dgrad.rows) == 3 * 8 * 2
    line = next(line for line in wgrad.figure.data if line.name == "nvfp4")
    assert list(line.x) == pytest.approx([1 - 0.998] * 8) and wgrad.figure.layout.xaxis.type == "log"


def test_arms_differ_by_more_than_colour_and_text_by_contrast(make_sweep, fake):
    arms = ["bf16", *(f"arm{place}" for place in range(30))]
    comparison = compare(make_sweep([fake.Run(arm=arm) for arm in arms]), "bf16")
    style = look.styles(comparison)
    assert len({(line["color"], line["dash"]) for line in style.values()}) == 31
    assert style["bf16"]["color"] == look.BASELINE_COLOUR
    assert all(style[a]["dash"] != style[b]["dash"] for a, b in itertools.pairwise(arms[1:]))


def test_the_parity_matrix_is_there_when_a_parity_run_is_among_the_runs(make_sweep, fake):
    runs = make_sweep([fake.Run(), fake.Run(arm="nvfp4", seed=0, gap=0.1)])
    parity = make_sweep([fake.Run(arm="parity")], name="parity")[0]
    config = parity.config() | {"job": "parity"}
    parity.config_path.write_text(yaml.safe_dump(config))
    row = {"check": "kernel", "case": "normal", "subject": "mxfp8", "status": "PASS"}
    wrong = row | {"subject": "<b>", "status": "FAIL", "mismatches": 3, "total": 9, "first_index": "[0, 1]"}
    rows = [row, wrong, row | {"check": "routing", "subject": "mxfp8|nvfp4"}]
    parity.jsonl("parity").write_text("".join(json.dumps(each) + "\n" for each in rows))
    comparison = compare([*runs, parity], "bf16")
    text = Tags(rendered(comparison)).text
    assert "Parity matrix (2 passed, 1 failed, 0 skipped)" in text and "FAIL 1/1 at [0, 1]" in text
    assert "Parity matrix of routing: row format by column format" in text and "3 of 9 differ" in text
    assert "Parity matrix" not in Tags(rendered(compare(runs, "bf16"))).text
    assert "| &lt;b&gt; | FAIL 1/1 at \\[0, 1\\] |" in report_markdown(comparison)
