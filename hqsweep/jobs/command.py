"""The job command: runs a program of the user's own, and takes the rows that it logs.

Rows are JSON lines, {"step": 10, "val_loss": 2.31}: the program prints them, or writes them to the file that `log`
names. A program that calls hqsweep.track writes them into a file of the run, by the environment that it gets:

    HQSWEEP_ROWS   the file of rows       HQSWEEP_RUN_DIR   the run's folder, for its checkpoints
    HQSWEEP_ARM    the run's arm          HQSWEEP_SEED      its seed

An attempt that comes after an interrupted one drops the rows from its own first step on, so that a program which goes
on from its checkpoint, and one that starts anew, both leave one curve.
"""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from hqsweep.config.command import CommandConfig, filled
from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.jobs.sink import Sink

ROWS, RUN_DIR, ARM, SEED = "HQSWEEP_ROWS", "HQSWEEP_RUN_DIR", "HQSWEEP_ARM", "HQSWEEP_SEED"
FOLDER = "command"
"""The folder within a run's in which hqsweep.track leaves its rows."""
POLL_S = 0.1
GRACE_S = 10.0
"""The seconds that a program has between SIGTERM and SIGKILL when its run is stopped."""
STEP = "step"
SHOWN = 200
"""The characters of a program's last words that a reason has."""


