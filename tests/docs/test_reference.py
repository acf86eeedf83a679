"""docs/reference is what the code says today."""

from pathlib import Path

import pytest

from docs.generate.pages import pages
from hqsweep.formats import NAMES, options
from hqsweep.ops.stats import gather

REFERENCE = Path(__file__).parents[2] / "docs/reference"
PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_not_stale(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name], f"docs/reference/{name} is stale; run `make docs`"


def test_there_is_no_other_page() -> None:
    assert {path.name for path in REFERENCE.iterdir()} == set(PAGES)


def test_nothing_is_left_out() -> None:
    text = {name: page.replace("\\", "") for name, page in PAGES.items()}
    for name in NAMES:
        assert f"| {name} |" in text["formats.md"]
        assert all(
            f"| +{option} |" in text["formats.md"] for option in options(name) if name not in ("bf16", "fp16", "fp32")
        )
    for key in ("train.microbatches", "data.markov.order", "engine.workers", "parity.checks"):
        assert f"| {key} |" in text["config.md"]
    for command in ("run", "recipe export", "doctor"):
        assert f"## hqsweep {command}\n" in text["cli.md"]
    assert "--dry-run" in text["cli.md"]


def test_every_statistic_is_named() -> None:
    import torch

    from hqsweep.formats import parse

    x, format = torch.randn(32, 32), parse("mxfp8")
    for name in gather(x, format, format.encode(x)).row():
        assert (
            name.removesuffix("_median").removesuffix("_p5").replace("scale_max", "scale_min") in PAGES["statistics.md"]
        )
