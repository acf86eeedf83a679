"""A person types and presses TAB, in real interactive shells that load what --install-completion wrote."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.sweep.engine import launch
from hqsweep.sweep.store.store import RunStore

TYPED = {
    # before TAB -> after it; "Z" is typed afterwards, so that a space, or none, shows
    "hqsweep recipe sho": "hqsweep recipe show Z",
    "hqsweep run --dry": "hqsweep run --dry-run Z",
    "hqsweep run conf=quick": "hqsweep run conf=quickstart Z",
    "hqsweep run conf=mi": "hqsweep run conf=mine Z",
    "hqsweep run recipe=nvfp4_fwd_mxfp8_bwd_o": "hqsweep run recipe=nvfp4_fwd_mxfp8_bwd_original Z",
    "hqsweep run conf=mine recipe=bf16,mxfp6_e2": "hqsweep run conf=mine recipe=bf16,mxfp6_e2m3 Z",
    "hqsweep run conf=mine 'recipe=mxfp6_e2": "hqsweep run conf=mine recipe=mxfp6_e2m3 Z",
    "hqsweep run train.lr": "hqsweep run train.lr=Z",
    "hqsweep run conf=mine seed=1 model.rop": "hqsweep run conf=mine seed=1 model.rope_base=Z",
    "hqsweep recipe diff bf16 mxfp8_e": "hqsweep recipe diff bf16 mxfp8_e5m2_grad Z",
    "hqsweep compare alo": "hqsweep compare alone Z",
    "hqsweep gate --baseline b.json alo": "hqsweep gate --baseline b.json alone Z",
}
SHELLS = {"bash": ["bash", "-i"], "zsh": ["zsh", "-i"]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, which is the working directory too, with a config and a sweep of one run."""
    monkeypatch.chdir(tmp_path)
    Path("conf").mkdir()
    Path("conf/mine.yaml").write_text("defaults: [convergence, _self_]\n")
    plan = launch.plan(["conf=convergence", "recipe=mxfp8", "track=none"])
    RunStore(Path("runs")).create(sweep="alone", conf="convergence", overrides=[], runs=plan.points)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("ZDOTDIR", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "dumb")
    return tmp_path


def after_tab(command: list[str], typed: list[str]) -> list[str]:
    """Each line as the shell has it after TAB and "Z": it is made an argument of printf, which says it."""
    controller, terminal = pty.openpty()
    shell = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    try:
        said = _talk(controller, "PS1=; unset zle_bracketed_paste; echo re''ady\n", "ready")
        lines = []
        for line in typed:
            # ^A goes to the beginning of the line
            said = _talk(controller, f"{line}\tZ\x01printf '<%s> ' \x05; echo do''ne\n", "done")
            words = said.replace("\r", "").split("\n")[-2].split("<")[1:]
            lines.append(" ".join(word.split(">")[0] for word in words))
        return lines
    finally:
        shell.kill()
        shell.wait()
        os.close(controller)


def _talk(controller: int, text: str, until: str) -> str:
    """Send keys, and read to the line that begins the answer's end; 60 seconds."""
    os.write(controller, text.encode())
    said, deadline = "", time.monotonic() + 60
    while f"{until}\r" not in said:
        assert time.monotonic() < deadline, f"the shell says {said!r}"
        if select.select([controller], [], [], 0.2)[0]:
            said += os.read(controller, 4096).decode(errors="replace")
    return said[: said.index(f"{until}\r")] + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_tab_in_a_real_shell(shell: str, home: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for _ in range(2):  # the second time changes nothing
        assert CliRunner().invoke(app, ["--install-completion", shell]).exit_code == 0
    loader = (home / f".{shell}rc").read_text()
    assert loader.count("source") == 1 and f"completion.{shell}" in loader
    assert dict(zip(TYPED, after_tab(SHELLS[shell], list(TYPED)), strict=True)) == TYPED


def test_bash_without_the_equals_sign_among_the_wordbreaks(home: Path) -> None:
    CliRunner().invoke(app, ["--install-completion", "bash"])
    with (home / ".bashrc").open("a") as file:
        file.write("COMP_WORDBREAKS=${COMP_WORDBREAKS//=}\n")
    assert after_tab(["bash", "-i"], ["hqsweep run recipe=mxfp6_e2"]) == ["hqsweep run recipe=mxfp6_e2m3 Z"]


def test_show_prints_the_function_and_other_shells_are_one_sentence(home: Path) -> None:
    shown = CliRunner().invoke(app, ["--show-completion", "bash"])
    assert shown.exit_code == 0 and "complete -o default -F _hqsweep_completion hqsweep" in shown.stdout
    refused = CliRunner().invoke(app, ["--install-completion", "tcsh"])
    assert refused.exit_code == 2 and "one for bash and zsh" in refused.stderr and refused.stderr.count("\n") == 1
