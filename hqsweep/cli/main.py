"""The command line: parse, call one function, print. Heavy imports stay inside the commands, so that --help is instant.

Results go to stdout, progress and errors to stderr. Exit codes: 0 good; 1 a regression or a mismatch; 2 wrong
usage or config; 3 a run failed or is missing; 4 no usable baseline.
"""

from pathlib import Path
from typing import Annotated

import typer

from hqsweep import __version__
from hqsweep.cli import compare as cli_compare
from hqsweep.cli import completion as cli_completion
from hqsweep.cli import files, judge, probe, recipe, runs
from hqsweep.cli import query as cli_query
from hqsweep.cli import run as cli_run
from hqsweep.cli.output import AsJson, OneSentence, RunsDir, Sort, Where, choice, print_result
from hqsweep.errors import EXIT_FAILED

app = typer.Typer(
    cls=OneSentence, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich for it would double the time of --help
)  # fmt: skip


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hqsweep {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version of hqsweep alone."),
]


def main() -> None:
    """The console script."""
    cli_completion.register()
    app(prog_name="hqsweep")


@app.callback(invoke_without_command=True)
def hqsweep(
    context: typer.Context,
    install: cli_completion.Install = None,
    show_script: cli_completion.Show = None,
    short_version: Version = False,
) -> None:
    """Which low-precision training recipe can I trust? Sweeps, bit-exact quantizers, paired statistics."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(cli_run.run)


@app.command()
def ls(
    tag: Annotated[str | None, typer.Option(help="Only sweeps that have this tag, or runs that do.")] = None,
    where: Where = None,
    sort: Sort = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the sweeps, the newest last.

    --where and --sort take sweep, conf, created, tags and note, and arms, runs, trunks, forks and each state as
    numbers. Exit code 3 where something of them is damaged, missing or foreign.
    """
    from hqsweep.report.pages.sweeps import list_sweeps
    from hqsweep.sweep.store.store import RunStore

    page, document = list_sweeps(RunStore(runs_dir), tag, choice(where, sort))
    print_result(as_json, document, page)
    raise typer.Exit(EXIT_FAILED if any(sweep["faults"] for sweep in document) else 0)


@app.command()
def show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SWEEP",
            help="A run: its name, its beginning, SWEEP/BEGINNING or its folder; or a sweep.",
            autocompletion=cli_completion.run_or_sweep,
        ),
    ],
    every: Annotated[bool, typer.Option("--all", help="Manifest, config and all that was checked, too.")] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show one run, or a sweep.

    Of a run: state, recipe, loss, largest quantization errors, where its files are. Of a sweep: its command, states,
    arms and runs; exit code 3 where something of it is damaged, missing or foreign.
    """
    from hqsweep.report.pages.show import show_run
    from hqsweep.report.pages.sweeps import show_sweep
    from hqsweep.sweep.store.store import RunStore

    store = RunStore(runs_dir)
    if folder := store.sweep_path(run):
        page, document = show_sweep(folder)
        print_result(as_json, document, page)
        raise typer.Exit(EXIT_FAILED if document["faults"] else 0)
    page, document = show_run(store.one(run), every=every)
    print_result(as_json, document, page)


@app.command()
def doctor(
    every: Annotated[bool, typer.Option("--all", help="Every part, every pair of formats, and the reasons.")] = False,
    card: Annotated[
        str | None, typer.Option("--as", metavar="CARD", help="Answer for another card, such as B200 or H100.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine can run natively, exactly or not at all, and why."""
    from hqsweep.cli.doctor import doctor

    page, document = doctor(card, every=every)
    print_result(as_json, document, page)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print versions, for the report of a fault."""
    from hqsweep.track.machine import facts

    shown = {key: value for key, value in facts().items() if key in ("versions", "platform", "isa", "kernel_build")}
    print_result(as_json, shown, *(f"{key}: {value}" for key, value in shown.items()))


@app.command()
def schema(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="Such as ls, or baseline update; none: list them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    import json

    from hqsweep.cli.answers import ANSWERS
    from hqsweep.cli.answers import schema as schema_of

    document = schema_of(" ".join(command)) if command else list(ANSWERS)
    print_result(as_json, document, json.dumps(document, indent=2) if command else "\n".join(ANSWERS))


for _command in (
    cli_compare.compare, cli_compare.ladder, judge.judge, cli_run.plan, cli_compare.gate, probe.probe, cli_query.query,
    cli_query.serve, runs.verify, runs.status, runs.cancel, runs.sync, runs.note,
):  # fmt: skip
    app.command()(_command)
app.command(context_settings={"ignore_unknown_options": True})(runs.tag)
app.command()(runs.rm)
app.add_typer(cli_compare.baseline_app, name="baseline")
app.add_typer(recipe.app, name="recipe")
app.add_typer(files.checkpoint_app, name="checkpoint")
app.add_typer(files.data_app, name="data")
