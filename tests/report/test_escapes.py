"""HTML in every name that a config, a folder or a failure can bring: text in the page, in Markdown and in CSV."""

import json
import re
from xml.etree import ElementTree

import pandas as pd
import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.pages.folder import write
from tests.report.pages.test_html import Tags

pytestmark = pytest.mark.slow

IMG = '<img src=x onerror="injected=1">'
ARM, RECIPE = f"{IMG} & 'arm'", f'{IMG}\n| "recipe", `r`'
SWEEP, LAYER, WHY = f"{IMG}sweep", f"{IMG}.layers.*", "</script><svg onload=alert(1)> boom"


@pytest.fixture
def page(make_sweep, fake, tmp_path):
    overrides = ({"name": LAYER, "linear": "bf16"},)
    runs = [fake.Run(seed=seed) for seed in (0, 1)]
    runs += [fake.Run(arm=ARM, recipe=RECIPE, seed=seed, overrides=overrides, gap=0.01) for seed in (0, 1)]
    runs += [fake.Run(arm=ARM, recipe=RECIPE, seed=2, overrides=overrides, state="failed", reason=WHY, steps=120)]
    comparison = compare(make_sweep(runs, name=SWEEP), "bf16")
    stats = comparison.frames.stats
    stats["layer"] = IMG + stats["layer"].astype(str)
    stats["format"] = IMG
    return write(comparison, tmp_path / "out")


def test_in_html_they_are_text(page):
    text = page.read_text()
    tags = Tags(text)
    allowed = {"html", "head", "meta", "link", "title", "style", "script", "body", "h1", "h2", "nav", "div", "table",
               "thead", "tbody", "tr", "th", "td", "p", "a", "ul", "li", "b", "figure", "figcaption", "button", "wbr",
               "fieldset", "legend", "label", "main", "details", "summary", "dl", "dt", "dd",
               "input", "span", "tfoot", "svg", "line",
               "path", "rect", "circle", "text", "g"}  # fmt: skip
    assert {tag for tag, _ in tags.tags} <= allowed
    assert not [name for _, attributes in tags.tags for name in attributes if name.startswith("on")]
    for name in (ARM, " ".join(RECIPE.split()), SWEEP, WHY, LAYER.replace('"', '\\"')):
        assert name in tags.text, name
    inert = text[text.index("</style>") :]
    assert "<img" not in inert and "<svg onload" not in inert
    assert {attributes["data-arm"] for _, attributes in tags.tags if "data-arm" in attributes} == {"bf16", ARM}


def test_in_pictures_and_on_the_light_page_they_are_text(page):
    pictures = {path.stem: ElementTree.parse(path).getroot() for path in (page.parent / "figures").glob("*.svg")}
    assert set(pictures) == {"forest", "curves", "gaps", "sqnr", "underflow", "gradients", "speed"}
    for picture in pictures.values():
        assert {element.tag.partition("}")[2] for element in picture.iter()} <= {
            "svg", "rect", "line", "text", "tspan", "path", "circle", "title", "g"
        }  # fmt: skip
    assert ARM in "".join(pictures["curves"].itertext()) and ARM in "".join(pictures["speed"].itertext())
    text = (page.parent / "report_light.html").read_text()
    tags = Tags(text)
    assert "script" not in {tag for tag, _ in tags.tags} and "<img" not in text and "<svg onload" not in text
    assert not [name for _, attributes in tags.tags for name in attributes if name.startswith("on")]
    for name in (ARM, " ".join(RECIPE.split()), SWEEP, WHY, LAYER.replace('"', '\\"')):
        assert name in tags.text, name


def test_the_values_of_figures_are_json_in_which_no_tag_ends_the_script(page):
    """The page's script shows them as text."""
    scripts = re.findall(r'<script type="application/json">(.+?)</script>', page.read_text(), re.DOTALL)
    traces = [trace for script in scripts for trace in json.loads(script)["traces"]]
    assert len(scripts) >= 9 and not any("<" in script for script in scripts)
    assert {trace["name"] for trace in traces if trace.get("name")} >= {"bf16", ARM}
    assert any(IMG in row for trace in traces for row in trace.get("rows", ()))


def test_in_markdown_they_are_text(page):
    text = (page.parent / "report.md").read_text()
    assert "<" not in text.replace("&lt;", "") and "&lt;img src=x" in text
    for block in text.split("\n\n"):
        lines = [line.replace("\\\\", "").replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1


def test_csv_gives_them_back_as_they_were(page):
    runs = pd.read_csv(page.parent / "runs.csv")
    assert set(runs["arm"]) == {"bf16", ARM} and set(runs["config.recipe.name"]) == {"bf16", RECIPE}
    assert set(runs["sweep"]) == {SWEEP} and WHY in set(runs["reason"])
    assert set(pd.read_csv(page.parent / "compare.csv")["arm"]) == {"bf16", ARM}
    files = {path.stem: pd.read_csv(path) for path in (page.parent / "figures").glob("*.csv")}
    assert all(ARM in set(rows["arm"]) for rows in files.values()) and len(files) == 8
    assert files["quantization_error"]["layer"].str.startswith(IMG).all()
