"""`hqsweep query`: questions about runs in SQL; `hqsweep serve`: their reports in a browser."""

import csv
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import AsJson, RunsDir, counting, print_result, say
from hqsweep.errors import EXIT_FAILED, UserError


def query(
    question: Annotated[
        str | None,
        typer.Argument(metavar="[SQL]", help="As in: arm, seed, min(val_loss) where step > 100; none: the columns."),
    ] = None,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUNS...]", help="Sweeps, runs or folders; default: all sweeps.",
            autocompletion=cli_completion.run_or_sweep,
        ),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Ask for columns of runs, metrics and statistics.

    Plain columns beside aggregates are the groups. A whole select is taken, too: select ... from runs, metrics, stats,
    parity or calibrate. Exit code 3 where runs are damaged, missing or foreign: they are named and left out.
    """
    from hqsweep.queries.index import NAMES, Tables
    from hqsweep.queries.sql import ask
    from hqsweep.sweep.store.store import RunStore

    if as_csv and as_json:
        raise UserError("--csv and --json: one answer has one form; give one of them")
    store = RunStore(runs_dir)
    with counting("runs read") as done:
        tables = Tables(store.resolve(runs) if runs else store.all_runs(), done, root=store.root)
        if question is None:
            answer = {name: [column for part in tables.columns(name) for column in part] for name in NAMES}
        else:
            answer = ask(question, tables)
    if question is None:
        lines = [f"{name}: {', '.join(columns)}" for name, columns in answer.items()]
        print_result(as_json, answer, *lines)
    else:
        _print(answer, as_json, as_csv)
    lost = tables.left_out
    for entry in lost:
        say(f"hqsweep: left out: {entry.line}", err=True)
    raise typer.Exit(EXIT_FAILED if lost else 0)


def _print(answer: Any, as_json: bool, as_csv: bool) -> None:
    """Print a pyarrow Table."""
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(answer.column_names)
        writer.writerows(zip(*(column.to_pylist() for column in answer.columns), strict=True))
        return
    names = answer.column_names
    rows = list(zip(*(column.to_pylist() for column in answer.columns), strict=True))
    print_result(
        as_json, [dict(zip(names, row, strict=True)) for row in rows] if as_json else None, _table(answer, rows)
    )


def _table(answer: Any, rows: list[tuple[Any, ...]]) -> Any:
    import pyarrow as pa

    from hqsweep.report.pages.text import TextTable, number, text, to_rich

    if not rows:
        return "no row"
    cells = tuple(tuple(number(v, ".6g") if isinstance(v, float) else text(v) for v in row) for row in rows)
    kinds = [column.type for column in answer.schema]
    numeric = [index for index, kind in enumerate(kinds) if pa.types.is_integer(kind) or pa.types.is_floating(kind)]
    return to_rich(TextTable(header=tuple(answer.column_names), rows=cells, numeric=frozenset(numeric)), "")


def serve(
    sweeps: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEPS...]", help="Sweeps, by name or folder; default: all.",
            autocompletion=cli_completion.run_or_sweep,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address; another than a loopback one lets other machines read the reports.")
    ] = "127.0.0.1",
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds between two looks of a browser.")] = 15.0,
    runs_dir: RunsDir = Path("runs"),
) -> None:  # fmt: skip
    """Show reports in a browser, refreshed while runs go on: read only, for this machine alone."""
    from hqsweep.api.serve import serve as serve_sweeps

    serve_sweeps(*(sweeps or []), runs_dir=runs_dir, host=host, port=port, every_s=every)
