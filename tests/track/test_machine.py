import subprocess

from hqsweep.track import machine


def test_facts_of_this_machine():
    manifest = machine.facts()
    assert manifest["versions"]["torch"] and manifest["versions"]["python"].startswith("3.")
    assert manifest["host"] and manifest["platform"] and manifest["isa"] and manifest["threads"] >= 1


def test_threads_are_those_given_to_the_worker(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert machine.facts()["threads"] == 5


def test_isa_is_read_from_cpuinfo(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu sse2 avx2 avx512f amx_bf16\nprocessor : 1\nflags : fpu\n")
    assert machine.cpu_isa(path) == "avx2 avx512f amx_bf16"
    path.write_text("Features\t: fp asimd sve bf16\n")
    assert machine.cpu_isa(path) == "asimd bf16 sve"
    assert machine.cpu_isa(tmp_path / "none") == machine.platform.machine()


def test_commit_and_dirt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.git_state() == {"commit": None, "dirty": None}
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "file").write_text("1")
    for command in (("init", "-q"), ("add", "file"), (*author, "commit", "-qm", "x")):
        subprocess.run(["git", *command], check=True)
    clean = machine.git_state()
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert machine.git_state() == clean | {"dirty": True}


def test_the_diff_of_a_changed_checkout_is_bounded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "file").write_text("old\n")
    for command in (("init", "-q"), ("add", "file"), (*author, "commit", "-qm", "x")):
        subprocess.run(["git", *command], check=True)
    assert "diff" not in machine.facts(with_diff=True)
    (tmp_path / "file").write_text("new\n")
    assert machine.facts(with_diff=True)["diff"].endswith("-old\n+new") and "diff" not in machine.facts()
    (tmp_path / "file").write_bytes(b"x\xff" * 40_000)
    text = machine.facts(with_diff=True)["diff"]
    assert len(text) < machine.MOST_DIFF + 40 and text.splitlines()[-1].endswith(" more characters")
    subprocess.run(["git", "config", "diff.external", "touch evil"], check=True)
    assert machine.git_diff() == text and not (tmp_path / "evil").exists()


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.git_state() == {"commit": None, "dirty": None}


def test_a_package_that_is_not_installed_has_no_version():
    assert machine._version("surely-not-installed-anywhere") is None
