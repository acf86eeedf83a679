import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("wandb")

from support.track import wandb_file

from hqsweep.config.jobs import TABLES, VERDICT_COLUMNS
from hqsweep.sweep.store.names import id_in
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.track import tracker as destination
from hqsweep.track import wandb as mirror
from hqsweep.track.open import open_tracker
from hqsweep.track.tracker import NullTracker

CONFIG = {
    "job": "parity", "sweep": "grid", "seed": 3, "deep": {"er": [1, 2.5, None]},
    "track": {"kind": "wandb", "mode": "auto", "project": "hqsweep", "entity": None, "init_timeout_s": 2},
}  # fmt: skip
ENVIRONMENT = ("API_KEY", "MODE", "BASE_URL", "SILENT", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR", "DIR", "PROJECT")


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path):
    for name in ENVIRONMENT:
        monkeypatch.setenv(f"WANDB_{name}", "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(f"WANDB_{name}")
    monkeypatch.delenv("NETRC", raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def run(tmp_path):
    point = SimpleNamespace(config=CONFIG, arm="mxfp8 lr=0.1", overrides=[])
    return RunStore(tmp_path / "runs").create(sweep="grid", conf="c", overrides=[], runs=[point])[0]


def test_an_offline_run_mirrors_config_metrics_and_tables(run, tmp_path):
    tracker = mirror.open_run(run, CONFIG)
    for step in (0, 10, 20):
        tracker.log(step, {"train_loss": 3.0 - step})
    tracker.log(20, {"val_loss": math.nan})
    row = dict.fromkeys(TABLES["stats"]) | {"layer": "l.0", "tensor": "input", "direction": "rowwise", "sqnr_db": 30.5}
    tracker.sampled(20, [row])
    tracker.table("stats", [{"layer": "a", "sqnr_db": 30.5}, {"layer": "b", "sqnr_db": None}])
    assert tracker.finish(0)
    (folder,) = mirror.offline_folders(run)
    mirrored = wandb_file.load(folder)
    assert (mirrored.run.run_group, mirrored.run.job_type) == ("grid", "parity")
    assert mirrored.run.display_name == f"mxfp8 lr=0.1 s3 {id_in(run.name)}"
    assert list(mirrored.run.tags) == ["mxfp8 lr=0.1", "seed 3"]
    assert (mirrored.run.project, mirrored.run.run_id) == ("hqsweep", mirror.known_id_of(run))
    assert {key: mirrored.config[key] for key in CONFIG} == CONFIG
    assert [(row["_step"], row["train_loss"]) for row in mirrored.history] == [(0, 3.0), (10, -7.0), (20, -17.0)]
    assert math.isnan(mirrored.history[-1]["val_loss"])
    assert mirrored.history[-1]["sqnr_db/l.0/input/rowwise"] == 30.5
    table = json.loads((folder / "files" / mirrored.history[-1]["stats.path"]).read_text())
    assert (table["columns"], table["data"]) == (["layer", "sqnr_db"], [["a", 30.5], ["b", None]])
    assert mirrored.exit_code == 0
    assert list((tmp_path / "home").iterdir()) == []
    assert [path.name for path in run.sweep_path.iterdir() if "wandb" in path.name] == []


LONG = "nvfp4_row_scaled_fwd_high_precision_bwd"


def opened(monkeypatch, path, manifest, config=CONFIG):
    """What wandb.init is given for the run in a folder."""
    given = {}
    run = RunDir(path)
    monkeypatch.setattr(RunDir, "manifest", lambda self: {"job": "convergence"} | manifest)
    monkeypatch.setattr(mirror.wandb, "init", lambda **fields: given.update(fields) or SimpleNamespace())
    mirror.open_run(run, config)
    return SimpleNamespace(**given)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"h100_study_1/{LONG}-s0-at4-08f77c493b", f"h200_study_1/{LONG}-s0-at4-08f77c493b"),
        ("a b/bf16-s0-08f77c493b", "a_b/bf16-s0-08f77c493b"),
        ("a/b-x-s0-08f77c493b", "a-b/x-s0-08f77c493b"),
        (f"{'s' * 250}1/bf16-s0-08f77c493b", f"{'s' * 250}2/bf16-s0-08f77c493b"),
        ("ü/bf16-s0-08f77c493b", "ö/bf16-s0-08f77c493b"),
    ],
)
def test_runs_of_two_sweeps_never_share_an_id(first, second, tmp_path, monkeypatch):
    ids = [opened(monkeypatch, tmp_path / path, {"arm": LONG, "seed": 0}).id for path in (first, second)]
    assert ids[0] != ids[1]
    assert all(len(name) <= mirror.ID_LENGTH and re.fullmatch("[A-Za-z0-9._-]+", name) for name in ids)
    groups = [opened(monkeypatch, tmp_path / path, {"arm": "a", "seed": 0}).group for path in (first, second)]
    assert groups[0] != groups[1] and max(map(len, groups)) <= mirror.NAME_LENGTH


