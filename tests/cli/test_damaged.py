"""Commands that take many runs: one that is damaged, missing or foreign is named with file, fault and remedy, the
others are shown, and the exit code is 3."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app
from hqsweep.errors import Damaged
from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.left_out import exit_code
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore, seal, sweep_file
from tests.report.conftest import FakeRun, three_arms, write_sweep

pytestmark = pytest.mark.slow


def hqsweep(*words: str) -> Result:
    result = CliRunner().invoke(app, [*words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    """bf16, mxfp8 and nvfp4 at seeds 0, 1, 2, finished."""
    monkeypatch.chdir(tmp_path)
    return [RunDir(path) for path in write_sweep(Path("runs/t"), three_arms())]


def compared(sweep: str = "t") -> Comparison:
    """Without the pages of a report, which take seconds."""
    return compare(RunStore(Path("runs")).resolve([sweep]))


def edit(run: RunDir) -> None:
    run.config_path.write_text(run.config_path.read_text().replace("lr: 0.001", "lr: 0.002"))


def cut(run: RunDir) -> None:
    data = run.jsonl("metrics").read_bytes()
    run.jsonl("metrics").write_bytes(data[: data.rfind(b"\n", 0, -1) + 1])


def double(run: RunDir) -> None:
    run.jsonl("metrics").write_bytes(run.jsonl("metrics").read_bytes() * 2)


def halve_a_loss(run: RunDir) -> None:
    data = run.jsonl("metrics").read_bytes()
    last = data.rindex(b'"value": ') + 9
    run.jsonl("metrics").write_bytes(data[:last] + b"1" + data[last + 1 :])


def swap_rows(run: RunDir) -> None:
    other = next(path for path in run.sweep_path.iterdir() if path.name[:5] == "mxfp8")
    shutil.copy(other / "metrics.jsonl", run.jsonl("metrics"))


def add_rows(run: RunDir) -> None:
    run.jsonl("parity").write_text("{}\n")


def unseal(run: RunDir) -> None:
    (run.path / seal.FILE).unlink()


DAMAGES: dict[str, Callable[[RunDir], None]] = {
    "config.yaml": edit, "metrics.jsonl": cut, "rows doubled": double, "value edited": halve_a_loss,
    "foreign rows": swap_rows, "parity.jsonl": add_rows, "seal.json": unseal,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_named_and_not_used(runs, damage):
    bad = runs[-1]
    DAMAGES[damage](bad)
    name = damage if "." in damage else "metrics.jsonl"
    comparison = compared()
    (lost,) = comparison.left_out
    assert (lost.run, lost.state, lost.file) == (f"t/{bad.name}", "damaged", str(bad.path / name))
    assert lost.fault and "hqsweep" in lost.remedy and lost.line in comparison.notes[0]
    assert exit_code(comparison.left_out, partial=True) == 3
    assert comparison.arms.set_index("arm")["runs"].to_dict() == {"bf16": 3, "mxfp8": 3, "nvfp4": 2}
    shown = hqsweep("show", bad.name)
    assert (shown.exit_code, shown.stdout) == (3, "") and name in shown.stderr
    verified = hqsweep("verify", "t", "--json")
    assert verified.exit_code == 3
    assert str(bad.path / name) in [fault["file"] for fault in json.loads(verified.stdout)["faults"]]
    if damage != "value edited":  # which no size tells, and rows are not read here
        for words in (["ls"], ["status", "t"]):
            listed = hqsweep(*words)
            assert listed.exit_code == 3 and name in listed.stdout and "8 " in listed.stdout


def test_reports_gate_and_baseline_say_which_run_they_left_out(runs):
    assert hqsweep("baseline", "update", "t", "--baseline", "base.json").exit_code == 0
    before = Path("base.json").read_bytes()
    cut(runs[-1])
    done = hqsweep("compare", "t", "--json", "--partial")
    (lost,) = json.loads(done.stdout)["left_out"]
    assert done.exit_code == 3 and lost["run"] == f"t/{runs[-1].name}" and lost["file"].endswith("metrics.jsonl")
    assert lost["run"] in Path("reports/t/report.md").read_text()
    gated = hqsweep("gate", "t", "--baseline", "base.json", "--summary", "summary.md", "--junit", "gate.xml")
    assert gated.exit_code == 3 and runs[-1].name in gated.stdout
    assert all(runs[-1].name in Path(name).read_text() for name in ("summary.md", "gate.xml"))
    updated = hqsweep("baseline", "update", "t", "--baseline", "base.json")
    assert updated.exit_code == 3 and "was not written" in updated.stdout and Path("base.json").read_bytes() == before


@pytest.mark.parametrize("gone", ["folder", "config"])
def test_a_run_that_is_gone_is_missing_and_not_one_seed_fewer(runs, gone):
    shutil.rmtree(runs[-1].path) if gone == "folder" else runs[-1].config_path.unlink()
    (lost,) = compared().left_out
    assert (lost.state, lost.run) == ("missing", f"t/{runs[-1].name}")
    assert (exit_code([lost], partial=False), exit_code([lost], partial=True)) == (3, 0)
    for words in (["status", "t"], ["ls"], ["verify"]):
        result = hqsweep(*words)
        assert result.exit_code == 3 and str(runs[-1].path) in result.stdout.replace("\n", ""), words


def test_unfinished_runs_are_exit_code_3_unless_partial_is_wanted(runs):
    stopped = FakeRun(arm="nvfp4", seed=2, state="interrupted", reason="stop")
    write_sweep(Path("runs/begun"), [*three_arms()[:8], stopped])
    (lost,) = compared("begun").left_out
    assert (lost.state, lost.fault) == ("interrupted", "stop") and "goes on" in lost.remedy
    assert hqsweep("compare", "begun", "--partial").exit_code == 0
    said = hqsweep("compare", "begun")
    assert said.exit_code == 3 and "Left out, 1 run" in " ".join(said.stdout.split())


def test_a_folder_that_the_sweep_does_not_list_is_foreign(runs):
    (copy,) = write_sweep(Path("runs/else"), [FakeRun(arm="nvfp4", seed=3, gap=0.5)])
    shutil.copytree(copy, runs[0].sweep_path / copy.name)
    (lost,) = compared().left_out
    assert (lost.state, lost.run) == ("foreign", f"t/{copy.name}") and compared().arms["runs"].max() == 3
    for words in (["ls"], ["status", "t"], ["verify", "t"]):
        result = hqsweep(*words)
        assert result.exit_code == 3 and copy.name in result.stdout, words


@pytest.mark.parametrize("content", ["[]", "", "{", None])
def test_a_sweep_without_its_list_is_not_compared_and_the_others_are_listed(runs, content):
    write_sweep(Path("runs/good"), three_arms()[:3])
    path = Path("runs/t/sweep.json")
    path.write_text(content) if content is not None else path.unlink()
    done = hqsweep("compare", "t")
    assert done.exit_code == 3 and "sweep.json" in done.stderr and "`hqsweep run`" in done.stderr
    assert "good" in hqsweep("ls").stdout and compared("good").left_out == ()


def test_an_edited_list_of_runs_is_named(runs):
    path = Path("runs/t/sweep.json")
    path.write_text(path.read_text().replace(f'"{runs[-1].name}"', f'"{runs[0].name}"'))
    with pytest.raises(Damaged, match="contradicts its own checksum"):
        compared()


def test_a_whole_copy_of_the_folder_is_as_good(runs):
    shutil.copytree("runs", "copy")
    assert compare(RunStore(Path("copy")).resolve(["t"])).left_out == ()
    assert hqsweep("status", "t", "--runs-dir", "copy").exit_code == 0
    assert json.loads(hqsweep("ls", "--json", "--runs-dir", "copy").stdout)[0]["faults"] == []


def test_runs_of_an_earlier_version_are_sealed_as_they_are_when_asked(runs):
    record = sweep_file.read(Path("runs/t"))
    Path("runs/t/sweep.json").write_text(json.dumps(record))
    for run in runs:
        unseal(run)
    asked = hqsweep("compare", "t")
    assert asked.exit_code == 3 and "hqsweep verify --seal" in asked.stderr
    assert hqsweep("verify", "t").exit_code == 3
    sealed = json.loads(hqsweep("verify", "t", "--seal", "--json").stdout)["sealed"]
    assert str(Path("runs/t/sweep.json")) in sealed


def test_a_probe_takes_only_operands_that_the_run_captured(runs: list[RunDir]) -> None:
    folder = runs[0].path / seal.CAPTURED
    folder.mkdir()
    save_file({"layers.0.input": torch.ones(64, 64)}, folder / "step_3.safetensors")
    runs[0].write_status(state="finished")
    assert hqsweep("probe", str(folder), "--json").exit_code == 0
    save_file({"layers.0.input": torch.zeros(64, 64)}, folder / "step_3.safetensors")
    for path in (folder / "step_3.safetensors", folder):
        refused = hqsweep("probe", str(path), "--json")
        assert refused.exit_code == 3 and "step_3.safetensors: is not what it was" in refused.stderr, refused.output


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("batch: ", "bitch: ", "has no key 'batch'"),
        ("seed: 0\n", "seed: 0\nstats: {every: x}\n", "under 'stats.every', where an integer belongs"),
        ("init_noise: ", "init_noise: x", "under 'model.init_noise', where a number belongs"),
    ],
)
def test_the_config_of_a_foreign_run_lacks_nothing_that_is_read(
    runs: list[RunDir], old: str, new: str, fault: str
) -> None:
    text = runs[0].config_path.read_text()
    assert old in text
    runs[0].config_path.write_text(text.replace(old, new, 1))
    runs[0].write_status(state="finished")  # by a program that seals what it wrote
    result = hqsweep("compare", "t", "--json")
    assert result.exit_code == 3 and fault in result.stdout, result.output
    assert hqsweep("show", str(runs[0].path)).exit_code in (0, 3)


def test_a_damaged_baseline_is_named_and_not_only_that_no_arm_has_its_name(runs: list[RunDir]) -> None:
    for run in runs[:3]:
        cut(run)
    result = hqsweep("compare", "t", "--baseline", "bf16", "--json")
    assert result.exit_code == 3 and "bf16-s0" in result.stderr and "metrics.jsonl" in result.stderr, result.output
    assert "no arm is called 'bf16'" in result.stderr


def test_a_folder_in_the_place_of_the_list_of_runs_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / sweep_file.FILE / "mine").mkdir(parents=True)
    record = dict.fromkeys(sweep_file.TEXTS, "x") | {name: [] for name in sweep_file.LISTS}
    sweep_file.write(tmp_path, record)
    assert sweep_file.read(tmp_path) == {"study": {}} | record and (tmp_path / "sweep.json.aside1/mine").is_dir()
