"""trackio as a mirror: what it is given, once a step, also by a run that goes on."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hqsweep.config.jobs import VERDICT_COLUMNS
from hqsweep.sweep.store.store import RunStore
from hqsweep.track import open as opening
from hqsweep.track.tracker import upload_line

TRACK = {"kind": "trackio", "mode": "auto", "project": "mine", "entity": None, "init_timeout_s": 2}
CONFIG = {"job": "convergence", "sweep": "grid", "seed": 3, "track": TRACK}


class Trackio(ModuleType):
    """trackio's names that the mirror uses, over rows in memory."""

    def __init__(self):
        super().__init__("trackio")
        self.stored, self.opened = {}, []
        self.Table = lambda dataframe: dataframe.to_dict("records")
        self.Api = lambda: SimpleNamespace(runs=self._runs)

    def _runs(self, project):
        if not self.stored:
            raise ValueError(f"Project '{project}' does not exist")
        return [
            SimpleNamespace(name=name, delete=lambda name=name: self.stored.pop(name)) for name in list(self.stored)
        ]

    def init(self, project, name, group, config, **rest):
        print("* Trackio project initialized")
        self.opened.append((project, name, group, config, rest))
        rows = self.stored.setdefault(name, [])
        return SimpleNamespace(
            log=lambda values, step: rows.append((step, values)), finish=lambda: print("* Run finished")
        )


@pytest.fixture
def trackio(monkeypatch):
    fake = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(opening, "check_installed", lambda kind: None)
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    sys.modules.pop("hqsweep.track.trackio", None)
    yield fake
    sys.modules.pop("hqsweep.track.trackio", None)


@pytest.fixture
def run(tmp_path):
    point = SimpleNamespace(config=CONFIG, arm="mxfp8", overrides=[])
    return RunStore(tmp_path / "runs").create(sweep="grid", conf="c", overrides=[], runs=[point])[0]


def rows(run, *steps):
    lines = "".join(f'{{"step": {step}, "metric": "train_loss", "value": {step}.5}}\n' for step in steps)
    run.jsonl("metrics").write_text(lines)


def test_a_run_that_goes_on_has_every_step_once(run, trackio, capsys):
    rows(run, 1, 2, 3)
    tracker = opening.open_tracker(run)
    tracker.rewind(-1)
    for step in (1, 2, 3):
        tracker.log(step, {"train_loss": step + 0.5})
    assert tracker.finish(0) is True
    tracker = opening.open_tracker(run)
    tracker.rewind(2)  # of a checkpoint: step 3 comes again
    tracker.log(3, {"train_loss": 3.5})
    tracker.table("parity", [{"check": "kernel", "status": "PASS"}])
    assert tracker.finish(0) is True
    name = f"grid/{run.name}"
    assert trackio.stored == {
        name: [(1, {"train_loss": 1.5}), (2, {"train_loss": 2.5}), (3, {"train_loss": 3.5}),
               (3, {"parity": [{"check": "kernel", "status": "PASS"}]})]
    }  # fmt: skip
    project, opened, group, config, rest = trackio.opened[0]
    assert (project, opened, group, config["seed"]) == ("mine", name, "grid", 3) and rest["auto_log_gpu"] is False
    assert "Trackio" not in capsys.readouterr().out, "JSON may be printed there"


def test_sync_makes_it_again_and_a_report_stands_beside(run, trackio, tmp_path):
    rows(run, 1, 2)
    run.write_status(state="finished", exit_code=0)
    assert opening.sync(run, "auto") == []
    assert [step for step, _ in trackio.stored[f"grid/{run.name}"]] == [1, 2]
    arm = dict.fromkeys(VERDICT_COLUMNS, 0.5) | {"arm": "mxfp8", "verdict": "worse"}
    module = importlib.import_module("hqsweep.track.trackio")
    assert module.log_verdicts("grid", TRACK, "study", [arm])
    scalars, table = (values for _, values in trackio.stored["grid/report study"])
    assert scalars["gap_pct/mxfp8"] == 0.5 and table["verdicts"][0]["verdict"] == "worse"


def test_a_failure_of_trackio_is_a_line_of_the_log(run, trackio, monkeypatch, capsys):
    monkeypatch.setattr(trackio, "init", lambda **fields: 1 / 0)
    tracker = opening.open_tracker(run)
    tracker.rewind(-1)
    tracker.log(1, {"train_loss": 1.0})
    assert tracker.finish(0) is False
    assert "trackio: rewind: ZeroDivisionError: division by zero; the run goes on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "environment", "line"),
    [
        ("auto", {}, "trackio: `trackio show --project mine` shows the runs"),
        ("auto", {"TRACKIO_SPACE_ID": "me/s"}, "trackio: uploading to me/s; track.mode=offline keeps it here"),
        ("offline", {"TRACKIO_SPACE_ID": "me/s"}, "trackio: `trackio show --project mine` shows the runs"),
    ],
)
def test_the_start_says_where_rows_go(mode, environment, line):
    assert upload_line(TRACK | {"mode": mode}, environment) == line


def test_the_real_package_takes_it(run, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    for module in [name for name in sys.modules if name.split(".")[0] == "trackio" or name == "hqsweep.track.trackio"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    rows(run, 1, 2, 3)
    for first in (-1, 2):
        tracker = opening.open_tracker(run)
        tracker.rewind(first)
        for step in range(max(first, 0) + 1, 4):
            tracker.log(step, {"train_loss": step + 0.5})
        assert tracker.finish(0) is True
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    logs = storage.get_logs("mine", f"grid/{run.name}")
    assert [(row["step"], row["train_loss"]) for row in logs] == [(1, 1.5), (2, 2.5), (3, 3.5)]
