"""Shared by the commands: their arguments, the end of wrong input, and the printing of results."""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from hqsweep.cli import completion as cli_completion
from hqsweep.errors import EXIT_FAILED, EXIT_USAGE, Damaged, UserError, visible

Shown = Any
"""Anything that rich prints: text or a RenderableType, which would have to be imported for its name."""
FILE_WIDTH = 200
NEXT = "next: "
"""The beginning of a line with the command that may come next."""
NO_ROOM = (
    "a library cannot be loaded, or memory cannot be had; free some, or raise the limit that `ulimit -v` or the job's"
    " memory sets"
)

RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder of the sweeps.")]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUNS...",
        help="Sweeps, runs, beginnings of runs, or folders.",
        autocompletion=cli_completion.run_or_sweep,
    ),
]
Where = Annotated[
    str | None, typer.Option("--where", metavar="SQL", help="Only rows for which this holds: state = 'failed'.")
]
Sort = Annotated[
    str | None, typer.Option("--sort", metavar="KEYS", help="The order: columns; -loss begins with the highest.")
]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def choice(where: str | None, sort: str | None) -> Callable[[list[dict[str, Any]]], list[int]] | None:
    """What --where and --sort ask for, as a function from rows to the numbers of those to show; None for all rows."""
    if where is None and sort is None:
        return None
    from hqsweep.queries.sql import chosen

    return lambda rows: chosen(rows, where, sort, "--where or --sort")


class OneSentence(TyperGroup):
    """A group of commands that end in one line on stderr: for wrong input with exit code 2, for damaged files with 3.

    A lack of memory, and libraries that cannot be loaded, end with exit code 3, too.
    """

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            _check_folder()
            code = super().main(*args, standalone_mode=False, **extra)
        except Damaged as error:
            code = _refuse(str(error), EXIT_FAILED)
        except UserError as error:
            code = _refuse(str(error))
        except OSError as error:  # a file or folder that was named is missing, not writable, no folder, or full
            code = _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (MemoryError, ImportError) as error:
            if _names_a_module(error):  # a fault of ours or of the installation, whose place the traceback names
                raise
            code = _refuse(f"{NO_ROOM} ({error or 'MemoryError'})", EXIT_FAILED)
        except typer.TyperException as error:
            code = _refuse(f"{error.format_message().rstrip('.')}; see --help")
        if standalone_mode:
            sys.exit(code)
        return code


def _names_a_module(error: BaseException) -> bool:
    """Whether an import fails since a module, or a name in it, does not exist."""
    return isinstance(error, ModuleNotFoundError) or str(error).startswith("cannot import name ")


def _check_folder() -> None:
    """UserError where the working directory is gone, which libraries meet in many ways."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was deleted; cd to a folder that exists, and type it again") from None


def say(line: str, *, err: bool = False) -> None:
    """Print a line to a person, safely: its text may come from another user's file. On a terminal it is wrapped."""
    stream = sys.stderr if err else sys.stdout
    typer.echo(wrapped(visible(line, keep="\n"), _columns(stream)), err=err)


def wrapped(line: str, columns: int | None) -> str:
    """The line in lines of at most `columns`, broken at spaces; None for no edge. Words that are longer stay whole, and
    so do a command to copy and a text that has line breaks."""
    if columns is None or "\n" in line or line.startswith(NEXT):
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)


def _columns(stream: TextIO) -> int | None:
    """The width of the terminal that a stream writes to; None where it is none."""
    if not stream.isatty():
        return None
    asked = os.environ.get("COLUMNS", "")
    try:
        return int(asked) if asked.isdecimal() and int(asked) else os.get_terminal_size(stream.fileno()).columns or None
    except OSError:
        return None


def _refuse(message: str, code: int = EXIT_USAGE) -> int:
    say(f"hqsweep: {' '.join(message.split())}", err=True)
    return code


@contextmanager
def waiting(for_what: str) -> Iterator[None]:
    """Show on a terminal, beside a turning mark, the work of a command that has nothing to print yet."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.text import Text

    from hqsweep.sweep.console import SafeConsole

    with SafeConsole(stderr=True).status(Text(for_what)):
        yield


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal: a function that takes how many are done, and how many there are."""
    if not sys.stderr.isatty():
        yield lambda number, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hqsweep.sweep.console import SafeConsole

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda number, total: bar.update(task, completed=number, total=total)


def print_result(as_json: bool, document: Any, *shown: Shown) -> None:
    """Print `document` as JSON, or `shown` to a person. JSON has no NaN and no infinity: both are null there."""
    if as_json:
        import json

        typer.echo(json.dumps(as_plain(document), indent=2))
        return
    console, columns = result_console(), _columns(sys.stdout)
    for part in shown:
        is_line = isinstance(part, str)
        console.print(wrapped(part, columns) if is_line else part, markup=False, highlight=False, soft_wrap=is_line)


def as_plain(document: Any) -> Any:
    """The document as JSON has it: null for NaN and infinity, text for paths, lists for tuples."""
    import json

    return json.loads(json.dumps(document, default=str), parse_constant=lambda name: None)


def result_console() -> Any:
    """The SafeConsole of results; a file or a pipe has no edge to break lines at, and takes FILE_WIDTH columns."""
    from hqsweep.sweep.console import SafeConsole

    console = SafeConsole()
    return console if console.is_terminal or "COLUMNS" in os.environ else SafeConsole(width=FILE_WIDTH)


GRID_COLUMNS = {
    "arm": "arm", "seed": "seed", "state": "state", "minutes": "minutes", "run": "run", "changed": "changed",
}  # fmt: skip
FORK_COLUMNS = {
    "arm": "arm", "seed": "seed", "point": "point", "state": "state", "minutes": "minutes", "trunk": "trunk",
    "run": "run",
}  # fmt: skip
RESULT_COLUMNS = {
    "arm": "arm", "seed": "seed", "point": "point", "state": "state", "val_loss": "val loss",
    "tokens_per_s": "tokens/s", "seconds": "seconds", "reason": "reason",
}  # fmt: skip
DROP = ("changed", "trunk", "tokens/s", "seconds", "Slurm job", "loss", "run")
"""The headings of rows_table that a narrow terminal goes without, the first one first; a column of names that heads
the table stays."""
SPECS = {"val_loss": ".4f", "loss": ".4f", "tokens_per_s": ",.0f", "seconds": ".1f", "minutes": ".1f"}


def rows_table(heading: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> Shown:
    """Rows as a table; `columns` maps keys of a row to headings."""
    from hqsweep.report.pages.text import TextTable, number, text, to_rich

    def cell(key: str, value: Any) -> str:
        if key in SPECS:
            return number(value, SPECS[key])
        return " ".join(value) if isinstance(value, list) else text(value)

    cells = tuple(tuple(cell(key, row[key]) for key in columns) for row in rows)
    numeric = frozenset(index for index, key in enumerate(columns) if key in SPECS or key in ("seed", "point"))
    table = TextTable(header=tuple(columns.values()), rows=cells, numeric=numeric)
    for name in ("reason", "point", "minutes", "job"):
        if name in columns and all(row.get(name) is None for row in rows):
            table = table.without(columns[name])
    return to_rich(table, heading, drop=[name for name in DROP if name != table.header[0]])
