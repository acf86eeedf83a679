"""hqsweep.compare: what `hqsweep compare` says, as tables and figures."""

import re
from pathlib import Path

import plotly.graph_objects as go
import pytest

import hqsweep as hq
from hqsweep.errors import UserError
from tests.report.conftest import FakeRun, fork_study, three_arms, write_sweep

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_sweep(tmp_path / "runs/study", three_arms())
    return tmp_path / "runs"


def test_the_words_of_the_command_are_taken(runs: Path) -> None:
    comparison = hq.compare("study", margin="5%", runs_dir=runs)
    verdicts = comparison.verdicts.set_index("arm")
    assert list(verdicts.index) == ["bf16", "mxfp8", "nvfp4"] and verdicts.loc["nvfp4", "margin_pct"] == 5
    assert comparison.headline.startswith("mxfp8 (+") and comparison.baseline == "bf16" and not comparison.left_out
    assert len(comparison.points) == 6 and comparison.notes and (runs / "noise.jsonl").is_file()
    assert repr(comparison) == f"<Comparison study: 2 arms against bf16: {comparison.headline}>"


def test_sweeps_and_runs_are_taken_for_their_names(runs: Path) -> None:
    sweep = hq.Sweep("study", runs_dir=runs)
    whole = hq.compare("study", runs_dir=runs)
    assert hq.compare(sweep).headline == hq.compare(*sweep).headline == whole.headline
    assert [run.path for run in hq.Sweep(sweep[0], *sweep[1:])] == [run.path for run in sweep]
    for call in (hq.compare, hq.Sweep):
        with pytest.raises(UserError, match=r"takes names, folders, sweeps and runs, not list"):
            call(["study"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"margin": "0"}, "margin: got '0'"),
        ({"window": 0}, "window: 0 steps"),
        ({"baseline": "mxpf8"}, "did you mean 'mxfp8'"),
    ],
)
def test_what_the_command_refuses_is_refused(runs: Path, options: dict, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        hq.compare("study", runs_dir=runs, **options)


def test_whole_runs_beside_forks_are_refused(runs: Path) -> None:
    write_sweep(runs / "forks", fork_study({"mxfp8": 0.001}, trunks=2))
    with pytest.raises(UserError, match="whole runs and forks among them"):
        hq.compare("study", "forks", runs_dir=runs)


def test_tables_are_those_of_the_report(runs: Path) -> None:
    comparison = hq.compare("study", runs_dir=runs)
    assert {"arms", "training", "errors", "runs", "provenance"} <= set(comparison.tables)
    arms = comparison.tables["arms"]
    assert list(arms["verdict"]) == ["baseline", "equivalent", "worse"] and arms["gap %"].iloc[2].startswith("+1.")
    assert "worse" in comparison.latex() and "layers" in comparison.latex("errors")


def test_figures_are_whole_by_themselves(runs: Path) -> None:
    figures = hq.compare("study", runs_dir=runs).figures
    assert {"forest", "val_loss", "val_loss_gap", "sqnr_nvfp4"} <= set(figures)
    assert all(isinstance(figure, go.Figure) and figure.layout.title.text for figure in figures.values())
    losses = figures["val_loss"]
    assert losses.layout.showlegend and {t.name for t in losses.data if t.showlegend is not False} == {
        "bf16", "mxfp8", "nvfp4",
    }  # fmt: skip


def test_files_for_paper_and_the_report(runs: Path, tmp_path: Path) -> None:
    comparison = hq.compare("study", runs_dir=runs)
    assert {path.suffix for path in comparison.save("svg", tmp_path / "a")} == {".svg"}
    assert {path.stem for path in comparison.save("latex", tmp_path / "b")} == set(comparison.tables)
    assert comparison.report(tmp_path / "c").name == "report.html"
    with pytest.raises(UserError, match="svg or png"):
        comparison.save("pdf", tmp_path)


def test_a_notebook_gets_the_verdict_and_the_forest_plot(tmp_path: Path) -> None:
    bad = [FakeRun(arm="<script>", recipe="<script>", fmt="mxfp8", seed=seed, gap=0.01) for seed in range(2)]
    write_sweep(tmp_path / "runs/x", [*(FakeRun(seed=seed) for seed in range(2)), *bad])
    page = hq.compare("x", runs_dir=tmp_path / "runs")._repr_html_()
    assert 'src="data:image/svg+xml;base64,' in page and "<script>" not in page and "<td>&lt;script&gt;</td>" in page