class Rows:
    """Takes rows of JSON into a sink."""

    def __init__(self, sink: Sink, steps: int | None) -> None:
        self._sink, self._steps = sink, steps
        self.count, self._first = 0, True
        self.metrics: dict[str, float] = {}
        """The last value of each metric."""

    def line(self, text: str) -> bool:
        """Take a line if it is a row: an object with a step and numbers beside it; returns whether it is."""
        row = parsed(text)
        if row is not None:
            self.row(row[0], row[1])
        return row is not None

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step."""
        if self._first:
            self._first = False
            self._sink.rewind(self._sink.mark(step - 1), step - 1)
        self._sink.metric(step, dict(values))
        self.metrics |= values
        self.count += 1
        loss = next((value for name, value in values.items() if "loss" in name), None)
        if self._steps is None:
            self._sink.progress(step, step, loss, None, part=0.0)  # how much is left is not known
        else:
            self._sink.progress(min(step, self._steps), self._steps, loss, None)


def parsed(text: str) -> tuple[int, dict[str, float]] | None:
    """(step, metric -> value) of a line of JSON; None for any other line. "NaN" and "Infinity" as text are numbers,
    and other lines are left out."""
    text = text.strip()
    if not text.startswith("{"):
        return None
    try:
        row = loads(text)
    except ValueError:
        return None
    step = row.get(STEP) if isinstance(row, dict) else None
    if type(step) is float and step.is_integer():
        step = int(step)
    if type(step) is not int or not 0 <= step < 2**63:
        return None
    values = {name: number for name, value in row.items() if name != STEP and (number := _number(value)) is not None}
    return (step, values) if values else None


def _number(value: Any) -> float | None:
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value.replace("Infinity", "inf"))
    return float(value) if type(value) in (int, float) else None


def run(config: CommandConfig, sink: Sink, workspace: Path) -> None:
    """Run the program to its end. UserError where it cannot be started, fails, or logs nothing (of the metric)."""
    arm = str(_planned(workspace).get("arm") or config.recipe.name)
    values = config.values(arm, str(workspace.resolve()))
    words = config.words(arm, str(workspace.resolve()))
    sent = workspace / FOLDER / "rows.jsonl"
    sent.parent.mkdir(exist_ok=True)
    sent.unlink(missing_ok=True)
    files = [sent]
    if config.log is not None:
        log = Path(filled(config.log, values))
        files.append(log)
        log.unlink(missing_ok=True)  # of an earlier attempt
    sink.manifest(command=words, cwd=os.getcwd(), device="")
    rows = Rows(sink, config.steps)
    environment = {
        ROWS: str(sent.resolve()), RUN_DIR: str(workspace.resolve()), ARM: arm, SEED: str(config.seed),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    sink.phase("running the command")
    try:
        process = subprocess.Popen(
            words, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"command: '{words[0]}' cannot be started: {why}") from None
    _follow(process, rows, [Follower(path, rows.line) for path in files], takes_prints=config.log is None)
    _check(config, rows)


def _planned(workspace: Path) -> dict[str, Any]:
    """The manifest as it was before the run."""
    try:
        return json_of(workspace / "manifest.json")
    except (OSError, ValueError):
        return {}


def json_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    document = loads(path.read_bytes())
    return document if isinstance(document, dict) else {}


class Follower:
    """Hands over each line that is added to a file, once it is whole."""

    def __init__(self, path: Path, take: Callable[[str], Any]) -> None:
        self._path, self._take, self._at, self._rest = path, take, 0, ""

    def look(self) -> None:
        """Hand over new rows. A file that became shorter was begun again."""
        if not self._path.is_file():
            return
        with self._path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            if file.seek(0, os.SEEK_END) < self._at:
                self._at, self._rest = 0, ""
            file.seek(self._at)
            text = self._rest + file.read()
            self._at = file.tell()
        *lines, self._rest = text.split("\n")
        for line in lines:
            self._take(line)

    def end(self) -> None:
        """Hand over all, a last line without an end too."""
        self.look()
        self._take(self._rest)
        self._rest = ""


def _follow(process: subprocess.Popen[str], rows: Rows, followers: list[Follower], *, takes_prints: bool) -> None:
    """Take the rows until the program ends, and print all that it prints. Raises UserError for its failure."""
    lines: queue.Queue[tuple[bool, str]] = queue.Queue()
    streams = ((process.stdout, True), (process.stderr, False))
    readers = [threading.Thread(target=_read, args=(*stream, lines), daemon=True) for stream in streams]
    for reader in readers:
        reader.start()
    last = ""
    try:
        while True:
            alive = any(reader.is_alive() for reader in readers)
            ended = process.poll() is not None and not alive
            last = _drain(lines, rows, takes_prints=takes_prints) or last
            for follower in followers:
                follower.look()
            if ended:
                break
            readers[0].join(POLL_S)
    except BaseException:
        _stop(process)
        raise
    for follower in followers:
        follower.end()
    if process.returncode:
        raise UserError(f"command: {_ended(process.returncode)}{f'; it said: {last[:SHOWN]}' * bool(last)}")


def _read(stream: IO[str], is_output: bool, lines: queue.Queue[tuple[bool, str]]) -> None:
    for line in stream:
        lines.put((is_output, line))


def _drain(lines: queue.Queue[tuple[bool, str]], rows: Rows, *, takes_prints: bool) -> str:
    """Take the lines that are there; returns the last one that it complained with."""
    last = ""
    while not lines.empty():
        is_output, line = lines.get()
        print(line, end="", file=sys.stdout, flush=True)
        if is_output and takes_prints:
            rows.line(line)
        elif line.strip():
            last = " ".join(line.split())
    return last


def _ended(code: int) -> str:
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"


def _stop(process: subprocess.Popen[str]) -> None:
    """End the program: SIGTERM, then SIGKILL."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _check(config: CommandConfig, rows: Rows) -> None:
    """Raise UserError where nothing was logged, or the metric that is judged was not."""
    if not rows.count:
        ways = 'call hqsweep.track, print JSON lines such as {"step": 10, "val_loss": 2.31}, or name their file by log='
        where = f", and {config.log} has no row" if config.log else ""
        raise UserError(f"command: it ended well and logged nothing{where}; {ways}FILE")
    metric = config.judge.metric
    if metric is not None and metric not in rows.metrics:
        raise UserError(f"judge.metric: no row has '{metric}'; it logged {', '.join(sorted(rows.metrics)[:12])}")


def send(path: Path, step: int, values: Mapping[str, float]) -> None:
    """Add a row to the file that a run's job follows; NaN and inf as text."""
    plain = {name: value if math.isfinite(value) else _text(value) for name, value in values.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({STEP: step, **plain}) + "\n")


def _text(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
