"""The job command: rows of what a program prints, writes or sends, and a sentence for each way that it goes wrong."""

import shlex
import sys
import time
from pathlib import Path

import pytest

from hqsweep.config.command import CommandConfig
from hqsweep.errors import UserError
from hqsweep.jobs import command
from hqsweep.jobs.command import Follower, Rows, parsed, run
from hqsweep.sweep.grid.arms import GridPoint
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.track.rows import RowSink
from hqsweep.track.tracker import NullTracker


def config(script: str, **keys) -> CommandConfig:
    words = f"{sys.executable} -c {shlex.quote(script)} {{recipe}} {{seed}} {{run_dir}}"
    return CommandConfig.model_validate({"job": "command", "sweep": "s", "command": words, "seed": 3, **keys})


@pytest.fixture
def folder(tmp_path, monkeypatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    dump = config("pass").model_dump(mode="json")
    return RunStore(Path("runs")).create(
        sweep="s", conf="command", overrides=[], runs=[GridPoint(config=dump, overrides=(), changed=(), arm="baseline")]
    )[0]


def done(script: str, folder: RunDir, **keys):
    sink = RowSink(folder, NullTracker())
    try:
        run(config(script, **keys), sink, folder.path)
    finally:
        sink.close()
    return [(row["step"], row["metric"], row["value"]) for row in folder.rows("metrics")]


def test_printed_lines_of_json_are_rows_and_all_is_in_the_log(folder, capfd):
    script = 'print("hello");print(\'{{"step": 1, "loss": 2.5, "name": "x"}}\');print(\'{{"no": 1}}\')'
    assert done(script, folder) == [(1, "loss", 2.5)]
    assert capfd.readouterr().out.splitlines() == ["hello", '{"step": 1, "loss": 2.5, "name": "x"}', '{"no": 1}']
    assert folder.manifest()["command"][-3:] == ["baseline", "3", str(folder.path.resolve())]


def test_rows_of_a_file_that_log_names(folder):
    script = "import sys;open('x' + sys.argv[2], 'w').write('{{\"step\": 5, \"acc\": 0.5}}')"
    Path("x3").write_text('{"step": 1, "acc": 9}\n')  # of an earlier attempt
    assert done(script, folder, log="x{seed}") == [(5, "acc", 0.5)]


def test_rows_that_hqsweep_track_sends(folder):
    lines = (
        "import hqsweep as hq",
        "r = hq.track('any', arm='b', seed=3)",
        "r.log(1, loss=2.0)",
        "r.log(2, loss=1e400)",
    )
    script = "\n".join(lines)
    rows = done(script, folder)
    assert rows[0] == (1, "loss", 2.0) and rows[1] == (2, "loss", float("inf"))


@pytest.mark.parametrize(
    ("script", "keys", "said"),
    [
        ("import sys; print('oh no', file=sys.stderr); sys.exit(4)", {}, "it ended with exit code 4; it said: oh no"),
        ("import os; os.kill(os.getpid(), 9)", {}, "it was ended by SIGKILL"),
        ("pass", {}, "it ended well and logged nothing; call hqsweep.track, print JSON lines"),
        ("pass", {"log": "gone"}, "logged nothing, and gone has no row"),
        ('print(\'{{"step": 1, "a": 2}}\')', {"judge": {"metric": "b"}}, "judge.metric: no row has 'b'; it logged a"),
    ],
)
def test_what_goes_wrong(script, keys, said, folder):
    with pytest.raises(UserError, match=said):
        done(script, folder, **keys)


def test_a_program_that_is_not_there(folder):
    gone = config("pass", command="/no/such {seed}")
    with pytest.raises(UserError, match="command: '/no/such' cannot be started: No such file"):
        run(gone, RowSink(folder, NullTracker()), folder.path)


def test_rows_of_an_earlier_attempt_are_dropped_from_the_first_step_on(folder):
    lines = ";".join(f'print(\'{{{{"step": {step}, "a": 1}}}}\')' for step in (1, 2, 3))
    done(lines, folder)
    assert done('print(\'{{"step": 2, "a": 7}}\')', folder) == [(1, "a", 1.0), (2, "a", 7.0)]


def test_a_stop_ends_the_program(folder, monkeypatch):
    class Stop(BaseException):
        pass

    def stop(*arguments):
        raise Stop

    monkeypatch.setattr(command.Follower, "look", stop)
    began = time.monotonic()
    with pytest.raises(Stop):
        done("import time; time.sleep(60)", folder)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ('{"step": 3, "a": 1, "b": "NaN", "c": null}', (3, ["a", "b"])), ('{"step": 3.0, "a": 1}', (3, ["a"])),
        ('{"step": -1, "a": 1}', None), ('{"step": true, "a": 1}', None), ('{"step": 1}', None), ("[1]", None),
        ('{"step": 1.5, "a": 1}', None), ('{"a": 1}', None), ("{x", None), ("", None), ('{"step": 1, "a": true}', None),
    ],
)  # fmt: skip
def test_lines_that_are_rows(line, row):
    found = parsed(line)
    assert (found and (found[0], [*found[1]])) == row


def test_a_follower_waits_for_whole_lines(tmp_path):
    lines, path = [], tmp_path / "a"
    follower = Follower(path, lines.append)
    follower.look()
    path.write_text('{"a": ')
    follower.look()
    assert lines == []
    path.write_text('{"a": 1}\nx')
    follower.look()
    assert lines == ['{"a": 1}']
    follower.end()
    assert lines == ['{"a": 1}', "x"]


def test_progress_is_known_with_steps():
    class Sink:
        def __init__(self):
            self.said = []

        def mark(self, step):
            return {}

        def rewind(self, marks, step):
            pass

        def metric(self, step, values):
            pass

        def progress(self, step, steps, loss, speed, part=None):
            self.said.append((step, steps, loss, part))

    sink = Sink()
    Rows(sink, 10).row(12, {"val_loss": 2.0})
    Rows(sink, None).row(12, {"acc": 2.0})
    assert sink.said == [(10, 10, 2.0, None), (12, 12, None, 0.0)]
