"""What a report says of an arm: one sentence in plain words, with its size, its interval and what would decide it.

The verdict itself comes from hqsweep.verdicts; a margin makes "equivalent" mean something, an interval the rest.
"""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

Row = Mapping[str, Any]
"""A row of Comparison.arms, as far as it is filled in. A row whose gaps are not in % has the key "unit": PLAIN."""
PLAIN = "plain"
"""The unit of gaps that are differences of the metric itself."""
IDENTICAL = "identical"
"""The verdict of an arm whose operands are its baseline's."""
IDENTICAL_REMEDY = "Leave the arm out, or quantize what this model has"
NULL_IN_DOUBT = "The null arm is not shown equal to {baseline}, so the machinery is in doubt."
BLIND = (
    "A fork does not see damage that builds up from the start of training, early instability, or late divergence; whole"
    " runs do."
)
NO_TOKENS = -100.0
"""The slowdown in % of an arm that needs no tokens at all: the end of an interval without a lower end."""
FINE, TENTHS = 0.1, 5.0
"""Half-widths in % below which a third decimal of a gap is shown, and a first one of a slowdown."""
FEWEST_TRUNKS = 3
"""Trunks below which there is no verdict about all trunks."""


def state_text(states: pd.Series) -> str:
    """ "3 finished", or "2 finished, 1 failed"."""
    return ", ".join(f"{count} {state}" for state, count in states.value_counts().items())


def fault(run: Any) -> str:
    """Why a run (a row of Frames.runs) has no final loss: "failed (loss is nan at step 37)"."""
    if run.state == "finished":
        return "finished without a finite val_loss"
    why = run.reason.partition("; a repeat")[0] if isinstance(run.reason, str) else ""
    return run.state + (f" ({why})" if why else "")


def sentence(row: Row, unfinished: pd.DataFrame, no_baseline: str = "") -> str:
    """The verdict in plain words; `unfinished`, the arm's runs (of Frames.runs) without a final loss, come first.

    no_baseline: why the arm's baseline is a baseline of no arm, as arms.perturbed() says it.
    """
    trouble = ""
    if len(unfinished):
        trouble = f"{len(unfinished)} of {row['runs']} runs without a result: {_faults(unfinished)}. "
    if row["diverged"]:
        trouble += f"{row['diverged']} of {row['runs']} runs diverged, the first at {row['diverged_at']:,.0f} tokens. "
    doubt = f" {NULL_IN_DOUBT.format(baseline=_name(row))}" if row["null_in_doubt"] else ""
    return trouble + ("Null arm: " if row["null"] else "") + _finding(row, no_baseline) + doubt


def _faults(unfinished: pd.DataFrame) -> str:
    """What happened to which runs; a fault of many runs once."""
    runs: dict[str, list[str]] = {}
    for run in unfinished.itertuples():
        runs.setdefault(fault(run), []).append(_which(run))
    few = 2
    return "; ".join(
        f"{', '.join(which)} {what}" if len(which) <= few else f"{len(which)} {what}, the first {which[0]}"
        for what, which in runs.items()
    )


def _which(run: Any) -> str:
    return f"seed {run.seed}" + (f" at {run.point}" if run.design == "fork" else "")


def _name(row: Row) -> str:
    return f"'{row['baseline']}'"


def _finding(row: Row, no_baseline: str) -> str:
    name = _name(row)
    match row["verdict"]:
        case "baseline" if math.isnan(row["final_loss"]):
            return "No run of the baseline has a final loss."
        case "baseline":
            return f"Baseline: final val loss {row['final_loss']:.4f} nats."
        case "identical":
            return f"{identity(row)}{_repeated(row)}. {IDENTICAL_REMEDY}."
        case "failed" | "unfinished":
            return "No run of this arm has a final loss."
        case "waiting":
            return "It still runs, and waits for seeds that other arms have finished: no gap yet."
        case "unpaired" if no_baseline:
            return f"No gap: {name} {no_baseline}, so no arm is paired with it."
        case "unpaired":
            others = "" if row["design"] == "fork" else " and the other arms"
            return f"No finished {_unit(row, 1)} in common with {name}{others}: no gap."
        case "diverged" if row["pairs"] == 0:
            return f"No verdict, and no other run is paired with {name}."
        case "diverged":
            return f"No verdict. The others end {row['paired_gap']:+.4f} nats from {name} over {row['pairs']} runs."
        case "equivalent" if row["gap_pct"] == row["half_pct"] == 0:
            return f"equivalent to {name}: equal in every digit over {_replicates(row)}."
        case "equivalent":
            size = f"{tokens(row)}{_percent(row)} ({_interval(row)}) over {_replicates(row)}{_after(row)}"
            return f"equivalent to {name} within {margin_text(row)}: {size}{_narrower(row)}."
        case "undecided":
            return _undecided(row)
        case verdict:
            inside = f", inside the margin of {margin_text(row)}" if row["within_margin"] else ""
            size = f"({_interval(row)}) over {_replicates(row)}{_after(row)}{inside}."
            if known := tokens(row):
                return f"{verdict} than {name}: {known}{_percent(row)} {size}"
            return f"{verdict} than {name} by {_percent(row).lstrip('+-')} {size}"


