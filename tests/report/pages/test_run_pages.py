"""A page for each run, and the links to it."""

import re

import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.pages import run_pages
from hqsweep.report.pages.folder import write
from hqsweep.sweep.store import edits

pytestmark = pytest.mark.slow

IMG = "<img src=x onerror=alert(1)>"


def test_every_run_has_a_page_with_its_losses_its_curves_and_its_config(make_sweep, fake, tmp_path):
    runs = make_sweep(fake.fork_study({"mxfp8": 0.004}, trunks=2, points=(40,)))
    edits.note([edits.Target(folder=runs[0].sweep_path, run=runs[-1].name)], f"*odd* {IMG}")
    comparison = compare(runs)
    page = write(comparison, tmp_path / "out")
    links = set(re.findall(r'href="(runs/[^"]+)"', page.read_text()))
    files = {path.relative_to(page.parent).as_posix(): path.read_text() for path in page.parent.glob("runs/*.html")}
    assert links == {f"runs/{run.name}.html" for run in runs[2:]} and len(files) == 6, "trunks have pages too"
    own = files[f"runs/{runs[-1].name}.html"]
    (final,) = comparison.finals[comparison.finals["run"] == f"sweep/{runs[-1].name}"].itertuples()
    for words in (
        "mxfp8",
        "step 40",
        f"{final.train_loss:.6f}",
        f"{final.gap:+.6f} nats",
        "train_loss",
        "recipe.",
        "0123abcd",
    ):
        assert words in own
    assert own.count('class="chart"') == 1, "val_loss has one value"
    assert "<em>odd</em>" in own and "<img" not in own and 'href="../report.html"' in own
    assert "report_light" not in own and "default-src 'none'" in own


def test_pages_of_runs_of_one_name_are_apart_and_many_runs_have_none(make_sweep, fake, monkeypatch, tmp_path):
    first, second = (make_sweep(fake.three_arms(), name) for name in ("one", "two"))
    comparison = compare([*first, *second[:3]], "bf16")
    files = run_pages.file_names(comparison)
    assert len(set(files.values())) == len(files) and all(
        re.fullmatch(r"runs/[\w.-]+\.html", each) for each in files.values()
    )
    page = write(comparison, tmp_path / "out", each_run=False)
    assert not page.with_name("runs").exists() and 'href="runs/' not in page.read_text()
    monkeypatch.setattr(run_pages, "MOST", 2)
    assert len(run_pages.file_names(comparison)) == 2
