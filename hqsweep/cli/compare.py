"""`hqsweep compare` judges recipes, `hqsweep ladder` predicts their gaps at a larger size, `hqsweep gate` judges a
sweep by a stored baseline, and `hqsweep baseline` stores one."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hqsweep.cli.output import AsJson, Junit, OneSentence, Runs, RunsDir, print_result, waiting
from hqsweep.errors import EXIT_FAILED, EXIT_MISMATCH, UserError


def compare(
    runs: Runs,
    baseline: Annotated[
        str | None,
        typer.Option(help="Arm, or recipe, that the others are measured against; default: the sweep's, else bf16."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Report folder; default reports/SWEEP.")] = None,
    window: Annotated[
        float | None,
        typer.Option(help="Last steps, or last part of a run, over which losses are averaged; default 0.1."),
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option(help="Largest gap that counts as none, in % of the baseline's loss; default: the sweep's, 0.25%."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit 1 unless all runs finished, all learnt, and the null arm is equivalent."),
    ] = False,
    track: Annotated[
        bool, typer.Option("--track", help="Show the verdicts beside the runs in W&B, TensorBoard or trackio, too.")
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Exit 0 though runs are missing or not finished; damaged ones stay 3.")
    ] = False,
    metric: Annotated[
        str | None, typer.Option(help="Of runs of a command or of hqsweep.track: the metric; default: as they state.")
    ] = None,
    figures: Annotated[
        str | None,
        typer.Option(metavar="svg|png", help="Also write every figure as a file of its own, into paper/ there."),
    ] = None,
    latex: Annotated[bool, typer.Option("--latex", help="Also write the tables as LaTeX, into paper/ there.")] = False,
    as_league: Annotated[
        bool, typer.Option("--league", help="Also rank the arms by gap, with bits and native speed, into league.csv.")
    ] = False,
    junit_file: Junit = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Say which recipes are worse, better or equivalent, and write a report.

    A table here; HTML, Markdown, CSV and Parquet in the report folder. Exit code 3 where runs are missing, damaged or
    not finished: they are named and left out.
    """
    with waiting("reading the runs and writing the report"):
        from hqsweep.api.comparison import compared
        from hqsweep.cli.judge import print_judgement
        from hqsweep.foreign_logs.logs import is_of_commands, judge_runs
        from hqsweep.report.compare.compare import document
        from hqsweep.report.compare.league import league
        from hqsweep.report.compare.left_out import exit_code
        from hqsweep.report.gate.ci import checked, verdict_rows, write_junit
        from hqsweep.report.pages.folder import write, write_csv
        from hqsweep.report.pages.paper import check_kind, write_figures, write_latex
        from hqsweep.report.pages.tables import rich_effects, rich_league, rich_table
        from hqsweep.sweep.store.store import RunStore
        from hqsweep.track.open import mirror_report

        if figures:
            check_kind(figures)
        selected = RunStore(runs_dir).resolve(runs)
        folder = out or Path("reports", "+".join(dict.fromkeys(run.sweep for run in selected)))
        if is_of_commands(selected):
            options = {"--check": check, "--track": track, "--figures": figures, "--latex": latex}
            options["--league"] = as_league
            if given := next((name for name, value in options.items() if value), None):
                raise UserError(
                    f"{given}: is for runs of hqsweep's own trainer, and these are of a command; leave it out"
                )
            judgement = judge_runs(selected, baseline, window, margin, metric)
            code = print_judgement(judgement, folder, junit_file, as_json=as_json)
            raise typer.Exit(0 if partial else code)
        if metric is not None:
            raise UserError("--metric: runs of hqsweep are compared by their loss; `hqsweep judge` takes any metric")
        comparison = compared(selected, baseline, 0.1 if window is None else window, margin)
        page = write(comparison, folder)
        paper = write_figures(comparison, figures, page.parent / "paper") if figures else []
        paper += write_latex(comparison, page.parent / "paper") if latex else []
        ranked = league(comparison) if as_league else None
        if ranked is not None:
            write_csv(ranked, page.parent / "league.csv")
    if junit_file:
        write_junit(junit_file, "compare", verdict_rows(comparison))
    good, line = checked(comparison) if check else (True, "")
    result = document(comparison) | {"report": str(page), "paper": [str(path) for path in paper], "check": line or None}
    result |= {} if ranked is None else {"league": ranked.to_dict("records")}
    lines = [
        f"baseline: {comparison.baseline} ({comparison.baseline_why})",
        f"report: {page}",
        *([f"for paper: {len(paper)} files in {paper[0].parent}"] if paper else []),
        *([line] if line else []),
    ]
    if track and not mirror_report(selected, page.parent, result["arms"]):
        lines.append(
            "--track: no tracker has taken the report; the sweep's track.kind says whether W&B, TensorBoard or trackio"
            " should"
        )
    print_result(as_json, result, rich_table(comparison), *rich_effects(comparison), *rich_league(ranked), *lines)
    raise typer.Exit(exit_code(comparison.left_out, partial) if good else EXIT_MISMATCH)


