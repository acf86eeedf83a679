"""What commands print on a terminal: lines are broken at words, and a command to copy stays whole."""

import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest

from hqsweep.cli.output import wrapped

WARNING = "warning: fp8_delayed has no history before its first step, in which it takes the amax of the call; " * 2
PATH = "/a/folder-with-a-name/" + "x" * 100
PRINTS = f"""
from hqsweep.cli.output import print_result, say
say({WARNING!r}, err=True)
print_result(False, None, {WARNING!r}, "report: {PATH}")
say("next: hqsweep compare {PATH} and --other words")
"""


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_line_is_broken_at_its_spaces_alone(columns):
    lines = wrapped(f"{WARNING}{PATH}", columns).splitlines()
    assert " ".join(lines).split() == f"{WARNING}{PATH}".split()
    assert max(len(line) for line in lines if PATH not in line) <= columns and lines[-1] == PATH


@pytest.mark.parametrize("line", [f"next: hqsweep compare {PATH} --check", "a: 1\n" + "b " * 100])
def test_commands_and_what_is_laid_out_stay(line):
    assert wrapped(line, 40) == line


def test_without_a_terminal_no_line_is_broken():
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [WARNING] and WARNING in done.stdout.splitlines()


def test_a_terminal_gets_whole_words():
    controller, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    files = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    env = dict(os.environ)  # without the COLUMNS that readline sets in C alone
    subprocess.run([sys.executable, "-c", PRINTS], **files, env=env, check=True)
    os.close(terminal)
    shown = b""
    while part := _read(controller):
        shown += part
    lines = [line.rstrip() for line in shown.decode().splitlines()]
    assert (
        " ".join(lines).split()
        == f"{WARNING} {WARNING} report: {PATH} next: hqsweep compare {PATH} and --other words".split()
    )
    assert [line for line in lines if len(line) > 70] == [PATH, f"next: hqsweep compare {PATH} and --other words"]


def _read(controller: int) -> bytes:
    """What a terminal has shown; b"" at its end."""
    try:
        return os.read(controller, 65536)
    except OSError:
        return b""
