"""What is shipped: the source archive and its wheel, used in a fresh environment outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SDIST = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
TINY = [
    "data.max_bytes=200000", "model.dim=32", "model.layers=1", "train.steps=5", "train.batch=2", "train.context=32",
    "train.eval_batches=1", "stats.every=0", "engine.workers=1", "track=none",
]  # fmt: skip
pytestmark = pytest.mark.slow


def run(*words: object, cwd: Path, **env: str) -> str:
    """stdout of a command, which must end well; PYTHONPATH and the activated environment are not passed on."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environment | env, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def tracked(*folders: str) -> list[str]:
    return run("git", "ls-files", "--cached", "--others", "--exclude-standard", *folders, cwd=ROOT).split()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, with configs in it that somebody keeps there for himself."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a git checkout")
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("conf/mine.yaml", "conf/recipe/mine.yaml", "conf/own/mine.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("name: mine\n")
    return folder


@pytest.fixture(scope="module")
def archive(checkout: Path) -> Path:
    name = run(sys.executable, "-c", SDIST, checkout / "dist", cwd=checkout).split()[-1]
    return checkout / "dist" / name


def wheel(source: Path, out: Path, *settings: str) -> Path:
    """Built as `pip install SOURCE` does, without network and without CUDA."""
    words = ["--no-index", "--no-deps", "--no-build-isolation", f"--config-settings=build-dir={out}/build", *settings]
    run(sys.executable, "-m", "pip", "wheel", "-q", "-w", out, *words, source, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def built(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source archive, so that nothing it needs can be missing from the archive. To compile without
    optimization takes a third of the time."""
    settings = ("--config-settings=cmake.define.HQ_CUDA=OFF", "--config-settings=cmake.build-type=None")
    return wheel(archive, tmp_path_factory.mktemp("built"), *settings)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; the other packages are those of this one."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    python = folder / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", built, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder


def packaged(names: list[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_configs_are_shipped_as_tracked_and_those_of_the_user_are_not(
    checkout: Path, archive: Path, built: Path, tmp_path: Path
) -> None:
    expected = {name.removeprefix("conf/") for name in tracked("conf") if name.endswith((".yaml", ".jsonl"))}
    with tarfile.open(archive) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
        assert {name for name in packaged(names, "conf/") if name.endswith((".yaml", ".jsonl"))} == expected
        assert packaged(names, "csrc/") >= {name.removeprefix("csrc/") for name in tracked("csrc")}
    shipped = set(zipfile.ZipFile(built).namelist())
    assert packaged(list(shipped), "hqsweep/conf/") == expected
    assert packaged(list(shipped), "hqsweep/") >= packaged(tracked("hqsweep"), "hqsweep/")
    direct = zipfile.ZipFile(wheel(checkout, tmp_path, "--config-settings=wheel.cmake=false")).namelist()
    assert set(direct) >= {name for name in shipped if name.startswith("hqsweep/") and "/_C." not in name}
    assert packaged(direct, "hqsweep/conf/") == expected


def test_the_wheel_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    python, hqsweep = (installed / "venv/bin" / name for name in ("python", "hqsweep"))
    where = run(python, "-c", "import hqsweep; print(hqsweep.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(installed)
    results = json.loads(run(hqsweep, "run", "conf=convergence", "recipe=bf16,mxfp8", *TINY, "--json", cwd=tmp_path))
    assert [(row["arm"], row["state"]) for row in results] == [("bf16", "finished"), ("mxfp8", "finished")]
    assert "report: reports/convergence/report.html" in run(hqsweep, "compare", "convergence", cwd=tmp_path)
    names = [row["name"] for row in json.loads(run(hqsweep, "recipe", "ls", "--json", cwd=tmp_path))]
    assert {f"recipe/{name}.yaml" for name in names} == set(packaged(tracked("conf/recipe"), "conf/"))
    assert "exact" in run(hqsweep, "doctor", cwd=tmp_path)
    assert "complete -o default" in run(hqsweep, "--show-completion", "bash", cwd=tmp_path)
    asked = {
        "_HQSWEEP_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": "hqsweep run conf=quick",
    }
    assert run(hqsweep, cwd=tmp_path, **asked).split() == ["conf=quickstart"]
