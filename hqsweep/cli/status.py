"""Commands for runs that are there already: hqsweep status, hqsweep cancel, hqsweep sync."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hqsweep.cli.output import AsJson, Runs, RunsDir, print_result, rows_table, say
from hqsweep.errors import EXIT_FAILED, Damaged

STATUS_COLUMNS = {
    "run": "run", "state": "state", "step": "step", "loss": "loss", "tokens_per_s": "tokens/s", "seconds": "seconds",
    "job": "Slurm job", "reason": "reason",
}  # fmt: skip

app = typer.Typer()


@app.command()
def status(
    runs: Runs,
    follow: Annotated[bool, typer.Option("--follow", help="Show them until none runs or waits in a queue.")] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show the present state of runs, on Slurm too.

    Exit code 3 when one of them has failed, was interrupted, is damaged or gone, or is no run of its sweep.
    """
    from hqsweep.sweep.console import SafeConsole
    from hqsweep.sweep.engine import follow as observer
    from hqsweep.sweep.progress import open_display
    from hqsweep.sweep.store.store import RunStore, known

    selected = RunStore(runs_dir).resolve(runs)
    if follow:
        observer.follow(selected, open_display(SafeConsole(stderr=True)))
    listed, strangers = known(selected)
    rows = [*observer.status_rows(listed), *map(observer.stranger_row, strangers)]
    heading = f"{sum(row['state'] == 'finished' for row in rows)} of {len(rows)} runs finished"
    print_result(as_json, rows, rows_table(heading, rows, STATUS_COLUMNS))
    bad = ("failed", "interrupted", "foreign", *observer.UNUSABLE)
    raise typer.Exit(EXIT_FAILED if any(row["state"] in bad for row in rows) else 0)


@app.command()
def cancel(runs: Runs, runs_dir: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """Cancel runs that wait or run.

    Their rows and checkpoints stay, and the same `hqsweep run` goes on from there. Exit code 3 when one of them is
    damaged or gone.
    """
    from hqsweep.sweep.engine import follow as observer
    from hqsweep.sweep.store.store import RunStore

    selected = RunStore(runs_dir).resolve(runs)
    bad = [run.seen()["reason"] for run in selected if run.seen()["state"] in observer.UNUSABLE]
    taken = [run.name for run in observer.cancel(selected)]
    print_result(as_json, taken, *(f"cancelled: {name}" for name in taken or ["none waits or runs"]))
    _end(bad)


@app.command()
def sync(
    runs: Runs,
    mode: Annotated[
        Literal["auto", "offline", "online"], typer.Option(help="auto: online where you are logged in to W&B.")
    ] = "auto",
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Make the mirror of runs, in W&B or TensorBoard, again from their rows.

    Offline, the folders that `wandb sync` uploads are printed; for TensorBoard its folder. Exit code 3 when a run is
    damaged or gone; the others are done.
    """
    from hqsweep.sweep.store.store import RunStore
    from hqsweep.track.sync import sync as replay

    folders, bad = {}, []
    for run in RunStore(runs_dir).resolve(runs):
        try:
            folders[run.name] = [str(folder) for folder in replay(run, mode)]
        except Damaged as fault:
            bad.append(str(fault))
    print_result(
        as_json, folders, *(" ".join([f"{name}:", *(at or ["on the server"])]) for name, at in folders.items())
    )
    _end(bad)


def _end(bad: list[str]) -> None:
    """Name the runs that cannot be used; then exit code 3."""
    for sentence in bad:
        say(f"hqsweep: {sentence}", err=True)
    if bad:
        raise typer.Exit(EXIT_FAILED)
