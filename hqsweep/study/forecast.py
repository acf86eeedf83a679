"""The cost of a study before it runs: the replicates and minutes that resolve a gap, from the noise that comparable
studies measured; and the state of each run of a plan with the minutes that are ahead.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqsweep.config.job import Config
from hqsweep.config.study import margin_in_tokens
from hqsweep.errors import Damaged, UserError
from hqsweep.host import usable_cpus
from hqsweep.jobs.pace import Pace as StepPace
from hqsweep.jobs.pace import evaluations, measure
from hqsweep.report.compare.frames import FORK
from hqsweep.study.comparable import (
    DESIGNS,
    Row,
    Wanted,
    comparable,
    far_lines,
    near_tokens,
    same_device,
    same_study,
    study_of,
    wanted_of,
)
from hqsweep.study.device import RunDevice, device_of
from hqsweep.study.noise import FILE
from hqsweep.study.sequential import Plan
from hqsweep.sweep.engine.process import slots
from hqsweep.sweep.grid.compose import PACKAGED
from hqsweep.sweep.store.documents import Document, Mapped, Number, Text, check_document
from hqsweep.sweep.store.files import read_rows
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.train.record import checkpoints, record_path
from hqsweep.verdicts import plan as power

COUNTS = ("params", "tokens", "run_tokens", "arms_run", "seconds")


class Measured(Document):
    """The fields that a forecast reads of a row of the registry."""

    params: Number
    tokens: Number
    run_tokens: Number
    arms_run: Number
    seconds: Number
    trunk_tokens: Number
    sd_pct: Number
    model: Mapped
    data: Mapped
    design: Text
    device: Text
    arms: Mapped


class Arm(Document):
    """The fields that it reads of each arm of a row."""

    null: bool
    sd_pct: Number


REMEDY = "delete that line; hqsweep compare measures it again"
MEASURE = (
    "run a sweep of this model and data with three seeds (`seed=0,1,2`), and `hqsweep compare` keeps what it measures"
)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One design of a study of `arms` arms under test.

    maximum       that is stated, of a study that grows until it is decided; more replicates are not to be had
    replicates    seeds, or trunks, with which a gap of the asked size is called worse (or better) in 4 of 5 studies;
                  inf beyond 1000
    minutes       they take together, on the device of that study; inf with them
    replicates_low, replicates_high, minutes_low, minutes_high
                  the same by each of the `studies` comparable studies: the least and the greatest
    half_width    % of the baseline's loss: half of the 95 % interval, joint over the arms, that they give
    sd_pct        of one replicate's gap, from the study that `basis` names in words, the nearest one
    estimate      whether that study was of another model or other data
    margin_pct, to_settle
                  of forks with fork.until=settled: the margin in % of the loss, and the trunks after which 4 of 5
                  studies know every gap to it (inf beyond the maximum); NaN for others, and for a margin in tokens
                  where that study did not measure how fast the loss falls
    """

    design: str
    arms: int
    maximum: int | None
    replicates: float
    minutes: float
    replicates_low: float
    replicates_high: float
    minutes_low: float
    minutes_high: float
    studies: int
    half_width: float
    sd_pct: float
    basis: str
    estimate: bool
    margin_pct: float = math.nan
    to_settle: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The seconds that a token of a plan's model takes, at as many runs at a time as a study had: by the nearest one,
    which `basis` names in words, and the least and the greatest by all comparable ones."""

    seconds: float
    low: float
    high: float
    basis: str


def registry(runs_dir: Path) -> list[dict[str, Any]]:
    """The rows of study.noise: those measured here, then those that come with the package.

    UserError where there are none, Damaged for a row that no comparison has written.
    """
    rows = [*written(runs_dir / FILE), *read_rows(Path(str(PACKAGED)) / FILE)]
    if not rows:
        raise UserError(
            f"no study has measured its noise yet ({runs_dir / FILE} is not there); `hqsweep run conf=fork`, then"
            " `hqsweep compare fork`, measures that of forks, and any sweep of two seeds that of whole runs"
        )
    return rows


def written(path: Path) -> list[dict[str, Any]]:
    """The rows of a registry. Raises Damaged for one that lacks a field that a forecast reads, or has it of another
    kind."""
    rows = read_rows(path, REMEDY)
    for number, row in enumerate(rows, 1):
        at = f"{path}: line {number}"
        check_document(Path(at), row, Measured, remedy=REMEDY)
        for arm in row["arms"].values() or [None]:
            check_document(Path(at), arm, Arm, remedy=REMEDY)
        if min(row[name] for name in COUNTS) <= 0:
            raise Damaged(at, f"has a number of {', '.join(COUNTS)} that is not above 0", REMEDY)
    return rows


def forecasts(plan: Plan, resolve: float, rows: Sequence[Row]) -> list[Forecast]:
    """A forecast for each design that has a comparable row, the cheapest first; `resolve` in % of the baseline's loss.

    UserError for a plan that compares nothing, and where no row is comparable.
    """
    wanted = _asked(plan)
    near = {design: comparable(wanted, design, rows) for design in DESIGNS}
    designs = [_forecast(wanted, design, found, resolve) for design, found in near.items() if found]
    if not designs:
        raise UserError(
            f"conf={plan.conf}: no study of a comparable model, data and number of tokens has measured its noise;"
            f" {MEASURE}; {'; '.join(far_lines(wanted, rows))}"
        )
    return sorted(designs, key=lambda forecast: forecast.minutes)


def not_used(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """A line for each of the nearest studies that a forecast of the plan does not use, and why."""
    return far_lines(_asked(plan), rows)


def pace(plan: Plan, rows: Sequence[Row]) -> Pace | str:
    """The pace of the plan's model by comparable studies on this kind of device; studies of the other design only where
    there is none of its own. Without any, why there is none, in words."""
    wanted = wanted_of(plan)
    if wanted is None:
        return "a Python function builds the model, whose size is not known here"
    for design in sorted(DESIGNS, key=lambda design: (design == FORK) != bool(plan.study.fork)):
        near = [row for row in comparable(wanted, design, rows) if same_device(wanted, row)]
        if near:
            seconds = [_a_token(row) * wanted.params / row["params"] for row in near]
            return Pace(seconds=seconds[0], low=min(seconds), high=max(seconds), basis=_basis(wanted, near[0]))
    far = far_lines(wanted, [row for row in rows if same_device(wanted, row)])
    return "; ".join(["no comparable study on this kind of device was compared", *far])


def _asked(plan: Plan) -> Wanted:
    """The study of a plan; UserError where it compares nothing, or its size is unknown."""
    wanted = wanted_of(plan)
    if wanted is None:
        raise UserError(
            f"conf={plan.conf}: a Python function builds the model, which only `hqsweep run` imports, so its size is"
            " not known, nor which study is like it"
        )
    if wanted.arms < 1:
        raise UserError(f"conf={plan.conf}: one arm, and no other to measure; add recipes, as in recipe=bf16,mxfp8")
    return wanted


def _forecast(wanted: Wanted, design: str, rows: Sequence[Row], resolve: float) -> Forecast:
    """By the first of the rows; all of them give the range. Minutes come from rows on this kind of device, where
    there is one."""
    name, row = DESIGNS[design], rows[0]
    counts = [_replicates(wanted, design, each, resolve) for each in rows]
    here = [same_device(wanted, each) for each in rows]
    minutes = [count * _seconds(wanted, design, each) / 60 for count, each in zip(counts, rows, strict=True)]
    timed = [each for each, fits in zip(minutes, here, strict=True) if fits] or minutes
    count, sd = counts[0], _sd(wanted, design, row)
    half = math.nan
    if math.isfinite(count):
        half = power.half_width(name, sd, wanted.arms, int(count), wanted.null, wanted.maximum)
    margin = _margin(wanted, row) if wanted.settles and design == FORK else math.nan
    return Forecast(
        margin_pct=margin,
        to_settle=margin if math.isnan(margin) else power.to_settle(sd, wanted.arms, margin, wanted.maximum),
        design=name, arms=wanted.arms, maximum=wanted.maximum, replicates=count, minutes=minutes[0],
        replicates_low=min(counts), replicates_high=max(counts),
        minutes_low=min(timed), minutes_high=max(timed), studies=len(rows),
        half_width=half, sd_pct=sd, basis=_basis(wanted, row), estimate=not same_study(wanted, row),
    )  # fmt: skip


def _margin(wanted: Wanted, row: Row) -> float:
    """The margin in % of the loss; NaN for one in tokens where the row has no slope that turns it into one."""
    tokens = margin_in_tokens(wanted.margin)
    if math.isnan(tokens):
        return float(wanted.margin)
    slope = row.get("slope_pct")
    return slope * math.log2(1 + tokens / 100) if isinstance(slope, float) and slope > 0 else math.nan


def _replicates(wanted: Wanted, design: str, row: Row, resolve: float) -> float:
    sd = _sd(wanted, design, row)
    return power.replicates(DESIGNS[design], sd, wanted.arms, gap=resolve, maximum=wanted.maximum, null=wanted.null)


def _sd(wanted: Wanted, design: str, row: Row) -> float:
    """The standard deviation of one replicate's gap in %. Arms of whole runs differ little, and are taken together; the
    loudest arm of forks has ten times the noise of the quietest, and decides. A gap of whole runs is to the mean of the
    controls, one or two."""
    if design == FORK:
        tested = {arm: noise["sd_pct"] for arm, noise in row["arms"].items() if not noise["null"]}
        return max([sd for arm, sd in tested.items() if arm in wanted.names] or tested.values())
    before = 1 + any(noise["null"] for noise in row["arms"].values())
    return row["sd_pct"] * math.sqrt((1 + 1 / (1 + wanted.null)) / (1 + 1 / before))


def _seconds(wanted: Wanted, design: str, row: Row) -> float:
    """The seconds of one replicate: the row's seconds for as many tokens, times the ratio of parameters."""
    tokens = wanted.replicate.get(design) or row["trunk_tokens"] + len(wanted.names) * row["run_tokens"]
    return _a_token(row) * tokens * wanted.params / row["params"]


