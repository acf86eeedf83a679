"""A report beside the runs that it is of: which tracker gets it, and that nothing is needed where there is none."""

import json
from types import SimpleNamespace

import pytest

from hqsweep.sweep.store.store import RunStore
from hqsweep.track import mirror

ARM = {"arm": "nvfp4", "verdict": "worse", "gap": 1.5, "ci_low": 1.0, "ci_high": 2.0, "margin": 0.25}
ARM |= {"within_margin": False, "n": 4, "sentence": "worse than 'bf16' by 1.5 %."}
TRACK = {"mode": "offline", "project": "hqsweep", "entity": None, "init_timeout_s": 2}


@pytest.fixture
def runs_of(tmp_path, monkeypatch):
    """runs_of(kind) -> the runs of a sweep whose `track` section is of that kind."""
    for name in ("DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "wandb"))

    def runs(kind):
        config = {"job": "parity", "sweep": "grid", "seed": 0, "track": TRACK | {"kind": kind}}
        point = SimpleNamespace(config=config, arm="nvfp4", overrides=[])
        return RunStore(tmp_path / "runs").create(sweep="grid", conf="c", overrides=[], runs=[point])

    return runs


def test_runs_without_a_tracker_or_without_its_package_keep_the_report_where_it_is(runs_of, tmp_path, monkeypatch):
    assert not mirror.mirror_report(runs_of("none"), tmp_path, [ARM])
    monkeypatch.setattr(mirror, "find_spec", lambda name: None)
    assert not mirror.mirror_report(runs_of("wandb"), tmp_path, [ARM])


def test_wandb_gets_the_verdicts_and_the_report(runs_of, tmp_path):
    pytest.importorskip("wandb")
    from support.track import wandb_file

    report = tmp_path / "report"
    report.mkdir()
    (report / "report.html").write_text("<html>")
    runs = runs_of("wandb")
    assert mirror.mirror_report(runs, report, [ARM])
    (folder,) = (runs[0].sweep_path / "wandb").glob("offline-run-*")
    record = wandb_file.load(folder)
    assert record.summary["verdict/nvfp4"] == "worse" and record.summary["gap_pct/nvfp4"] == 1.5
    (table,) = [row["verdicts.path"] for row in record.history if "verdicts.path" in row]
    assert json.loads((folder / "files" / table).read_text())["data"] == [list(ARM.values())]
