"""The report's tables: rich for the terminal, Markdown for a pull request, the same cells for the HTML
page.
"""

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from hqsweep.report import experts
from hqsweep.report.arms import Comparison
from hqsweep.report.frames import config_leaves
from hqsweep.report.gemm_plans import arm_lines
from hqsweep.report.parity import text_tables
from hqsweep.report.text import TextTable, markdown, markdown_text, number, text, to_rich
from hqsweep.report.verdict import fault

COLOUR = {
    "worse": "red",
    "failed": "red",
    "diverged": "red",
    "better": "green",
    "equal": "green",
    "one seed": "yellow",
    "unpaired": "yellow",
}
SHOWN_ELSEWHERE = {"run_id", "sweep", "arm", "seed", "job", "overrides", "started", "gemm_plan", "recipe_schedule"}
"""Facts of the manifest that have their own place in a report."""
FIRST = ("device", "commit", "dirty", "data_hash", "versions")
"""Facts that come before the others."""


def arms_table(comparison: Comparison) -> TextTable:
    """One row per arm: final loss, gap with its interval, gap in %, corrected p, seeds, seeds needed, speed, state."""
    rows = tuple(
        (
            row.arm,
            number(row.final_loss),
            *_gap_cells(row),
            str(row.seeds),
            number(row.seeds_needed, ".0f"),
            number(row.tokens_per_s, ",.0f"),
            row.state,
        )
        for row in comparison.arms.itertuples()
    )
    header = (
        "arm",
        "final loss",
        "gap (nats)",
        "95 % interval",
        "gap %",
        "p (Holm)",
        "seeds",
        "seeds needed",
        "tokens/s",
        "state",
    )
    return TextTable(header=header, rows=rows, numeric=frozenset(range(1, 9)))


def _gap_cells(row: Any) -> tuple[str, str, str, str]:
    if row.arm == row.baseline:
        return "baseline", "-", "-", "-"
    span = _span(row.gap_lo, row.gap_hi, "+.4f") if row.seeds != 1 else "one seed"
    return number(row.gap, "+.4f"), span, number(row.gap_pct, "+.2f"), number(row.p_holm, ".2g")


def _span(low: float, high: float, spec: str) -> str:
    return "-" if math.isnan(low) else f"{low:{spec}} to {high:{spec}}"


def training_table(comparison: Comparison) -> TextTable:
    """One row per arm on what its curves say: trailing train gap, tokens-to-loss overhead, spike scores, divergence."""
    rows = tuple(
        (
            row.arm,
            number(row.train_gap, "+.4f"),
            _span(row.train_lo, row.train_hi, "+.4f"),
            number(row.overhead_pct, "+.1f"),
            _span(row.overhead_lo, row.overhead_hi, "+.1f"),
            number(row.loss_spikes_pct, ".2f"),
            number(row.grad_spikes_pct, ".2f"),
            f"{row.diverged} of {row.runs}" if row.diverged else "none",
            number(row.diverged_at, ",.0f"),
        )
        for row in comparison.arms.itertuples()
    )
    header = (
        "arm",
        "train gap (nats)",
        "95 % interval",
        "tokens-to-loss overhead %",
        "95 % interval of it",
        "loss spikes %",
        "gradient spikes %",
        "diverged",
        "at token",
    )
    return TextTable(header=header, rows=rows, numeric=frozenset(range(1, 9)) - {7})


def unfinished_table(comparison: Comparison) -> TextTable:
    """Runs without a final loss (failed, interrupted, still running, or finished with NaN), each with its reason."""
    without = comparison.finals["run"][comparison.finals["final_loss"].isna()]
    runs = comparison.frames.runs
    rows = tuple(
        (run.arm, str(run.seed), fault(run), _progress(run), run.run)
        for run in runs[runs["run"].isin(without)].itertuples()
    )
    return TextTable(header=("arm", "seed", "state", "step", "run"), rows=rows, numeric=frozenset({1, 3}))


