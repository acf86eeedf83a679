"""The cost of a study before it runs: the replicates and minutes that resolve a gap, from the noise that earlier
studies measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqsweep.errors import Damaged, UserError
from hqsweep.report.frames import FORK, WHOLE
from hqsweep.study.noise import FILE, model_of, parameters
from hqsweep.study.sequential import Plan
from hqsweep.sweep.compose import PACKAGED
from hqsweep.sweep.documents import check_document
from hqsweep.sweep.files import read_rows
from hqsweep.sweep.point import is_trunk
from hqsweep.train.build import pick_device
from hqsweep.verdicts import plan as power

DESIGNS = {FORK: "forks", WHOLE: "whole runs"}
"""Design of a comparison -> its name in hqsweep.verdicts.plan."""
COUNTS = ("params", "tokens", "run_tokens", "arms_run", "seconds")
ROW: dict[str, Any] = dict.fromkeys((*COUNTS, "trunk_tokens", "sd_pct"), float) | {
    "model": dict, "data": dict, "design": str, "device": str, "arms": dict,
}  # fmt: skip
"""The fields that a forecast reads of a row of the registry."""
ARM: dict[str, Any] = {"null": bool, "sd_pct": float}
"""The fields that it reads of each of a row's arms."""
SAME = 1.05
"""The ratio up to which two numbers of tokens count as one."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One design of a study of `arms` arms under test.

    maximum       that is stated, of a study that grows until it is decided; more replicates are not to be had
    replicates    seeds, or trunks, with which a gap of the asked size is called worse (or better) in 4 of 5 studies;
                  inf beyond 1000
    minutes       they take together, on the device of that study; inf with them
    half_width    % of the baseline's loss: half of the 95 % interval, joint over the arms, that they give
    sd_pct        of one replicate's gap, from the study that `basis` names in words
    estimate      whether that study was of another model or other data
    """

    design: str
    arms: int
    maximum: int | None
    replicates: float
    minutes: float
    half_width: float
    sd_pct: float
    basis: str
    estimate: bool


def registry(runs_dir: Path) -> list[dict[str, Any]]:
    """The rows of study.noise: those measured here, then those that come with the package.

    UserError where there are none, Damaged for a row that no comparison has written.
    """
    rows = [*_written(runs_dir / FILE), *read_rows(Path(str(PACKAGED)) / FILE)]
    if not rows:
        raise UserError(
            f"no study has measured its noise yet ({runs_dir / FILE} is not there); `hqsweep run conf=fork`, then"
            " `hqsweep compare fork`, measures that of forks, and any sweep of two seeds that of whole runs"
        )
    return rows


def _written(path: Path) -> list[dict[str, Any]]:
    """The rows of a registry. Raises Damaged for one that lacks a field that a forecast reads, or has it of another
    kind."""
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        at, remedy = f"{path}: line {number}", "delete that line; hqsweep compare measures it again"
        check_document(Path(at), row, ROW, ROW, remedy)
        for arm in row["arms"].values() or [None]:
            check_document(Path(at), arm, ARM, ARM, remedy)
        if min(row[name] for name in COUNTS) <= 0:
            raise Damaged(at, f"has a number of {', '.join(COUNTS)} that is not above 0", remedy)
    return rows


def forecasts(plan: Plan, resolve: float, rows: Sequence[Mapping[str, Any]]) -> list[Forecast]:
    """A forecast for each design that has a row, the cheapest first; `resolve` in % of the baseline's loss.

    UserError for a plan that compares nothing.
    """
    wanted = _wanted(plan)
    if wanted is None:
        raise UserError(
            f"conf={plan.conf}: a Python function builds the model, which only `hqsweep run` imports, so its size is"
            " not known, nor which study is like it"
        )
    if wanted.arms < 1:
        raise UserError(f"conf={plan.conf}: one arm, and no other to measure; add recipes, as in recipe=bf16,mxfp8")
    designs = [
        _forecast(wanted, name, nearest, resolve) for name in DESIGNS if (nearest := _nearest(wanted, name, rows))
    ]
    return sorted(designs, key=lambda forecast: forecast.minutes)


