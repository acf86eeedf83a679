import subprocess
import sys

import pytest
import yaml

from hqsweep.errors import UserError
from hqsweep.sweep.store import RunDir
from hqsweep.track.open import open_tracker
from hqsweep.track.tracker import NullTracker


@pytest.fixture
def run(tmp_path):
    def make(kind):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"track": {"kind": kind}}))
        return RunDir(tmp_path)

    return make


def test_none_is_the_tracker_that_does_nothing(run):
    tracker = open_tracker(run("none"))
    assert isinstance(tracker, NullTracker)
    tracker.log(0, {"loss": 1.0})
    tracker.table("stats", [])
    assert tracker.finish(0)


def test_none_imports_no_wandb_and_wandb_is_asked_for_in_one_sentence(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert isinstance(open_tracker(run("none")), NullTracker)
    with pytest.raises(UserError, match=r"track\.kind: 'wandb' needs the package wandb; `pip install wandb`"):
        open_tracker(run("wandb"))


def test_rows_and_tracker_import_without_wandb():
    program = "import sys; sys.modules['wandb'] = None; import hqsweep.track.rows, hqsweep.track.tracker"
    subprocess.run([sys.executable, "-c", program], check=True)