def _progress(run: Any) -> str:
    return "-" if math.isnan(run.step) else f"{run.step:.0f} of {run.steps:.0f}"


def config_diff(runs: pd.DataFrame) -> TextTable:
    """Config leaves that are not the same in all arms (seed aside): one row per leaf, one column per arm."""
    arms = {arm: rows for arm, rows in runs.groupby("arm", sort=False)}
    differing = [name for name in config_leaves(runs) if runs[name].map(text).nunique() > 1]
    rows = [(name.removeprefix("config."), *(distinct(part[name]) for part in arms.values())) for name in differing]
    return TextTable(header=("key", *arms), rows=tuple(row for row in rows if len(set(row[1:])) > 1))


def arm_by_key(comparison: Comparison) -> TextTable:
    """config_diff with a row for each arm, as the arms are ordered. Keys that tell the arms apart in the same way share
    a column, and recipe.name is left out where it is the arm's own name."""
    runs, order = comparison.frames.runs, {arm: place for place, arm in enumerate(comparison.arms["arm"])}
    diff = config_diff(runs.sort_values("arm", key=lambda arms: arms.map(order), kind="stable"))
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, *values in diff.rows:
        if key != "recipe.name" or tuple(values) != diff.header[1:]:
            keys.setdefault(tuple(values), []).append(key)
    rows = tuple((", ".join(names), *values) for values, names in keys.items())
    return TextTable(header=diff.header, rows=rows).transposed("arm") if rows else diff.without(*diff.header)


def provenance(runs: pd.DataFrame) -> TextTable:
    """Every fact of the manifests: one value when all runs agree, else each value with the number of runs that have
    it."""
    names = [name for name in runs.columns if name.startswith("manifest.")]
    names = [name for name in names if name.split(".")[1] not in SHOWN_ELSEWHERE]
    names.sort(key=lambda name: FIRST.index(name.split(".")[1]) if name.split(".")[1] in FIRST else len(FIRST))
    rows = tuple((name.removeprefix("manifest."), distinct(runs[name], count=True)) for name in names)
    return TextTable(header=("fact", "value"), rows=rows)


def gemm_plans(runs: pd.DataFrame) -> TextTable:
    """The operands that each GEMM of an arm got and the plan that computed it, with the number of modules."""
    rows = [(arm, *line) for arm, part in runs.groupby("arm", sort=False) for line in arm_lines(part)]
    return TextTable(header=("arm", "GEMM", "operands: plan (modules)"), rows=tuple(rows))


def gemm_errors(stats: pd.DataFrame) -> TextTable:
    """Output error of each GEMM against FP32, per arm: medians over layers, steps and seeds, and the layer with the
    lowest SQNR."""
    rows = []
    outputs = stats[stats["direction"].eq("output") & stats["tensor"].ne("routed")]  # those are tokens
    for (arm, gemm), part in outputs.groupby(["arm", "tensor"], sort=False):
        by_layer = part.groupby("layer")["sqnr_db"].median()
        errors = number(part["rel_l2"].median(), ".2e"), number(part["cosine"].min(), ".6f")
        levels = number(part["sqnr_db"].median(), ".1f"), number(by_layer.min(), ".1f")
        rows.append((arm, gemm, *levels, text(by_layer.idxmin() if by_layer.notna().any() else None), *errors))
    header = ("arm", "GEMM", "median SQNR (dB)", "worst layer (dB)", "worst layer", "median rel. L2", "lowest cosine")
    return TextTable(header=header, rows=tuple(rows), numeric=frozenset({2, 3, 5, 6}))