def pace(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> tuple[float, str] | None:
    """(the seconds that a token of the plan's model takes, at as many runs at a time as that study had; that study, in
    words). It is a study of the other design where there is none of this one; None where none was on this kind of
    device."""
    wanted = _wanted(plan)
    if wanted is None:
        return None
    own = sorted(DESIGNS, key=lambda design: (design == FORK) != bool(plan.study.fork))
    near = [row for design in own if (row := _nearest(wanted, design, rows)) and _same_device(wanted, row)]
    return (_a_token(near[0]) * wanted.params / near[0]["params"], _basis(wanted, near[0])) if near else None


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The planned study; tokens and per-replicate tokens as in a row of study.noise, by design; whether it runs on a
    GPU."""

    model: Mapping[str, Any]
    data_hash: str
    params: int
    on_gpu: bool
    tokens: int
    names: frozenset[str]
    arms: int
    null: bool
    maximum: int | None
    replicate: Mapping[str, int]


def _wanted(plan: Plan) -> _Wanted | None:
    """The study of a plan; None for a model whose size is not known."""
    if not hasattr(plan.first, "train"):
        raise UserError(f"conf={plan.conf}: a {plan.first.job} job compares no recipes; give a convergence sweep")
    pairs = [pair for pair in zip(plan.points, plan.configs, strict=True) if not is_trunk(pair[0])]
    names = list(dict.fromkeys(point.arm for point, _ in pairs))
    tested = len(names) - 1 - plan.study.null_arm
    first, fork = pairs[0][1], plan.study.fork
    if (params := parameters(first)) is None:
        return None
    step, whole, replicate = first.train.batch * first.train.context, first.train.steps, {}
    if fork:
        starts = {config.start for _, config in pairs}
        whole = sum(starts) // len(starts) + fork.steps + fork.decay
        trunk = 0 if fork.goes_on else max(starts)
        replicate[FORK] = (trunk + len(names) * len(starts) * (fork.steps + fork.decay)) * step
    replicate[WHOLE] = len(names) * whole * step
    return _Wanted(
        model=model_of(first),
        data_hash=plan.data[0].data.hash, params=params, tokens=whole * step,
        on_gpu=pick_device(first.train.device).type == "cuda",
        names=frozenset(names), arms=tested, null=plan.study.null_arm, replicate=replicate,
        maximum=plan.study.seeds.max if plan.study.seeds.until == "decided" else None,
    )  # fmt: skip


def _same(wanted: _Wanted, row: Mapping[str, Any]) -> bool:
    return (row["model"], row.get("data_hash")) == (wanted.model, wanted.data_hash)


def _same_device(wanted: _Wanted, row: Mapping[str, Any]) -> bool:
    """Whether both ran on a CPU, or both on a GPU."""
    return wanted.on_gpu == (row["device"] != "cpu")


def _nearest(wanted: _Wanted, design: str, rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of a design with the same model and data, or else one from the same kind of device, the nearest in
    parameters and tokens."""

    def distance(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
        params, tokens = abs(math.log(row["params"] / wanted.params)), abs(math.log(row["tokens"] / wanted.tokens))
        return not _same(wanted, row), not _same_device(wanted, row), params + tokens

    return min((row for row in rows if row["design"] == design), key=distance, default=None)


def _forecast(wanted: _Wanted, design: str, row: Mapping[str, Any], resolve: float) -> Forecast:
    name, sd = DESIGNS[design], _sd(wanted, design, row)
    count = power.replicates(name, sd, wanted.arms, gap=resolve, maximum=wanted.maximum, null=wanted.null)
    half = math.nan
    if math.isfinite(count):
        half = power.half_width(name, sd, wanted.arms, int(count), wanted.null, wanted.maximum)
    return Forecast(
        design=name, arms=wanted.arms, maximum=wanted.maximum, replicates=count,
        minutes=count * _seconds(wanted, design, row) / 60,
        half_width=half, sd_pct=sd, basis=_basis(wanted, row), estimate=not _same(wanted, row),
    )  # fmt: skip


def _sd(wanted: _Wanted, design: str, row: Mapping[str, Any]) -> float:
    """The standard deviation of one replicate's gap in %. Arms of whole runs differ little, and are taken together; the
    loudest arm of forks has ten times that of the quietest, and decides. A gap of whole runs is to the mean of the
    controls, one or two."""
    if design == FORK:
        tested = {arm: noise["sd_pct"] for arm, noise in row["arms"].items() if not noise["null"]}
        return max([sd for arm, sd in tested.items() if arm in wanted.names] or tested.values())
    before = 1 + any(noise["null"] for noise in row["arms"].values())
    return row["sd_pct"] * math.sqrt((1 + 1 / (1 + wanted.null)) / (1 + 1 / before))


def _seconds(wanted: _Wanted, design: str, row: Mapping[str, Any]) -> float:
    """The seconds of one replicate: those of the row for as many tokens, times the ratio of parameters."""
    tokens = wanted.replicate.get(design) or row["trunk_tokens"] + len(wanted.names) * row["run_tokens"]
    return _a_token(row) * tokens * wanted.params / row["params"]


def _a_token(row: Mapping[str, Any]) -> float:
    """The seconds that a token took in the study of the row."""
    return row["seconds"] / (row["trunk_tokens"] + row["arms_run"] * row["run_tokens"])


def _basis(wanted: _Wanted, row: Mapping[str, Any]) -> str:
    """The study that the noise comes from, in words."""
    study = f"{'+'.join(row['sweeps'])} ({row['replicates']} {'trunks' if row['design'] == FORK else 'seeds'} on "
    study += f"{row['device']}, {row['date']})"
    near = max(row["tokens"], wanted.tokens) <= SAME * min(row["tokens"], wanted.tokens)
    tokens = "" if near else f", at {_short(row['tokens'])} tokens where this is at {_short(wanted.tokens)}"
    tokens += "" if _same_device(wanted, row) else "; minutes are those of that device, not of this machine"
    if _same(wanted, row):
        return f"{study}: the same model and data{tokens}"
    sizes = f"{_short(row['params'])} parameters where this has {_short(wanted.params)}"
    return f"{study}: an estimate, of another model or other data, {sizes}{tokens}"


def _short(count: float) -> str:
    """The count with three digits, such as 10.6M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
