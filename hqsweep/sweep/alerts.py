"""Alerts of a sweep that runs: a command, a webhook or a desktop notice when a run fails or diverges, and at the end.

An event is a mapping of texts: event ("failure", "divergence" or "end"), sweep, run, arm, reason, path, text (one
sentence with all of it) and, at the end of a study that grows, verdicts. A command gets it as JSON on stdin and in
HQSWEEP_EVENT, HQSWEEP_RUN and so on, never in its words, so that no name or reason can become a command. A webhook gets
a POST of {"text": ..., "content": ..., "event": {...}}, which Slack, Mattermost and Discord show.

No alert stops a sweep: each has a time limit, and a fault is one line. The address of a webhook, which is a secret, is
an option or in HQSWEEP_WEBHOOK, not in a config, and is never printed.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

from hqsweep.errors import Damaged, UserError, visible
from hqsweep.sweep.console import Display, Status
from hqsweep.sweep.store.run_dir import RunDir

Event = Mapping[str, str]
COMMAND_S, WEBHOOK_S = 30.0, 10.0
"""The seconds that a command and a webhook may take."""
MOST = 20
"""The number of alerts on runs; the last one says that others follow without."""
DIVERGED = "loss is "


@dataclass(frozen=True, kw_only=True)
class Alerts:
    """What is done at which event.

    on_failure  a command of /bin/sh for each run that fails or diverges
    on_end      one for the end of the sweep, and for the verdicts of a study that grows
    webhook     an http or https address that takes JSON
    notice      show a notice on this desktop

    Raises UserError for an address that is none, and for a desktop without notify-send or osascript.
    """

    on_failure: str | None = None
    on_end: str | None = None
    webhook: str | None = None
    notice: bool = False

    def __post_init__(self) -> None:
        for name in ("on_failure", "on_end"):
            command = getattr(self, name)
            if command is not None and (not isinstance(command, str) or not command.strip() or "\0" in command):
                raise UserError(f"{name}: is no command; give one, such as 'mail -s hqsweep me@example.com'")
        if self.webhook is not None and not _is_address(self.webhook):
            raise UserError("webhook: is no address; give one that begins with https:// or http:// and names a host")
        if self.notice and _notifier() is None:
            raise UserError("notice: neither notify-send nor osascript is on this machine; leave the notice out")

    def any(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.on_failure or self.on_end or self.webhook or self.notice)


def _is_address(text: object) -> bool:
    try:
        parts = urlsplit(text if isinstance(text, str) else "")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and text.isprintable() and " " not in text
    except ValueError:
        return False


def _notifier() -> str | None:
    return next((name for name in ("notify-send", "osascript") if shutil.which(name)), None)


@dataclass(kw_only=True)
class Alarm:
    """Sends the events of one sweep. say: takes a line on each alert that does not work."""

    alerts: Alerts
    say: Callable[[str], None]
    _threads: list[threading.Thread] = field(default_factory=list)
    _count: int = 0

    def failed(self, run: RunDir, reason: str) -> None:
        """A run has failed, or its loss has diverged."""
        self._count += 1
        if self._count > MOST:
            return
        kind = "divergence" if reason.startswith(DIVERGED) else "failure"
        arm, verb = "", "diverged" if kind == "divergence" else "failed"
        with suppress(Damaged):
            arm = str(run.manifest()["arm"])
        more = "; no alert on further runs" if self._count == MOST else ""
        text = f"hqsweep: {run.sweep}/{run.name} {verb}: {reason}{more}"
        self.send({
            "event": kind, "sweep": run.sweep, "run": run.name, "arm": arm, "reason": reason, "path": str(run.path),
            "text": text,
        })  # fmt: skip

    def ended(self, sweep: str, line: str, verdicts: Mapping[str, str]) -> None:
        """The sweep has ended; verdicts: arm -> verdict, where there are such."""
        said = ", ".join(f"{arm} {verdict}" for arm, verdict in verdicts.items())
        text = f"hqsweep: {sweep}: {line}" + (f"; {said}" if said else "")
        event = {"event": "end", "sweep": sweep, "run": "", "arm": "", "reason": line, "path": "", "text": text}
        self.send(event | ({"verdicts": json.dumps(dict(verdicts))} if verdicts else {}))

    def send(self, event: Event) -> None:
        """Send an event in the background."""
        event = {name: visible(value) for name, value in event.items()}
        command = self.alerts.on_end if event["event"] == "end" else self.alerts.on_failure
        jobs: list[tuple[str, Callable[[], None]]] = []
        if command:
            jobs.append(("the command", lambda: _run(command, event)))
        if self.alerts.webhook:
            jobs.append(("the webhook", lambda: _post(self.alerts.webhook, event)))
        if self.alerts.notice:
            jobs.append(("the desktop notice", lambda: _notify(event)))
        for what, job in jobs:
            thread = threading.Thread(target=self._try, args=(what, event["event"], job), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _try(self, what: str, kind: str, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self.say(f"alert: {what} for the {kind} did not work: {_why(error)}")

    def wait(self) -> None:
        """Return when all alerts are sent, or their time is over."""
        for thread in self._threads:
            thread.join(COMMAND_S + 1.0)


def _why(error: Exception) -> str:
    """The reason without the address, which a library may put into its message."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {round(error.timeout, 1):g} s"
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit code {error.returncode}"
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or type(reason).__name__)


def _run(command: str, event: Event) -> None:
    values = {f"HQSWEEP_{name.upper()}": value for name, value in event.items()}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | values, start_new_session=True,
    )  # fmt: skip
    try:
        with suppress(BrokenPipeError):
            process.communicate(json.dumps(event).encode(), timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, "command")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A webhook's answer leads nowhere else."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


def _post(address: str, event: Event) -> None:
    body = json.dumps({"text": event["text"], "content": event["text"], "event": event}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json", "User-Agent": "hqsweep"})
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=WEBHOOK_S) as answer:
        answer.read(1024)


def _notify(event: Event) -> None:
    words = {
        "notify-send": ["notify-send", "--app-name=hqsweep", "--", "hqsweep", event["text"]],
        "osascript": [
            "osascript", "-e", "on run argv", "-e", 'display notification (item 1 of argv) with title "hqsweep"',
            "-e", "end run", event["text"],
        ],
    }[_notifier()]  # fmt: skip
    subprocess.run(words, timeout=WEBHOOK_S, check=True, stdin=subprocess.DEVNULL, capture_output=True)


class AlertingDisplay:
    """A Display that passes everything on to another one, and raises the alarm for runs that fail from now on."""

    def __init__(self, display: Display, alarm: Alarm, runs: Callable[[str], RunDir]) -> None:
        self._display, self._alarm, self._runs = display, alarm, runs
        self._states: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.__exit__(*exception)

    def update(self, run: str, status: Status) -> None:
        self._display.update(run, status)
        before = self._states.get(run)
        self._states[run] = status["state"]
        if status["state"] == "failed" and before not in (None, "failed"):
            self._alarm.failed(self._runs(run), str(status["reason"] or "no reason is known"))

    def expect(self, steps: Mapping[str, int]) -> None:
        self._display.expect(steps)

    def say(self, line: str) -> None:
        self._display.say(line)
