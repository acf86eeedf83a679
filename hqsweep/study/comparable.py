"""Which earlier studies a plan may use: trained ones with a comparable model, data, tokens and design. The others say
nothing about the planned study, and are named with the difference.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hqsweep.config.jobs import COMMAND
from hqsweep.errors import UserError
from hqsweep.report.compare.frames import FORK, WHOLE
from hqsweep.study.device import device_of
from hqsweep.study.noise import model_of, parameters
from hqsweep.study.sequential import Plan
from hqsweep.sweep.grid.arms import is_trunk

DESIGNS = {FORK: "forks", WHOLE: "whole runs"}
"""Design of a comparison -> its name in hqsweep.verdicts.plan."""
REACH = 4
"""The ratio of two numbers of parameters or tokens beyond which studies are not comparable."""
SAME = 1.05
"""The ratio up to which two numbers of tokens count as one."""
SHOWN = 2
"""The number of studies of a design that are named as not comparable; the others are counted."""

Row = Mapping[str, Any]
"""A row of study.noise."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The planned study. tokens, and replicate by design, count tokens as a row of study.noise does. fork_tokens: the
    tokens of one arm's forks, None for whole runs. on_gpu: whether it runs on a GPU. ends_together: whether its forks
    end together (fork.end), whose gap of a whole run is noisier than a mean over points."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    data_hash: str
    params: int
    on_gpu: bool
    tokens: int
    fork_tokens: int | None
    ends_together: bool
    names: frozenset[str]
    arms: int
    null: bool
    maximum: int | None
    margin: float | str
    settles: bool
    replicate: Mapping[str, int]


def wanted_of(plan: Plan) -> Wanted | None:
    """The study of a plan; None for a model whose size is not known."""
    if plan.first.job == COMMAND:
        raise UserError(
            f"conf={plan.conf}: hqsweep knows no noise of a command; `hqsweep plan --from runs/SWEEP` plans by its runs"
        )
    if not hasattr(plan.first, "train"):
        raise UserError(f"conf={plan.conf}: a {plan.first.job} job compares no recipes; give a convergence sweep")
    pairs = [pair for pair in zip(plan.points, plan.configs, strict=True) if not is_trunk(pair[0])]
    names = list(dict.fromkeys(point.arm for point, _ in pairs))
    tested = len(names) - 1 - plan.study.null_arm
    first, fork = pairs[0][1], plan.study.fork
    if (params := parameters(first)) is None:
        return None
    step, whole, replicate, forked = first.train.batch * first.train.context, first.train.steps, {}, None
    if fork:
        starts = {config.start for _, config in pairs}
        lengths = [fork.steps_from(at) + fork.decay for at in starts]
        whole = (sum(starts) + sum(lengths)) // len(starts)
        forked = sum(lengths) * step
        replicate[FORK] = (0 if fork.goes_on else max(starts)) * step + len(names) * forked
    replicate[WHOLE] = len(names) * whole * step
    return Wanted(
        model=model_of(first),
        data=first.data.model_dump(mode="json"), data_hash=plan.data[0].data.hash,
        params=params, tokens=whole * step, fork_tokens=forked,
        on_gpu=device_of(first).on_gpu,
        ends_together=bool(fork and fork.end), names=frozenset(names), arms=tested, null=plan.study.null_arm,
        replicate=replicate,
        maximum=plan.study.maximum, margin=plan.study.margin, settles=plan.study.settles,
    )  # fmt: skip


def same_study(wanted: Wanted, row: Row) -> bool:
    """Whether both are of one model and the same data."""
    return (row["model"], row.get("data_hash")) == (wanted.model, wanted.data_hash)


def same_device(wanted: Wanted, row: Row) -> bool:
    """Whether both ran on a CPU, or both on a GPU."""
    return wanted.on_gpu == (row["device"] != "cpu")


def comparable(wanted: Wanted, design: str, rows: Iterable[Row]) -> list[Row]:
    """The comparable rows of a design, the nearest first: the same model and data, then the same kind of device, then
    by parameters and tokens."""
    fits = [row for row in rows if row["design"] == design and not why_far(wanted, row)]
    return sorted(fits, key=lambda row: (not same_study(wanted, row), not same_device(wanted, row), _far(wanted, row)))


def why_far(wanted: Wanted, row: Row) -> list[str]:
    """What makes a row no guide for the planned study, in words; [] where it is comparable: trained, of the same kind
    of model and source of data, and within REACH in parameters and tokens, of forks also in the tokens of an arm."""
    why = []
    if row.get("trained") is None:
        why.append("it does not say whether its runs were trained, which `hqsweep compare` measures again")
    elif not row["trained"]:
        why.append("its runs are barely trained")
    if _kind(row["model"]) != _kind(wanted.model):
        why.append("another kind of model")
    why += _ratio(row["params"], wanted.params, "parameters")
    if _source(row["data"]) != _source(wanted.data):
        why.append(f"other data ({row['data'].get('source')})")
    why += _ratio(row["tokens"], wanted.tokens, "tokens")
    if row["design"] == FORK:
        why += _ratio(row["run_tokens"], wanted.fork_tokens or row["run_tokens"], "tokens after the fork")
        why += [] if any(not arm["null"] for arm in row["arms"].values()) else ["it has no arm but the null arm"]
        together = bool(row.get("ends_together"))
        if together != wanted.ends_together:
            why.append("its forks end together (fork.end)" if together else "its forks do not end together (fork.end)")
    return why


def far_lines(wanted: Wanted, rows: Sequence[Row]) -> list[str]:
    """A line for each design on its nearest rows that are not used, and why; designs that lack a comparable row come
    first."""
    lines: dict[str, bool] = {}
    for design, name in DESIGNS.items():
        far = [row for row in rows if row["design"] == design and why_far(wanted, row)]
        far.sort(key=lambda row: (len(why_far(wanted, row)), _far(wanted, row)))
        said = [f"{study_of(row)}: {', '.join(why_far(wanted, row))}" for row in far[:SHOWN]]
        said += [f"{len(far) - SHOWN} more"] if len(far) > SHOWN else []
        if said:
            lines[f"{name}: not used: {'; '.join(said)}"] = bool(comparable(wanted, design, rows))
    return sorted(lines, key=lines.get)


def study_of(row: Row) -> str:
    """The study in words: its sweeps, replicates, device and date."""
    unit = "trunks" if row["design"] == FORK else "seeds"
    return f"{'+'.join(row['sweeps'])} ({row['replicates']} {unit} on {row['device']}, {row['date']})"


def near_tokens(wanted: Wanted, row: Row) -> bool:
    """Whether both have as many tokens, or nearly so."""
    return max(row["tokens"], wanted.tokens) <= SAME * min(row["tokens"], wanted.tokens)


def _far(wanted: Wanted, row: Row) -> float:
    return abs(math.log(row["params"] / wanted.params)) + abs(math.log(row["tokens"] / wanted.tokens))


def _kind(model: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two models must have in common: whose they are, the function that builds them, and experts."""
    return model.get("kind"), model.get("target"), bool(model.get("experts"))


def _source(data: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two data sections must have in common."""
    source = data.get("source")
    return source, data.get("path"), data.get("markov") if source == "markov" else None


def _ratio(own: float, wanted: float, what: str) -> list[str]:
    """The ratio of a number to the plan's, in words; [] within REACH."""
    ratio = own / wanted
    if 1 / REACH <= ratio <= REACH:
        return []
    return [f"{max(ratio, 1 / ratio):.3g} times {'as many' if ratio > 1 else 'fewer'} {what}"]
