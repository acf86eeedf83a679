"""Alerts: what a command, a webhook and a desktop get, and that none of them can harm the sweep, or be harmed by it."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from hqsweep.errors import UserError
from hqsweep.sweep import alerts
from hqsweep.sweep.alerts import MOST, Alarm, AlertingDisplay, Alerts
from hqsweep.sweep.store.run_dir import RunDir

EVIL = "$(touch evil) `touch evil`; touch evil #'\"\n\x1b[2J\0"


class Server(HTTPServer):
    def __init__(self, code: int = 200, headers: dict[str, str] | None = None, pause_s: float = 0.0) -> None:
        self.code, self.extra, self.pause_s, self.got = code, headers or {}, pause_s, []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/secret-token"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        time.sleep(self.server.pause_s)
        self.send_response(self.server.code)
        for name, value in self.server.extra.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(**getattr(request, "param", {}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_dir(folder: Path) -> RunDir:
    run = RunDir(folder / "study/nvfp4-s0-0123456789")
    run.path.mkdir(parents=True, exist_ok=True)
    run.update_manifest(run_id="x", sweep="study", arm="nvfp4", seed=0, job="convergence", overrides=[])
    return run


def raised(given: Alerts, folder: Path, reason: str = "loss is nan at step 3") -> list[str]:
    """The lines that an alarm says about a run that fails."""
    lines: list[str] = []
    alarm = Alarm(alerts=given, say=lines.append)
    alarm.failed(run_dir(folder), reason)
    alarm.wait()
    return lines


def test_a_command_gets_the_event_on_stdin_and_in_its_environment(tmp_path: Path) -> None:
    command = 'cat > event.json; printf "%s|%s" "$HQSWEEP_EVENT" "$HQSWEEP_TEXT" > said'
    assert raised(Alerts(on_failure=command), tmp_path) == []
    event = json.loads(Path("event.json").read_text())
    assert event == {
        "event": "divergence", "sweep": "study", "run": "nvfp4-s0-0123456789", "arm": "nvfp4",
        "reason": "loss is nan at step 3", "path": str(tmp_path / "study/nvfp4-s0-0123456789"),
        "text": "hqsweep: study/nvfp4-s0-0123456789 diverged: loss is nan at step 3",
    }  # fmt: skip
    assert Path("said").read_text() == f"divergence|{event['text']}"


def test_no_name_or_reason_becomes_a_command(tmp_path: Path) -> None:
    lines = raised(
        Alerts(on_failure='printf %s "$HQSWEEP_REASON" > said; echo $HQSWEEP_TEXT > /dev/null'), tmp_path, EVIL
    )
    assert lines == [] and not list(tmp_path.rglob("evil"))
    assert Path("said").read_text() == EVIL.replace("\n", "\\n").replace("\x1b", "\\x1b").replace("\0", "\\x00")


@pytest.mark.parametrize(("command", "why"), [("exit 7", "exit code 7"), ("sleep 60", "it took more than 0.2 s"),
                                              ("no-such-program", "exit code 127")])  # fmt: skip
def test_a_command_that_fails_is_one_line(
    command: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "COMMAND_S", 0.2 if "sleep" in command else 30.0)
    began = time.monotonic()
    lines = raised(Alerts(on_failure=command), tmp_path)
    assert lines == [f"alert: the command for the divergence did not work: {why}"] and time.monotonic() - began < 20


def test_a_webhook_gets_text_and_event(server: Server, tmp_path: Path) -> None:
    assert raised(Alerts(webhook=server.address), tmp_path, "timed out after 3 s") == []
    (body,) = server.got
    assert body["text"] == body["content"] == body["event"]["text"] and body["event"]["event"] == "failure"


@pytest.mark.parametrize(
    ("server", "why"),
    [({"code": 404}, "the server answered 404"), ({"pause_s": 3.0}, "TimeoutError|timed out"),
     ({"code": 302, "headers": {"Location": "file:///etc/passwd"}}, "the server answered 302")],
    indirect=["server"],
)  # fmt: skip
def test_a_webhook_that_fails_is_one_line_without_its_address(
    server: Server, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "WEBHOOK_S", 0.5)
    (line,) = raised(Alerts(webhook=server.address), tmp_path)
    assert "secret-token" not in line and any(part in line for part in why.split("|")) and len(server.got) == 1


def test_a_webhook_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (line,) = raised(Alerts(webhook="http://127.0.0.1:9/secret-token"), tmp_path)
    assert line == "alert: the webhook for the divergence did not work: Connection refused"


def test_a_notice_goes_to_the_desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/notify-send"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.said"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    assert raised(Alerts(notice=True), tmp_path, "-x") == []
    assert program.with_suffix(".said").read_text().splitlines()[-2:] == [
        "hqsweep", "hqsweep: study/nvfp4-s0-0123456789 failed: -x",
    ]  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="neither notify-send nor osascript"):
        Alerts(notice=True)


@pytest.mark.parametrize(
    "address", ["file:///etc/passwd", "ftp://x/y", "http://", "x", "", "http://a b", 3, "http://[::1"]
)
def test_an_address_that_is_none_is_refused(address: object) -> None:
    with pytest.raises(UserError, match="webhook: is no address"):
        Alerts(webhook=address)


@pytest.mark.parametrize("command", ["", "  ", 3, "a\0b"])
def test_a_command_that_is_none_is_refused(command: object) -> None:
    with pytest.raises(UserError, match="on_end: is no command"):
        Alerts(on_end=command)


def test_only_runs_that_fail_now_raise_the_alarm_and_not_without_end(tmp_path: Path) -> None:
    shown, sent = [], []
    inner = SimpleNamespace(update=lambda run, status: shown.append(run))
    alarm = Alarm(alerts=Alerts(), say=print)
    alarm.send = sent.append
    display = AlertingDisplay(inner, alarm, lambda name: run_dir(tmp_path))
    failed, running = {"state": "failed", "reason": "x"}, {"state": "running", "reason": None}
    display.update("old", failed)
    for run in range(MOST + 5):
        for status in (running, failed, failed):
            display.update(f"run{run}", status)
    assert len(shown) == 1 + 3 * (MOST + 5) and len(sent) == MOST
    assert sent[-1]["text"].endswith("; no alert on further runs") and "further" not in sent[-2]["text"]


def test_the_end_of_a_sweep_has_its_verdicts(tmp_path: Path) -> None:
    alarm = Alarm(alerts=Alerts(on_end="cat > end.json", on_failure="touch failure"), say=print)
    alarm.ended("study", "4 of 4 runs finished", {"mxfp8": "equivalent", "nvfp4": "worse"})
    alarm.wait()
    event = json.loads(Path("end.json").read_text())
    assert event["text"] == "hqsweep: study: 4 of 4 runs finished; mxfp8 equivalent, nvfp4 worse"
    assert json.loads(event["verdicts"]) == {"mxfp8": "equivalent", "nvfp4": "worse"} and not Path("failure").exists()
