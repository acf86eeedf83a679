"""The command line: one sentence for wrong input, exit codes, JSON, and a start-up that loads nothing heavy."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hqsweep import __version__
from hqsweep.api.finish import after_failures
from hqsweep.cli.main import app
from hqsweep.sweep.engine import launch
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

TINY = [
    "conf=convergence", "data=markov", "data.markov.length=4096", "model.dim=32", "model.layers=1", "model.heads=2",
    "train.steps=2", "train.batch=2", "train.context=32", "train.eval_batches=1", "stats.every=0", "track=none",
]  # fmt: skip


def hqsweep(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def process(*words: str, cwd: Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-m", "hqsweep", *words], cwd=cwd, capture_output=True, text=True)


BROKEN = {
    "torn": ("conf/torn.yaml", "defaults: [convergence\njob: x\n"),
    "tron": ("conf/torn.yaml", "defaults: [convergence\njob: x\n"),
    "lost": ("conf/lost.yaml", "defaults: [convergence, {override recipe: nvpf4}]\n"),
    "loop": ("conf/loop.yaml", "defaults: [convergence, _self_]\ntrain: {lr: '${train.lrr}'}\n"),
    "open": ("conf/open.yaml", "job: convergence\nseed: ???\n"),
    "bare": ("conf/bare.yaml", "seed: 1\n"),
    "stamp": ("conf/stamp.yaml", "defaults: [convergence, _self_]\nseed: !!timestamp 1\n"),
    "map": ("conf/map.yaml", "defaults: {}\n"),
    "twin": ("conf/recipe/twin.yaml", "name: bf16\nlinear: mxfp8\n"),
}
"""A part of a command's words -> the file that it means, and its text."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


