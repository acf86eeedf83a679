"""The runs that a study adds to a grid, and what its arms are measured against.

The null arm is the baseline again, with initial weights that a harmless perturbation has touched. How far it ends from
the baseline is what the experiment cannot resolve. The perturbation has the size of quantization noise: a smaller one
(1e-5) stays on the baseline's trajectory for long and overstates the resolution.

A fork study has trunks in the baseline's recipe, and every arm forked from each trunk at every point. Where other keys
than the recipe's are swept, each of their values has trunks of its own.

A growing study states some keys before its first run, and keeps them: the level of its verdicts holds for these alone.

In grids of a program of the user's own (job: command) recipes get names, and the command must hold what varies.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hqsweep.config.command import placeholders
from hqsweep.config.jobs import COMMAND, COMPARED
from hqsweep.config.study import FORK_STEPS, NULL_NOISE, ForkStudy, SeedsConfig, StudyConfig, margin_in_tokens
from hqsweep.errors import UserError, nearest
from hqsweep.sweep.grid.arms import Grid, GridPoint, check_size, is_trunk, section, without
from hqsweep.sweep.store.store import RunStore


def name_recipe(config: dict[str, Any]) -> None:
    """Replace the word for {recipe} of a command by its section: its name, of a path the file's name."""
    word = config.get("recipe")
    if config.get("job") == COMMAND and isinstance(word, str | int | float):
        text = str(word)
        name = Path(text).stem if text.endswith((".yaml", ".yml")) else text
        config["recipe"] = {"name": name, "text": text}


def check_commands(points: Sequence[GridPoint], study: StudyConfig) -> None:
    """UserError for commands that give several points of the grid the same words, and for what a study of commands
    cannot be: forks, a null arm that hqsweep makes, a margin in tokens."""
    if points[0].config.get("job") != COMMAND:
        return
    if study.null_arm:
        raise UserError(
            "null_arm: true, but hqsweep knows no weights of a command; add an arm that repeats the baseline, and name"
            " it by judge.null_arm=NAME"
        )
    if study.fork is not None:
        raise UserError("fork: a command has no trunk that hqsweep could fork; leave it out")
    if margin_in_tokens(study.margin) == margin_in_tokens(study.margin):
        raise UserError(f"margin: {study.margin}; hqsweep knows no tokens of a command; give a part, as in 0.25%")
    by_command: dict[Any, list[GridPoint]] = {}
    for point in points:
        by_command.setdefault((point.config.get("command"), point.config.get("log")), []).append(point)
    for (command, _), own in by_command.items():
        _check(command, own, grows=study.seeds.until == "decided")


def _check(command: Any, points: Sequence[GridPoint], *, grows: bool) -> None:
    """Check the points of one command."""
    if not isinstance(command, str):
        raise UserError(
            f"command: got {command!r}; give the words of a program, as in 'python train.py --seed {{seed}}'"
        )
    known = placeholders(command, "command")
    if "arm" not in known and _varies(section(point, "recipe").get("text") for point in points):
        _need("recipe", known)
    if grows or _varies(point.config.get("seed") for point in points):
        _need("seed", known)
    for key in dict.fromkeys(key for point in points for key in section(point, "args")):
        if _varies(section(point, "args").get(key) for point in points):
            _need(key, known)


def _varies(values: Iterable[Any]) -> bool:
    return len(set(map(str, values))) > 1


