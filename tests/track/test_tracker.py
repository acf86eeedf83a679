import subprocess
import sys

import pytest
import yaml

from hqsweep.config.jobs import TABLES
from hqsweep.errors import UserError
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.open import open_tracker
from hqsweep.track.tracker import SAMPLED, NullTracker, curves, verdict_scalars


@pytest.fixture
def run(tmp_path):
    def make(kind):
        (tmp_path / "config.yaml").write_text(
            yaml.safe_dump({"job": "convergence", "seed": 0, "track": {"kind": kind}})
        )
        return RunDir(tmp_path)

    return make


def test_none_is_the_tracker_that_does_nothing(run):
    tracker = open_tracker(run("none"))
    assert isinstance(tracker, NullTracker)
    tracker.rewind(-1)
    tracker.log(0, {"loss": 1.0})
    tracker.sampled(0, [])
    tracker.table("stats", [])
    assert tracker.finish(0)


def test_none_imports_no_wandb_and_wandb_is_asked_for_in_one_sentence(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert isinstance(open_tracker(run("none")), NullTracker)
    with pytest.raises(
        UserError, match=r"track\.kind: 'wandb' needs the package wandb; pip install 'hqsweep\[wandb\]'"
    ):
        open_tracker(run("wandb"))


def test_tensorboard_is_asked_for_in_one_sentence(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"'tensorboard' needs the package tensorboard; pip install 'hqsweep\[tens"):
        open_tracker(run("tensorboard"))


def test_curves_are_named_by_statistic_layer_tensor_and_direction():
    nothing = dict.fromkeys(TABLES["stats"])
    rows = [
        nothing | {"layer": "l.0", "tensor": "input", "direction": "rowwise", "sqnr_db": 30.5, "saturation_pct": 0.0},
        nothing | {"layer": "l.0", "tensor": "fprop", "direction": "output", "sqnr_db": 20.0, "cosine": 0.9},
        nothing | {"layer": "l.1.experts.3", "tensor": "routed", "direction": "output", "tokens": 4.0, "load": 0.5},
    ]
    assert curves(rows) == {
        "sqnr_db/l.0/input/rowwise": 30.5,
        "sqnr_db/l.0/fprop/output": 20.0,
        "saturation_pct/l.0/input/rowwise": 0.0,
        "load/l.1.experts.3/routed/output": 0.5,
    }
    assert set(SAMPLED) <= TABLES["stats"].keys() and curves([]) == {}


def test_rows_and_tracker_import_without_wandb():
    program = "import sys; sys.modules['wandb'] = None; sys.modules['tensorboard'] = None;"
    program += "import hqsweep.track.rows, hqsweep.track.tracker, hqsweep.track.open"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_gap_of_a_whole_run_has_a_name_of_its_own():
    arm = {"arm": "nvfp4", "gap": 5.5, "ci_low": 4.8, "ci_high": 6.2, "end": 480, "slowdown_pct": 20.9,
           "slowdown_low": None, "lasting_pct": None}  # fmt: skip
    names = {"whole_run_gap_pct": 5.5, "whole_run_gap_pct_low": 4.8, "whole_run_gap_pct_high": 6.2}
    assert verdict_scalars(arm) == names | {"slowdown_pct": 20.9}
    assert verdict_scalars(arm | {"end": None, "lasting_pct": 0.3})["lasting_pct"] == 0.3
    assert "gap_pct" in verdict_scalars({"gap": 1.0})
