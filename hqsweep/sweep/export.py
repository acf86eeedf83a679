"""The trained weights of a run, for other programs: a Hugging Face folder, or safetensors."""

from pathlib import Path

import torch
from torch import nn

from hqsweep.checkpoints.save import save_model, save_state
from hqsweep.checkpoints.user_model import check_same
from hqsweep.config.job import ConvergenceConfig, parse
from hqsweep.config.user_model import FactoryModelConfig, HFModelConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.sweep.run_dir import RunDir
from hqsweep.train.checkpoint import read_state
from hqsweep.train.fork import start_from
from hqsweep.train.loop import adapted, make_optimizer
from hqsweep.train.record import NotAsWritten, checkpoints


def export_run(run: RunDir, out: Path, step: int | None = None) -> tuple[Path, int]:
    """Write the weights of a run at a step, by default the last that it kept: the float32 masters where weights are
    held in other formats. Returns where they are, and the step.

    Raises UserError for a run that trains no model, has no such checkpoint, or where something lies at `out`; Damaged
    for a checkpoint that is not what the run wrote.
    """
    config = parse(run.config())
    if not isinstance(config, ConvergenceConfig):
        raise UserError(f"{run.path}: it is a run of the job {config.job}, which trains no model to export")
    path = _state_file(run, config, step)
    try:
        state = read_state(path, torch.device("cpu"))
    except NotAsWritten as error:
        raise Damaged(path, f"{error.fault}, so it is not exported", "export another step, or run it again") from None
    if isinstance(config.model, FactoryModelConfig):  # whose function is not imported to write what it has built
        return save_state(state["model"], out), state["step"]
    users = isinstance(config.model, HFModelConfig)
    return save_model(_users(config.model, state) if users else _trained(config, state), out), state["step"]


def _state_file(run: RunDir, config: ConvergenceConfig, step: int | None) -> Path:
    """The checkpoint of a step. UserError where there is none."""
    found = checkpoints(run.checkpoint)
    if not found:
        why = "it has kept no checkpoint"
        if config.start:
            why = f"a fork keeps no state of its end; its trunk {config.fork.trunk_name} has that of its beginning"
        raise UserError(f"{run.path}: {why}, so there is nothing to export")
    if step is None:
        return found[max(found)]
    if step not in found:
        raise UserError(
            f"{run.path}: it has no checkpoint of step {step}; it has those of {', '.join(map(str, found))}"
        )
    return found[step]


def _users(section: HFModelConfig, state: dict) -> nn.Module:
    """The Hugging Face model of a run with the weights of one of its states. UserError where its folder is gone, or has
    another model than it had."""
    check_same(section)
    from hqsweep.models.hf import load_model  # with transformers

    model = load_model(section.path, pretrained=False)
    model.load_state_dict(state["model"])
    return model


@torch.no_grad()
def _trained(config: ConvergenceConfig, state: dict) -> nn.Module:
    """The model of a run with the weights of one of its states."""
    plain = config.model_copy(update={"model": config.model.model_copy(update={"quantized_weights": False})})
    adapter = adapted(plain, len(state["model"]["embedding.weight"]), config.recipe.build(), torch.device("cpu"))
    optimizer = make_optimizer(adapter, config.train)
    start_from(adapter.model, optimizer, state)
    for parameter in adapter.model.parameters():
        parameter.copy_(optimizer.master_param(parameter))
    return adapter.model
