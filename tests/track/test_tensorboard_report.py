"""Verdicts beside the runs that TensorBoard has."""

import pytest

pytest.importorskip("tensorboard")

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.mirror import mirror_report
from hqsweep.track.tensorboard_report import WIDTH, forest_text, log_report


def arm(name, verdict, gap, low, high):
    known = {"arm": name, "verdict": verdict, "gap": gap, "ci_low": low, "ci_high": high, "margin": 0.25}
    return known | {"within_margin": None, "n": 4, "sentence": f"{name}: {verdict}.", "other": 1}


ARMS = [
    arm("nvfp4 lr=0.1", "worse", 1.25, 1.0, 1.5),
    arm("mxfp8", "equivalent", 0.0625, 0.0, 0.125),
    arm("mxfp4", "undecided", None, None, None),
]


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "runs" / "grid" / "a")
    run.path.mkdir(parents=True)
    (run.path / "config.yaml").write_text(
        yaml.safe_dump({"job": "parity", "seed": 0, "track": {"kind": "tensorboard"}})
    )
    return run


def test_verdicts_forest_and_gaps_replace_those_of_before(run, tmp_path):
    for arms in (ARMS[:1], ARMS):
        assert mirror_report([run], tmp_path / "reports" / "grid", arms)
    loaded = EventAccumulator(str(run.sweep_path / "tensorboard" / "grid")).Reload()
    texts = {tag: loaded.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in loaded.Tags()["tensors"]}
    header, _, first, *_ = texts["verdicts/text_summary"].split("\n")
    assert header == "| arm | verdict | gap | ci_low | ci_high | margin | within_margin | n | sentence |"
    assert first == "| nvfp4 lr=0.1 | worse | 1.25 | 1.0 | 1.5 | 0.25 |  | 4 | nvfp4 lr=0.1: worse. |"
    assert texts["forest/text_summary"] == f"```text\n{forest_text(ARMS)}\n```"
    gaps = {tag: [event.value for event in loaded.Scalars(tag)] for tag in loaded.Tags()["scalars"]}
    assert gaps == {"gap_pct/nvfp4 lr=0.1": [1.25], "gap_pct/mxfp8": [0.0625]}
    assert len(list((run.sweep_path / "tensorboard" / "grid").iterdir())) == 1


def test_the_forest_is_drawn_to_scale():
    axis, first, second = forest_text(ARMS).split("\n")
    assert axis.split() == ["-0.25", "%", "+1.5", "%"]
    place = {name: line.index(line[14:]) for name, line in (("mxfp8", first), ("nvfp4", second))}
    assert set(place.values()) == {14} and first.startswith("mxfp8 ") and second.startswith("nvfp4 lr=0.1 ")
    bars = [line[14 : 14 + WIDTH] for line in (first, second)]
    per_pct = (WIDTH - 1) / 1.75
    assert [bar.index("o") for bar in bars] == [round(0.3125 * per_pct), round(1.5 * per_pct)]
    assert [bar.index("|") for bar in bars] == [round(0.25 * per_pct)] * 2 and bars[1].count(":") == 2
    assert (bars[1].index("-"), bars[1].rindex("-")) == (round(1.25 * per_pct), WIDTH - 1)
    assert first.endswith("  equivalent") and second.endswith("  worse")
    assert forest_text(ARMS[2:]) == "no arm has a gap"


def test_what_cannot_be_written_is_one_line(run, tmp_path, capsys):
    (run.sweep_path / "tensorboard").write_text("in the way")
    assert not log_report(run.sweep_path, tmp_path / "report", ARMS)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("tensorboard: report: ") and line.endswith("report")


@pytest.mark.parametrize("kind", ["none", "tensorboard"])
def test_nothing_is_kept_where_nothing_tracks(run, tmp_path, kind, monkeypatch):
    (run.path / "config.yaml").write_text(yaml.safe_dump({"job": "parity", "seed": 0, "track": {"kind": kind}}))
    monkeypatch.setattr("hqsweep.track.mirror.find_spec", lambda name: None)
    assert not mirror_report([run], tmp_path / "report", ARMS)
    assert not (run.sweep_path / "tensorboard").exists()


def test_a_name_of_others_is_text_in_the_forest():
    line = forest_text([arm("a```\n# b\x1b[2J", "worse", 1.0, 0.5, 1.5)]).split("\n")[1]
    assert line.startswith("a'''\\n# b\\x1b[2J  ")
