"""`hqsweep run`, with --dry-run and --more-steps, and `hqsweep plan`, which starts nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.judge import print_plan
from hqsweep.cli.output import (
    FORK_COLUMNS,
    GRID_COLUMNS,
    NEXT,
    RESULT_COLUMNS,
    AsJson,
    Junit,
    print_result,
    rows_table,
    say,
    waiting,
)
from hqsweep.config.jobs import COMMAND, COMPARED
from hqsweep.errors import EXIT_FAILED, EXIT_MISMATCH, UserError

NO_IMPORT = "which --no-import refuses; give one that is none, or leave --no-import out"


def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="conf=NAME [KEY=VALUE...]", help="A sweep, and overrides.", autocompletion=cli_completion.run_word
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print runs, states and minutes; start nothing.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --dry-run: time a few steps of each kind of run for its minutes.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Repeat finished runs.")] = False,
    config_dir: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Your configs; ./conf is searched in any case.")
    ] = None,
    more_steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="As a sweep of N steps more, from the runs that are there.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Start runs for this long alone, as in 90s, 20m or 2h; then compare."),
    ] = None,
    junit_file: Junit = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time (engine.workers).")] = None,
    no_import: Annotated[
        bool,
        typer.Option("--no-import", help="Refuse Python factories of recipes and models, instead of importing them."),
    ] = False,
    on_failure: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="A command of sh for each run that fails: HQSWEEP_TEXT, JSON on stdin."),
    ] = None,
    on_end: Annotated[
        str | None, typer.Option(metavar="CMD", help="The same at the end of the sweep, with its verdicts.")
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="HQSWEEP_WEBHOOK", help="POST failures and the end to this address."),
    ] = None,
    notice: Annotated[bool, typer.Option("--notice", help="Show them as notices on this desktop, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a sweep: all of its grid that is not finished.

    KEY=V1,V2 and KEY=range(1,4) span the grid; recipe=NAME1,NAME2 takes whole recipes, and
    'recipe.linear.input=nvfp4|mxfp8' sets one tensor's row and column formats. seeds.until=decided adds seeds until
    every arm has a verdict.
    """
    from hqsweep.sweep.engine.task import Until

    limit = None if until is None else Until(until)
    from hqsweep.sweep.alerts import Alerts

    alerts = Alerts(on_failure=on_failure, on_end=on_end, webhook=webhook or None, notice=notice)
    if measure and not dry_run:
        raise UserError("--measure: times steps for the minutes of --dry-run; add --dry-run")
    from hqsweep.sweep.console import SafeConsole, open_display
    from hqsweep.sweep.grid.run_words import read, with_seeds

    with waiting("checking every run of the sweep"):
        request = read(words, config_dir=config_dir, workers=workers)
        from hqsweep.recipe.factories import Importer  # only now: a mistyped key is found before torch is imported
        from hqsweep.sweep.engine import launch

        importer = Importer(partial(say, err=True), allowed=() if no_import else None, refusal=NO_IMPORT)
        if dry_run:
            typed = () if no_import else functions_in(words)
            importer = Importer(partial(say, err=True), allowed=typed, others_by_name=True)
        plan = launch.plan_of(request, importer)
    planned = partial(launch.plan, config_dir=config_dir, workers=workers, importer=importer)
    if more_steps is not None:
        plan = _longer(plan, words, planned, more_steps, dry_run=dry_run)
    if dry_run:
        _show_plan(plan, words, planned, force=force, measure=measure, as_json=as_json)
        return
    from hqsweep.api.finish import finish_with

    display, told, look = open_display(SafeConsole(stderr=True)), partial(say, err=True), partial(say, err=as_json)
    options = {"say": told, "look": look, "force": force, "until": limit}
    ended = finish_with(alerts, plan, lambda seeds: planned(with_seeds(words, seeds)), display, **options)
    results = [launch.result(run) for run in ended.runs]
    if plan.first.engine.slurm.detach:
        print_result(as_json, results)
        return
    raise typer.Exit(_print_ended(ended, results, plan, junit_file, timed=limit is not None, as_json=as_json))


