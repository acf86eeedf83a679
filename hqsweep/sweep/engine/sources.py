"""Checkpoints of other programs that the trunks of a fork study begin from: by the hash of their bytes, after a look at
what is in them, and with how many steps of a rising learning rate.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from hqsweep.checkpoints.foreign.inspect import Checkpoint, inspect_checkpoint
from hqsweep.checkpoints.foreign.load import check_fits
from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import ModelConfig
from hqsweep.config.study import ForkStudy
from hqsweep.config.user_model import HFModelConfig
from hqsweep.errors import UserError
from hqsweep.recipe.sectioned import Recipe
from hqsweep.train import data
from hqsweep.train.model import GPT

LEAST_REWARM = 100
"""Steps of re-warm at least, where the first fork leaves room for them."""
BF16 = Recipe.from_config({"linear": "bf16"})


def begin_from_sources(configs: Iterable[ConvergenceConfig], study: ForkStudy) -> tuple[list[ConvergenceConfig], str]:
    """The runs of a fork study whose trunks are trained, each trunk with what it begins from and every run with the
    re-warm of its trunk; and a line that says so, "" where all trunks begin from random weights.

    Raises:
        UserError: what is no checkpoint, or one of another model; a re-warm that does not fit.
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
    """How long a re-warm is by default, where the optimizer's moments are gone: 100 steps, or 3 / (1 - beta2) if that
    is more. After t steps the second moment averages over (1 - beta2^t) / (1 + beta2^t) of the samples that it does in
    the end: 90 % of them at t = ln 19 / -ln beta2, which is 2.94 / (1 - beta2) for a beta2 near 1."""
    return max(LEAST_REWARM, math.ceil(3 / (1 - beta2)))


def _rewarm(config: ConvergenceConfig, study: ForkStudy, checkpoint: Checkpoint) -> tuple[int, str]:
    """Steps of re-warm of a run's trunk, and what is to be said of what it begins from."""
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
    """What is in a checkpoint. UserError where that is not sound."""
    try:
        checkpoint = inspect_checkpoint(path)
        checkpoint.check()
    except UserError as error:
        raise UserError(f"fork.trunk: {error}") from None
    return checkpoint


def _check_fits(checkpoint: Checkpoint, config: ConvergenceConfig) -> None:
    """UserError for names and shapes that are not those of the model."""
    if (model := _outline(config)) is None:
        return
    try:
        check_fits(checkpoint, model)
    except UserError as error:
        raise UserError(f"fork.trunk: {error}") from None


def _outline(config: ConvergenceConfig) -> nn.Module | None:
    """The model without memory for its weights; None where a Python function makes it that nobody might import."""
    if not isinstance(config.model, ModelConfig):
        from hqsweep.models.build import outline  # not for a GPT

        return outline(config.model)
    with torch.device("meta"):
        return GPT(config.model, data.loaded(config.data).vocab_size, BF16, torch.float32)
