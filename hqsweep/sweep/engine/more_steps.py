"""Longer runs from finished ones: `hqsweep run ... --more-steps N` makes a sweep with N steps more.

Its runs continue from checkpoints of the finished runs, and end with the rows and weights of a run from step 1 on. This
holds up to the last step at which both runs have the same learning rates and recipes. Warm-up is kept in steps, so that
step comes before the decay, or before a change of recipe at a part of the steps. There is no such checkpoint if all
remaining ones lie in the decay.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hqsweep.config.job import ConvergenceConfig
from hqsweep.errors import UserError
from hqsweep.recipe.stages import stages
from hqsweep.sweep.store.names import data_seen, run_id
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.train.build import learning_rate
from hqsweep.train.record import NotAsWritten, check_recorded, checkpoints, write_record

OPTION = "--more-steps"
CHANGED = ("train.steps", "train.warmup", "sweep")


@dataclass(frozen=True, kw_only=True)
class Start:
    """A finished run, and the step of the checkpoint from which its longer run continues."""

    run: RunDir
    path: Path
    step: int


def longer_words(words: Sequence[str], configs: Sequence[Any], more: int) -> list[str]:
    """The overrides of the longer sweep, named SWEEP-STEPS. UserError where its steps cannot be raised."""
    first = configs[0]
    if not all(isinstance(config, ConvergenceConfig) for config in configs):
        raise UserError(f"{OPTION}: a {first.job} job trains nothing that has steps; give a convergence sweep")
    if any(config.fork for config in configs):
        raise UserError(
            f"{OPTION}: forks start from trunks, so more of a fork study needs no copies; give more points in fork.at,"
            " or other fork.steps, by the same command"
        )
    if len({(config.train.steps, config.train.warmup) for config in configs}) > 1:
        raise UserError(f"{OPTION}: train.steps or train.warmup is swept; go on with one of its values at a time")
    before = first.train.steps
    unchanged = [text for text in words if text.lstrip("+").partition("=")[0] not in CHANGED]
    warmup = _same_warmup(first.train.warmup * before, before + more)
    return [
        *unchanged,
        f"train.steps={before + more}",
        f"train.warmup={warmup!r}",
        f"sweep={first.sweep}-{before + more}",
    ]


def _same_warmup(rise: float, steps: int) -> float:
    """Return the fraction of `steps` that is `rise` steps, exact to the last bit if a float can be."""
    near = rise / steps
    for fraction in (near, math.nextafter(near, 0), math.nextafter(near, 1)):
        if fraction * steps == rise:
            return fraction
    return near


def starts(
    runs: Sequence[RunDir], configs: Sequence[ConvergenceConfig], longer: Sequence[ConvergenceConfig]
) -> list[Start]:
    """Return the start of each run of the longer sweep. runs: the shorter sweep's.

    UserError if one of them did not finish, or has no checkpoint that a longer run would have reached.
    """
    return [_start(*of_run) for of_run in zip(runs, configs, longer, strict=True)]


def _start(run: RunDir, config: ConvergenceConfig, longer: ConvergenceConfig) -> Start:
    status = run.seen()
    if status["state"] != "finished":
        said = f", {status['reason']}" if status["reason"] else ""
        raise UserError(
            f"{OPTION}: {run.name} of '{run.sweep}' has not finished ({status['state']}{said}); the same command"
            f" without {OPTION} finishes it"
        )
    last = _last_alike(config, longer)
    there = checkpoints(run.checkpoint)
    for step, path in reversed(there.items()):
        if step <= last and _whole(config, step) and _is_own(path, run_id(run.config())):
            return Start(run=run, path=path, step=step)
    steps = longer.train.steps
    existing = f"its checkpoints are of step {' and '.join(map(str, there))}" if there else "it has no checkpoint"
    raise UserError(
        f"{OPTION}: a run of {steps} steps is like {run.name} of '{run.sweep}' up to step {last} of"
        f" {config.train.steps}, where {_why(config, last)}, and {existing}; train it from its start by"
        f" train.steps={steps} sweep={config.sweep}-{steps}. A sweep with train.decay=0 can be gone on with"
    )


def _last_alike(config: ConvergenceConfig, longer: ConvergenceConfig) -> int:
    """The last step up to which both have the same learning rates and recipes."""
    steps = config.train.steps
    odd = (s for s in range(1, steps + 1) if learning_rate(config.train, s) != learning_rate(longer.train, s))
    rates = next(odd, steps + 1) - 1
    changes = [
        {(stage.first_step, i) for i, stage in enumerate(stages(of_run.recipe.build(), of_run.own_steps))}
        for of_run in (config, longer)
    ]
    moved = [first for first, _ in changes[0] ^ changes[1]]
    return min([rates, *(first - 1 for first in moved), *_captured(config)])


def _captured(config: ConvergenceConfig) -> list[int]:
    """The last step before operands were captured, as a list; captured operands are not copied. [] where none were."""
    at = config.stats.capture_at
    return [] if at is None else [at - 1]


def _whole(config: ConvergenceConfig, step: int) -> bool:
    """Whether a longer run, too, writes the rows of the step that a run may have written only because it was its
    last."""
    train = config.train
    return step < train.steps or not (step % train.log_every or step % train.eval_every)


def _why(config: ConvergenceConfig, last: int) -> str:
    train = config.train
    if learning_rate(train, last + 1) < train.lr and last + 1 > train.warmup * train.steps and train.decay:
        return f"its learning rate begins to fall (train.decay={train.decay:g})"
    return "a longer run has another learning rate, or another recipe by its schedule"


def _is_own(path: Path, run: str) -> bool:
    try:
        return check_recorded(path).run == run
    except NotAsWritten:
        return False


def seed(start: Start, run: RunDir) -> None:
    """Give a run of the longer sweep, before it begins, the checkpoint and the rows before it."""
    with run.lock():
        if run.has_finished() or checkpoints(run.checkpoint):
            return
        record = check_recorded(start.path)
        for table in record.rows:
            _copy_rows(start.run.jsonl(table), run.jsonl(table), record.rows[table]["bytes"])
        run.checkpoint.mkdir(exist_ok=True)
        target = run.checkpoint / start.path.name
        if start.path.is_dir():
            shutil.copytree(start.path, target)
        else:
            target.write_bytes(start.path.read_bytes())
        config, before = run.config(), start.run.written_status()
        write_record(target, replace(record, run=run_id(config), data=data_seen(config, run.manifest()) or ""))
        part = start.step / before["progress"]["steps"] if before["progress"] else 0.0
        run.update_manifest(continues=f"{start.run.sweep}/{start.run.name} from step {start.step}")
        run.write_status(seconds=round(part * before["seconds"], 3))


def _copy_rows(source: Path, target: Path, count: int) -> None:
    """The first bytes of a file, which the checkpoint's mark counts."""
    if count:
        target.write_bytes(source.read_bytes()[:count])
