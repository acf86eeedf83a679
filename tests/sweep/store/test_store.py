import multiprocessing
import os
import signal
import socket
import time

import pytest
import yaml

from hqsweep import host
from hqsweep.errors import UserError
from hqsweep.host import Busy
from hqsweep.sweep.store.names import NOT_IN_ID, run_id, run_name
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore


def test_run_id_ignores_key_order_and_what_changes_no_number(planned):
    config = planned().config
    shuffled = dict(reversed(config.items()))
    assert run_id(shuffled) == run_id(config)
    for key in NOT_IN_ID:
        assert run_id(config | {key: "other"}) == run_id(config)
    assert run_id(config | {"seed": 1}) != run_id(config)
    assert run_id(config | {"train": {"compile": "auto"}}) == run_id(config | {"train": {}})
    assert run_id(config | {"train": {"compile": "off"}}) != run_id(config | {"train": {}})
    assert run_id(config | {"recipe": {"name": "nvfp4"}}) != run_id(config)


def test_run_name_is_recipe_seed_and_id_and_a_safe_folder_name(planned):
    config = planned(recipe="nvfp4|a/b", seed=3).config
    assert run_name(config) == f"nvfp4_a_b-s3-{run_id(config)[:10]}"
    parity = {"job": "parity", "seed": 0}
    assert run_name(parity) == f"parity-s0-{run_id(parity)[:10]}"


def test_create_writes_config_manifest_status_and_sweep(store, planned):
    runs = store.create(sweep="fakes", conf="c", overrides=["seed=0,1"], runs=[planned(seed=0), planned(seed=1)])
    assert [run.config()["seed"] for run in runs] == [0, 1]
    assert runs[1].manifest() == {"run_id": run_id(runs[1].config()), "sweep": "fakes", "arm": "mxfp8", "seed": 1,
                                  "job": "convergence", "overrides": ["seed=1"]}  # fmt: skip
    assert runs[0].status()["state"] == "pending"
    assert store.runs("fakes") == runs
    assert store.sweeps() == ["fakes"]


def test_create_twice_changes_nothing_and_adds_only_what_is_new(store, planned):
    first = store.create(sweep="fakes", conf="c", overrides=[], runs=[planned(seed=0)])
    first[0].update_manifest(device="cpu")
    first[0].write_status(state="finished")
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    assert store.create(sweep="fakes", conf="c", overrides=[], runs=[planned(seed=0)]) == first
    assert {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()} == before
    both = store.create(sweep="fakes", conf="c", overrides=[], runs=[planned(seed=1), planned(seed=0)])
    assert store.runs("fakes") == [first[0], both[0]]


def test_a_run_that_is_not_finished_takes_new_tracking_a_finished_one_keeps_its_config(store, planned):
    (run,) = store.create(sweep="fakes", conf="c", overrides=[], runs=[planned()])
    store.create(sweep="fakes", conf="c", overrides=[], runs=[planned(track={"kind": "wandb"})])
    assert run.config()["track"] == {"kind": "wandb"}
    with run.lock():
        store.create(sweep="fakes", conf="c", overrides=[], runs=[planned()])
    run.write_status(state="finished")
    store.create(sweep="fakes", conf="c", overrides=[], runs=[planned()])
    assert run.config()["track"] == {"kind": "wandb"}


def test_equal_points_of_a_grid_are_one_run(store, planned):
    assert len(store.create(sweep="fakes", conf="c", overrides=[], runs=[planned(), planned()])) == 1


@pytest.mark.parametrize("name", ["a/b", "..", "", "a b"])
def test_a_sweep_needs_a_folder_name(store, name):
    with pytest.raises(UserError, match="is not a folder name"):
        store.create(sweep=name, conf="c", overrides=[], runs=[])


def test_sweeps_are_listed_in_order_of_creation_and_other_folders_are_none(store, planned):
    assert store.sweeps() == []
    for name in ("zeta", "alpha"):
        store.create(sweep=name, conf="c", overrides=[], runs=[planned()])
        time.sleep(0.002)
    (store.root / "notes").mkdir()
    assert store.sweeps() == ["zeta", "alpha"]
    assert store.runs("notes") == [] == store.runs("unknown")


@pytest.fixture
def grid(store, planned) -> list[RunDir]:
    recipes = ["nvfp4", "nvfp4_2d", "mxfp8"]
    points = [planned(recipe=recipe, seed=seed) for recipe in recipes for seed in (0, 1)]
    return store.create(sweep="grid", conf="c", overrides=[], runs=points)


