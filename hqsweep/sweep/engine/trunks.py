"""Forks and their starts.

A start is a trunk of the same sweep, by the name of its run, or a checkpoint of an earlier run. A checkpoint is known
by the hash of its file, and its config is checked against the fork's.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hqsweep.checkpoints.inspect import Checkpoint, inspect_checkpoint
from hqsweep.checkpoints.weights import check_fits
from hqsweep.config.job import Config, ConvergenceConfig, parse
from hqsweep.config.model import HFModelConfig, ModelConfig
from hqsweep.config.study import ForkStudy
from hqsweep.errors import UserError
from hqsweep.recipe.sectioned import Recipe
from hqsweep.sweep.grid.arms import GridPoint, is_trunk, section
from hqsweep.sweep.store.names import data_seen, run_name
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.seen_data import of_before
from hqsweep.train import data
from hqsweep.train.corpus import SHOWN_DIGITS
from hqsweep.train.model import GPT
from hqsweep.train.record import NotAsWritten, check_recorded, checkpoints, record_path

SAME_TRAIN = ("lr", "batch", "context", "weight_decay", "beta1", "beta2", "clip", "dtype")
"""The keys of train that a fork shares with its trunk: arms differ from the baseline in the recipe alone."""

PARTS: dict[str, Callable[[str], bool]] = {
    "model": lambda key: key not in ("init_noise", "path"),
    "data": lambda key: key not in ("path", "hash"),
    "train": lambda key: key in SAME_TRAIN,
}
"""Section -> whether a fork shares a key of it with its trunk.

