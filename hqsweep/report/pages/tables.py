"""The report's tables: rich for the terminal, and the same cells for the pages."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
from rich.text import Text

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import ENERGY, FORK, config_leaves
from hqsweep.report.compare.verdict import IDENTICAL, at_least, digits, fault, identity
from hqsweep.report.pages.gemm_plans import arm_lines
from hqsweep.report.pages.text import Fitted, TextTable, number, text, to_rich

COLOUR = {
    "worse": "red",
    "failed": "red",
    "diverged": "red",
    "better": "green",
    "equivalent": "green",
    "identical": "red",
    "undecided": "yellow",
    "unfinished": "yellow",
    "unpaired": "yellow",
    "waiting": "yellow",
}
SHOWN_ELSEWHERE = {"run_id", "sweep", "arm", "seed", "job", "overrides", "started", "gemm_plan", "recipe_schedule",
                   "system"}  # fmt: skip
"""The entries of the manifest that have their own place in a report."""
FIRST = ("device", "commit", "dirty", "data_hash", "versions")
"""The entries that come before the others."""


def by_gap(comparison: Comparison) -> pd.DataFrame:
    """The arms, the baseline first, then by gap, arms without a gap last."""
    arms = comparison.arms.assign(others=comparison.arms["arm"] != comparison.arms["baseline"])
    return arms.sort_values(["others", "gap_pct"], kind="stable", ignore_index=True).drop(columns="others")


TRAINED = "train loss in the decay"


def arms_table(comparison: Comparison, *, brief: bool = False) -> TextTable:
    """One row per arm, the baseline first, then by gap: verdict, gap in % of the baseline's loss with its interval, gap
    in nats, the 90 % interval of equivalence, adjusted p, replicates and how many more, losses, speed, state. brief:
    the verdict is one word, and what it means stands beside the table.

    The gap in nats of an arm is its loss minus the baseline's, of the loss that decides: both stand in the row."""
    forked = comparison.design == FORK
    unit, deciding = ("trunks", "train") if forked else ("seeds", "val")
    done = comparison.finals[comparison.finals["gap"].notna()]
    trained = done.groupby("arm")["train_loss"].mean()
    rows = tuple(
        (
            row.arm,
            _verdict(row, brief),
            *_token_cells(row),
            *_gap_cells(row),
            str(row.n) if row.arm != row.baseline else "-",
            number(row.more, "+.0f") if math.isfinite(row.more) else "-",
            number(trained.get(row.arm)),
            number(row.val_gap_pct, "+.3f"),
            number(row.final_loss),
            number(row.tokens_per_s, ",.0f"),
            number(row.joules_per_token, ".3g"),
            row.state,
        )
        for row in by_gap(comparison).itertuples()
    )
    header = (
        "arm",
        "verdict",
        "more tokens %",
        "95 % of them",
        "gap %",
        "95 % interval",
        "90 % interval",
        "gap (nats)" if brief else f"{deciding} gap (nats)",
        "p",
        unit,
        f"more {unit}",
        TRAINED,
        "val gap %",
        "final val loss",
        "tokens/s",
        "J/token",
        "state",
    )
    table = TextTable(header=header, rows=rows, numeric=frozenset(range(2, 16)))
    if not forked:
        table = table.without(TRAINED, "val gap %")
    elif math.isfinite(comparison.arms["end"].iloc[0]):  # the gap is the one of a whole run, and no mean of forks
        table = table.without(TRAINED)
    return table if table.column("J/token") - {"-"} else table.without("J/token")


def _verdict(row: Any, brief: bool) -> str:
    if row.verdict == IDENTICAL and not brief:
        return identity(row._asdict())
    return f"{row.verdict} (in margin)" if row.verdict in ("worse", "better") and row.within_margin else row.verdict


def _token_cells(row: Any) -> tuple[str, str]:
    """The slowdown and its interval."""
    if least := at_least(row.slowdown_low, row.slowdown_high):
        return "-", f"{'over' if least > 0 else 'under'} {least:+.0f}"
    if math.isnan(row.slowdown_pct):
        return "-", "-"
    return number(row.slowdown_pct, "+.1f"), _span(row.slowdown_low, row.slowdown_high, "+.1f")