baseline_app = typer.Typer(cls=OneSentence, no_args_is_help=True, help="Keep the baseline that the gate compares with.")
Baseline = Annotated[Path, typer.Option(metavar="FILE", help="The stored baseline, a JSON file to keep in git.")]


def ladder(
    sweeps: Runs,
    at: Annotated[
        str | None, typer.Option(help="Parameters to predict for, such as 124M; default: 3 times the largest.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of that training; default: as many a parameter as at the largest size.")
    ] = None,
    design: Annotated[
        str | None, typer.Option(metavar="fork|whole", help="The sweeps that laws are fitted to; default: forks.")
    ] = None,
    margin: Annotated[
        str, typer.Option(metavar="PERCENT", help="Largest gap that counts as none, in % of the baseline's loss.")
    ] = "0.25%",
    out: Annotated[Path | None, typer.Option(help="Report folder; default reports/ladder.")] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Predict gaps at a larger size, from a sweep for each size of a model.

    Two laws are fitted, and the interval holds both. From three sizes on the largest is also predicted from the
    others. The report folder gets ladder.md, ladder.svg, ladder.csv and measured.csv.
    """
    with waiting("fitting the laws"):
        from hqsweep.api.ladder import ladder as fitted
        from hqsweep.report.pages.ladder import rich_tables

        found = fitted(*sweeps, at=at, tokens=tokens, design=design, margin=margin, runs_dir=runs_dir)
        page = found.report(out or Path("reports/ladder"))
    lines = repr(found).splitlines()
    print_result(as_json, found.document | {"report": str(page)}, *rich_tables(found._found), *lines, f"report: {page}")


def gate(
    runs: Runs,
    baseline: Baseline,
    margin: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="Largest change that counts as none, 0.25%; default: the sweep's."),
    ] = None,
    junit_file: Junit = None,
    summary: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="GITHUB_STEP_SUMMARY", help="Also append a Markdown summary to this file."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Judge runs against a stored baseline.

    Equal config and machine: every arm must be bitwise equal. Otherwise the change of its gap is judged: worse,
    better, equivalent within the margin, or undecided. Exit code: 0 good, 1 a regression, 3 failed, missing or
    damaged runs, 4 no usable baseline, or too few replicates to decide. With a baseline that `hqsweep judge --store`
    has written, RUNS are logs of another program.
    """
    from hqsweep.foreign_logs.gate import is_stored

    if is_stored(baseline):
        from hqsweep.cli.judge import print_gate

        raise typer.Exit(print_gate(places(runs, runs_dir), baseline, margin, junit_file, summary, as_json=as_json))
    from hqsweep.report.gate.ci import write_junit
    from hqsweep.report.gate.gate import gate
    from hqsweep.report.gate.verdict import UNIT, append, gate_markdown
    from hqsweep.sweep.store.store import RunStore

    verdicts = gate(RunStore(runs_dir).resolve(runs), baseline, margin)
    if junit_file:
        write_junit(junit_file, "gate", verdicts.rows())
    if summary:
        append(summary, gate_markdown(verdicts))
    document = {"outcome": verdicts.outcome, "unit": UNIT} | asdict(verdicts)
    print_result(as_json, document, verdicts.table(), *verdicts.notes())
    raise typer.Exit(verdicts.exit_code)


def places(words: list[str], runs_dir: Path) -> list[Path]:
    """The paths of logs, and the folders of sweeps, that words name."""
    return [path if (path := Path(word)).exists() else runs_dir / word for word in words]


@baseline_app.callback()
def group() -> None:
    """Make the app a group: a lone command would stand for it otherwise."""


@baseline_app.command()
def update(
    runs: Runs,
    baseline: Baseline,
    add: Annotated[
        bool, typer.Option("--add", help="Keep what is stored, and add these runs as one more draw of it.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Store runs as the baseline, and show what changes.

    Losses are stored as hex floats, which hold every bit. One stored draw may be a lucky one; --add keeps those of
    several machines side by side. Exit code 3, and the file left as it is, when a run has no final loss.
    """
    from hqsweep.foreign_logs.gate import store_runs
    from hqsweep.foreign_logs.logs import is_of_commands
    from hqsweep.report.gate.baseline_update import update
    from hqsweep.sweep.store.store import RunStore

    selected = RunStore(runs_dir).resolve(runs)
    if is_of_commands(selected):
        if add:
            raise UserError("--add: a baseline of commands has one draw; leave it out")
        store_runs(selected, baseline)
        print_result(as_json, {"path": str(baseline)}, f"stored {baseline}")
        return
    change = update(selected, baseline, add)
    print_result(as_json, asdict(change), change.table())
    raise typer.Exit(EXIT_FAILED if change.refused else 0)
