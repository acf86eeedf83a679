"""`hqsweep verify`: are the files of sweeps what the runs have written?"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import AsJson, RunsDir, print_result
from hqsweep.errors import EXIT_FAILED, Damaged, UserError


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
    sweeps, runs = _meant(store, words or store.sweeps())
    findings = _with_a_bar(lambda done: verify(sweeps, runs, keep=keep, done=done))
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


def _meant(store: Any, words: list[str]) -> tuple[list[Path], list[Any]]:
    """(folders of sweeps, runs apart), as words of RunStore.resolve name them."""
    sweeps, runs = [], []
    for word in words:
        if folder := store.sweep_path(word):
            sweeps.append(folder)
        else:
            runs += store.resolve([word])
    return sweeps, runs


def _with_a_bar(work: Any) -> Any:
    """The work, with a bar on stderr that counts runs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hqsweep.sweep.console import SafeConsole

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as bar:
        task = bar.add_task("runs", total=None)
        return work(lambda number, total: bar.update(task, completed=number, total=total))


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
