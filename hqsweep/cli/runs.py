"""Commands for runs that are there already: status, cancel, sync, note, tag, rm and verify."""

import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import AsJson, Runs, RunsDir, Sort, Where, choice, counting, print_result, rows_table, say
from hqsweep.errors import EXIT_FAILED, Damaged, UserError

STATUS_COLUMNS = {
    "run": "run", "state": "state", "step": "step", "loss": "loss", "tokens_per_s": "tokens/s", "seconds": "seconds",
    "job": "Slurm job", "reason": "reason",
}  # fmt: skip


def status(
    runs: Runs,
    follow: Annotated[bool, typer.Option("--follow", help="Show them until none runs or waits in a queue.")] = False,
    where: Where = None,
    sort: Sort = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show the present state of runs, on Slurm too.

    --where and --sort take the keys of --json, and sweep, arm, seed and point. Exit code 3 when one of them has failed,
    was interrupted, is damaged or gone, or is no run of its sweep.
    """
    from hqsweep.sweep.console import SafeConsole, open_display
    from hqsweep.sweep.engine import follow as observer
    from hqsweep.sweep.store.store import RunStore, known

    selected = RunStore(runs_dir).resolve(runs)
    if follow:
        observer.follow(selected, open_display(SafeConsole(stderr=True)))
    listed, strangers = known(selected)
    rows = [*observer.status_rows(listed), *map(observer.stranger_row, strangers)]
    if choose := choice(where, sort):
        rows = [rows[place] for place in choose(_cells(rows, [*listed, *strangers]))]
    heading = f"{sum(row['state'] == 'finished' for row in rows)} of {len(rows)} runs finished"
    print_result(as_json, rows, rows_table(heading, rows, STATUS_COLUMNS))
    bad = ("failed", "interrupted", "foreign", *observer.UNUSABLE)
    raise typer.Exit(EXIT_FAILED if any(row["state"] in bad for row in rows) else 0)


def _cells(rows: list[dict[str, Any]], runs: list[Any]) -> list[dict[str, Any]]:
    """What conditions see of each run: its row of status, with the step as a number, and facts of its manifest."""
    pairs = zip(runs, rows, strict=True)
    return [_facts(run) | row | {"step": _number(row["step"])} for run, row in pairs]


def _facts(run: Any) -> dict[str, Any]:
    """sweep, arm, seed and point of a run, None where its manifest cannot be read."""
    manifest: dict[str, Any] = {}
    with suppress(Damaged):
        manifest = run.manifest()
    return {"sweep": run.sweep} | {name: manifest.get(name) for name in ("arm", "seed", "point")}


def _number(step: str | None) -> int | None:
    """The step of "30/200"."""
    done = (step or "").partition("/")[0]
    return int(done) if done.isdecimal() else None


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


def sync(
    runs: Runs,
    mode: Annotated[
        Literal["auto", "offline", "online"], typer.Option(help="auto: online where you are logged in to W&B.")
    ] = "auto",
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Make the mirror of runs, in W&B, TensorBoard or trackio, again from their rows.

    Offline, the folders that `wandb sync` uploads are printed; for TensorBoard its folder. Exit code 3 when a run is
    damaged or gone; the others are done.
    """
    from hqsweep.sweep.store.store import RunStore
    from hqsweep.track.open import sync as replay

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


Target = Annotated[
    str,
    typer.Argument(metavar="RUN|SWEEP", help="A sweep, or runs.", autocompletion=cli_completion.run_or_sweep),
]


def note(
    target: Target,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="What to remember; '' takes it away, none prints it.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Write a note on a sweep or a run, which ls and show print."""
    from hqsweep.sweep.store import edits
    from hqsweep.sweep.store.store import RunStore

    asked = edits.targets(RunStore(runs_dir), target)
    if text is not None:
        edits.note(asked, text)
    _print_notes(as_json, asked)


def tag(
    target: Target,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[+TAG -TAG...]", help="Tags to add and to take away; none: print.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Tag a sweep or runs, as in: hqsweep tag stdlib +good -draft. `ls --tag good` finds them."""
    from hqsweep.sweep.store import edits
    from hqsweep.sweep.store.store import RunStore

    asked = edits.targets(RunStore(runs_dir), target)
    if changes:
        edits.tag(asked, changes)
    _print_notes(as_json, asked)


def _print_notes(as_json: bool, asked: list[Any]) -> None:
    """Print the note and the tags of each target."""
    from hqsweep.sweep.store import edits

    said = {target.name: edits.read(target.folder).get(target.run, edits.Note()) for target in asked}
    document = {name: {"note": own.note, "tags": list(own.tags)} for name, own in said.items()}
    lines = [f"{name}: {edits.line(own) or 'no note, no tag'}" for name, own in said.items()]
    print_result(as_json, document, *lines)


def rm(
    runs: Runs,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Delete runs, or whole sweeps: never one that runs or waits, nor a trunk without its forks."""
    from hqsweep.sweep.store.edits import delete, removals
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


def verify(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEPS...]", help="Sweeps, runs or folders; default: all.",
            autocompletion=cli_completion.run_or_sweep,
        ),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also a stored baseline, every entry by its hash.")
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--seal", help="Seal what an earlier version finished without a seal, as it is: taken on trust."),
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Read all files of sweeps, and name each that is not what was written.

    Seals, ids, rows, Parquet copies, checkpoints and the trunks of forks; which data each run has read, and whether
    these are still there; without names also the noise of earlier studies (noise.jsonl). Exit code 3 where something is
    wrong with the files.
    """
    from hqsweep.sweep.store.store import RunStore
    from hqsweep.sweep.store.verify import verify

    store = RunStore(runs_dir)
    sweeps, runs = _sweeps_and_runs(store, words or store.sweeps())
    with counting("runs") as done:
        findings = verify(sweeps, runs, keep=keep, done=done)
    faults = [{"file": fault.file, "fault": fault.fault, "remedy": fault.remedy} for fault in findings.faults]
    if not words:
        faults += _registry_faults(runs_dir)
    if baseline is not None:
        faults += _baseline_faults(baseline)
    document = {"runs": findings.runs, "faults": faults, "sealed": list(map(str, findings.sealed))}
    document["data"] = [asdict(seen) for seen in findings.data]
    lines = [f"sealed as it is, which proves nothing of the time before: {path}" for path in findings.sealed]
    lines += [f"{fault['file']}: {fault['fault']}; {fault['remedy']}".removesuffix("; ") for fault in faults]
    lines += [seen.line for seen in findings.data]
    number = f"{findings.runs} run{'s' * (findings.runs != 1)}"
    lines += [f"{number}: {len(faults)} fault{'s' * (len(faults) != 1)}" if faults else f"{number}: all as written"]
    print_result(as_json, document, *lines)
    raise typer.Exit(EXIT_FAILED if faults else 0)


def _sweeps_and_runs(store: Any, words: list[str]) -> tuple[list[Path], list[Any]]:
    """(folders of sweeps, runs apart), as words of RunStore.resolve name them."""
    sweeps, runs = [], []
    for word in words:
        if folder := store.sweep_path(word):
            sweeps.append(folder)
        else:
            runs += store.resolve([word])
    return sweeps, runs


def _registry_faults(runs_dir: Path) -> list[dict[str, str]]:
    """The fault of the noise of earlier studies, which plans read."""
    from hqsweep.study.forecast import FILE, written

    try:
        written(runs_dir / FILE)
    except Damaged as fault:
        return [{"file": str(fault.file), "fault": fault.fault, "remedy": fault.remedy}]
    return []


def _baseline_faults(path: Path) -> list[dict[str, str]]:
    from hqsweep.report.gate.baseline import read_baseline

    try:
        read_baseline(path)
    except UserError as error:
        fault = str(error).removeprefix(f"{path}: ")
        return [{"file": str(path), "fault": fault, "remedy": ""}]
    return []
