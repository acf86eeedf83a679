"""hqsweep.serve: pages of sweeps, made anew while runs go on, and no way to any other file."""

import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from hqsweep.api.serve import Server, open_server
from hqsweep.errors import UserError
from hqsweep.sweep.store.store import RunStore
from tests.report.conftest import FakeRun, three_arms, write_sweep


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "runs"
    write_sweep(folder / "study", three_arms())
    return folder


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Server]:
    yield from served(runs)


def served(runs: Path, *words: str) -> Iterator[Server]:
    with open_server(words, runs, "127.0.0.1", 0, 0.01) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def get(server: Server, path: str, host: str = "localhost", method: str = "GET") -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    response = connection.getresponse()
    return response, response.read().decode("utf-8", "replace")


def test_a_sweep_has_its_states_and_its_report(server: Server) -> None:
    response, text = get(server, "/")
    assert response.status == 200 and '<a href="/study/">study</a>' in text and "9 finished" in text
    response, text = get(server, "/study/")
    assert (
        "9 of 9 runs finished" in text and 'src="report_light.html"' in text and response.getheader("Refresh") is None
    )
    response, text = get(server, "/study/report_light.html")
    assert "2 arms against bf16" in text and response.getheader("Content-Type") == "text/html; charset=utf-8"
    assert get(server, "/study/figures/forest.svg")[0].getheader("Content-Type").startswith("image/svg+xml")
    assert get(server, "/study/report.html", method="HEAD")[1] == ""


def test_a_sweep_at_work_is_made_anew_and_asked_for_again(tmp_path: Path) -> None:
    write_sweep(tmp_path / "study", [FakeRun(seed=0), FakeRun(seed=1), FakeRun(arm="mxfp8", state="running", steps=50)])
    run = RunStore(tmp_path).runs("study")[2]
    for server in served(tmp_path):
        with run.lock():
            response, text = get(server, "/study/")
            assert response.getheader("Refresh") == "0.01" and "1 running" in text and "asked again" in text
            first = get(server, "/study/runs.csv")[1]
            with run.jsonl("metrics").open("a") as file:
                file.write('{"step": 51, "metric": "train_loss", "value": 1.5}\n')
            get(server, "/study/")
            assert get(server, "/study/metrics.parquet")[0].status == 200 and first != ""
        report = server.site._reports["study"]
        assert report._made[1] is not None


def test_a_sweep_without_a_report_says_why(tmp_path: Path) -> None:
    write_sweep(tmp_path / "study", [FakeRun(trunk="")])
    for server in served(tmp_path):
        text = get(server, "/study/")[1]
        assert "No report yet. runs: nothing but trunks" in text and "<iframe" not in text


def test_nothing_is_written_in_the_folder_of_runs_and_reports_go_at_the_end(runs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    for server in served(runs):
        get(server, "/study/")
        temporary = server.site._temporary
        assert (temporary / "0/report.html").is_file()
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before and not temporary.exists()


@pytest.mark.parametrize(
    "path",
    ["/study/../study/sweep.json", "/study/../../secret", "/study/%2e%2e/%2e%2e/secret", "/study/..%2f..%2fsecret",
     "/../secret", "//etc/passwd", "/study//etc/passwd", "/study/figures/../../secret", "/study/sweep.json", "/other/",
     "/study/bf16-s0/config.yaml", "/study/report.html/", "/study/figures/", "/study/figures", "/study/%00", "/%",
     "/study/..\\..\\secret", "http://x/study/../secret", "*", "/study"],
)  # fmt: skip
def test_no_path_leads_out_of_the_report(server: Server, runs: Path, path: str) -> None:
    (runs.parent / "secret").write_text("hidden")
    get(server, "/study/")
    response, text = get(server, path)
    assert response.status == 404 and "hidden" not in text and "There is no such page" in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[", "localhost.x"])
def test_a_page_of_another_site_cannot_read(server: Server, host: str) -> None:
    assert get(server, "/study/", host=host)[0].status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8765", "127.0.0.1:1", "[::1]:8765"])
def test_this_machine_can(server: Server, host: str) -> None:
    response, _ = get(server, "/", host=host)
    assert response.status == 200 and "frame-ancestors 'self'" in response.getheader("Content-Security-Policy")
    assert response.getheader("X-Content-Type-Options") == "nosniff"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_only_reads(server: Server, method: str) -> None:
    assert get(server, "/study/", method=method)[0].status == 501


def test_hostile_names_and_reasons_are_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[2J"
    write_sweep(tmp_path / "study", [FakeRun(state="failed", reason=evil)])
    for server in served(tmp_path):
        text = get(server, "/study/")[1]
        assert "<script>" not in text and "&lt;script&gt;alert(1)" in text and "\x1b" not in text


def test_who_can_read_is_said_and_only_loopback_asks_for_its_name(runs: Path) -> None:
    with open_server((), runs, "127.0.0.1", 0, 1.0) as server:
        assert "from this machine alone" in server.line
    with open_server(("study",), runs, "0.0.0.0", 0, 1.0) as server:
        assert "by everyone who reaches this address" in server.line
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert get(server, "/", host="gpu-box.lan")[0].status == 200
        server.shutdown()


def test_what_cannot_be_served_is_a_sentence(runs: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        here = "127.0.0.1"
        cases = (
            (("nope",), runs, here, 0, 1.0, "'nope' is no sweep in"),
            ((), tmp_path / "none", here, 0, 1.0, "no sweep in"),
            ((), runs, here, port, 1.0, "cannot be served"),
            ((), runs, "no.such.host.invalid", 0, 1.0, "cannot be served"),
            ((), runs, here, 70000, 1.0, "give one from 0 to 65535"),
            ((), runs, here, 0, 0.0, "give seconds above 0"),
        )
        for *arguments, says in cases:
            with pytest.raises(UserError, match=says):
                open_server(*arguments)