def _gap_cells(row: Any) -> tuple[str, ...]:
    if math.isnan(row.gap_pct):
        return ("-",) * 5
    places = f"+.{digits(row.half_pct)}f"
    ends = (_span(row.ci_low_pct, row.ci_high_pct, places), _span(row.eq_low_pct, row.eq_high_pct, places))
    return number(row.gap_pct, places), *ends, number(row.gap, "+.4f"), number(row.p, ".2g")


def _span(low: float, high: float, spec: str) -> str:
    return "-" if math.isnan(low) else f"{low:{spec}} to {high:{spec}}"


def effects_table(comparison: Comparison) -> TextTable:
    """The effects of a factorial study, main effects first, in % of the baseline's loss."""
    table = comparison.effects.table
    half = ((table["high"] - table["low"]) / 2).median() if len(table) else math.nan
    places = f"+.{digits(half)}f"
    rows = tuple(
        (row.effect, f"{row.pct:{places}}", _span(row.low, row.high, places), number(row.p, ".2g"), str(row.n),
         "yes" if row.resolved else "no", row.aliases or "-")
        for row in table.itertuples()
    )  # fmt: skip
    header = ("effect", "cost %", "95 % interval", "p", "n", "resolved", "mixed with")
    shown = TextTable(header=header, rows=rows, numeric=frozenset({1, 3, 4}))
    return shown if shown.column("mixed with") - {"-"} else shown.without("mixed with")


def points_table(comparison: Comparison) -> TextTable:
    """Two rows per arm, by gap: the gap in % of training loss over the decay, which decides, and of validation at the
    end. One column per fork point, and all together: mean over trunks, with its sd; of forks that end together the gap
    of a whole run. Empty for whole runs."""
    points = comparison.points.sort_values("point", kind="stable")
    draws = list(dict.fromkeys(points["draw"]))
    if comparison.design != FORK or not draws:
        return TextTable(header=("arm",), rows=())
    rows = tuple(
        (arm, loss, *_point_cells(points[points["arm"] == arm], f"{loss}_gap_pct", draws))
        for arm in by_gap(comparison)["arm"]
        if arm in set(points["arm"])
        for loss in ("train", "val")
    )
    end = comparison.arms["end"].iloc[0]
    together = "together" if math.isnan(end) else f"run of {end:.0f} steps"
    header = ("arm", "loss", *(f"gap % at {draw}" for draw in draws), together)
    table = TextTable(header=header, rows=rows, numeric=frozenset(range(2, len(header))))
    return table.without(together) if len(draws) == 1 else table


def _point_cells(points: pd.DataFrame, column: str, draws: list[str]) -> list[str]:
    """ "+1.32 (sd 0.16)" for each of `draws` and for the means of the trunks; `points` are of one arm."""
    apart = [points[points["draw"] == draw][column] for draw in draws]
    together = (points[column] * points["weight"]).groupby(points["trunk"]).sum(min_count=1)
    return [_with_sd(gaps) for gaps in (*apart, together)]


def _with_sd(gaps: pd.Series) -> str:
    sd = gaps.std()
    places = digits(sd)
    return number(gaps.mean(), f"+.{places}f") + ("" if math.isnan(sd) else f" (sd {sd:.{places}f})")


def training_table(comparison: Comparison) -> TextTable:
    """One row per arm on what its curves say: the gaps of both losses, the loss that a
    doubling of tokens takes off, correlation over seeds, spike scores, divergence."""
    rows = tuple(
        (
            row.arm,
            *_percent_cells(row, "train"),
            *_percent_cells(row, "val"),
            number(row.slope, ".3f"),
            number(row.correlation, "+.2f"),
            number(row.loss_spikes_pct, ".2f"),
            number(row.grad_spikes_pct, ".2f"),
            f"{row.diverged} of {row.runs}" if row.diverged else "none",
            number(row.diverged_at, ",.0f"),
        )
        for row in comparison.arms.itertuples()
    )
    header = (
        "arm",
        "train gap %",
        "95 % of it",
        "val gap %",
        "95 % of that",
        "nats a doubling",
        "correlation",
        "loss spikes %",
        "gradient spikes %",
        "diverged",
        "at token",
    )
    return TextTable(header=header, rows=rows, numeric=frozenset(range(1, 11)) - {9}).without(
        *(["correlation"] if comparison.design == FORK else [])
    )


def _percent_cells(row: Any, loss: str) -> tuple[str, str]:
    gap, low, high = (getattr(row, f"{loss}_{cell}_pct") for cell in ("gap", "low", "high"))
    places = f"+.{digits((high - low) / 2)}f"
    return number(gap, places), _span(low, high, places)


