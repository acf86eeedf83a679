"""The trained weights of a run, for other programs: a Hugging Face folder, or safetensors."""

from pathlib import Path

import torch
from torch import Tensor, nn

from hqsweep.checkpoints import dcp
from hqsweep.checkpoints.sharded_load import load_sharded
from hqsweep.checkpoints.user_model import check_same
from hqsweep.checkpoints.weights import as_plain, save_model, save_pretrained, save_state
from hqsweep.config.job import ConvergenceConfig, parse
from hqsweep.config.model import FactoryModelConfig, HFModelConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.models.hf import meta_model
from hqsweep.models.hf_folder import HFConfig, read_hf_config
from hqsweep.optim import MASTER
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.train.adapter import ModelAdapter
from hqsweep.train.build import adapted, make_optimizer
from hqsweep.train.checkpoint import read_state, step_of
from hqsweep.train.fork import start_from
from hqsweep.train.record import NotAsWritten, check_recorded, checkpoints
from hqsweep.train.user_model import NUMBERS

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""The files of a Hugging Face folder that are copied beside the weights."""


def export_run(run: RunDir, out: Path, step: int | None = None, *, grid: bool = False) -> tuple[Path, int]:
    """Write the weights of a run at a step, by default the last whose checkpoint is there: the float32 masters where
    hqsweep's own model holds quantized ones. grid: projected weights as codes of their grids. Returns the path, and the
    step. No code of a user's is imported.

    Raises UserError for a run that trains no model, has no such checkpoint, whose config.json is missing or another, or
    where something lies at `out`; Damaged for a checkpoint that is not what the run wrote.
    """
    config = parse(run.config(), recorded=True)
    if not isinstance(config, ConvergenceConfig):
        raise UserError(f"{run.path}: it is a run of the job {config.job}, which trains no model to export")
    path = _state_file(run, config, step)
    try:
        if path.is_dir():
            check_recorded(path)
            return _write_folder(config, path, out, grid), step_of(path)
        state = read_state(path, torch.device("cpu"))
    except NotAsWritten as error:
        raise Damaged(path, f"{error.fault}, so it is not exported", "export another step, or run it again") from None
    return _write(config, state, out, grid), state["step"]


def _write(config: ConvergenceConfig, state: dict, out: Path, grid: bool) -> Path:
    """Write the weights in one of a run's states, in the format of its kind of model."""
    if grid and isinstance(config.model, HFModelConfig | FactoryModelConfig):
        raise UserError("--grid is for runs of hqsweep's own model; leave it out")
    if isinstance(config.model, HFModelConfig):
        check_same(config.model)
        known = read_hf_config(config.model.path)
        model = _of_config(known, _values(state), config.model.architecture)
        beside = {name: (known.folder / name).read_bytes() for name in TOKENIZER if (known.folder / name).is_file()}
        return save_pretrained(model, out, beside)
    if isinstance(config.model, FactoryModelConfig):
        return save_state(_values(state), out)
    return save_model(_trained(config, state), out, grid=grid)


def _values(state: dict) -> dict[str, Tensor]:
    """Return the weights of a user's model in a state, by name.

    A held quantized weight gives its master. Tied weights give the same tensor.
    """
    numbers, values, masters = state.get(NUMBERS, {}), {}, {}
    for name, weight in state["model"].items():
        if not isinstance(weight, HybridQuantizedTensor):
            values[name] = weight
            continue
        number = numbers[name]
        if number not in masters:
            master = state["optimizer"]["state"].get(number, {}).get(MASTER)
            masters[number] = as_plain(weight) if master is None else master.view(weight.shape)
        values[name] = masters[number]
    return values


def _write_folder(config: ConvergenceConfig, path: Path, out: Path, grid: bool) -> Path:
    """Write the weights in the folder that ranks of a run have written, in the format of its kind of model."""
    weights = read_folder(path)
    if isinstance(config.model, HFModelConfig | FactoryModelConfig):
        return _write(config, {"model": weights}, out, grid)
    model = _adapter(config, len(weights["embedding.weight"])).model
    load_sharded(model, None, path)
    return save_model(model, out, grid=grid)


def export_folder(folder: Path, out: Path) -> Path:
    """Write the weights in a folder of torch.distributed.checkpoint as safetensors with the names that they have there.
    Returns the path. UserError for an incomplete checkpoint, and where something lies at `out`."""
    return save_state(read_folder(folder), out)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder of torch.distributed.checkpoint, by name."""
    checkpoint = dcp.inspect_folder(folder)
    checkpoint.check()
    return dcp.read(checkpoint)


def _with_ties(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights, also under the other names of tied parameters."""
    named = dict(model.named_parameters(remove_duplicate=False))
    there = {id(p): weights[name] for name, p in named.items() if name in weights}
    return weights | {name: there[id(p)] for name, p in named.items() if name not in weights and id(p) in there}


def _of_config(config: HFConfig, weights: dict[str, Tensor], architecture: str) -> nn.Module:
    """The model of a config.json with these weights, which are not copied. UserError where they are not its weights."""
    model = meta_model(config, architecture)
    weights = _with_ties(model, weights)
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    if wanted != {name: value.shape for name, value in weights.items()}:
        raise UserError(
            f"model.path: '{config.path}' is of another model than the run trained; put the one of the run back there"
        )
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _state_file(run: RunDir, config: ConvergenceConfig, step: int | None) -> Path:
    """Return the checkpoint of a step. UserError for a step without one."""
    there = checkpoints(run.checkpoint)
    if not there:
        why = "it has kept no checkpoint"
        if config.start:
            why = f"a fork keeps no state of its end; its trunk {config.fork.trunk_name} has that of its beginning"
        raise UserError(f"{run.path}: {why}, so there is nothing to export")
    if step is None:
        return there[max(there)]
    if step not in there:
        raise UserError(
            f"{run.path}: it has no checkpoint of step {step}; it has those of {', '.join(map(str, there))}"
        )
    return there[step]


def _adapter(config: ConvergenceConfig, vocab_size: int) -> ModelAdapter:
    """The model of a run, whose weights are not held quantized."""
    plain = config.model_copy(update={"model": config.model.model_copy(update={"quantized_weights": False})})
    return adapted(plain, vocab_size, config.recipe.build(), torch.device("cpu"))


@torch.no_grad()
def _trained(config: ConvergenceConfig, state: dict) -> nn.Module:
    """The model of a run with the weights of one of its states."""
    adapter = _adapter(config, len(state["model"]["embedding.weight"]))
    optimizer = make_optimizer(adapter, config.train)
    start_from(adapter.model, optimizer, state)
    for parameter in adapter.model.parameters():
        parameter.copy_(optimizer.master_param(parameter))
    return adapter.model