def _need(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise UserError(
            f"command: {name} varies over the grid, and no {{{name}}} is in it, so that runs would repeat each other;"
            f" pass it on, as in --{name} {{{name}}}"
        )


def with_study(points: list[GridPoint], study: StudyConfig) -> Grid:
    """The grid with the runs that the study adds, and the name of its baseline."""
    why = ""
    if points[0].config.get("job") in COMPARED:
        check_commands(points, study)
        baseline, why = baseline_of(points, study.baseline)
        if study.fork is not None:
            points = fork_points(points, study.fork, baseline, null_arm=study.null_arm)
        elif study.null_arm:
            points = [*points, *null_points(points, baseline)]
        study = study.model_copy(update={"baseline": study.baseline or baseline.variant})
        if study.settles:
            study = study.model_copy(update={"seeds": SeedsConfig(max=_most_trunks(points, study.fork))})
    _check_arms([point for point in points if not is_trunk(point)])
    return Grid(points=points, study=study, baseline_why=why)


def _check_arms(points: Iterable[GridPoint]) -> None:
    """Two recipes under one name would be taken for repetitions of each other."""
    seen: dict[tuple[str, str], GridPoint] = {}  # by arm, seed and point of a fork
    for point in points:
        seed, at = point.config.get("seed"), section(point, "fork").get("at")
        twin = seen.setdefault((point.arm, json.dumps([seed, at])), point)
        if twin is not point:
            raise UserError(
                f"{' '.join(twin.changed)} and {' '.join(point.changed)} are different runs with the same recipe.name"
                f" '{point.arm}'; give each recipe a name of its own"
            )


NULL_ARM = "null_arm"
"""The key of a sweep that asks for it."""
NAME = "null"
NOISE = 0.01
BASELINE = "bf16"


def baseline_of(points: Sequence[GridPoint], wanted: str | None) -> tuple[GridPoint, str]:
    """The first run of the baseline, and why it is that, "" of a grid of one arm: of the arm or recipe of that name,
    by default the arm called baseline, else bf16, else the first recipe that is as its name says, else the first.

    UserError for a name that the grid does not have.
    """
    if wanted is None:
        chosen, why = _usual(points)
        return chosen, why if len({point.arm for point in points}) > 1 else ""
    for name in (lambda p: p.arm, lambda p: p.variant, lambda p: section(p, "recipe").get("name")):
        chosen = next((point for point in points if name(point) == wanted), None)
        if chosen is not None:
            return chosen, "named by the key baseline"
    names = list(dict.fromkeys(point.arm for point in points))
    raise UserError(f"baseline: no arm or recipe '{wanted}'{nearest(wanted, names)}; the grid has {', '.join(names)}")


def _usual(points: Sequence[GridPoint]) -> tuple[GridPoint, str]:
    recipes = [str(section(point, "recipe").get("name")) for point in points]
    whole = [point for point in points if point.whole]
    called = next((point for point in points if point.variant == "baseline"), None)
    exact = next((p for p, name in zip(points, recipes, strict=True) if p.whole and name == BASELINE), None)
    if called is not None:
        return called, "its name says so"
    if exact is not None:
        return exact, "it is not quantized"
    if len({point.variant for point in whole}) == 1 and len(set(recipes)) == 1:
        return whole[0], "the one arm in which nothing is changed"
    return (whole or points)[0], "the first of the grid; baseline=ARM takes another"


def null_points(points: Sequence[GridPoint], baseline: GridPoint) -> list[GridPoint]:
    """The runs that null_arm=true adds: runs of the baseline with model.init_noise=0.01, as recipe and arm "null".

    Where other keys than the recipe's are swept, each of their values gets a null arm of its own.
    """
    return [_perturbed(point) for point in points if point.variant == baseline.variant]


def _perturbed(point: GridPoint) -> GridPoint:
    recipe, model = section(point, "recipe"), section(point, "model")
    noise = f"model.init_noise={NOISE}"
    return replace(
        point,
        config=point.config | {"recipe": recipe | {"name": NAME}, "model": model | {"init_noise": NOISE}},
        overrides=(*without(point.overrides, NULL_ARM), f"{NULL_ARM}=false", f"recipe.name='{NAME}'", noise),
        changed=(*without(point.changed, "recipe"), noise),
        arm=NAME + point.settings,
    )


TRUNK = "trunk"
"""Arm of the trunks, and how their runs' names begin."""


def fork_points(
    points: Sequence[GridPoint], study: ForkStudy, baseline: GridPoint, *, null_arm: bool
) -> list[GridPoint]:
    """The trunks, then the forks of every point of the grid, then the forks of the null arm.

    The config of a fork names its trunk only when that has a name (GridPoint.trunk). UserError for a point beyond the
    trunk, and for train.steps that is no integer.
    """
    check_size(len(points) * len(study.at), "fork.at")
    recipe, trunks, forks = section(baseline, "recipe"), {}, []
    null = [replace(p, arm=NAME + p.settings) for p in points if p.variant == baseline.variant]
    for point, noise in [*((p, 0.0) for p in points), *((p, NULL_NOISE) for p in (null if null_arm else []))]:
        _check_steps(point)
        trunk = None if study.goes_on else _trunk(point, study, recipe)
        if trunk is not None:
            trunk = trunks.setdefault(json.dumps(trunk.config), trunk)
            _check_alone(trunk, trunks.values(), point)
        forks += [_fork(point, study, at, trunk, noise) for at in study.at or [study.file_step]]
    return [*trunks.values(), *forks]


def _check_alone(trunk: GridPoint, trunks: Collection[GridPoint], point: GridPoint) -> None:
    """UserError where another trunk has the same seed and settings, so that arms would not be paired."""
    place = trunk.arm, trunk.config.get("seed")
    if any(other is not trunk and (other.arm, other.config.get("seed")) == place for other in trunks):
        raise UserError(
            f"arms.{point.variant}: it changes what its trunk is trained with; the arms of a fork study go on from one"
            " trunk, so let them differ in recipe alone, and sweep other keys"
        )


def _check_steps(point: GridPoint) -> None:
    """UserError for another value than a number of steps, which every run of a study replaces."""
    steps = section(point, "train").get("steps", 0)
    if type(steps) is not int:
        raise UserError(f"train.steps: got {steps!r}; must be an integer")


def _trunk(point: GridPoint, study: ForkStudy, recipe: dict[str, Any]) -> GridPoint:
    train, last = section(point, "train"), max(study.at)
    longest = train.get("steps", last)
    if last > longest:
        raise UserError(
            f"fork.at: step {last} is beyond the trunk, which has {longest} steps (train.steps); give at most that, or"
            " more of train.steps"
        )
    fork = _section(study, trunk=None)
    unsampled = section(point, "stats") | {"every": 0}
    config = {"recipe": recipe, "train": train | {"steps": last}, "stats": unsampled, "fork": fork}
    changed = tuple(text for text in point.changed if not _key(text).startswith("recipe"))
    return replace(point, config=point.config | config, changed=changed, arm=TRUNK + point.settings)


def _section(study: ForkStudy, **changes: Any) -> dict[str, Any]:
    """The section fork of a run."""
    return (
        study.model_dump(exclude={"rewarm", "end", "until", "max_steps"})
        | {"steps": study.steps or FORK_STEPS}
        | changes
    )


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _fork(point: GridPoint, study: ForkStudy, at: int, trunk: GridPoint | None, noise: float) -> GridPoint:
    steps = study.steps_from(at)
    fork = _section(study, at=[at], steps=steps, trunk=study.trunk if study.goes_on else TRUNK, noise=noise)
    config = {"train": section(point, "train") | {"steps": at + steps + study.decay}, "fork": fork}
    changed, overrides = (*point.changed, f"fork.at={at}"), (*without(point.overrides, "fork.at"), f"fork.at={at}")
    if noise:
        config["recipe"] = section(point, "recipe") | {"name": NAME}
        changed = (*without(point.changed, "recipe"), f"fork.noise={noise}", f"fork.at={at}")
    return replace(point, config=point.config | config, overrides=overrides, changed=changed, trunk=trunk)


def _most_trunks(points: Sequence[GridPoint], study: ForkStudy) -> int:
    """The trunks that fit with their forks into the steps of a study that goes on until it is settled, at most MAXIMUM;
    UserError for fewer than a verdict needs."""
    steps = sum(max(study.at) if is_trunk(point) else study.end - section(point, "fork")["at"][0] for point in points)
    each = math.ceil(steps / len({point.config.get("seed") for point in points}))
    from hqsweep.verdicts.designs import Forks  # scipy takes half a second, which no other study pays
    from hqsweep.verdicts.estimate import MAXIMUM

    most = min(study.max_steps // each, MAXIMUM)
    if most < Forks.first:
        raise UserError(
            f"fork.max_steps: {study.max_steps} steps, but {Forks.first} trunks with their forks, the fewest for a"
            f" verdict, take {Forks.first * each}; give as many at least"
        )
    return most


STATED = ("fork.until", "fork.max_steps", "seeds.until", "seeds.max", "margin", "baseline")
GROWS = ("decided", "settled")


def check_stated(store: RunStore, sweep: str, study: StudyConfig) -> None:
    """UserError where a sweep has begun to run as a growing study, or is to go on as one, and was stated otherwise."""
    if not (store.root / sweep / "sweep.json").is_file():
        return
    now = study.model_dump(mode="json")
    before = StudyConfig().model_dump(mode="json") | store.facts(sweep).get("study", {})
    if not any(_value(each, key) in GROWS for each in (now, before) for key in ("seeds.until", "fork.until")):
        return
    other = next((key for key in STATED if _value(now, key) != _value(before, key)), None)
    if other is None or all(run.seen()["state"] in ("pending", "missing") for run in store.runs(sweep)):
        return
    raise UserError(
        f"{other}: {_value(now, other)}, but '{sweep}' began to run with {other}={_value(before, other)}, and what a"
        f" study that grows until it is decided states before its first run stays; give that, or another sweep=NAME"
    )


def _value(study: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; of a section or key that a study lacks None, of fork.until fixed."""
    for part in key.split("."):
        study = (study or {}).get(part)
    return "fixed" if study is None and key == "fork.until" else study