def left_out_table(comparison: Comparison) -> TextTable:
    """The runs that cannot be trusted (damaged, missing, or none of their sweep's), with the file and the remedy."""
    untold = [entry for entry in comparison.left_out if entry.state in ("damaged", "missing", "foreign")]
    rows = tuple((entry.run, entry.state, Path(entry.file).name, entry.fault, entry.remedy) for entry in untold)
    return TextTable(header=("run", "state", "file", "what is wrong", "what to do"), rows=rows)


def unfinished_table(comparison: Comparison) -> TextTable:
    """The runs without a final loss (failed, interrupted, still running, or finished with NaN), each with its
    reason."""
    without = comparison.finals["run"][comparison.finals["final_loss"].isna()]
    runs = comparison.frames.runs
    rows = tuple(
        (run.arm, str(run.seed), str(run.point), fault(run), _progress(run), run.run)
        for run in runs[runs["run"].isin(without)].itertuples()
    )
    table = TextTable(header=("arm", "seed", "point", "state", "step", "run"), rows=rows, numeric=frozenset({1, 2, 4}))
    return table if comparison.design == FORK else table.without("point")


def _progress(run: Any) -> str:
    return "-" if math.isnan(run.step) else f"{run.step:.0f} of {run.steps:.0f}"


def config_diff(runs: pd.DataFrame) -> TextTable:
    """The config leaves that are not the same in all arms (without the seed): one row per leaf, one column per arm."""
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
    """Every entry of the manifests: one value when all runs agree, else each value with the number of runs that have
    it."""
    names = [name for name in runs.columns if name.startswith("manifest.")]
    names = [name for name in names if name.split(".")[1] not in SHOWN_ELSEWHERE]
    names.sort(key=lambda name: FIRST.index(name.split(".")[1]) if name.split(".")[1] in FIRST else len(FIRST))
    rows = tuple((name.removeprefix("manifest."), distinct(runs[name], count=True)) for name in names)
    return TextTable(header=("fact", "value"), rows=rows)


def gemm_plans(runs: pd.DataFrame) -> TextTable:
    """The operands that each GEMM of an arm got and the plan that computed it, with the number of modules; GEMMs, and
    then arms, that have the same ones share a row."""
    rows = [(arm, *line) for arm, part in runs.groupby("arm", sort=False) for line in arm_lines(part)]
    table = TextTable(header=("arm", "GEMM", "operands: plan (modules)"), rows=tuple(rows))
    return table.folded("GEMM").folded("arm")


def gemm_errors(stats: pd.DataFrame) -> TextTable:
    """The output error of each GEMM against FP32, per arm: medians over layers, steps and seeds, and the layer with the
    lowest SQNR."""
    rows = []
    outputs = stats[stats["direction"].eq("output") & stats["tensor"].ne("routed")]  # those are tokens
    for (arm, gemm), part in outputs.groupby(["arm", "tensor"], sort=False):
        by_layer = part.groupby("layer")["sqnr_db"].median()
        errors = number(part["rel_l2"].median(), ".2e"), number(part["cosine"].min(), ".6f")
        levels = number(part["sqnr_db"].median(), ".1f"), number(by_layer.min(), ".1f")
        rows.append((arm, gemm, *levels, text(by_layer.idxmin() if by_layer.notna().any() else None), *errors))
    header = ("arm", "GEMM", "median SQNR (dB)", "worst layer (dB)", "worst layer", "median rel. L2", "lowest cosine")
    return TextTable(header=header, rows=tuple(rows), numeric=frozenset({2, 3, 5, 6})).folded("GEMM").folded("arm")


def runs_table(comparison: Comparison) -> TextTable:
    """One row per run: final loss, its gap (of the loss that decides) to the baseline's run of the same replicate,
    time, speed, and the energy of GPUs where it was measured."""
    runs = comparison.frames.runs.set_index("run")
    rows = tuple(
        (
            final.arm,
            str(final.seed),
            str(final.point),
            final.state,
            number(final.train_loss, ".6f"),
            number(final.final_loss, ".6f"),
            number(final.gap, "+.6f"),
            number(runs.at[final.run, "seconds"], ".0f"),
            number(runs.at[final.run, "tokens_per_s"], ",.0f"),
            number(runs.at[final.run, ENERGY], ".3g") if ENERGY in runs else "-",
            final.run,
        )
        for final in comparison.finals.itertuples()
    )
    forked = comparison.design == FORK
    header = (
        "arm",
        "seed",
        "point",
        "state",
        TRAINED,
        "final val loss",
        f"{'train' if forked else 'val'} gap (nats)",
        "seconds",
        "tokens/s",
        "J/token",
        "run",
    )
    table = TextTable(header=header, rows=rows, numeric=frozenset(range(1, 10)) - {3})
    table = table if table.column("J/token") - {"-"} else table.without("J/token")
    return table if forked else table.without("point", TRAINED)


