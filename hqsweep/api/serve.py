"""hqsweep.serve: the reports of sweeps in a browser, made anew while runs go on.

    /                   the sweeps
    /SWEEP/             states of the runs, and the report so far; the browser asks again every few seconds
    /SWEEP/report.html  and every other file of a report folder, which is made in a temporary folder

Nothing is written in the folder of runs and nothing is taken from a request but its path, which has to be the name of a
page or of a file of the report: there is no other way to a file. On the loopback address, which is the default, only
requests by a loopback name are answered, so that no page of another site can read the reports (DNS rebinding).
"""

import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from mimetypes import guess_type
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from hqsweep.api.comparison import compared
from hqsweep.errors import Damaged, UserError, visible
from hqsweep.report.pages.folder import write
from hqsweep.sweep.console import cells, counts, how_far
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

PORT = 8765
LIVE = ("pending", "running")
LOOPBACK = "127.0.0.1"
NAMES = ("localhost", LOOPBACK, "::1")
"""The names by which a browser on this machine reaches a loopback address."""
POLICY = "default-src 'self' 'unsafe-inline' data: blob:; frame-ancestors 'self'; form-action 'none'; base-uri 'none'"
STYLE = (
    ":root{color-scheme:light dark}body{font:14px system-ui,sans-serif;margin:0 auto;max-width:75rem;padding:1rem}"
    "table{border-collapse:collapse}td,th{padding:.15rem .7rem;text-align:left;border-bottom:1px solid #8884}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}iframe{border:0;width:100%;height:85vh;margin-top:1rem}"
)