def functions_in(words: Sequence[str]) -> list[str]:
    """The Python functions of models, losses and data that the words themselves name. A dry run imports these alone."""
    keys = ("model._target_", "model.loss", "data._target_")
    pairs = [word.lstrip("+").partition("=") for word in words]
    return [path for key, _, value in pairs if key in keys for path in value.split(",")]


def _print_ended(
    ended: Any, results: list[dict[str, Any]], plan: Any, junit_file: Path | None, *, timed: bool, as_json: bool
) -> int:
    """Print the results of runs that have ended, and write them as JUnit XML. Returns the exit code.

    timed: whether runs started for a stated time alone, so that what is there is compared.
    """
    from hqsweep.config.jobs import CHECKED_TABLES
    from hqsweep.report.pages.checks import job_tables

    runs, growth, sweep = ended.runs, ended.growth, plan.first.sweep
    rows = {table: [row for run in runs for row in run.rows(table)] for table in CHECKED_TABLES}
    checked = [row for part in rows.values() for row in part]
    if junit_file:
        from hqsweep.report.gate.ci import run_rows, write_junit  # which takes pandas

        write_junit(junit_file, sweep, [*run_rows(runs), *checked])
    failed = any(result["state"] != "finished" for result in results)
    decided = growth.comparison if growth else _compared(plan, runs) if timed else None
    of_command = plan.first.job == COMMAND
    tables = [rows_table("results", results, RESULT_COLUMNS)] if failed or not (checked or decided) else []
    said: Any = {"runs": results, "looks": ended.looks} if growth else {"runs": results} if timed else results
    if decided:
        if of_command:
            from hqsweep.foreign_logs.judge import document
            from hqsweep.foreign_logs.table import rich_table
        else:
            from hqsweep.report.compare.compare import document
            from hqsweep.report.pages.tables import rich_table

        said, tables = said | document(decided), [*tables, rich_table(decided)]
    print_result(as_json, said, *job_tables(rows), *tables)
    _hint(as_json, results, sweep)
    if failed:
        return EXIT_FAILED
    return EXIT_MISMATCH if any(row["status"] == "FAIL" for row in checked) else 0


def _compared(plan: Any, runs: Sequence[Any]) -> Any:
    """The comparison of the runs that are there; None where no two arms could have one."""
    from hqsweep.sweep.grid.arms import is_trunk

    arms = {point.arm for point in plan.points if not is_trunk(point)}
    if plan.first.job not in COMPARED or len(arms) < 2:
        return None
    if plan.first.job == COMMAND:
        from hqsweep.foreign_logs.logs import judge_runs

        return judge_runs(list(runs))
    from hqsweep.api.comparison import compared

    return compared(list(runs))


def _hint(as_json: bool, results: list[dict[str, Any]], sweep: str) -> None:
    """Print each warning of the runs once, then what to type next, on stderr beside JSON: the log of the first failed
    run, else the comparison."""
    from hqsweep.api.finish import after_failures, warnings_of

    for warning in warnings_of(results):
        say(warning, err=as_json)
    several = len({result["arm"] for result in results}) > 1
    then = f"hqsweep compare {sweep}" if several else f"hqsweep show {results[0]['run']}"
    say(after_failures(results) or f"{NEXT}{then}", err=as_json)


def _show_plan(
    plan: Any,
    words: Sequence[str],
    planned: Callable[[list[str]], Any],
    *,
    force: bool,
    measure: bool,
    as_json: bool,
) -> None:
    """Print the runs of a plan with their states; UserError after that where they would be refused. Writes nothing.
    planned: the plan of other words."""
    from hqsweep.study.forecast import outlook, time_steps
    from hqsweep.study.sequential import first_seeds
    from hqsweep.sweep.engine import launch
    from hqsweep.sweep.grid.run_words import with_seeds

    timed = None
    if measure:
        launch.check(plan)
        with waiting("timing a few steps of each kind of run"):
            timed = time_steps(plan, partial(say, err=True))
    ahead = outlook(plan, plan.rows(), force=force, timed=timed)
    columns = FORK_COLUMNS if plan.study.fork else GRID_COLUMNS
    lines = [*plan.lines, *([f"on {ahead.device}"] if ahead.device else []), _time_ahead(ahead)]
    for line in plan.same if as_json else ():
        say(line, err=True)
    print_result(as_json, list(ahead.rows), rows_table(plan.heading, list(ahead.rows), columns), *lines)
    launch.check(plan)
    if plan.study.maximum is not None:
        first_seeds(plan, lambda seeds: planned(with_seeds(words, seeds)))