Paths of models and data may have changed; hashes may not. The data's hash is compared by itself, because trunks of
earlier versions have it in their manifests.
"""

Pair = tuple[GridPoint, Config]


def linked(
    grid: Sequence[GridPoint], configs: Sequence[Config], study: ForkStudy, there: Collection[str] = ()
) -> tuple[list[Pair], str]:
    """Return the runs of a fork study, in which every fork names its start, and a line on the source of the trunks.

    Configs are canonical. A trunk that several points of the grid share comes once. The line is "" for random weights.
    there: the ends of the names of the sweep's runs.

    Raises:
        UserError: fork.trunk is no checkpoint, or one of another model, data, vocabulary or training.
    """
    if study.goes_on and study.rewarm is not None:
        raise UserError(
            "fork.rewarm: is of trunks that begin from a checkpoint of another program, and fork.trunk names that of a"
            " run, from whose whole state forks go on; leave it out"
        )
    files, begun = _files(study) if study.goes_on else {}, ""
    if not files:
        configs, begun = begin_from_sources(configs, study)
    if files:
        _check_outside(next(iter(files.values()))[0], configs)
    trunks = [
        of_before(config, there) if is_trunk(point) else config for point, config in zip(grid, configs, strict=True)
    ]
    names = {id(point): run_name(config.model_dump(mode="json")) for point, config in zip(grid, trunks, strict=True)}
    pairs: dict[str, Pair] = {}
    for point, config in zip(grid, trunks, strict=True):
        if files:
            path, digest = files[config.start]
            config = _started(config, trunk=str(path), trunk_hash=digest)
        elif point.trunk is not None:
            config = _started(config, trunk=names[id(point.trunk)])
        config = of_before(config, there)
        dump = config.model_dump(mode="json")
        pairs.setdefault(run_name(dump), (replace(point, config=dump), config))
    return list(pairs.values()), begun


def _started(config: ConvergenceConfig, **known: str) -> ConvergenceConfig:
    return config.model_copy(update={"fork": config.fork.model_copy(update=known)})


def _files(study: ForkStudy) -> dict[int, tuple[Path, str]]:
    """Point -> the checkpoint of fork.trunk at it, and its hash."""
    source = Path(study.trunk)
    stored = checkpoints(source / "checkpoint")
    if study.file_step:
        stored = {study.file_step: source} if source.exists() else {}
    if not stored:
        raise UserError(
            f"fork.trunk: '{source}' has no checkpoint; give a file step_N.pt, a folder step_N, or the folder of a run"
            " that has some, or one of another program: a folder of Hugging Face's or of torch.distributed.checkpoint,"
            " or a file"
        )
    missing = [at for at in study.at if at not in stored]
    if missing:
        there = ", ".join(map(str, stored))
        raise UserError(f"fork.at: '{source}' has no checkpoint of step {missing[0]}; it has those of {there}")
    paths = {at: stored[at].resolve() for at in study.at or stored}
    return {at: (path, _sha256(path)) for at, path in paths.items()}


def _sha256(path: Path) -> str:
    """The hash of a checkpoint. UserError where its record has another; earlier versions wrote no record."""
    try:
        if path.is_dir() or record_path(path).exists():
            return check_recorded(path).sha256
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except NotAsWritten as error:
        raise UserError(
            f"fork.trunk: '{path.parent.parent}': {error}; give another checkpoint, or train its run again"
        ) from None


def _check_outside(path: Path, configs: Iterable[ConvergenceConfig]) -> None:
    """UserError unless the run of a checkpoint had the model, the data and the training of its forks."""
    run = RunDir(path.parent.parent)
    if not run.config_path.is_file():
        raise UserError(f"fork.trunk: {run.path} has no config.yaml, which says what the checkpoint in it is one of")
    trunk = parse(run.config())
    if not isinstance(trunk, ConvergenceConfig):
        raise UserError(f"fork.trunk: {run.path} is a run of the job {trunk.job}, which trains no model to go on with")
    known = data_seen(run.config(), run.manifest())
    for config in configs:
        for key, theirs, ours in _different(trunk, config):
            raise UserError(f"fork.trunk: {run.path} was trained with {key}={theirs}, but its forks have {key}={ours}")
        ours = config.data.hash
        if known not in (None, ours):
            raise UserError(
                f"fork.trunk: {run.path} was trained on other data (hash {known[:SHOWN_DIGITS]}) than its forks would"
                f" be ({ours[:SHOWN_DIGITS]}), though under the same keys; give the data of the trunk, or another trunk"
            )


def _different(trunk: ConvergenceConfig, fork: ConvergenceConfig) -> list[tuple[str, object, object]]:
    """Return the keys, with both values, in which a fork differs from its trunk."""
    theirs, ours = (dict(_leaves(config.model_dump(include=set(PARTS)))) for config in (trunk, fork))
    shared = [key for key in ours if PARTS[key.partition(".")[0]](key.partition(".")[2])]
    return [(key, theirs.get(key, "none"), ours[key]) for key in shared if theirs.get(key, "none") != ours[key]]


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def check_twins(points: Iterable[GridPoint]) -> None:
    """UserError for arms that differ in recipe.name alone, by canonical configs: they would be one run twice."""
    seen: dict[str, str] = {}
    for point in points:
        recipe = section(point, "recipe")
        if recipe and not is_trunk(point):
            content = json.dumps(point.config | {"recipe": recipe | {"name": None}}, sort_keys=True)
            other = seen.setdefault(content, point.arm)
            if other != point.arm:
                raise UserError(f"arms '{other}' and '{point.arm}' differ in the name alone; leave one of them out")


LEAST_REWARM = 100
"""Steps of re-warm at least, where the first fork leaves room for them."""
BF16 = Recipe.from_config({"linear": "bf16"})


def begin_from_sources(configs: Iterable[ConvergenceConfig], study: ForkStudy) -> tuple[list[ConvergenceConfig], str]:
    """The runs of a fork study whose trunks are trained, each trunk with what it begins from and every run with the
    re-warm of its trunk; and a line that says so, "" where all trunks begin from random weights.

    Raises:
        UserError: no checkpoint, or a checkpoint of another model; a re-warm that does not fit.
    """
    known: dict[Path, Checkpoint] = {}
    begun, lines, checked = [], {}, set()
    for config in configs:
        path = _source(config, study)
        if path is None:
            begun.append(config)
            continue
        checkpoint = known.get(path) or known.setdefault(path, _sound(path))
        content = config.model_dump_json(include={"model", "data"})
        if content not in checked:
            _check_fits(checkpoint, config)
            checked.add(content)
        steps, line = _rewarm(config, study, checkpoint)
        source = {"source": str(path), "source_hash": checkpoint.sha256} if config.fork.is_trunk else {}
        begun.append(config.model_copy(update={"fork": config.fork.model_copy(update={"warmup": steps, **source})}))
        lines[line] = None
    return begun, "; ".join(lines)


def _source(config: ConvergenceConfig, study: ForkStudy) -> Path | None:
    """The checkpoint that the trunk of a run begins from: fork.trunk, or else the weights of its model."""
    if study.is_foreign:
        return Path(study.trunk).resolve()
    if isinstance(config.model, HFModelConfig) and config.model.pretrained:
        return Path(config.model.path).resolve()
    if study.rewarm is not None:
        raise UserError("fork.rewarm: is of trunks that begin from a checkpoint, and these begin from random weights")
    return None


def rewarm_steps(beta2: float) -> int:
    """Return the default length of a re-warm without the optimizer's moments: 100 steps, or 3 / (1 - beta2) if that is
    more.

    After t steps the second moment averages over (1 - beta2^t) / (1 + beta2^t) of its final samples. It is 90 % at t =
    ln 19 / -ln beta2, which is 2.94 / (1 - beta2) for a beta2 near 1.
    """
    return max(LEAST_REWARM, math.ceil(3 / (1 - beta2)))


def _rewarm(config: ConvergenceConfig, study: ForkStudy, checkpoint: Checkpoint) -> tuple[int, str]:
    """Return the re-warm steps of a run's trunk, and a sentence about its starting point."""
    first, wanted = min(study.at), rewarm_steps(config.train.beta2)
    bare = checkpoint.optimizer == "none"
    steps, why = study.rewarm, ""
    if steps is None:
        steps = min(wanted, max(1, first // 2)) if bare else 0
        if bare and steps < wanted:
            why = f", not {wanted}, since the first fork is at step {first}"
    if steps > first:
        raise UserError(
            f"fork.rewarm: {steps} steps, but the first fork is at step {first}; give later ones in fork.at"
        )
    if bare and steps == 0:
        raise UserError(
            "fork.rewarm: 0, but the checkpoint has no moments of an optimizer, and the first steps of one without them"
            f" must be small; leave it out, which is {wanted} steps"
        )
    at = "" if checkpoint.step is None else f" of step {checkpoint.step}"
    moments = "without moments of an optimizer" if bare else "with the moments of its optimizer"
    return steps, f"trunks begin from {_shown(checkpoint.path)}{at}, {moments}; the rate rises over {steps} steps{why}"


def _shown(path: Path) -> Path:
    """A path as one types it in the folder where one is."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _sound(path: Path) -> Checkpoint:
    """Return the content of a checkpoint. UserError for a damaged one."""
    try:
        checkpoint = inspect_checkpoint(path)
        checkpoint.check()
    except UserError as error:
        raise UserError(f"fork.trunk: {error}") from None
    return checkpoint


def _check_fits(checkpoint: Checkpoint, config: ConvergenceConfig) -> None:
    """Raise UserError for names and shapes that differ from the model's."""
    if (model := _outline(config)) is None:
        return
    try:
        check_fits(checkpoint, model)
    except UserError as error:
        raise UserError(f"fork.trunk: {error}") from None


def _outline(config: ConvergenceConfig) -> nn.Module | None:
    """Return the model without memory for its weights; None if only a Python function that may not be imported builds
    it."""
    if not isinstance(config.model, ModelConfig):
        from hqsweep.models.build import outline  # not for a GPT

        return outline(config.model)
    with torch.device("meta"):
        return GPT(config.model, data.loaded(config.data).vocab_size, BF16, torch.float32)