RUN = "run conf=convergence "
WRONG = [
    # the words, what the one line must contain: the offending thing and what is right
    ("run", ["conf=NAME"]),
    ("run train.steps=3", ["conf=NAME is missing", "quickstart"]),
    ("run quickstart", ["conf=NAME is missing", "did you mean 'conf=quickstart'?"]),
    ("run conf=quikstart", ["conf=quikstart", "did you mean 'quickstart'?"]),
    ("run conf=quickstart conf=stdlib", ["conf=quickstart conf=stdlib", "one conf"]),
    ("run conf=quickstart,stdlib", ["conf=quickstart,stdlib", "one conf"]),
    ("run conf=", ["conf=", "one conf"]),
    ("run conf=conf/tron.yaml", ["conf=conf/tron.yaml", "did you mean 'torn.yaml'?"]),
    ("run conf=torn", ["torn.yaml: line 2", "correct the YAML"]),
    ("run conf=lost", ["nvpf4", "recipe"]),
    ("run conf=loop", ["train.lr", "train.lrr"]),
    ("run conf=open", ["seed", "no value yet", "seed=VALUE"]),
    ("run conf=stamp", ["conf=stamp"]),
    ("run conf=map", ["conf=map", "defaults must be a list"]),
    ("run conf=convergence train.steps=range(1,4,0)", ["train.steps=range(1,4,0)", "zero"]),
    ("run conf=convergence train.steps=glob(*)", ["train.steps=glob(*)", "no value"]),
    ("compare nothing --runs-dir " + "x" * 300, ["File name too long"]),
    ("run conf=bare", ["job: missing", "convergence, parity, calibrate"]),
    ("run conf=quickstart --dryrun", ["--dryrun", "--dry-run"]),
    ("run conf=quickstart --workers 0", ["--workers", "1"]),
    ("run conf=quickstart --config-dir nowhere", ["--config-dir", "nowhere"]),
    ("runs conf=quickstart", ["runs", "Did you mean 'run'?"]),
    (RUN + "train.stesp=3", ["train.stesp", "did you mean 'train.steps'?"]),
    (RUN + "+train.stesp=3", ["train.stesp", "did you mean 'train.steps'?"]),
    (RUN + "+a.b=1", ["a: no such key", "recipe"]),
    (RUN + "steps=3", ["steps", "did you mean 'train.steps'?"]),
    (RUN + "tarin.steps=3", ["tarin", "did you mean 'train'?"]),
    (RUN + "train.steps", ["'train.steps'", "KEY=VALUE"]),
    (RUN + "train.steps=abc", ["train.steps", "'abc'", "integer"]),
    (RUN + "train.steps=0", ["train.steps", "0", "greater than or equal to 1"]),
    (RUN + "train.lr=1e-3,fast", ["train.lr", "'fast'", "number", "in the run with train.lr=fast"]),
    (RUN + "train.dtype=bf61", ["train.dtype", "bf61", "did you mean 'bf16'?"]),
    (RUN + "train.warmup=0.9", ["train.warmup", "0.9", "train.decay 0.4"]),
    (RUN + "model.heads=3", ["model.dim", "3 heads", "multiple of 6"]),
    (RUN + "recipe=mxfp", ["recipe=mxfp", "did you mean 'mxfp8'?"]),
    (RUN + "recipe=mxfp8,nvpf4", ["nvpf4", "did you mean 'nvfp4'?"]),
    (RUN + "recipe=bf16,twin", ["recipe=bf16 and recipe=twin", "name of its own"]),
    (RUN + "recipe.linear.inptu=mxfp8", ["recipe.linear", "inptu", "did you mean 'input'?"]),
    (RUN + "recipe.linear.input=mxpf8", ["recipe.linear.input", "mxpf8", "did you mean 'mxfp8'?"]),
    (RUN + "recipe.linear.input=nvfp4+rth", ["+rth", "did you mean 'rht'?"]),
    (RUN + "recipe.linear.input=nvfp4|mxfp8@rowwise_dequantised", ["did you mean 'rowwise_dequantized'?"]),
    (RUN + "recipe.linear.grad_output=nvfp4+rht", ["wgrad", "nvfp4+rht", "Hadamard"]),
    (RUN + "recipe.gemm=strict recipe.linear.input=mxfp8", ["fprop", "input rowwise mxfp8", "weight rowwise bf16"]),
    (RUN + "data=txt", ["data=txt", "did you mean 'text'?"]),
    (RUN + "data=text", ["data.path", "data.path=FILE_OR_FOLDER"]),
    (RUN + "data=text data.path=nowhere.txt", ["data.path", "nowhere.txt", "does not exist"]),
    (RUN + "seed=1 seed=2", ["seed=2", "given twice"]),
    (RUN + "seed=-1", ["seed", "-1", "greater than or equal to 0"]),
    (RUN + "a=b=c", ["a=b=c", "KEY=VALUE"]),
    (RUN + "engine.workers=1,2", ["engine.workers", "cannot be swept"]),
    (RUN + "sweep=../up", ["sweep", "../up"]),
    (RUN + "model.dim=${model.dmi}", ["model.dim", "model.dmi"]),
    ("run conf=parity recipe=mxfp8", ["recipe", "parity"]),
    ("run conf=parity parity.formats=[mxfp8,nvpf4]", ["parity.formats", "nvpf4", "did you mean 'nvfp4'?"]),
    ("show nothing", ["'nothing'", "hqsweep ls"]),
    ("status nothing", ["'nothing'", "hqsweep ls"]),
    ("cancel nothing", ["'nothing'", "hqsweep ls"]),
    ("sync nothing", ["'nothing'", "hqsweep ls"]),
    ("sync nothing --mode on", ["--mode", "online"]),
    (RUN + "engine=slrum", ["engine=slrum", "did you mean 'slurm'?"]),
    (RUN + "engine.slurm.gres=gpu:1", ["engine.slurm", "add engine=slurm"]),
    (RUN + "engine=slurm engine.runs_per_gpu=2", ["engine.runs_per_gpu", "engine.slurm.gres"]),
    ("compare nothing", ["'nothing'", "hqsweep ls"]),
    ("gate nothing", ["--baseline"]),
]