def _time_ahead(ahead: Any) -> str:
    """A text such as: 8 to do, about 5 minutes (by the finished runs of this sweep)."""
    if not ahead.to_do:
        return "all finished; --force repeats them"
    if ahead.minutes is None:
        return f"{ahead.to_do} to do, minutes unknown: {ahead.basis}"
    low, high = f"{ahead.minutes:,.0f}", f"{ahead.most:,.0f}"
    minutes = f"about {low} minutes" if low == high else f"about {low} to {high} minutes"
    minutes = "less than a minute" if ahead.most < 1 else minutes
    return f"{ahead.to_do} to do, {minutes} ({ahead.basis})"


def _longer(plan: Any, words: list[str], planned: Callable[[list[str]], Any], more: int, *, dry_run: bool) -> Any:
    """Return the plan of the longer sweep. Unless it is a dry run, make its folders with the starts of its runs."""
    from hqsweep.sweep.engine import launch, more_steps
    from hqsweep.sweep.store.run_dir import RunDir
    from hqsweep.sweep.store.store import RunStore

    if plan.study.maximum is not None:
        raise UserError("--more-steps: a study that grows states its steps beforehand; give seeds.until=fixed")
    launch.check_data(plan)
    after = planned(more_steps.longer_words(words, plan.configs, more))
    store, sweep = RunStore(Path(plan.first.runs_dir)), plan.first.sweep
    runs = [RunDir(store.root / sweep / name) for name in store.names(sweep, plan.points)]
    with waiting("looking for checkpoints to go on from"):
        starts = more_steps.starts(runs, plan.configs, after.configs)
    steps = " and ".join(map(str, sorted({start.step for start in starts})))
    say(f"{after.first.sweep}: {launch.counted(len(starts), 'run')} from step {steps} of '{sweep}' on", err=True)
    if not dry_run:
        launch.check(after)
        for start, run in zip(starts, launch.folders(after), strict=True):
            more_steps.seed(start, run)
    return after