def distinct(values: pd.Series, count: bool = False) -> str:
    """The one value of a column, or all its values separated by "; ", with their counts if `count`."""
    counts = values.map(text).value_counts(sort=False)
    if len(counts) == 1:
        return counts.index[0]
    return "; ".join(f"{value} ({times} runs)" if count else value for value, times in counts.items())


def title(comparison: Comparison) -> str:
    """ "quickstart: 5 arms against bf16"."""
    sweeps = ", ".join(dict.fromkeys(comparison.frames.runs["sweep"]))
    others = int((comparison.arms["arm"] != comparison.arms["baseline"]).sum())
    return f"{sweeps}: {others} {'arm' if others == 1 else 'arms'} against {comparison.baseline}"


DROP = ("gap (nats)", "tokens/s", "trunks", "seeds")
"""The headings that a narrow terminal goes without, the first one first."""


def rich_table(comparison: Comparison) -> Fitted:
    """The arms for a terminal of 80 columns, coloured by verdict; the caption below has the sentences, the notes on
    all, and the plans that computed the GEMMs.

    The interval is left out when no arm has one, and the state when every run finished. Pages show all columns.
    """
    arms = by_gap(comparison)
    unit = "trunks" if comparison.design == FORK else "seeds"
    cells = arms_table(comparison, brief=True).without(
        "90 % interval", "p", f"more {unit}", TRAINED, "val gap %", "final val loss"
    )
    single = cells.column("95 % interval") == {"-"}
    cells = cells.without("95 % interval") if single else cells.without("tokens/s")
    if all(state.endswith("finished") and "," not in state for state in cells.column("state")):
        cells = cells.without("state")
    table = to_rich(cells, title(comparison), [COLOUR.get(verdict, "") for verdict in arms["verdict"]], DROP)
    sentences = [f"{row.arm}: {row.sentence}" for row in arms.itertuples()]
    table.caption = Text("\n".join([*sentences, *comparison.notes, *_computed_by(comparison.arms)]))
    return table


def rich_effects(comparison: Comparison) -> list[Fitted]:
    """The effects of a factorial study for a terminal; [] without one."""
    table = effects_table(comparison)
    colours = ["red" if row.pct > 0 else "green" for row in comparison.effects.table.itertuples()]
    resolved = comparison.effects.table["resolved"].tolist()
    shown = [colour if one else "" for colour, one in zip(colours, resolved, strict=True)]
    return [to_rich(table, "effects of the factors", shown, ("p", "n", "mixed with"))] if table.rows else []


def rich_league(ranked: pd.DataFrame | None) -> list[Fitted]:
    """The league (report.compare.league) for a terminal; [] without one."""
    if ranked is None:
        return []
    rows = tuple(
        (number(row.place, ".0f"), row.arm, row.verdict, number(row.gap_pct, "+.3f"),
         _span(row.ci_low_pct, row.ci_high_pct, "+.3f"), number(row.bits, ".2f"), "yes" if row.front else "",
         number(row.tokens_per_s, ",.0f"), number(row.speed, ".2f"))
        for row in ranked.itertuples()
    )  # fmt: skip
    header = ("", "arm", "verdict", "gap %", "95 % interval", "bits", "front", "tokens/s", "speed")
    table = TextTable(header=header, rows=rows, numeric=frozenset({0, 3, 5, 7, 8}))
    return [to_rich(table, "league", [COLOUR.get(verdict, "") for verdict in ranked["verdict"]], ("tokens/s",))]


def _computed_by(arms: pd.DataFrame) -> list[str]:
    """One line for each set of plans, with the arms that have it, if these are not all."""
    groups = arms.groupby("gemm", sort=False)["arm"].agg(", ".join)
    return [f"gemm: {how}" + (f" ({names})" if len(groups) > 1 else "") for how, names in groups.items()]