def test_what_one_folder_has_is_told_apart_by_its_names(tmp_path, monkeypatch):
    def fork(at, **keys):
        return CONFIG | {"fork": {"at": [at], "steps": 2, "decay": 1, "warmup": 1, **keys}}

    names = {
        opened(monkeypatch, tmp_path / f"w/{arm}-s1-at{at}-{digits}", {"arm": arm, "seed": 1}, fork(at, trunk="t")).name
        for arm, at, digits in (("nvfp4", 5, "0a"), ("nvfp4", 10, "0b"), ("x" * 200, 5, "0c"), ("x" * 200, 10, "0d"))
    }
    assert {"nvfp4 s1 at5 0a", "nvfp4 s1 at10 0b"} < names and len(names) == 4 and max(map(len, names)) == 128
    trunk = opened(monkeypatch, tmp_path / "w/trunk-s1-0e", {"arm": "bf16", "seed": 1}, fork(5))
    assert (trunk.name, trunk.tags) == ("trunk s1 0e", ["trunk", "seed 1"])
    one = opened(
        monkeypatch, tmp_path / "w/a-s1-at5-0f", {"arm": "a", "seed": 1, "trunk": "trunk-s1-0e"}, fork(5, trunk="t")
    )
    assert one.tags == ["fork", "a", "seed 1", "at 5", "trunk-s1-0e"]


def test_a_run_has_the_commit_and_the_diff_of_its_code(run):
    run.update_manifest(commit="0123abcd", diff="--- a/x\n+++ b/x\n")
    assert mirror.open_run(run, CONFIG).finish(0)
    (folder,) = mirror.offline_folders(run)
    assert wandb_file.load(folder).run.git.commit == "0123abcd"
    assert (folder / "files" / "diff.patch").read_text() == "--- a/x\n+++ b/x\n"


@pytest.mark.parametrize("folder", ["offline-run-20260101_010101-", "run-20260101_010101-"])
def test_a_run_that_an_earlier_version_started_keeps_its_id(run, folder):
    (run.path / "wandb" / f"{folder}tudy-nvfp4-s0-08f77c493b").mkdir(parents=True)
    (run.path / "wandb" / f"{folder.replace('2026', '2027')}other").mkdir()
    assert mirror.known_id_of(run) == "tudy-nvfp4-s0-08f77c493b"


@pytest.mark.slow
def test_a_resumed_run_keeps_its_id(run):
    for step in (1, 2):
        tracker = mirror.open_run(run, CONFIG)
        tracker.log(step, {"train_loss": 1.0})
        tracker.finish(0)
        time.sleep(1.1)  # its folder's name has seconds
    mirrored = [wandb_file.load(folder) for folder in mirror.offline_folders(run)]
    assert len({one.run.run_id for one in mirrored}) == 1
    assert [row["_step"] for one in mirrored for row in one.history] == [1, 2]