def test_resolve_takes_names_paths_and_beginnings(store, grid):
    assert store.resolve(["grid"]) == grid
    assert store.resolve([str(store.root / "grid")]) == grid
    assert store.resolve([str(grid[3].path)]) == [grid[3]]
    assert store.resolve([f"grid/{grid[3].name}"]) == [grid[3]]
    assert store.resolve([grid[3].name]) == [grid[3]]
    assert store.resolve(["nvfp4"]) == grid[:2]
    assert store.resolve(["nvfp4_2d-s1"]) == [grid[3]]
    assert store.resolve(["nvfp"]) == grid[:4]
    assert store.resolve(["grid/nvfp4"]) == store.resolve([f"{store.root}/grid/nvfp4"]) == grid[:2]
    assert store.one(f"grid/{grid[3].name[:12]}") == grid[3]
    assert store.resolve(["mxfp8", "grid"]) == grid[4:] + grid[:4]


def test_resolve_of_an_unknown_word_names_the_nearest(store, grid):
    with pytest.raises(UserError, match=r"'mxpf8' is no run or sweep in .*runs.*did you mean 'mxfp8'\?.*hqsweep ls"):
        store.resolve(["mxpf8"])
    with pytest.raises(UserError, match="'x' is no run or sweep"):
        RunStore(store.root / "nothing").resolve(["x"])


def test_config_of_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"no config\.yaml there"):
        RunDir(tmp_path).config()


def test_config_floats_come_back_as_floats(store, planned):
    (run,) = store.create(sweep="f", conf="c", overrides=[], runs=[planned(lr=1e-5, big=1e20, text="1e-5")])
    assert run.config() == planned(lr=1e-5, big=1e20, text="1e-5").config
    assert yaml.safe_load(run.config_path.read_text())["lr"] == 1e-5


def hold(path, ready, release):
    with RunDir(path).lock():
        ready.set()
        release.wait(10)


def test_the_lock_keeps_others_out_and_goes_with_its_process(make_runs):
    (run,) = make_runs("quick")
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(run.path, ready, release))
    holder.start()
    assert ready.wait(10)
    run.write_status(state="running", host=socket.gethostname())
    assert run.is_locked() and run.status()["state"] == "running"
    with pytest.raises(Busy), run.lock(wait_s=0.05):
        pass
    holder.kill()
    holder.join()
    assert not run.is_locked()
    assert run.status()["state"] == "interrupted" and run.status()["reason"] == "its worker is gone"
    assert run.written_status()["state"] == "running"
    with run.lock():
        assert run.is_locked()


def test_a_run_of_another_machine_is_taken_at_its_word(make_runs):
    (run,) = make_runs("quick")
    run.write_status(state="running", host="elsewhere")
    assert run.status()["state"] == "running"


def test_reset_keeps_what_was_planned_and_nothing_else(make_runs):
    (run,) = make_runs("quick")
    planned = {path: path.read_bytes() for path in run.path.iterdir()}
    run.checkpoint.mkdir()
    (run.checkpoint / "step_3.pt").write_bytes(b"x")
    for path in (run.jsonl("metrics"), run.parquet("metrics"), run.log):
        path.write_text("x")
    run.update_manifest(device="cpu")
    run.write_status(state="failed", reason="x", attempt=2)
    run.reset()
    assert {path: path.read_bytes() for path in run.path.iterdir()} == planned


def test_a_stopped_process_that_holds_the_list_of_runs_is_named(store, planned, make_runs, monkeypatch):
    make_runs("quick")
    monkeypatch.setattr(host, "NAMED_S", 0.1)
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(store.root / "fakes", ready, release))
    holder.start()
    assert ready.wait(10)
    os.kill(holder.pid, signal.SIGSTOP)
    said = []
    with pytest.raises(UserError, match=rf"'fakes': nothing can be added .*`kill -CONT {holder.pid}` lets it go on"):
        make_runs("quick", say=said.append)
    assert f"process {holder.pid} " in said[0]
    holder.kill()
    holder.join()
    make_runs("quick", say=pytest.fail)


def test_names_of_two_sweeps_are_told_apart_by_the_form_that_is_printed(store, grid, planned):
    other = store.create(sweep="other", conf="c", overrides=[], runs=[planned(recipe="nvfp4", seed=0)])
    names = [f"{run.sweep}/{run.name}" for run in (grid[0], other[0])]
    with pytest.raises(UserError, match=f"means 2 runs; name one of {names[0]}, {names[1]}$"):
        store.one(grid[0].name)
    for name, run in zip(names, (grid[0], other[0]), strict=True):
        assert store.one(name) == store.one(name[:-4]) == run
    with pytest.raises(UserError, match=r"'grid/mxpf8' is no run .* \(did you mean 'grid/mxfp8'\?\)"):
        store.one("grid/mxpf8")
    with pytest.raises(UserError, match="'gird/mxfp8' is no run"):
        store.one("gird/mxfp8")  # a beginning that other sweeps have is of no use
