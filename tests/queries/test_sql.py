"""Questions in SQL: the short form, groups, errors as sentences, and nothing but the tables of the runs."""

from pathlib import Path

import pytest

from hqsweep.errors import UserError
from hqsweep.queries.index import Tables
from hqsweep.queries.sql import ask, chosen
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from tests.report.conftest import three_arms, write_sweep


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunDir]:
    folder = tmp_path_factory.mktemp("runs")
    write_sweep(folder / "study", three_arms())
    return RunStore(folder).all_runs()


def rows(runs: list[RunDir], question: str) -> list[dict]:
    return ask(question, Tables(runs)).to_pylist()


SAME = (
    ("arm, seed, min(val_loss) where step > 100",
     "select arm, seed, min(val_loss) from metrics where step > 100 group by arm, seed order by arm, seed"),
    ("count(*), arm", "select count(*), arm from runs group by arm order by 1, 2"),
    ("count(*)", "select count(*) from runs"),
    ("arm, state", "select arm, state from runs"),
    ("arm, avg(sqnr_db) as db where layer like '%mlp%' having db > 25",
     "select arm, avg(sqnr_db) as db from stats where layer like '%mlp%' group by arm having db > 25 order by arm"),
    ("train.lr, TRAIN.STEPS, Arm", 'select "train.lr", "train.steps", arm from runs'),
    ("r.arm, r.train.lr from runs r", 'select r.arm, r."train.lr" from runs r'),
    ("arm, last(val_loss order by step, run) as final order by final desc limit 2;",
     "select arm, last(val_loss order by step, run) as final from metrics group by arm order by final desc limit 2"),
    ("with best as (select run, min(val_loss) as low from metrics) select count(*) from best",
     "select count(distinct run) from metrics"),
    ("step, arm, avg(train_loss) over (partition by arm) as level where step < 3 order by 2, 1",
     "select step, arm, avg(train_loss) over (partition by arm) as level from metrics where step < 3 order by 2, 1"),
)  # fmt: skip


@pytest.mark.parametrize(("short", "whole"), SAME)
def test_the_short_form_is_the_select_that_it_stands_for(runs: list[RunDir], short: str, whole: str) -> None:
    answer, expected = rows(runs, short), rows(runs, whole)
    assert answer and [list(row.values()) for row in answer] == [list(row.values()) for row in expected]


def test_sums_are_plain_numbers(runs: list[RunDir]) -> None:
    assert [type(row["s"]) for row in rows(runs, "sum(step) as s where step < 10")] == [int]


WRONG = (
    ("", "there is no question; name columns, as in: arm"),
    (" ; ", "there is no question"),
    ("arm, val_los", r"no column 'val_los' in runs \(did you mean 'val_loss'\?\); there are sweep, run, arm"),
    ("train.lx", r"no column 'train\.lx' in runs \(did you mean 'train\.lr'\?\)"),
    ("m.foo from metrics m", "no column 'foo' in metrics"),
    ("arm from metricz", r"no table 'metricz' \(did you mean 'metrics'\?\); there are runs, metrics, stats"),
    ("arm, mn(val_loss)", "no function 'mn'; there are min, max"),
    ("arm form metrics", "syntax error at or near 'metrics'; write columns and conditions"),
    ("arm, 'open", "unterminated string"),
    ("select 1; select 2", "one select is taken, and no other statement"),
    ("arm where arm > 1", "Cannot compare values of type VARCHAR and type INT"),
)


@pytest.mark.parametrize(("question", "says"), WRONG)
def test_wrong_questions_are_one_sentence(runs: list[RunDir], question: str, says: str) -> None:
    with pytest.raises(UserError, match=f"^query: {says}") as caught:
        rows(runs, question)
    assert "\n" not in str(caught.value)


def test_a_query_reaches_nothing_but_the_runs(runs: list[RunDir], tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("word\nhidden\n")
    (tmp_path / "data").mkdir()
    attacks = (
        f"select * from '{secret}'", f"select * from read_csv('{secret}')", f"select * from read_text('{secret}')",
        f"select * from glob('{tmp_path}/*')", f"select * from parquet_scan('{secret}')",
        "select * from read_json('http://127.0.0.1:9/x')", "select * from secret", "select getenv('HOME')",
        f"copy (select 1) to '{tmp_path}/out.csv'", f"attach '{tmp_path}/x.db'", "install httpfs", "load 'httpfs'",
        "set enable_external_access = true", "pragma database_list", "drop view runs", "create table t as select 1",
        f"export database '{tmp_path}/data'", f"select * from query('select * from ''{secret}''')",
        f"select * from query_table('{secret}')", f"select * from sniff_csv('{secret}')",
        "select * from runs; copy runs to 'x.csv'",
    )  # fmt: skip
    for attack in attacks:
        with pytest.raises(UserError, match=r"^query: "):
            rows(runs, attack)
            pytest.fail(attack)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "secret.csv"]
    assert not list((tmp_path / "data").iterdir())


LISTED = [
    {"run": "a", "state": "finished", "loss": 2.0, "tags": ["x", "y"]},
    {"run": "b", "state": "failed", "loss": None, "tags": []},
    {"run": "c", "state": "finished", "loss": 1.0, "tags": ["y"]},
]


@pytest.mark.parametrize(
    ("where", "sort", "places"),
    [(None, None, [0, 1, 2]), ("state = 'finished'", None, [0, 2]), ("loss < 3", "loss", [2, 0]),
     (None, "-loss", [0, 2, 1]), (None, "state, -run", [1, 2, 0]), ("tags like '%x%'", None, [0]),
     ("loss is null or run = 'a' -- all", "-run", [1, 0])],
)  # fmt: skip
def test_rows_are_chosen_and_sorted(where: str | None, sort: str | None, places: list[int]) -> None:
    assert chosen(LISTED, where, sort, "--where") == places


@pytest.mark.parametrize(
    ("where", "sort", "says"),
    [("stat = 1", None, r"no column 'stat' \(did you mean 'state'\?\); there are run, state, loss, tags"),
     (None, "los", r"no column 'los' \(did you mean 'loss'\?\)"), ("state =", None, "syntax error"),
     ("true) union select 1 from listed where (true", None, "syntax error|one select|a condition"),
     ("run in (select * from '/etc/passwd')", None, "a condition on the columns"), ("1; drop table x", None, "syntax"),
     ("run in (select word from read_csv('/etc/passwd'))", None, "a condition on the columns")],
)  # fmt: skip
def test_wrong_conditions_are_one_sentence(where: str | None, sort: str | None, says: str) -> None:
    with pytest.raises(UserError, match=f"^--where or --sort: ({says})"):
        chosen(LISTED, where, sort, "--where or --sort")


def test_nothing_is_chosen_from_nothing() -> None:
    assert chosen([], "state = 'x'", "y", "--where") == []
