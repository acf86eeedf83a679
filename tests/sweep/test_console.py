"""The last line of the display."""

import io

import pytest
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from support.sweep.shown import Shown

from hqsweep.sweep.console import LiveDisplay, PlainDisplay, SafeConsole, cells, duration, open_display, time_left
from hqsweep.sweep.engine import launch
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


def status(state="running", step=None, **changes):
    progress = {"step": step, "steps": 200, "loss": 2.5, "tokens_per_s": 9500.4, "eta_s": 61.0} if step else None
    return PENDING | {"state": state, "progress": progress} | changes


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120, height=10)


def printed(console):
    return console.file.getvalue().splitlines()


def test_durations_read_as_a_clock():
    assert [duration(s) for s in (None, float("inf"), 0, 61.4, 3725)] == ["", "", "0:00", "1:01", "1:02:05"]


def test_cells_show_time_left_while_running_and_time_taken_after():
    assert cells(status(step=40)) == ("2.5000", "9,500", "1:01")
    assert cells(status("finished", step=200, seconds=35.0)) == ("2.5000", "9,500", "0:35")
    assert cells(status("pending")) == ("", "", "")
    unknown = {"step": 1, "steps": 2, "loss": None, "tokens_per_s": None, "eta_s": None}
    assert cells(status(progress=unknown)) == ("", "", "")


def test_plain_lines_are_rare(console):
    display = PlainDisplay(console, every_s=0.05)
    with display:
        for run in ("a", "b"):
            display.update(run, status("pending"))
        display.update("a", status())
        for step in range(1, 100):
            display.update("a", status(step=step))
        display.update("a", status("finished", step=200, seconds=35.0))
        display.update("b", status("failed", reason="killed by SIGKILL"))
    lines = printed(console)
    assert lines[0] == "a: running"
    assert lines[-3] == "a: finished after 0:35, loss 2.5000 (1 of 2 runs finished)"
    assert lines[-2] == "b: failed, killed by SIGKILL (1 of 2 runs finished, 1 failed)"
    assert lines[-1] == "1 of 2 runs finished, 1 failed"
    assert len(lines) < 10


def test_a_plain_line_of_progress(console):
    display = PlainDisplay(console, every_s=0.0)
    display.update("a", status("pending"))
    display.update("a", status())
    display.update("a", status(step=40))
    assert printed(console)[-1] == "a: step 40/200, loss 2.5000, 9,500 tokens/s, 1:01 left"


@pytest.mark.parametrize("display", [PlainDisplay, LiveDisplay])
def test_steps_of_a_fork_begin_where_it_leaves_its_trunk(display):
    shown, fork = SafeConsole(file=io.StringIO(), width=120), status(step=180)
    with display(shown) if display is LiveDisplay else display(shown, every_s=0.0) as of_sweep:
        of_sweep.update("a", status("pending"))
        of_sweep.update("a", status())
        of_sweep.update("a", fork | {"progress": fork["progress"] | {"first": 160, "part": 0.5}})
    out = shown.file.getvalue()
    assert "20/40" in out and "180" not in out


def test_a_run_taken_up_again_says_nothing_until_it_runs(console):
    display = PlainDisplay(console, every_s=0.0)
    for state in ("interrupted", "interrupted", "pending"):
        display.update("a", status(state, step=40, reason="stopped by SIGTERM" if state == "interrupted" else None))
    assert printed(console) == []
    display.update("a", status(step=40))
    assert printed(console) == ["a: running"]


def test_a_long_line_is_not_wrapped_and_brackets_are_not_markup(console):
    line = "a: " + "x" * 200 + " [bold]"
    PlainDisplay(console).say(line)
    assert printed(console) == [line]


def test_the_table_shows_what_matters_when_the_terminal_is_low(console):
    display = LiveDisplay(console)
    for index in range(30):
        display.update(f"run{index}", status("finished" if index < 20 else "pending"))
    display.update("run7", status("failed", reason="loss is nan at step 37"))
    display.update("run25", status(step=40))
    console.print(display._draw())
    lines = printed(console)
    assert len(lines) == 8  # heading, 6 runs, counts
    assert lines[-1] == "19 of 30 runs finished, 1 running, 1 failed"
    (failed,) = [line for line in lines if "run7" in line]
    assert "loss is nan at step 37" in failed
    (running,) = [line for line in lines if "run25" in line]
    assert all(text in running for text in ("40/200", "2.5000", "9,500", "1:01"))


