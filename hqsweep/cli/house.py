"""Commands that keep house: hqsweep note, hqsweep tag, hqsweep rm."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import AsJson, Runs, RunsDir, print_result, say
from hqsweep.errors import UserError

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
    from hqsweep.sweep.store import notes
    from hqsweep.sweep.store.store import RunStore

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
    from hqsweep.sweep.store import notes
    from hqsweep.sweep.store.store import RunStore

    asked = notes.targets(RunStore(runs_dir), target)
    if changes:
        notes.tag(asked, changes)
    _print(as_json, asked)


def _print(as_json: bool, asked: list[Any]) -> None:
    """Print the note and the tags of each target."""
    from hqsweep.sweep.store import notes

    said = {target.name: notes.read(target.folder).get(target.run, notes.Note()) for target in asked}
    document = {name: {"note": own.note, "tags": list(own.tags)} for name, own in said.items()}
    lines = [f"{name}: {notes.line(own) or 'no note, no tag'}" for name, own in said.items()]
    print_result(as_json, document, *lines)


@app.command()
def rm(
    runs: Runs,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Delete runs, or whole sweeps: never one that runs or waits, nor a trunk without its forks."""
    from hqsweep.sweep.store.removal import delete, removals
    from hqsweep.sweep.store.store import RunStore

    doomed = removals(RunStore(runs_dir), runs)
    names = {str(removal.folder): [] if removal.link else [run.name for run in removal.runs] for removal in doomed}
    for removal in doomed:
        of = f"the sweep {removal.folder.name}" if removal.whole else f"{removal.folder.name}, which has more"
        if removal.link:
            say(f"{removal.folder} is a link to {removal.link}; the link is deleted, what is behind it stays", err=True)
            continue
        count = f"{len(removal.runs)} run{'s' * (len(removal.runs) != 1)}"
        say(f"{count} of {of}: {_some(names[str(removal.folder)])}", err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("rm: nothing was deleted; --yes deletes these without asking")
        typer.confirm("delete for good?", abort=True, err=True)
    links = [f"{removal.folder} was a link; {removal.link} stays" for removal in doomed if removal.link]
    for removal in doomed:
        delete(removal)
    left = [str(removal.folder) for removal in doomed if removal.whole and removal.folder.is_dir()]
    left = [f"{folder} stays, with files that are not of hqsweep" for folder in left]
    print_result(as_json, names, "deleted", *links, *left)


def _some(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
