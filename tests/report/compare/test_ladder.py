"""Ladders of sweeps: sizes and gaps as the sweeps have them, predictions, pages and refusals."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hqsweep.errors import UserError
from hqsweep.report.compare import ladder as ladders
from hqsweep.report.compare.compare import compare
from hqsweep.report.figures.ladder import ladder_panel
from hqsweep.report.figures.svg import drawing
from hqsweep.report.pages.ladder import measured_table, predicted_table, rich_tables, write_ladder
from hqsweep.sweep.grid.compose import expand
from hqsweep.sweep.store.run_dir import RunDir

SIZES = {"a": 1e6, "b": 3e6, "c": 9e6}


@pytest.fixture(scope="module", autouse=True)
def sizes():
    """Each sweep is compared once. The fakes have no sizes of their own."""
    comparisons = {}

    def sized(runs):
        sweep = runs[0].sweep_path
        if sweep not in comparisons:
            comparisons[sweep] = compare(runs)
            comparisons[sweep].frames.runs["manifest.params"] = SIZES[sweep.name[0]]
        return comparisons[sweep]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladders, "compare", sized)
        yield


@pytest.fixture(scope="module")
def write(tmp_path_factory, fake):
    """write(runs, name) -> the RunDirs of a sweep."""
    root = tmp_path_factory.mktemp("ladder")
    return lambda runs, name: [RunDir(path) for path in fake.write_sweep(root / name, runs)]


@pytest.fixture(scope="module")
def sweeps(write, fake):
    """Forks at three sizes, whose gaps fall with the size."""

    def gap(nats, name):
        return lambda seed, point: nats * (SIZES[name] / 3e6) ** -0.1 * (1 + 0.02 * seed)

    return [
        write(
            fake.fork_study({"nvfp4": gap(0.03, name), "mxfp8": gap(0.0005, name), "null": 0.0}, base=3 - 0.3 * place),
            name,
        )
        for place, name in enumerate(SIZES)
    ]


@pytest.fixture(scope="module")
def found(sweeps):
    return ladders.ladder(sweeps, at=(3e7, None))


def test_a_rung_has_the_sweeps_gaps_losses_and_tokens(sweeps):
    rung = ladders.rung_of(ladders.compare(sweeps[1]))
    assert rung.params == 3e6 and set(rung.gaps) == {"nvfp4", "mxfp8"}
    assert rung.gaps["nvfp4"] == pytest.approx(0.03 * (1 + 0.02 * np.arange(4)))
    assert rung.losses == pytest.approx([2.7] * 4) and rung.tokens == (60 + 40) * 4 * 32


def test_predictions_stand_beside_what_was_measured(found):
    assert (found.design, found.params) == ("fork", 3e7) and found.tokens == pytest.approx(3e7 / 9e6 * 12800)
    assert found.verdict("nvfp4") == "worse" and found.verdict("mxfp8") == "equivalent"
    assert found.held["nvfp4"].covered and len(found.measured) == 6
    assert "lies in its prediction from the smaller ones" in found.sentence("nvfp4")
    assert found.sentence("nvfp4").startswith("worse at 30M parameters and 42.7k tokens: +1.")
    assert set(found.curves["arm"]) == {"nvfp4", "mxfp8"} and found.curves["params"].max() == pytest.approx(3e7)


def test_a_size_far_away_warns_in_every_verdict(sweeps):
    far = ladders.ladder(sweeps, at=(2e8, None))
    assert all("22 times the largest size" in far.sentence(arm) for arm in far.predictions)


def test_the_document_and_the_files(found, tmp_path):
    page = json.loads(json.dumps(ladders.document(found)))
    assert [arm["arm"] for arm in page["arms"]] == ["nvfp4", "mxfp8"] and page["arms"][0]["held_out"]["covered"]
    assert page["arms"][0]["laws"].keys() == {"parts", "power"}
    path = write_ladder(found, tmp_path / "report")
    assert {"ladder.md", "ladder.svg", "ladder.csv", "measured.csv"} == {file.name for file in path.parent.iterdir()}
    assert "- **nvfp4**: worse at 30M parameters" in path.read_text()
    assert predicted_table(found).rows[0][-1] == "covered" and measured_table(found).header[2:] == ("1M", "3M", "9M")
    assert len(rich_tables(found)) == 2


def test_the_figure_has_a_line_a_band_and_marks(found):
    panel = ladder_panel(found)
    assert panel.figure.layout.xaxis.type == "log" and "nvfp4 +1." in panel.says
    assert [trace.mode for trace in panel.figure.data] == ["lines", "lines", "lines", "markers"] * 2
    assert drawing(panel).inner


def test_whole_runs_stand_beside_forks_and_can_be_fitted(sweeps, write, fake):
    whole = [write([replace(run) for run in fake.three_arms()], f"{name}_whole") for name in SIZES]
    both = ladders.ladder([*sweeps, *whole])
    assert both.design == "fork" and set(both.measured["design"]) == {"fork", "whole run"}
    assert ladders.ladder([*sweeps, *whole], design="whole").design == "whole run"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"design": "both"}, "takes fork or whole"), ({"design": "whole"}, "0 sizes in sweeps of whole runs")],
)
def test_other_questions_are_refused(sweeps, change, said):
    with pytest.raises(UserError, match=said):
        ladders.ladder(sweeps, **change)
    with pytest.raises(UserError, match="1 sizes in sweeps of forks"):
        ladders.ladder(sweeps[:1])


@pytest.mark.parametrize(
    ("text", "value"), [("124M", 124e6), ("2.5b", 2.5e9), ("3e7", 3e7), (1000, 1000), ("40k", 4e4)]
)
def test_sizes_are_read(text, value):
    assert ladders.parse_size(text, "at") == value
    assert ladders.parse_size(ladders.size_text(value), "at") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "-3M", "0", "many", "nan", "1x"])
def test_other_sizes_are_refused(text):
    with pytest.raises(UserError, match=r"at: got .*124M, 2.5B or 3e7"):
        ladders.parse_size(text, "at")


def test_sizes_of_conf_ladder_have_twenty_tokens_a_parameter():
    for size in ("40k", "130k", "380k", "1m", "3m", "10m", "30m"):
        point = expand("ladder", [f"size={size}", "seed=0", "recipe=bf16"]).points[-1]
        model, train = point.config["model"], point.config["train"]
        hidden = -(-8 * model["dim"] // 3 // 32) * 32
        params = model["layers"] * (4 * model["dim"] ** 2 + 3 * model["dim"] * hidden) + 2 * 256 * model["dim"]
        assert 18 < train["steps"] * train["batch"] * train["context"] / params < 22, size
        assert point.config["sweep"] == f"ladder_{size}"
        whole = expand("ladder_whole", [f"size={size}", "seed=0", "recipe=bf16", "sweep=w"]).points[-1].config
        assert whole.get("fork") is None and whole["train"]["decay"] == 0.1
        assert whole["train"]["steps"] == train["steps"]