@pytest.mark.slow
def test_a_killed_run_loses_about_a_second(run):
    program = f"""
        import time
        from pathlib import Path
        from hqsweep.sweep.store.run_dir import RunDir
        from hqsweep.track import wandb
        run = RunDir(Path({str(run.path)!r}))
        tracker = wandb.open_run(run, run.config())
        for step in range(1000):
            tracker.log(step, {{"loss": 1.0}})
            print(step, flush=True)
            time.sleep(0.1)
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    while worker.stdout.readline() != "25\n":
        pass
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    (folder,) = mirror.offline_folders(run)
    assert len(wandb_file.load(folder).history) >= 10


@pytest.mark.slow
def test_a_server_out_of_reach_means_offline_after_the_time_out(run, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    tracker = mirror.open_run(run, CONFIG)
    assert time.monotonic() - began < 15
    tracker.log(1, {"loss": 1.0})
    tracker.finish(0)
    assert "wandb: cannot track online: CommError" in capsys.readouterr().out
    (folder,) = mirror.offline_folders(run)
    assert len(wandb_file.load(folder).history) == 1


@pytest.mark.slow
def test_training_does_not_wait_for_a_server_that_never_answers(run, monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        tracker = open_tracker(run)
        for step in range(100):
            tracker.log(step, {"loss": 1.0})
        assert time.monotonic() - began < 1
        assert tracker.finish(0)
    assert "wandb: cannot track online: CommError" in capfd.readouterr().out
    (folder,) = mirror.offline_folders(run)
    assert len(wandb_file.load(folder).history) == 100


def test_no_tracker_at_all_is_better_than_no_run(run, monkeypatch, capsys):
    def broken(**fields):
        raise OSError("disk\nfull")

    monkeypatch.setattr(mirror.wandb, "init", broken)
    assert isinstance(mirror.open_run(run, CONFIG), NullTracker)
    assert capsys.readouterr().out == "wandb: cannot track offline: OSError: disk full\n"


@pytest.mark.parametrize(
    ("mode", "environment", "resolved"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("auto", {"WANDB_MODE": "online"}, "offline"),
        ("online", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "online"),
        ("offline", {"WANDB_API_KEY": "k", "WANDB_MODE": "online"}, "offline"),
        ("online", {}, "offline"),
    ],
)
def test_mode_is_the_config_then_the_environment_then_the_login(mode, environment, resolved, capsys):
    assert destination.resolve_mode(mode, environment) == resolved
    wanted = "online" in (mode, environment.get("WANDB_MODE")) and resolved == "offline" and mode != "offline"
    assert ("no API key" in capsys.readouterr().out) == wanted


def test_a_login_is_found_in_netrc_for_its_server_only(tmp_path):
    home = tmp_path / "home"
    assert not destination.logged_in({})
    (home / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    (home / ".netrc").chmod(0o600)
    assert destination.logged_in({})
    assert not destination.logged_in({"WANDB_BASE_URL": "https://wandb.example.org"})
    assert not destination.logged_in({"NETRC": str(tmp_path / "none")})
    (home / ".netrc").write_text("nonsense")
    assert not destination.logged_in({})


def test_errors_after_the_start_are_one_line_each_and_harmless(capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("service\ndied")

    tracker = mirror.WandbTracker(SimpleNamespace(log=fail, finish=fail))
    for step in range(3):
        tracker.log(step, {"loss": 1.0})
        tracker.sampled(step, [])
    tracker.rewind(0)
    tracker.table("stats", [{"a": 1}])
    tracker.finish(0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        "wandb: log: RuntimeError: service died",
        "wandb: table: RuntimeError: service died",
        "wandb: finish: RuntimeError: service died",
    ]


def test_a_report_becomes_an_artifact_beside_the_runs_with_its_verdicts(run, tmp_path):
    report = tmp_path / "report"
    (report / "figures").mkdir(parents=True)
    (report / "report.html").write_text("<html>")
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><text>worse, by 1 ±</text></svg>'
    (report / "figures" / "forest.svg").write_text(svg, encoding="utf-8")
    worse = {"arm": "nvfp4 lr=0.1", "verdict": "worse", "gap": 1.5, "ci_low": 1.0, "ci_high": 2.0, "margin": 0.25}
    worse |= {"within_margin": False, "n": 4, "sentence": "worse than 'bf16' by 1.5 %.", "other": 1}
    failed = worse | {"arm": "mxfp4", "verdict": "undecided", "gap": None, "ci_low": None, "ci_high": None}
    assert mirror.log_report(run.sweep_path, CONFIG["track"], report, [worse, failed])
    (folder,) = (run.sweep_path / "wandb").glob("offline-run-*")
    mirrored = wandb_file.load(folder)
    assert (mirrored.run.run_group, mirrored.run.job_type) == ("grid", "report")
    (artifact,) = [each for each in mirrored.artifacts if each.type == "report"]
    assert artifact.name == "report-grid"
    assert sorted(entry.path for entry in artifact.manifest.contents) == ["figures/forest.svg", "report.html"]
    assert Path(os.environ["WANDB_DATA_DIR"]).is_relative_to(run.sweep_path)
    told = {key: value for key, value in mirrored.summary.items() if "/" in key}
    assert told == {
        "verdict/nvfp4 lr=0.1": "worse",
        "gap_pct/nvfp4 lr=0.1": 1.5,
        "gap_pct_low/nvfp4 lr=0.1": 1.0,
        "gap_pct_high/nvfp4 lr=0.1": 2.0,
        "verdict/mxfp4": "undecided",
    }
    paths = {key: value for row in mirrored.history for key, value in row.items() if key.endswith(".path")}
    table = json.loads((folder / "files" / paths["verdicts.path"]).read_text())
    assert table["columns"] == list(VERDICT_COLUMNS)
    assert table["data"][0] == ["nvfp4 lr=0.1", "worse", 1.5, 1.0, 2.0, 0.25, False, 4, "worse than 'bf16' by 1.5 %."]
    assert svg in (folder / "files" / paths["forest.path"]).read_text(encoding="utf-8")


def test_a_report_without_a_picture_is_kept_all_the_same(run, tmp_path):
    (tmp_path / "report.html").write_text("<html>")
    assert mirror.log_report(run.sweep_path, CONFIG["track"], tmp_path, [])
    (folder,) = (run.sweep_path / "wandb").glob("offline-run-*")
    assert not [key for row in wandb_file.load(folder).history for key in row if key.startswith("forest")]
