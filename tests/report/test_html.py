"""The HTML page: complete, self-contained, and deaf to what configs try to inject."""

import re
from html.parser import HTMLParser

import pandas as pd
import pytest

from hqsweep.report import figures, html
from hqsweep.report.compare import compare

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


@pytest.fixture
def comparison(make_sweep, fake):
    runs = [*fake.three_arms(), fake.Run(arm=NASTY, state="failed", reason="boom <b onclick=x>", steps=80)]
    return compare(make_sweep(runs), "bf16")


def test_every_section_is_there(comparison):
    page = Tags(html.render(comparison))
    for words in (
        "sweep: 3 arms against bf16", "Runs without a result", "failed (boom <b onclick=x>)", "Gap to bf16",
        "Final gap", "Validation loss", "Training loss, rolling mean of 5 rows", "Quantization error",
        "GEMM output error", "Config: where the arms differ", "GEMM plans", "All runs", "Provenance",
        "-O3 -ffp-contract=off", *comparison.arms["verdict"],
    ):  # fmt: skip
        assert words in page.text
    drawn = [tag for tag, attributes in page.tags if "plotly-graph-div" in attributes.get("class", "")]
    assert len(drawn) == 2 + 3 + 3  # losses, gaps, and a heatmap for each arm that got as far as a sampled step


def test_names_from_configs_stay_text(comparison):
    page = html.render(comparison)
    tags = Tags(page)
    assert NASTY in tags.text
    assert "img" not in [tag for tag, _ in tags.tags] and not any(
        "onclick" in attributes for _, attributes in tags.tags
    )
    assert "<script>alert" not in page and "<img src=x" not in page


def test_nothing_is_fetched(comparison):
    tags = Tags(html.render(comparison)).tags
    assert not [attributes for _, attributes in tags if attributes.get("src")]
    assert [attributes["href"] for _, attributes in tags if "href" in attributes] == ["data:,"]
    policy = next(attributes["content"] for _, attributes in tags if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and not re.search(r"https?:", policy)


def test_plotly_is_inlined_once_and_dominates_the_size(comparison):
    page = html.render(comparison)
    assert page.count("plotly.js v") == 1 and len(page) < 6_000_000


def test_curves_hold_the_finished_seeds_and_mark_the_broken_run(comparison, fake):
    fig = figures.loss_curves(comparison, "val_loss")
    by_name = {trace.name: trace for trace in fig.data if trace.name}
    rows = comparison.frames.metrics
    last = rows[(rows["metric"] == "val_loss") & (rows["arm"] == "nvfp4") & (rows["step"] == fake.steps)]["value"]
    assert by_name["nvfp4"].y[-1] == pytest.approx(last.mean())
    crosses = [trace for trace in fig.data if trace.marker.symbol == "x"]
    assert len(crosses) == 1 and list(crosses[0].x) == [80]
    bands = [trace for trace in fig.data if trace.fill == "tonexty"]
    assert len(bands) == 3


def test_heatmap_shows_infinite_sqnr_as_exact_and_keeps_one_scale(comparison):
    maps = dict(figures.sqnr_heatmaps(comparison))
    assert {cell for row in maps["bf16"].data[0].text for cell in row} == {"∞"}
    assert len({(fig.data[0].zmin, fig.data[0].zmax) for fig in maps.values()}) == 1
    nvfp4 = maps["nvfp4"].data[0]
    assert len(nvfp4.y) == 8 and len(nvfp4.x[0]) == 6 and 18 < nvfp4.z[0][0] < 23


def test_long_lines_are_thinned_with_both_ends_kept(comparison):
    rows = figures.thin(pd.DataFrame({"step": range(10_000)}))
    assert len(rows) == figures.MAX_POINTS and rows["step"].iloc[0] == 0 and rows["step"].iloc[-1] == 9999
