"""Text of others on a console: no sequence of it reaches the terminal, and rich's own do."""

import io

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from hqsweep.sweep.console import SafeConsole
from hqsweep.sweep.progress import LiveDisplay, PlainDisplay
from hqsweep.sweep.store.run_dir import PENDING

NASTY = "a\x1b]0;owned\x07b\x1b[2J\x9b31m\u202ec\rd"
SHOWN = "b\\x1b[2J\\x9b31m\\u202ec"


def terminal():
    return SafeConsole(file=io.StringIO(), force_terminal=True, width=120, height=20)


def table():
    content = Table(title=NASTY)
    content.add_column(NASTY)
    content.add_row(Text(NASTY, style="red"))
    return content


@pytest.mark.parametrize("shown", [NASTY, Text(NASTY), table(), Panel(Text(NASTY)), Syntax(f"x: {NASTY}", "yaml")])
def test_escape_sequences_are_text(shown):
    console = terminal()
    console.print(shown, markup=False, highlight=False)
    out = console.file.getvalue()
    assert "\x1b]" not in out and "\x1b[2J" not in out and not set("\x07\x9b\u202e\r") & set(out)
    assert "owned" in out and "\\x1b" in out


def test_colours_and_line_ends_of_our_own_stay():
    console = terminal()
    console.print(Text("one\n\ttwo", style="red"))
    assert console.file.getvalue().startswith("\x1b[31mone\x1b[0m\n") and console.file.getvalue().count("\n") == 2
    with Live(Text("live"), console=console):
        pass
    assert "\x1b[?25l" in console.file.getvalue()


@pytest.mark.parametrize("display", [PlainDisplay, LiveDisplay])
def test_names_and_reasons_of_a_sweep_are_text(display):
    console = terminal()
    with display(console) as shown:
        shown.update(NASTY, PENDING | {"state": "running"})
        shown.update(NASTY, PENDING | {"state": "failed", "reason": NASTY, "seconds": 1.0})
        shown.say(f"{NASTY} said")
    out = console.file.getvalue()
    assert SHOWN in out and "\x1b]0" not in out and "\x1b[2J" not in out and "\x07" not in out