def test_runs_that_wait_have_one_line_together(console):
    display = LiveDisplay(console)
    for index in range(96):
        display.update(f"fork{index}", status("pending", reason=f"waits for trunk-s{index % 4}"))
    for index in range(4):
        display.update(f"trunk-s{index}", status(step=40))
    console.print(display._draw())
    lines = printed(console)
    assert len(lines) == 7  # heading, 4 trunks, those that wait, counts
    assert [text for text in lines if "waits" in text] == [lines[-2]]
    assert all(text in lines[-2] for text in ("96 runs", "pending", "waits for trunk-s0 and 3 more"))
    assert sum("running" in line for line in lines) == 5


def test_a_single_run_that_waits_has_a_line_of_its_own(console):
    display = LiveDisplay(console)
    display.update("fork0", status("pending", reason="waits for trunk-s0"))
    console.print(display._draw())
    assert "fork0" in printed(console)[1] and "waits for trunk-s0" in printed(console)[1]


def test_starts_of_many_runs_are_left_out(console):
    display = PlainDisplay(console)
    for state in ("pending", "running", "finished"):
        for index in range(30):
            display.update(f"run{index}", status(state))
    assert len(printed(console)) == 30 and ": running" not in console.file.getvalue()


def test_the_kind_of_display_follows_the_console(console):
    assert isinstance(open_display(console), PlainDisplay)
    with open_display(Console(file=io.StringIO(), force_terminal=True)) as live:
        assert isinstance(live, LiveDisplay)
        live.update("a", status(step=3))
        live.say("hello")
    assert "hello" in live._console.file.getvalue()


def test_a_run_before_its_first_step_says_what_it_is_at(console):
    display = PlainDisplay(console, every_s=0.0)
    display.update("a", status("pending"))
    display.update("a", status())
    display.update("a", status(phase="loading data"))
    assert printed(console)[-1] == "a: loading data"


def test_a_job_without_steps_of_equal_length_says_how_much_is_done_and_the_time_left(console):
    progress = {"step": 0, "steps": 15, "part": 0.37, "loss": None, "tokens_per_s": None, "eta_s": 20.0}
    display = PlainDisplay(console, every_s=0.0)
    display.update("a", status("pending"))
    display.update("a", status())
    display.update("a", status(phase="kernel", progress=progress))
    assert printed(console)[-1] == "a: kernel, 37 %, 0:20 left"


def test_the_table_shows_what_a_run_waits_for(console):
    display = LiveDisplay(console)
    display.update("a", status("pending", phase="starting a worker"))
    display.update("b", status(phase="building the model"))
    console.print(display._draw())
    assert "starting a worker" in console.file.getvalue() and "building the model" in console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_the_live_table_fits_its_width_and_cuts_no_heading_and_no_number(width):
    console = Console(file=io.StringIO(), width=width, height=12)
    display = LiveDisplay(console)
    for index in range(30):
        display.update(f"nvfp4-s{index}-at400-0123456789", status("finished", step=200, seconds=35.0))
    display.update("bf16-s0-at400-0123456789", status("failed", reason="loss is nan at step 37; " + "x" * 200))
    for index in range(4):
        display.update(f"fork{index}", status("pending", reason=f"waits for trunk-s{index}"))
        display.update(f"more{index}", status("pending", reason="waits for a free worker"))
    display.update("bf16-s1-at400-0123456789", status(step=40))
    console.print(display._draw())
    lines = printed(console)
    assert max(map(len, lines)) <= width and len(lines) <= 12
    headings = "".join(lines[0].split())
    assert headings in ("runstatesteplosstokens/sleft,took", "runstatesteplossleft,took", "runstatestepleft,took")
    (running,) = [line.split() for line in lines if " running" in line and "of 40" not in line]
    assert running[0] == "bf16-s1-at400-0123456789" and running[-1] == "1:01" and "40/200" in " ".join(running)
    words = " ".join(" ".join(lines).split())
    assert "4 runs pending: waits for trunk-s0 and 3 more" in words
    assert "4 runs pending: waits for a free worker" in words
    assert lines[-1].startswith("30 of 40 runs finished")


