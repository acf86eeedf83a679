"""Commands that keep house: hqsweep note, hqsweep tag, hqsweep rm."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import AsJson, RunsDir, print_result

Target = Annotated[
    str,
    typer.Argument(metavar="RUN|SWEEP", help="A sweep, or runs.", autocompletion=cli_completion.run_or_sweep),
]

app = typer.Typer()


@app.command()
def note(
    target: Target,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="What to remember; '' takes it away, none prints it.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Write a note on a sweep or a run, which ls and show print."""
    from hqsweep.sweep import notes
    from hqsweep.sweep.store import RunStore

    asked = notes.targets(RunStore(runs_dir), target)
    if text is not None:
        notes.note(asked, text)
    _print(as_json, asked)


@app.command(context_settings={"ignore_unknown_options": True})
def tag(
    target: Target,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[+TAG -TAG...]", help="Tags to add and to take away; none: print.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Tag a sweep or runs, as in: hqsweep tag stdlib +good -draft. `ls --tag good` finds them."""
    from hqsweep.sweep import notes
    from hqsweep.sweep.store import RunStore

    asked = notes.targets(RunStore(runs_dir), target)
    if changes:
        notes.tag(asked, changes)
    _print(as_json, asked)


def _print(as_json: bool, asked: list[Any]) -> None:
    """What is said of each now."""
    from hqsweep.sweep import notes

    said = {each.name: notes.read(each.folder).get(each.run, notes.Note()) for each in asked}
    document = {name: {"note": each.note, "tags": list(each.tags)} for name, each in said.items()}
    lines = [f"{name}: {notes.line(each) or 'no note, no tag'}" for name, each in said.items()]
    print_result(as_json, document, *lines)