@pytest.mark.parametrize(("words", "parts"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_input_is_one_sentence_and_exit_2(
    words: str, parts: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(launch, "start")
    for name, text in (file for part, file in BROKEN.items() if part in words):
        write(folder / name, text)
    result = hqsweep(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("hqsweep: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr
    assert not (folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["run conf=quickstart train.stesp=3", "run --dryrun"])
def test_wrong_input_of_a_real_process(words: str, folder: Path) -> None:
    done = process(*words.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hqsweep: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", ["run conf=ci --dry-run", "ls", "doctor"])
def test_a_working_directory_that_was_deleted_is_said(words: str, folder: Path) -> None:
    gone = folder / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && {sys.executable} -P -m hqsweep {words}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder, timeout=60)
    said = "hqsweep: the working directory was deleted; cd to a folder that exists, and type it again\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["run conf=ci --dry-run", "recipe ls"])
def test_a_machine_with_too_little_memory_is_no_regression(words: str, folder: Path) -> None:
    script = f"ulimit -v 400000; {sys.executable} -P -m hqsweep {words}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1), done.stderr
    assert done.stderr.startswith("hqsweep: a library cannot be loaded, or memory cannot be had; free some, or raise")


@pytest.mark.parametrize("error", [MemoryError(), ImportError("lib.so: failed to map segment from shared object")])
def test_memory_that_runs_out_in_a_command_is_exit_3(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def facts() -> None:
        raise error

    monkeypatch.setattr("hqsweep.track.machine.facts", facts)
    result = hqsweep("version")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1) and str(error) in result.stderr


@pytest.mark.parametrize("words", ["from hqsweep import gone", "import hqsweep.gone"])
def test_a_missing_import_of_ours_keeps_its_traceback(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hqsweep.track.machine.facts", lambda: exec(words))
    result = hqsweep("version")
    assert isinstance(result.exception, ImportError) and "gone" in str(result.exception)
    assert "memory cannot be had" not in result.stderr


def test_dry_run_prints_the_grid_and_starts_nothing(folder: Path) -> None:
    words = ["run", "conf=convergence", "recipe=bf16,mxfp8", "seed=0,1", "--dry-run"]
    rows = json.loads(hqsweep(*words, "--json").stdout)
    assert [(row["arm"], row["seed"]) for row in rows] == [("bf16", 0), ("bf16", 1), ("mxfp8", 0), ("mxfp8", 1)]
    assert rows[2]["changed"] == ["recipe=mxfp8", "seed=0"]
    assert rows[2]["config"]["recipe"]["linear"] == dict.fromkeys(("input", "weight", "grad_output"), "mxfp8")
    assert len({row["run"] for row in rows}) == 4
    table = hqsweep(*words)
    assert table.exit_code == 0
    assert "4 runs" in table.stdout and "baseline: bf16 (it is not quantized)" in table.stdout
    assert [row["state"] for row in rows] == ["to do"] * 4 and "4 to do, " in table.stdout
    assert table.stdout.count("seed=1") == 2
    assert not (folder / "runs").exists()


def test_native_without_a_gpu_is_refused_at_the_start_and_shown_before_it(folder: Path) -> None:
    words = ["run", *TINY, "train.device=cpu", "recipe=bf16,current_scaling", "recipe.gemm=native"]
    dry, result = hqsweep(*words, "--dry-run", "--json"), hqsweep(*words)
    assert [row["config"]["recipe"]["gemm"] for row in json.loads(dry.stdout)] == ["native", "native"]
    assert (result.exit_code, result.stdout, dry.exit_code) == (2, "", 2)
    assert "gemm=native needs a GPU of compute capability 8.9 or later; this run is on the CPU" in result.stderr
    assert result.stderr == dry.stderr and result.stderr.count("\n") == 1 and not (folder / "runs").exists()
    write(folder / "conf/recipe/cores.yaml", "name: cores\nlinear: fp8_current\ngemm: native\n")
    assert "gemm: native" in hqsweep("recipe", "show", "cores").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["data.markov.length=900", "train.context=128"],
            "the val split has 90 tokens, too short for train.context=128",
        ),
        (["data.markov.length=100", "train.context=128"], "the train split has 100 tokens"),
        (["data=text", "data.path=short.txt"], "the train split has 27 tokens, too short for train.context=32"),
        (["data=stdlib", "data.max_bytes=100"], "at least 2 are needed"),
    ],
)
def test_data_too_short_is_refused_before_anything_starts(words: list[str], says: str, folder: Path) -> None:
    (folder / "short.txt").write_text("x" * 30)
    keys = {word.partition("=")[0] for word in words}
    rest = [word for word in TINY if word.partition("=")[0] not in keys]
    for option in ([], ["--dry-run"]):
        result = hqsweep("run", *rest, *words, *option)
        assert result.exit_code == 2 and says in result.stderr, result.stderr
    assert not (folder / "runs").exists()


def test_workers_is_the_engines_key() -> None:
    assert launch.plan(["conf=quickstart", "recipe=bf16"], workers=3).first.engine.workers == 3
    twice = hqsweep("run", "conf=quickstart", "engine.workers=1", "--workers", "2")
    assert "engine.workers is given twice" in twice.stderr


def test_an_own_recipe_and_sweep_from_config_dir(folder: Path) -> None:
    write(folder / "my/recipe/mine.yaml", "name: mine\nlinear: mxfp8\n")
    write(folder / "my/try.yaml", "defaults: [convergence, _self_, {override recipe: mine}]\n")
    (row,) = json.loads(hqsweep("run", "conf=try", "--config-dir", "my", "--dry-run", "--json").stdout)
    assert (row["arm"], row["config"]["sweep"]) == ("mine", "try")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_sweep_from_start_to_report(folder: Path) -> None:
    words = ["run", *TINY, "recipe=bf16,mxfp8", "--json", "--junit", "out/junit.xml"]
    first = hqsweep(*words)
    results = json.loads(first.stdout)
    assert first.exit_code == 0, first.stderr
    assert [(r["arm"], r["state"]) for r in results] == [("bf16", "finished"), ("mxfp8", "finished")]
    assert all(0 < r["val_loss"] < 10 for r in results)
    assert "next: hqsweep compare convergence" in first.stderr
    assert ET.parse("out/junit.xml").getroot().get("tests") == "2"

    again = json.loads(hqsweep(*words).stdout)
    assert again == results  # nothing was repeated: the seconds are the same

    compared = hqsweep("compare", "convergence", "--json")
    assert json.loads(compared.stdout)["report"] == "reports/convergence/report.html"
    assert Path("reports/convergence/report.html").is_file()
    checked = hqsweep("compare", "convergence", "--check", "--junit", "compare.xml")
    assert checked.exit_code == 1 and "there is no null arm; null_arm=true adds one" in checked.stdout
    assert ET.parse("compare.xml").getroot().get("tests") == "1"
    assert "did you mean 'bf16'?" in hqsweep("compare", "convergence", "--baseline", "bf61").stderr

    assert hqsweep("gate", "convergence", "--baseline", "base.json").exit_code == 4
    stored = json.loads(hqsweep("baseline", "update", "convergence", "--baseline", "base.json", "--json").stdout)
    assert [row["change"] for row in stored["rows"]] == ["new", "new"]
    words = ["gate", "convergence", "--baseline", "base.json", "--junit", "gate.xml", "--summary", "gate.md"]
    gated = hqsweep(*words, "--json")
    assert gated.exit_code == 0 and json.loads(gated.stdout)["outcome"] == "pass"
    assert ET.parse("gate.xml").getroot().get("failures") == "0" and "✅ pass" in Path("gate.md").read_text()
    CliRunner(env={"GITHUB_STEP_SUMMARY": "step.md"}).invoke(app, words[:4])
    assert Path("step.md").read_text() == Path("gate.md").read_text()

    assert json.loads(hqsweep("ls", "--json").stdout)[0]["states"] == {"finished": 2}
    assert json.loads(hqsweep("show", results[0]["run"], "--json").stdout)["config"]["recipe"]["name"] == "bf16"
    shown = hqsweep("show", "convergence")
    assert shown.exit_code == 0 and "2 finished; conf=convergence" in shown.stdout
    document = json.loads(hqsweep("show", "convergence", "--json").stdout)
    assert [row["run"] for row in document["runs"]] == [r["run"] for r in results]
    last = hqsweep("checkpoint", "show", "convergence/bf16")
    assert last.exit_code == 0 and results[0]["run"] in last.stdout and ", step " in last.stdout


@pytest.mark.slow
def test_status_cancel_and_sync_of_a_sweep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = RunStore(folder / "runs").create(
        sweep="tiny", conf="c", overrides=[], runs=launch.plan([*TINY, "recipe=bf16,mxfp8"]).points
    )
    runs[0].jsonl("metrics").write_text('{"step": 1, "metric": "lr", "value": 0.5}\n')
    runs[0].write_status(state="finished", exit_code=0)
    rows = json.loads(hqsweep("status", "tiny", "--json").stdout)
    assert [(row["run"], row["state"], row["job"]) for row in rows] == [
        (runs[0].name, "finished", None), (runs[1].name, "pending", None)
    ]  # fmt: skip
    assert json.loads(hqsweep("cancel", "tiny", "--json").stdout) == [runs[1].name]
    assert hqsweep("cancel", "tiny").stdout == "cancelled: none waits or runs\n"
    shown = hqsweep("status", "tiny", "--follow")
    assert shown.exit_code == 3 and "1 of 2 runs finished" in shown.stdout and "cancelled" in shown.stdout
    pytest.importorskip("wandb")
    for name in ("DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(folder / "wandb"))
    (mirror,) = json.loads(hqsweep("sync", runs[0].name, "--mode", "offline", "--json").stdout)[runs[0].name]
    assert Path(mirror).is_relative_to(runs[0].path.relative_to(folder)) and list(Path(mirror).glob("*.wandb"))


def test_detached_runs_are_submitted_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(launch, "run_slurm", lambda runs, **keys: calls.append((len(runs), keys)))
    words = ["run", *TINY, "engine=slurm", "engine.slurm.detach=true", "--workers", "3", "train.device=cuda"]
    result = hqsweep(*words)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    ((count, keys),) = calls
    assert (count, keys["workers"], keys["slurm"]["detach"], keys["retries"]) == (1, 3, True, 0)
    (row,) = json.loads(hqsweep(*words, "--json").stdout)
    assert (row["state"], row["val_loss"]) == ("pending", None)


def test_warnings_of_runs_are_told_once_at_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(plan: launch.SweepPlan, display: object, *, force: bool, until: object) -> list[RunDir]:
        runs = RunStore(folder / "runs").create(sweep="tiny", conf="tiny", overrides=[], runs=plan.points)
        for run in runs:
            run.update_manifest(warnings=["training reads its data twice"] if run.name.startswith("mxfp8") else [])
            run.write_status(state="finished")
        return runs

    monkeypatch.setattr(launch, "start", start)
    result = hqsweep("run", *TINY, "recipe=bf16,mxfp8", "seed=0,1")
    assert result.exit_code == 0
    assert result.stdout.count("warning: training reads its data twice (2 of 4 runs)\n") == 1


@pytest.mark.slow
def test_a_failed_run_exits_3_and_names_its_log(folder: Path) -> None:
    result = hqsweep("run", *TINY, "engine.timeout_s=0.01")
    assert result.exit_code == 3
    assert "1 of 1 runs did not finish" in result.stdout
    assert "log.txt" in result.stdout


@pytest.mark.parametrize(("status", "code"), [("PASS", 0), ("FAIL", 1)])
def test_a_parity_mismatch_exits_1(status: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"check": "kernel", "case": "normal", "subject": "mxfp8", "status": status, "mismatches": 1, "total": 9,
           "first_index": "q[3, 5]", "got": "0x7e", "expected": "0x7f", "note": None}  # fmt: skip

    def start(plan: launch.SweepPlan, display: object, *, force: bool, until: object) -> list[RunDir]:
        (run,) = RunStore(folder / "runs").create(sweep="parity", conf="parity", overrides=[], runs=plan.points)
        run.jsonl("parity").write_text(json.dumps(row) + "\n")
        run.write_status(state="finished")
        return [run]

    monkeypatch.setattr(launch, "start", start)
    result = hqsweep("run", "conf=parity", "--junit", "junit.xml")
    assert result.exit_code == code
    assert status in result.stdout
    assert len(ET.parse("junit.xml").getroot().findall(".//failure")) == code
    assert json.loads(hqsweep("run", "conf=parity", "--json").stdout)[0]["parity"] == {status: 1}


def test_help_loads_nothing_heavy(folder: Path) -> None:
    done = process("--help", cwd=folder, options=("-X", "importtime"))
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "hqsweep" in loaded
    assert not loaded & {"torch", "numpy", "pandas", "hydra", "omegaconf", "pydantic", "wandb", "plotly", "rich"}
    assert "compare" in done.stdout


def test_no_command_shows_the_help() -> None:
    result = hqsweep()
    assert result.exit_code == 0
    for command in ("run", "compare", "gate", "ls", "show", "version"):
        assert f"\n  {command} " in result.stdout


def test_the_version_alone() -> None:
    assert hqsweep("--version").stdout == f"hqsweep {__version__}\n"


def test_version_names_torch() -> None:
    assert json.loads(hqsweep("version", "--json").stdout)["versions"]["torch"]


def test_a_gpu_that_is_not_there_stops_before_anything_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in ([*TINY, "train.device=cuda"], ["conf=parity", "parity.device=cuda"]):
        for option in ([], ["--dry-run"]):
            result = hqsweep("run", *words, *option)
            assert result.exit_code == 2 and "no CUDA device; use cpu" in result.stderr
    result = hqsweep("run", *TINY, "train.compile=graph")
    assert result.exit_code == 2 and "train.compile: graph is a CUDA graph" in result.stderr
    assert not (folder / "runs").exists()


def test_a_run_that_diverged_is_not_to_be_repeated():
    good = [{"state": "finished", "reason": None, "path": f"runs/a/{name}"} for name in "de"]
    lost = {"state": "failed", "reason": "killed by SIGKILL", "path": "runs/a/b"}
    diverged = {"state": "failed", "reason": "loss is nan at step 3; a repeat would say the same", "path": "runs/a/c"}
    assert after_failures([diverged, *good]) == "1 of 3 runs diverged, and would again; change what the reason names"
    late = {"state": "pending", "reason": None, "path": "runs/a/f"}
    assert after_failures([*good, late]) == "2 of 3 runs done; the same command goes on"
    both = after_failures([diverged, lost, good[0]])
    assert both.startswith("1 of 3 runs did not finish; see runs/a/b/log.txt, then run again; 1 of 3 runs diverged")