def runs_table(comparison: Comparison) -> TextTable:
    """One row per run: final loss, its gap to the baseline's run of the same seed, time and speed."""
    runs = comparison.frames.runs.set_index("run")
    rows = tuple(
        (
            final.arm,
            str(final.seed),
            final.state,
            number(final.final_loss, ".6f"),
            number(final.gap, "+.6f"),
            number(runs.at[final.run, "seconds"], ".0f"),
            number(runs.at[final.run, "tokens_per_s"], ",.0f"),
            final.run,
        )
        for final in comparison.finals.itertuples()
    )
    header = ("arm", "seed", "state", "final loss", "gap (nats)", "seconds", "tokens/s", "run")
    return TextTable(header=header, rows=rows, numeric=frozenset(range(1, 7)) - {2})


def distinct(values: pd.Series, count: bool = False) -> str:
    """The one value of a column, or all its values separated by "; ", with their counts when asked."""
    counts = values.map(text).value_counts(sort=False)
    if len(counts) == 1:
        return counts.index[0]
    return "; ".join(f"{value} ({times} runs)" if count else value for value, times in counts.items())


def report_markdown(comparison: Comparison) -> str:
    """The report as one Markdown page."""
    runs = comparison.frames.runs
    parts = [
        f"# {markdown_text(title(comparison))}\n",
        *_section("Config: where the arms differ", arm_by_key(comparison)),
        "\n## Result\n\n",
        markdown(arms_table(comparison)),
        "\n",
        *(f"- **{markdown_text(row.arm)}**: {markdown_text(row.verdict)}\n" for row in comparison.arms.itertuples()),
        *_section("Runs without a result", unfinished_table(comparison)),
        *_section("Training: tokens to loss, spikes, divergence", training_table(comparison)),
        *_section("GEMM output error against FP32", gemm_errors(comparison.frames.stats)),
        *_section("Experts: lowest SQNR and highest underflow", experts.worst_experts(comparison)),
        *_section("Experts: highest and lowest load", experts.load_table(comparison)),
        *(part for table in text_tables(comparison.frames.parity) for part in _section(*table)),
        *_section("GEMM plans", gemm_plans(runs)),
        *_section("Provenance", provenance(runs)),
    ]
    return "".join(parts)


def _section(heading: str, table: TextTable) -> Iterable[str]:
    return (f"\n## {heading}\n\n", markdown(table)) if table.rows else ()


def title(comparison: Comparison) -> str:
    """ "quickstart: 5 arms against bf16"."""
    sweeps = ", ".join(dict.fromkeys(comparison.frames.runs["sweep"]))
    others = int((comparison.arms["arm"] != comparison.arms["baseline"]).sum())
    return f"{sweeps}: {others} {'arm' if others == 1 else 'arms'} against {comparison.baseline}"


def rich_table(comparison: Comparison) -> Table:
    """The arms for a terminal of 80 columns, coloured by outcome; the caption below has the verdict sentences and the
    plans that computed the GEMMs.

    The interval is left out when every arm has one seed, else seeds and tokens/s make room for it; sentences have the
    seeds, those needed and p. The state is left out when every run finished. Pages show all columns.
    """
    styles = [COLOUR.get(outcome, "") for outcome in comparison.arms["outcome"]]
    cells = arms_table(comparison).without("p (Holm)", "seeds needed")
    single = cells.column("95 % interval") <= {"-", "one seed"}
    cells = cells.without("95 % interval") if single else cells.without("seeds", "tokens/s")
    if all(state.endswith("finished") and "," not in state for state in cells.column("state")):
        cells = cells.without("state")
    table = to_rich(cells, title(comparison), styles)
    sentences = [f"{row.arm}: {row.verdict}" for row in comparison.arms.itertuples()]
    table.caption = Text("\n".join([*sentences, *_computed_by(comparison.arms)]))
    table.caption_justify = "left"
    return table


def _computed_by(arms: pd.DataFrame) -> list[str]:
    """One line for each set of plans, with the arms that have it where they are not all."""
    groups = arms.groupby("gemm", sort=False)["arm"].agg(", ".join)
    return [f"gemm: {how}" + (f" ({names})" if len(groups) > 1 else "") for how, names in groups.items()]
