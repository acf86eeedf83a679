"""`hqsweep plan`: what a study would cost that resolves a gap, before any of it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import AsJson, print_result, waiting


def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="conf=NAME [KEY=VALUE...]", help="A sweep, and overrides.", autocompletion=cli_completion.run_word
        ),
    ],
    resolve: Annotated[
        str, typer.Option(metavar="PERCENT", help="The gap to find, in % of the baseline's loss, as in 0.1%.")
    ],
    config_dir: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Your configs; ./conf is searched in any case.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a study: replicates and minutes that resolve a gap.

    For forks and for whole runs, from the noise that comparable studies measured (RUNS_DIR/noise.jsonl, which hqsweep
    compare writes): the least and the greatest of them. Studies that are not comparable are named. Starts nothing.
    """
    from dataclasses import asdict

    from hqsweep.config.study import parse_percent

    gap = parse_percent(resolve, "--resolve")
    with waiting("checking every run of the sweep"):
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
    lines += [_range(design) for design in designs if design.studies > 1]
    lines += [f"{name}: no comparable study has measured its noise yet" for name in missing]
    lines += unused
    print_result(as_json, document, _table(designs, gap), *lines, *_cheaper(designs))


def _table(designs: list[Any], gap: float) -> Any:
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