def drawn(display) -> str:
    """The last line of the display."""
    display._console.print(display._draw())
    return printed(display._console)[-1]


def test_the_last_line_says_when_the_sweep_ends(console):
    display = LiveDisplay(console)
    display.expect({"a": 200, "b": 200, "c": 200, "d": 100})
    for run in "abcd":
        display.update(run, status("pending"))
    assert drawn(display) == "0 of 4 runs finished"
    display.update("a", status(step=80))  # 61 s for 120 steps
    display.update("b", status())
    # 61 s of a, 500 steps at 61 / 120 s, by two workers
    assert drawn(display) == "0 of 4 runs finished, 2 running, about 3 min left"
    display.update("a", status("finished", step=200, seconds=1200.0))
    display.update("b", status("running", step=100, progress=None))
    assert drawn(display) == "1 of 4 runs finished, 1 running, about 25 min left"
    for run in "bc":
        display.update(run, status("finished", step=200, seconds=1200.0))
    display.update("d", status("failed"))
    assert drawn(display) == "3 of 4 runs finished, 1 failed"


def test_the_longest_run_bounds_the_time_left_and_what_is_unknown_is_left_out(console):
    display = LiveDisplay(console)
    for run in "abc":
        display.update(run, status(step=40))
    slow = status(step=40)
    display.update("a", slow | {"progress": slow["progress"] | {"eta_s": 600.0}})
    assert drawn(display) == "0 of 3 runs finished, 3 running, about 10 min left"
    display.update("d", status("pending"))  # whose steps nobody knows
    assert drawn(display) == "0 of 4 runs finished, 3 running"


def test_forks_have_the_steps_after_their_point(console):
    display = LiveDisplay(console)
    display.expect({"a": 40, "b": 40})
    progress = {"step": 180, "steps": 200, "loss": 2.5, "tokens_per_s": 9500.4, "eta_s": 600.0}
    display.update("a", status() | {"progress": progress})
    display.update("b", status("pending"))
    assert drawn(display) == "0 of 2 runs finished, 1 running, about 30 min left"


def test_a_sweep_says_the_steps_that_its_runs_have_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "run_local", lambda *runs, **options: None)
    words = ["conf=fork", "recipe=bf16,mxfp8", "seed=0", "fork.at=[40,80]", "fork.steps=10", "fork.decay=10"]
    words += ["fork.end=null", "data=markov", "track=none", "train.device=cpu", f"runs_dir={tmp_path}"]
    launch.start(launch.plan(words), display := Shown())
    trunks = [steps for run, steps in display.steps.items() if "trunk" in run]
    forks = {steps for run, steps in display.steps.items() if "trunk" not in run}
    assert trunks == [80] and forks == {20}


def test_times_left_are_rough():
    said = [time_left(seconds) for seconds in (None, float("nan"), 59, 60, 725, 5940, 9000)]
    assert said == ["", "", "less than a minute left", "about 1 min left", "about 12 min left", "about 1.6 h left",
                    "about 2.5 h left"]  # fmt: skip


@pytest.mark.parametrize("height", [5, 8, 24])
def test_the_last_line_stays_on_a_terminal_of_80_columns(height):
    console = Console(file=io.StringIO(), width=80, height=height, force_terminal=True, color_system=None)
    display = LiveDisplay(console)
    with display:
        for index in range(60):
            display.update(f"nvfp4_fwd_mxfp8_bwd-s{index}-at400-0123456789", status(step=40))
        display.update("bf16-s0-at400-0123456789", status("failed", reason="loss is nan at step 37; " + "x " * 200))
        for index in range(4):
            display.update(f"fork{index}", status("pending", reason=f"waits for trunk-s{index}"))
        for index in range(9):
            display.update(f"more{index}", status("pending", reason=f"reason {index} " * 20))
        display.expect({run: 200 for run in display._statuses})
        console.file.truncate(0)
        display._live.refresh()
        lines = console.file.getvalue().rstrip("\n").splitlines()
    assert "0 of 74 runs finished, 60 running, 1 failed, about 1 min left" in lines[-1]
