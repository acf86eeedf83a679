"""hqsweep.query: questions about runs in SQL, answered as DataFrames."""

from pathlib import Path

import pandas as pd

from hqsweep.api.comparison import OfRuns, folders_of
from hqsweep.errors import UserError
from hqsweep.queries.index import Tables
from hqsweep.queries.sql import ask
from hqsweep.report.compare.left_out import rows
from hqsweep.sweep.store.store import RunStore


def query(question: str, *words: str | Path | OfRuns, runs_dir: str | Path = "runs") -> pd.DataFrame:
    """The answer to a question in SQL about runs: one row for each row of the answer.

    question  columns and what follows them, "arm, seed, min(val_loss) where step > 100", or a whole select; tables are
              runs, metrics, stats, parity and calibrate (docs/query.md has their columns)
    words     sweeps and runs, as hqsweep.Sweep takes them; none: all sweeps of runs_dir
    runs_dir  folder of the sweeps, for names

    Losses are in nats, times in seconds, SQNR in dB. Runs whose files cannot be trusted are left out;
    `.attrs["left_out"]` of the answer has a dict for each.

    Raises:
        UserError: SQL that is wrong, a column or table that does not exist, a word that fits nothing.
        Damaged: no run can be trusted.
    """
    if not isinstance(question, str):
        raise UserError(f"query: takes a text of SQL, and got a {type(question).__name__}")
    folders = folders_of("query", words, runs_dir) if words else RunStore(Path(runs_dir)).all_runs()
    tables = Tables(folders)
    answer = ask(question, tables).to_pandas()
    answer.attrs["left_out"] = [dict(row) for row in rows(tables.left_out)]
    return answer
