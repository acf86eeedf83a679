"""`hqsweep judge`: verdicts on logs of other programs, their report, their stored baseline, and the gate by it."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hqsweep.cli.output import AsJson, Junit, print_result, waiting
from hqsweep.errors import EXIT_FAILED, UserError

Column = Annotated[str | None, typer.Option(metavar="NAME", help="The column, where its name is no usual one.")]


def judge(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOGS...", help="CSV, JSON lines or Parquet; a folder of them, or of TensorBoard's or W&B's files."
        ),
    ],
    baseline: Annotated[
        str | None, typer.Option(help="Arm that the others are measured against; default bf16.")
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option(
            help="Largest gap that counts as none: a part of the baseline's mean (0.25%), or a number, 0.002."
        ),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The metric; default val_loss, or the only one.")] = None,
    lower: Annotated[
        bool | None,
        typer.Option("--lower-is-better/--higher-is-better", help="Default: what the metric's name says."),
    ] = None,
    window: Annotated[
        float | None,
        typer.Option(
            help="Last steps, or last part of a run, over which values are averaged; default: the last value."
        ),
    ] = None,
    null_arm: Annotated[
        str | None, typer.Option(metavar="ARM", help="An arm that repeats the baseline: a second control.")
    ] = None,
    any_length: Annotated[
        bool, typer.Option("--any-length", help="Take runs that end at another step than most, too.")
    ] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Exit 0 though runs are left out.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a report into this folder: HTML, Markdown and CSV.")] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Store values and options as a baseline, to keep in git.")
    ] = None,
    gate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Judge by such a file instead; exit codes of `hqsweep gate`.")
    ] = None,
    junit_file: Junit = None,
    arm_column: Column = None,
    seed_column: Column = None,
    step_column: Column = None,
    trunk_column: Column = None,
    point_column: Column = None,
    as_json: AsJson = False,
) -> None:
    """Judge what another program trained, from its logs.

    A row for each run, or each step of a run, with columns arm and seed, and the metric. Forks have columns trunk
    and point, too. Exit code 3 where runs are left out: they are named.
    """
    columns = {"arm": arm_column, "seed": seed_column, "step": step_column, "trunk": trunk_column}
    columns |= {"point": point_column}
    if gate is not None:
        given = {"--metric": metric, "--baseline": baseline, "--window": window, "--null-arm": null_arm, "--out": out}
        given |= {
            "--store": store,
            "--lower-is-better or --higher-is-better": lower,
            "--any-length": any_length or None,
        }
        _check_alone(given | {f"--{what}-column": name for what, name in columns.items()}, gate)
        raise typer.Exit(print_gate(logs, gate, margin, junit_file, None, as_json=as_json))
    with waiting("reading the logs"):
        from hqsweep.foreign_logs.gate import store as keep
        from hqsweep.foreign_logs.judge import MARGIN, Question
        from hqsweep.foreign_logs.logs import Reading, judge_files

        reading = Reading(columns=columns, window=window, any_length=any_length)
        question = Question(
            metric=metric or "", baseline=baseline, margin=margin or MARGIN, lower=lower, null_arm=null_arm
        )
        judgement = judge_files(logs, question, reading)
    if store is not None:
        keep(judgement, question, reading, store)
    code = print_judgement(judgement, out, junit_file, as_json=as_json, stored=store)
    raise typer.Exit(0 if partial else code)


def print_judgement(
    judgement: Any, out: Path | None, junit_file: Path | None, *, as_json: bool, stored: Path | None = None
) -> int:
    """Print a judgement, and write its report into `out`; returns the exit code."""
    from hqsweep.foreign_logs.judge import document
    from hqsweep.foreign_logs.table import rich_table, verdict_rows

    page = None
    if out is not None:
        from hqsweep.foreign_logs.folder import write

        page = write(judgement, out)
    if junit_file is not None:
        from hqsweep.report.gate.ci import write_junit

        write_junit(junit_file, "judge", verdict_rows(judgement))
    said = document(judgement) | {"report": page and str(page), "stored": stored and str(stored)}
    lines = [*([f"report: {page}"] if page else []), *([f"stored {stored}"] if stored else [])]
    print_result(as_json, said, rich_table(judgement), *lines)
    return EXIT_FAILED if judgement.left_out else 0


def _check_alone(options: dict[str, Any], gate: Path) -> None:
    """Raise UserError for an option that a stored baseline states itself."""
    if given := next((name for name, value in options.items() if value is not None), None):
        raise UserError(f"{given}: {gate} states how its logs are read and judged; leave it out beside --gate")


def print_gate(
    logs: list[Path],
    baseline: Path,
    margin: str | None,
    junit_file: Path | None,
    summary: Path | None,
    *,
    as_json: bool,
) -> int:
    """Print the gate's verdicts on logs by a stored baseline, as `hqsweep gate` does for runs; returns the exit
    code."""
    with waiting("reading the logs"):
        from hqsweep.foreign_logs.gate import gate, read_stored, unit_of
        from hqsweep.foreign_logs.logs import judge_files
        from hqsweep.report.gate.ci import write_junit
        from hqsweep.report.gate.verdict import append, gate_markdown

        stored = read_stored(baseline)
        if margin is not None:
            stored = replace(stored, question=replace(stored.question, margin=margin))
        judgement = judge_files(logs, stored.question, stored.reading)
        verdicts = gate(judgement, stored)
    if junit_file:
        write_junit(junit_file, "gate", verdicts.rows())
    if summary:
        append(summary, gate_markdown(verdicts))
    said = {"outcome": verdicts.outcome, "unit": unit_of(stored), "metric": judgement.metric} | asdict(verdicts)
    left_out = list(judgement.left_out)
    print_result(as_json, said | {"left_out": left_out}, verdicts.table(), *(f"Left out: {text}" for text in left_out))
    return verdicts.exit_code


def print_plan(logs: list[Path], size: str, question: dict[str, Any], window: float | None, *, as_json: bool) -> None:
    """Print the seeds that decide a gap of `size`, by the noise of logs; question: baseline and metric."""
    with waiting("reading the logs"):
        from hqsweep.foreign_logs.judge import Question
        from hqsweep.foreign_logs.logs import Reading, read_files
        from hqsweep.foreign_logs.plan import document, plan
        from hqsweep.report.pages.text import to_rich

        log = read_files(logs, Question(**question), Reading(columns={}, window=window))
        planned = plan(log, size)
    arms = f"{planned.arms} arm{'s' * (planned.arms > 1)} against {planned.baseline}"
    table = to_rich(planned.table(), f"{planned.metric}, {arms}: {planned.replicate}s that decide {planned.text}")
    print_result(as_json, document(planned), table, planned.sentence, *planned.notes)