def plan(
    resolve: Annotated[
        str, typer.Option(metavar="PERCENT", help="The gap to find, in % of the baseline's loss, as in 0.1%.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="conf=NAME [KEY=VALUE...]", help="A sweep, and overrides.", autocompletion=cli_completion.run_word
        ),
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="LOGS", help="Logs of a study, as `hqsweep judge` reads them, for its noise."),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="With --from: the baseline of the logs; default bf16.")] = None,
    metric: Annotated[str | None, typer.Option(help="With --from: the metric.")] = None,
    window: Annotated[
        float | None, typer.Option(help="With --from: last steps, or last part of a run, that values are means of.")
    ] = None,
    config_dir: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Your configs; ./conf is searched in any case.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a study: replicates and minutes that resolve a gap.

    For forks and for whole runs, from the noise that comparable studies measured (RUNS_DIR/noise.jsonl, which hqsweep
    compare writes): the least and the greatest of them. Studies that are not comparable are named. Starts nothing.
    With --from LOGS in place of a sweep: the seeds that decide a gap, or a number in the metric's unit, by their noise.
    """
    from dataclasses import asdict

    if logs:
        if words:
            raise UserError(f"--from: plans by logs, and {words[0]} plans a sweep; give one of them")
        print_plan(logs, resolve, {"baseline": baseline, "metric": metric or ""}, window, as_json=as_json)
        return
    given = {"--baseline": baseline, "--metric": metric, "--window": window}
    if odd := next((name for name, value in given.items() if value is not None), None):
        raise UserError(f"{odd}: is of --from LOGS; leave it out, or give logs")
    if not words:
        raise UserError("plan: give conf=NAME, a sweep, or --from LOGS, the logs of an earlier study")

    from hqsweep.config.study import parse_percent

    gap = parse_percent(resolve, "--resolve")
    with waiting("checking every run of the sweep"):
        from hqsweep.report.compare.frames import FORK
        from hqsweep.study.forecast import DESIGNS, forecasts, not_used, registry
        from hqsweep.sweep.engine import launch

        planned = launch.plan(words, config_dir=config_dir)
        rows = registry(Path(planned.first.runs_dir))
        designs, unused = forecasts(planned, gap, rows), not_used(planned, rows)
    missing = sorted(set(DESIGNS.values()) - {design.design for design in designs})
    document = {"resolve_pct": gap, "designs": [asdict(design) for design in designs], "cheaper": designs[0].design}
    document |= {"not_used": unused}
    lines = [f"{design.design}: {design.basis}" for design in designs]
    lines += [f"{design.design}: more than seeds.max={design.maximum}" for design in designs if _beyond(design)]
    lines += [_settles(design) for design in designs if planned.study.settles and design.design == DESIGNS[FORK]]
    lines += [_range(design) for design in designs if design.studies > 1]
    lines += [f"{name}: no comparable study has measured its noise yet" for name in missing]
    lines += unused
    print_result(as_json, document, _designs_table(designs, gap), *lines, *_cheaper(designs))


def _designs_table(designs: list[Any], gap: float) -> Any:
    from hqsweep.report.pages.text import TextTable, number, to_rich

    rows = tuple(
        (
            design.design,
            _span(design.replicates_low, design.replicates_high, _count),
            _span(design.minutes_low, design.minutes_high, _minutes),
            number(design.half_width, ".2g"),
            number(design.sd_pct, ".2g"),
        )
        for design in designs
    )
    header = ("design", "replicates", "minutes", "± % at the end", "sd % of one")
    arms = designs[0].arms
    heading = f"a gap of {gap:g} % found in 4 of 5 studies of {arms} arm{'s' * (arms > 1)}"
    return to_rich(TextTable(header=header, rows=rows, numeric=frozenset(range(1, 5))), heading)


def _range(design: Any) -> str:
    count = f"{design.design}: from the least to the greatest of {design.studies} comparable studies; by the nearest,"
    return f"{count} {_count(design.replicates)} replicates, {_minutes(design.minutes)} minutes"


def _settles(design: Any) -> str:
    """When a study of fork.until=settled ends, by what is known before."""
    if design.margin_pct != design.margin_pct:
        return "fork.until=settled: no comparable study says which gap a margin in tokens is; try a margin in %"
    width, most = f"± {design.margin_pct:.2g} %", f"{design.maximum} trunks"
    if design.to_settle == float("inf"):
        return f"fork.until=settled: fork.max_steps has room for {most}, too few to know every gap to {width}"
    return f"fork.until=settled: every gap is known to {width} after about {design.to_settle:.0f} of at most {most}"


def _span(low: float, high: float, said: Any) -> str:
    """The least and the greatest as text, such as 11 to 40; one of them where both read alike."""
    return said(low) if said(low) == said(high) else f"{said(low)} to {said(high)}"


def _count(replicates: float) -> str:
    return "over 1000" if replicates == float("inf") else f"{replicates:.0f}"


def _beyond(design: Any) -> bool:
    """Whether a study that grows would end undecided."""
    return design.maximum is not None and design.maximum < design.replicates < float("inf")


def _cheaper(designs: list[Any]) -> list[str]:
    if designs[0].minutes == float("inf"):
        return ["no design finds this gap with 1000 replicates; ask for a larger one, or lower the noise"]
    if len(designs) < 2:
        return []
    first, second = designs[:2]
    return [f"cheaper: {first.design} ({_minutes(first.minutes)} minutes against {_minutes(second.minutes)})"]


def _minutes(minutes: float) -> str:
    """The minutes as text, with two digits below ten."""
    if minutes == float("inf"):
        return "-"
    return f"{minutes:.2g}" if minutes < 10 else f"{minutes:,.0f}"