def margin_text(row: Row) -> str:
    """ "0.25 %", or "1 % of the tokens"."""
    stated = row["margin_tokens"]
    return _of_unit(row, f"{row['margin_pct']:g}") if math.isnan(stated) else f"{stated:g} % of the tokens"


def tokens(row: Row) -> str:
    """ "22 % more tokens for the same loss (17 to 28 %); ", "at least 45 % more tokens for the same loss; " where the
    interval has one end, "" where there is no slowdown."""
    pct, low, high = row["slowdown_pct"], row["slowdown_low"], row["slowdown_high"]
    if math.isnan(pct):
        least = at_least(low, high)
        return (
            f"at least {abs(least):.0f} % {'more' if least > 0 else 'fewer'} tokens for the same loss; "
            if least
            else ""
        )
    known = "" if math.isnan(low) else f" ({slowdown_span(low, high)})"
    size = f"{abs(pct):.{_places(pct, low, high)}f} % {'fewer' if pct < 0 else 'more'} tokens"
    return f"{size} for the same loss{known}; "


def at_least(low: float, high: float) -> float:
    """The end of a slowdown's interval that has no other end, 0 where it has both or none."""
    return low if low > 0 and math.isinf(high) else high if high < 0 and low == NO_TOKENS else 0.0


def slowdown_span(low: float, high: float) -> str:
    """ "+17 to +28 %"."""
    spec = f"+.{_places(high, low, high)}f"
    return f"{low:{spec}} to {high:{spec}} %"


def _places(pct: float, low: float, high: float) -> int:
    """Decimals of a slowdown, and of its interval if it has one."""
    half = abs(pct) / 4 if math.isnan(low) else (high - low) / 2
    return 2 if half < FINE else 1 if half < TENTHS else 0


def _after(row: Row) -> str:
    """ ", 160 steps after the fork": a gap grows with them; or the parts of the gap of a whole run."""
    if math.isfinite(row["end"]):
        return f", as a run of {row['end']:.0f} steps from its first step on{parts(row)}"
    known = row["design"] == "fork" and math.isfinite(row["steps"])
    return (f", {row['steps']:.0f} steps after the fork" if known else "") + course(row)


def parts(row: Row) -> str:
    """ "; +2.51 % comes at once (+2.3 to +2.7 %), and each 100 steps add +0.387 % (+0.31 to +0.46 %)": the growth is
    none where its interval holds 0."""
    if math.isnan(row["at_once_pct"]):
        return ""
    at_once = _part(row, "at_once")
    if math.isnan(row["growth_low"]) or not row["growth_low"] <= 0 <= row["growth_high"]:
        return f"; {at_once} comes at once, and each 100 steps add {_part(row, 'growth')}"
    return f"; {at_once} comes at once, and no growth is resolved (100 steps: {_part(row, 'growth')})"


def course(row: Row) -> str:
    """ "; before the decay +1.40 % (+1.2 to +1.6 %) at once, +0.31 % (+0.22 to +0.40 %) lasting", or what else the end
    of the curve says; "" where that is not known."""
    if row["course"] not in ("flat", "closing", "growing", "open"):
        return ""
    known = f"; before the decay {_part(row, 'at_once')} at once, "
    match row["course"]:
        case "flat" if math.isnan(row["lasting_pct"]):
            return f"{known}flat at the end"
        case "flat":
            return f"{known}{_part(row, 'lasting')} lasting"
        case "growing":
            return f"{known}growing by {_part(row, 'growth')} per 100 steps"
        case "closing":
            rate = f"{abs(row['growth_pct']):.{digits(abs(row['growth_pct']))}f} % per 100 steps"
            return f"{known}still closing by {rate}{_settles(row['settles_in'])}"
        case _:
            return f"{known}not known to last: {_part(row, 'growth')} per 100 steps"


def _settles(steps: float) -> str:
    """ ": about 600 more steps decide"."""
    if math.isinf(steps):
        return ", with no end in sight"
    return f": about {steps:,.0f} more steps decide" if steps > 0 else ""


