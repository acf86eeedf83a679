"""The command line: parse, call one function, print. Heavy imports stay inside the commands, so that --help is instant.

Results go to stdout, progress and errors to stderr. Exit codes: 0 good; 1 a regression or a mismatch; 2 wrong
usage or config; 3 a run failed or is missing; 4 no usable baseline.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hqsweep import __version__
from hqsweep.cli import checkpoint as cli_checkpoint
from hqsweep.cli import compare as cli_compare
from hqsweep.cli import completion as cli_completion
from hqsweep.cli import data as cli_data
from hqsweep.cli import dry_run as cli_dry_run
from hqsweep.cli import gate as cli_gate
from hqsweep.cli import house as cli_house
from hqsweep.cli import longer as cli_longer
from hqsweep.cli import plan as cli_plan
from hqsweep.cli import probe as cli_probe
from hqsweep.cli import recipe as cli_recipe
from hqsweep.cli import status as cli_status
from hqsweep.cli import verify as cli_verify
from hqsweep.cli.output import (
    NEXT,
    RESULT_COLUMNS,
    AsJson,
    Junit,
    OneSentence,
    RunsDir,
    print_result,
    rows_table,
    say,
    waiting,
)
from hqsweep.errors import EXIT_FAILED, EXIT_MISMATCH

NO_IMPORT = "which --no-import refuses; give one that is none, or leave --no-import out"

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


@app.command()
def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="conf=NAME [KEY=VALUE...]", help="A sweep, and overrides.", autocompletion=cli_completion.run_word
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print runs, states and minutes; start nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Repeat finished runs.")] = False,
    config_dir: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Your configs; ./conf is searched in any case.")
    ] = None,
    more_steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="As a sweep of N steps more, from the runs that are there.")
    ] = None,
    junit_file: Junit = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time (engine.workers).")] = None,
    no_import: Annotated[
        bool,
        typer.Option("--no-import", help="Refuse Python factories of recipes and models, instead of importing them."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a sweep: all of its grid that is not finished.

    KEY=V1,V2 and KEY=range(1,4) span the grid; recipe=NAME1,NAME2 takes whole recipes, and
    'recipe.linear.input=nvfp4|mxfp8' sets one tensor's row and column formats. seeds.until=decided adds seeds until
    every arm has a verdict.
    """
    from hqsweep.config.jobs import CHECKED_TABLES
    from hqsweep.report.gate import junit
    from hqsweep.report.pages.job_tables import job_tables
    from hqsweep.sweep.console import SafeConsole
    from hqsweep.sweep.grid.run_words import read
    from hqsweep.sweep.progress import open_display

    with waiting("checking every run of the sweep"):
        request = read(words, config_dir=config_dir, workers=workers)
        from hqsweep.recipe.factories import Importer  # only now: a mistyped key is found before torch is imported
        from hqsweep.sweep.engine import launch

        importer = Importer(partial(say, err=True), allowed=() if no_import else None, refusal=NO_IMPORT)
        importer = None if dry_run else importer
        plan = launch.plan_of(request, importer)
    planned = partial(launch.plan, config_dir=config_dir, workers=workers, importer=importer)
    if more_steps is not None:
        plan = cli_longer.longer(plan, words, planned, more_steps, dry_run=dry_run)
    if dry_run:
        cli_dry_run.show(plan, words, planned, force=force, as_json=as_json)
        return
    from hqsweep.api.finish import finish

    display, told, look = open_display(SafeConsole(stderr=True)), partial(say, err=True), partial(say, err=as_json)
    ended = finish(plan, words, planned, display, say=told, look=look, force=force)
    runs, growth = ended.runs, ended.growth
    results = [launch.result(run) for run in runs]
    if plan.first.engine.slurm.detach:
        print_result(as_json, results)
        return
    rows = {table: [row for run in runs for row in run.rows(table)] for table in CHECKED_TABLES}
    checked = [row for part in rows.values() for row in part]
    if junit_file:
        junit.write(junit_file, plan.first.sweep, [*junit.run_rows(runs), *checked])
    failed = any(result["state"] != "finished" for result in results)
    decided = growth.comparison if growth else None
    tables = [rows_table("results", results, RESULT_COLUMNS)] if failed or not (checked or decided) else []
    said: Any = {"runs": results, "looks": ended.looks} if growth else results
    if decided:
        from hqsweep.report.compare.compare import document
        from hqsweep.report.pages.tables import rich_table

        said, tables = said | document(decided), [*tables, rich_table(decided)]
    print_result(as_json, said, *job_tables(rows), *tables)
    _hint(as_json, results, plan.first.sweep)
    if failed:
        raise typer.Exit(EXIT_FAILED)
    raise typer.Exit(EXIT_MISMATCH if any(row["status"] == "FAIL" for row in checked) else 0)


@app.command()
def ls(
    tag: Annotated[str | None, typer.Option(help="Only sweeps that have this tag, or runs that do.")] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the sweeps.

    Exit code 3 where something of them is damaged, missing or foreign.
    """
    from hqsweep.report.pages.listing import list_sweeps
    from hqsweep.sweep.store.store import RunStore

    page, document = list_sweeps(RunStore(runs_dir), tag)
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
    from hqsweep.report.pages.run_page import show_run
    from hqsweep.report.pages.sweep_page import show_sweep
    from hqsweep.sweep.store.store import RunStore

    store = RunStore(runs_dir)
    if folder := store.sweep_path(run):
        page, document = show_sweep(folder)
        print_result(as_json, document, page)
        raise typer.Exit(EXIT_FAILED if document["faults"] else 0)
    page, document = show_run(store.one(run), every=every)
    print_result(as_json, document, page)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run natively, exactly or not at all, and why."""
    from hqsweep.doctor.page import doctor

    page, document = doctor()
    print_result(as_json, document, page)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print versions, for the report of a fault."""
    from hqsweep.track.machine import facts

    shown = {key: value for key, value in facts().items() if key in ("versions", "platform", "isa", "kernel_build")}
    print_result(as_json, shown, *(f"{key}: {value}" for key, value in shown.items()))


app.command()(cli_compare.compare)
app.command()(cli_plan.plan)
app.command()(cli_gate.gate)
app.command()(cli_probe.probe)
app.command()(cli_verify.verify)
app.add_typer(cli_status.app)
app.add_typer(cli_house.app)
app.add_typer(cli_gate.app, name="baseline")
app.add_typer(cli_recipe.app, name="recipe")
app.add_typer(cli_checkpoint.app, name="checkpoint")
app.add_typer(cli_data.app, name="data")


def _hint(as_json: bool, results: list[dict[str, Any]], sweep: str) -> None:
    """Print each warning of the runs once, then what to type next, on stderr beside JSON: the log of the first failed
    run, else the comparison."""
    from hqsweep.api.finish import after_failures, warnings_of

    for warning in warnings_of(results):
        say(warning, err=as_json)
    several = len({result["arm"] for result in results}) > 1
    then = f"hqsweep compare {sweep}" if several else f"hqsweep show {results[0]['run']}"
    say(after_failures(results) or f"{NEXT}{then}", err=as_json)