def _a_token(row: Row) -> float:
    """The seconds that a token took in the study of the row."""
    return row["seconds"] / (row["trunk_tokens"] + row["arms_run"] * row["run_tokens"])


def _basis(wanted: Wanted, row: Row) -> str:
    """The study that the noise comes from, in words."""
    tokens = f", at {_short(row['tokens'])} tokens where this is at {_short(wanted.tokens)}"
    tokens = "" if near_tokens(wanted, row) else tokens
    tokens += "" if same_device(wanted, row) else "; minutes are those of that device, not of this machine"
    if same_study(wanted, row):
        return f"{study_of(row)}: the same model and data{tokens}"
    sizes = f"{_short(row['params'])} parameters where this has {_short(wanted.params)}"
    return f"{study_of(row)}: an estimate, of another model or other data, {sizes}{tokens}"


def _short(count: float) -> str:
    """The count with three digits, such as 10.6M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


Kind = tuple[str, ...]
"""The job or design of a run, the size of its steps, and, where it is known more closely, its arm."""
OF_A_STEP = ("batch", "microbatches", "context", "dtype", "device", "recompute", "compile", "parallel")
"""The keys of `train` that decide how long a step takes."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """rows: the plan's, each with `state` (finished, running, or what is to be done) and the `minutes` that it
    still needs (None: not known). minutes, most: of all runs to do, at as many at a time as the
    plan has workers, the least and the greatest that comparable studies say; None where nothing says how long they
    take. basis: the source of the minutes, in words. device: what will train them, and how that is known; "" for
    another job."""

    rows: tuple[Mapping[str, Any], ...]
    to_do: int
    minutes: float | None
    most: float | None
    basis: str
    device: str = ""


def outlook(
    plan: Plan, rows: Sequence[Mapping[str, Any]], *, force: bool = False, timed: Mapping[str, StepPace] | None = None
) -> Outlook:
    """The outlook of a plan whose runs are `rows`; force: whether finished ones are repeated; timed: what a step takes,
    as measured now."""
    first = plan.first
    folder = Path(first.runs_dir) / first.sweep
    device = device_of(first) if first.job == "convergence" else None
    seconds = _known_seconds(RunStore(Path(first.runs_dir)), first.sweep, device)
    seen, left = [], []
    for row, config in zip(rows, plan.configs, strict=True):
        run = RunDir(folder / row["run"])
        state, done = _state(run, force)
        steps = 0 if state == "finished" else _steps(config) - done
        kind = _kind(config)
        size = _size(row["config"])
        a_step = seconds.get((kind, size, row["arm"]), seconds.get((kind, size)))
        if timed is not None and (found := timed.get(pace_key(config))) is not None:
            a_step = found.seconds * (1 + evaluations(config) / max(_steps(config), 1))
        minutes = None if a_step is None else steps * a_step / 60
        seen.append({**row, "state": state, "minutes": minutes})
        left.append((config, steps))
    to_do = sum(steps > 0 for _, steps in left)
    low, high, basis = _all_minutes(plan, seen, left)
    if timed is not None and low is not None:
        basis = _measured_basis(timed)
        low, high = (minutes + _starts(timed, to_do, plan) for minutes in (low, high))
    said = "" if device is None else str(device)
    return Outlook(rows=tuple(seen), to_do=to_do, minutes=low, most=high, basis=basis, device=said)


Timed = Mapping[str, StepPace]
"""pace_key() of a run -> what a step takes."""


def pace_key(config: Config) -> str:
    """What decides how long a step takes: the recipe, the model and the training without its length."""
    dump = config.model_dump(mode="json")
    return json.dumps([dump.get("recipe"), _size(dump)], sort_keys=True)


def time_steps(plan: Plan, say: Callable[[str], None]) -> dict[str, StepPace]:
    """The pace of each kind of run that is to be done, measured one after another on this machine. `say` gets a line
    for each. UserError where Slurm would train on another machine, or nothing trains."""
    if plan.first.job != "convergence" or plan.first.engine.kind != "local":
        raise UserError("--measure: times trainings on this machine, and this sweep has none here; leave it out")
    if plan.first.train.parallel.world > 1:
        raise UserError("--measure: times runs of one process; leave it out for train.parallel")
    kinds = {pace_key(config): config for config in plan.configs}
    threads, timed = max(1, usable_cpus() // _at_a_time(plan)), {}
    for number, (key, config) in enumerate(kinds.items(), 1):
        named = config.model_dump(mode="json")
        timed[key] = found = measure(named, threads=threads, imports=plan.imports)
        say(
            f"measured {number} of {len(kinds)}: {config.recipe.name}, {found.seconds:.3g} s a step,"
            f" {found.tokens_per_s:,.0f} tokens/s after {found.start:.0f} s of loading, on {found.device}"
        )
    return timed


def _measured_basis(timed: Timed) -> str:
    first = next(iter(timed.values()))
    return f"by {first.steps} steps of each kind of run, measured now on {first.device}; one at a time"


def _starts(timed: Timed, to_do: int, plan: Plan) -> float:
    """The minutes until the first step of all runs. Only the first run of a worker loads everything."""
    start = max(found.start for found in timed.values())
    return start * min(len(timed), to_do) / _at_a_time(plan) / 60


def _at_a_time(plan: Plan) -> int:
    """The runs at a time as far as the config says; auto counts as one."""
    engine = plan.first.engine
    workers = None if engine.workers == "auto" else engine.workers
    return len(slots(workers, engine.runs_per_gpu)) if engine.kind == "local" else workers or 1


def _state(run: RunDir, force: bool) -> tuple[str, int]:
    """What is to be done with a run, and the number of its own steps that are done."""
    status = run.seen()
    state = status["state"]
    if state == "finished" and not force:
        return "finished", 0
    if force or state in ("missing", "damaged"):
        return "to do" if state == "missing" else "to do again", 0
    last = max((step for step, path in checkpoints(run.checkpoint).items() if record_path(path).exists()), default=0)
    if state == "running":
        return "running", last
    return (f"to do from step {last}" if last else "to do"), last


def _kind(config: Config) -> str:
    fork = getattr(config, "fork", None)
    return config.job if fork is None else "trunk" if fork.is_trunk else "fork"


def _steps(config: Config) -> int:
    """The steps of the run itself; 1 for a job that has none."""
    return config.own_steps if hasattr(config, "own_steps") else 1


def _known_seconds(store: RunStore, sweep: str, device: RunDevice | None) -> dict[Kind, float]:
    """Kind -> the seconds that a step took in the finished runs of the sweep, on this kind of device alone."""
    seconds: defaultdict[Kind, list[float]] = defaultdict(list)
    for run in _listed(store, sweep):
        try:
            status, manifest = run.status(), run.manifest()
            if status["state"] != "finished":
                continue
            size = _size(run.config())
            if device is not None and device.on_gpu != (manifest.get("device", device.name) != "cpu"):
                continue
        except (Damaged, KeyError, TypeError):
            continue
        job, point, progress = manifest["job"], manifest.get("point"), status["progress"]
        kind = "fork" if point is not None else "trunk" if run.name.startswith("trunk-") else job
        steps = progress["steps"] - (point or 0) if job == "convergence" and progress else 1
        for key in ((kind, size, manifest["arm"]), (kind, size)):
            seconds[key].append(status["seconds"] / max(steps, 1))
    return {key: sum(values) / len(values) for key, values in seconds.items()}


def _size(config: Mapping[str, Any]) -> str:
    """What decides, beside the recipe, how long a step takes: the model, without its noise, and the train section
    without the keys of its length and its learning rate."""
    model = {key: value for key, value in (config.get("model") or {}).items() if key != "init_noise"}
    train = config.get("train") or {}
    return json.dumps([model, {key: train.get(key) for key in OF_A_STEP}], sort_keys=True)


def _listed(store: RunStore, sweep: str) -> list[RunDir]:
    try:
        return store.runs(sweep)
    except Damaged:  # a list that the next run makes again
        return []


def _all_minutes(
    plan: Plan, rows: Sequence[Mapping[str, Any]], left: Sequence[tuple[Config, int]]
) -> tuple[float | None, float | None, str]:
    """The least and the greatest number of minutes of all that is to be done, and their source."""
    known = [row["minutes"] for row in rows if row["state"] != "finished"]
    if all(minutes is not None for minutes in known):
        minutes = math.fsum(known) / max(min(_at_a_time(plan), len(known)), 1)
        return minutes, minutes, "by the finished runs of this sweep"
    try:
        measured = pace(plan, registry(Path(plan.first.runs_dir)))
    except Damaged as fault:
        return None, None, f"no study is read, for {fault}"
    except UserError:  # of a job that trains no model
        measured = "no study is of such a job"
    if isinstance(measured, str):
        return None, None, f"no run like these has finished in this sweep, and {measured}"
    tokens = sum(steps * config.train.batch * config.train.context for config, steps in left)
    return tokens * measured.low / 60, tokens * measured.high / 60, f"by {measured.basis}"