def _part(row: Row, name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    places = digits((high - low) / 2)
    known = "" if math.isnan(low) else f" ({low:+.{places}f} to {high:+.{places}f} %)"
    return f"{row[f'{name}_pct']:+.{places}f} %{known}"


def identity(row: Row) -> str:
    """ "identical to bf16: nothing was quantized"."""
    return f"identical to {row['baseline']}: {row['identical']}"


def _repeated(row: Row) -> str:
    """How far the losses of an arm are from the baseline's, of which they are no other."""
    if row["gap"] == 0:
        return f", and the losses are equal over {_replicates(row)}"
    return f"; the losses differ by {_percent(row)} over {_replicates(row)}, which is not the recipe's"


def _undecided(row: Row) -> str:
    """No verdict yet: the gap, what its interval covers, and what more would decide."""
    name, unit = _name(row), _unit(row, 2)
    size = f"undecided against {name}: {tokens(row)}{_percent(row)}"
    if row["design"] == "fork" and row["n"] < FEWEST_TRUNKS:
        here = "this one trunk" if row["n"] == 1 else "these two trunks"
        other = "another seed" if row["n"] == 1 else "all trunks"
        known = not math.isnan(row["these_low_pct"])
        span = f" (95 % {_span(row, 'these_low_pct', 'these_high_pct')})" if known else ""
        more = row["more"] if math.isfinite(row["more"]) else FEWEST_TRUNKS - row["n"]
        least = (
            f"a verdict needs at least {more:.0f} more {_unit(row, more)}{duration(more * row['replicate_minutes'])}"
        )
        return f"{size}{span}, which covers the fork points of {here} and says nothing about {other}; {least}."
    if row["n"] == 1:
        cost = duration(row["replicate_minutes"])
        return f"{size} over one seed, which gives no interval; a verdict needs at least 1 more{cost}."
    interval = f" ({_interval(row)})" if math.isfinite(row["half_pct"]) else ""
    size += f"{interval} over {_replicates(row)}{_after(row)}"
    if row["null"]:
        return f"{size}."
    if math.isnan(row["more"]):
        return f"{size}; the same gap in every one, which no test takes."
    if math.isinf(row["more"]):
        return f"{size}; no number of {unit} within reach would decide it."
    if row["maximum"] and row["n"] + row["more"] > row["maximum"]:
        total = f"about {row['needed']:.0f} {unit} in all would decide, and this study has {row['maximum']} at most"
        return f"{size}; {total}."
    more = row["more"]
    return f"{size}; about {more:.0f} more {_unit(row, more)}{duration(more * row['replicate_minutes'])} would decide."


def duration(minutes: float) -> str:
    """ " (7 minutes here)", "" where no run reports its time."""
    if math.isnan(minutes):
        return ""
    return f" ({_rounded(minutes)} here)"


def _rounded(minutes: float) -> str:
    if minutes < 1:
        return "less than a minute"
    return f"{minutes:.0f} minute{'s' * (round(minutes) != 1)}" if minutes < 120 else f"{minutes / 60:.0f} hours"


def _unit(row: Row, count: float) -> str:
    return ("trunk" if row["design"] == "fork" else "seed") + "s" * (count != 1)


def _replicates(row: Row) -> str:
    return f"{row['n']} {_unit(row, row['n'])}"


def digits(half: float) -> int:
    """Decimals of a number in % whose interval reaches `half` to either side."""
    return 3 if 0 < half < FINE else 2


def decimals(half: float) -> int:
    """Decimals of a number in any other unit: two significant digits of `half`, 12 at most; 4 without an interval."""
    return min(12, max(0, 1 - math.floor(math.log10(half)))) if half > 0 else 4


def spec(row: Row, half: float) -> str:
    """The format of a gap, or of an end of its interval, which reaches `half` to either side."""
    return f"+.{decimals(half) if row.get('unit') == PLAIN else digits(half)}f"


def _of_unit(row: Row, number: str) -> str:
    return number if row.get("unit") == PLAIN else f"{number} %"


def _percent(row: Row) -> str:
    return _of_unit(row, format(row["gap_pct"], spec(row, row["half_pct"])))


def _span(row: Row, low: str, high: str) -> str:
    places = spec(row, (row[high] - row[low]) / 2)
    return _of_unit(row, f"{row[low]:{places}} to {row[high]:{places}}")


def _interval(row: Row) -> str:
    return f"95 % interval {_span(row, 'ci_low_pct', 'ci_high_pct')}"


def _narrower(row: Row) -> str:
    """The interval that decides, where the wider one leaves the margin."""
    if max(-row["ci_low_pct"], row["ci_high_pct"]) < row["margin_pct"]:
        return ""
    return f"; the 90 % interval, which decides this, is {_span(row, 'eq_low_pct', 'eq_high_pct')}"