def serve(
    *words: str | Path, runs_dir: str | Path = "runs", host: str = LOOPBACK, port: int = PORT, every_s: float = 15.0
) -> None:
    """Show the reports of sweeps under http://HOST:PORT/ until Ctrl-C.

    words     sweeps, by name or folder; none: all sweeps of runs_dir
    host      the address that is served; another machine reaches it only if it is no loopback address
    port      0: any free one
    every_s   seconds after which a browser asks again, and a report is made anew if runs have gone on

    Raises UserError for a word that is no sweep, and for an address that cannot be served.
    """
    server = open_server(words, Path(runs_dir), host, port, every_s)
    with server:
        print(server.line, flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def open_server(words: Sequence[str | Path], runs_dir: Path, host: str, port: int, every_s: float) -> "Server":
    """The server, which listens; its context manager deletes its reports."""
    store = RunStore(runs_dir)
    if not 0 <= port < 2**16:
        raise UserError(f"port: got {port}; give one from 0 to 65535")
    if not every_s > 0:
        raise UserError(f"every_s: got {every_s:g}; give seconds above 0")
    folders: dict[str, Path] = {}
    for word in words:
        folder = store.sweep_path(str(word))
        if folder is None:
            raise UserError(f"serve: '{word}' is no sweep in {runs_dir} and no folder of one; `hqsweep ls` lists them")
        folders[folder.resolve().name] = folder
    if not words and not store.sweeps():
        raise UserError(f"serve: no sweep in {runs_dir}; `hqsweep run conf=quickstart` makes one")
    try:
        return Server((host, port), Site(store=store, folders=folders, every_s=every_s))
    except OSError as error:
        raise UserError(f"serve: {host}:{port} cannot be served ({error.strerror}); give another --port") from None


@dataclass(kw_only=True)
class Site:
    """The pages. folders: name -> folder of each sweep; empty for all sweeps of the store."""

    store: RunStore
    folders: dict[str, Path]
    every_s: float
    _reports: dict[str, "_Report"] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)
    _temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="hqsweep-serve-")))

    def close(self) -> None:
        """Delete the reports."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def sweeps(self) -> dict[str, Path]:
        return self.folders or {name: self.store.root / name for name in self.store.sweeps()}

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes, bool]:
        """(status, type, content, whether the page changes) of a path of a URL."""
        parts = [unquote(part) for part in urlsplit(path).path.split("/")[1:]]
        sweeps = self.sweeps()
        if not parts:
            return self._missing()
        if parts == [""]:
            return self._html(self._listing(sweeps), live=True)
        name, rest = parts[0], parts[1:]
        if name not in sweeps or not rest:
            return self._missing()
        if rest == [""]:
            return self._sweep(name, sweeps[name])
        with self._lock:
            file = self._report(name).files.get("/".join(rest))
        if file is None:
            return self._missing()
        kind = guess_type(file.name)[0] or "application/octet-stream"
        return HTTPStatus.OK, kind + "; charset=utf-8" * kind.startswith("text/"), file.read_bytes(), False

    def _missing(self) -> tuple[HTTPStatus, str, bytes, bool]:
        text = '<p>There is no such page. <a href="/">All sweeps</a></p>'
        return HTTPStatus.NOT_FOUND, *self._html(text)[1:]

    def _html(self, body: str, *, live: bool = False) -> tuple[HTTPStatus, str, bytes, bool]:
        head = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        )
        page = f"{head}<title>hqsweep</title><style>{STYLE}</style><body>{body}</body></html>"
        return HTTPStatus.OK, "text/html; charset=utf-8", page.encode("utf-8", "replace"), live

    def _listing(self, sweeps: dict[str, Path]) -> str:
        rows = []
        for name, folder in sweeps.items():
            try:
                states = Counter(run.seen()["state"] for run in RunStore(folder.parent).runs(folder.name))
                said = ", ".join(f"{count} {state}" for state, count in states.items())
            except Damaged as fault:
                said = str(fault)
            rows.append(f'<tr><td><a href="/{quote(name, safe="")}/">{_text(name)}</a></td><td>{_text(said)}</td></tr>')
        return f"<h1>Sweeps</h1><table>{''.join(rows)}</table>"

    def _sweep(self, name: str, folder: Path) -> tuple[HTTPStatus, str, bytes, bool]:
        try:
            runs = RunStore(folder.parent).runs(folder.name)
        except Damaged as fault:
            return self._html(f"<h1>{_text(name)}</h1><p>{_text(str(fault))}</p>")
        statuses = {run.name: run.seen() for run in runs}
        with self._lock:
            report = self._report(name)
            report.refresh(runs, self.every_s)
        live = any(status["state"] in LIVE for status in statuses.values())
        clock = time.strftime("%H:%M:%S")
        note = f"as of {clock}; asked again every {self.every_s:g} s" if live else f"as of {clock}; nothing runs"
        body = f'<p><a href="/">All sweeps</a></p><h1>{_text(name)}</h1><p>{_text(counts(statuses))}, {note}</p>'
        shown = report.fault or "report_light.html"
        page = f"<p>{_text(shown)}</p>" if report.fault else f'<iframe src="{shown}" title="report"></iframe>'
        link = "" if report.fault else ' <p><a href="report.html">The interactive report</a></p>'
        return self._html(body + _table(statuses) + link + page, live=live)

    def _report(self, name: str) -> "_Report":
        if name not in self._reports:
            self._reports[name] = _Report(self._temporary / str(len(self._reports)))
        return self._reports[name]


@dataclass
class _Report:
    """The report folder of a sweep."""

    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    """Path below the folder -> file."""
    fault: str | None = None
    """Why there is none yet."""
    _made: tuple[float, Any] = (0.0, None)

    def refresh(self, runs: Sequence[RunDir], every_s: float) -> None:
        """Make the report anew if files of the runs have changed, but not more often than asked for."""
        made_s, before = self._made
        if before is not None and time.monotonic() - made_s < every_s:
            return
        if (now := [_changed(run) for run in runs]) == before:
            return
        self.fault = None
        try:
            write(compared(runs, keep=False), self.folder, each_run=False)
        except UserError as error:
            self.fault = f"No report yet. {error}"
        self.files = {
            path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()
        }
        self._made = time.monotonic(), now


def _changed(run: RunDir) -> list[int]:
    """The times at which the files of a run changed."""
    paths = (run.status_path, run.jsonl("metrics"), run.manifest_path)
    return [path.stat().st_mtime_ns if path.is_file() else 0 for path in paths]


def _table(statuses: dict[str, dict[str, Any]]) -> str:
    head = "".join(f"<th>{word}</th>" for word in ("run", "state", "step", "loss", "tokens/s", "left, took", "reason"))
    rows = []
    for run, status in statuses.items():
        step = how_far(status) if status["progress"] or status.get("phase") else ""
        numbers = "".join(f'<td class="n">{_text(cell)}</td>' for cell in cells(status))
        texts = "".join(f"<td>{_text(cell)}</td>" for cell in (run, status["state"], step))
        rows.append(f"<tr>{texts}{numbers}<td>{_text(status['reason'] or '')}</td></tr>")
    table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    return f"<details{' open' * (len(rows) <= 20)}><summary>Runs</summary>{table}</details>"


def _text(text: str) -> str:
    return escape(visible(text))


class Server(ThreadingHTTPServer):
    """Serves a Site."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], site: Site) -> None:
        self.site = site
        super().__init__(address, _Handler)
        host = self.server_address[0]
        self.is_loopback = ip_address(host).is_loopback

    def server_close(self) -> None:
        super().server_close()
        self.site.close()

    @property
    def line(self) -> str:
        """The address, and who can read it."""
        host, port = self.server_address[:2]
        who = "from this machine alone" if self.is_loopback else "by everyone who reaches this address"
        return f"http://{host}:{port}/ shows the reports, read only, {who}; Ctrl-C ends it"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "hqsweep", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer with a page or a file of a report."""
        if self.server.is_loopback and not _is_local(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", b"this address is for this machine alone\n")
            return
        try:
            *answer, live = self.server.site.answer(self.path)
        except Exception as error:
            text = f"this page cannot be made ({type(error).__name__}: {error})\n"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", visible(text).encode())
            return
        self._send(*answer, {"Refresh": f"{self.server.site.every_s:g}"} if live else {})

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, kind: str, content: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer",
        }  # fmt: skip
        for name, value in (headers | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Print nothing: a page that refreshes would fill the terminal."""


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine."""
    try:
        return urlsplit(f"//{host}").hostname in NAMES
    except ValueError:
        return False
