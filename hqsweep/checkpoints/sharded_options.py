"""The options of an optimizer's groups in a checkpoint over ranks: learning rates, betas, decay and so on.

A group's options are written twice. hqsweep's own text has their numbers once a group, and load_sharded uses these.
Under optimizer they stand as torch.distributed.checkpoint.state_dict flattens them, by which torchtitan saves and
loads: param_groups.NAME.lr and so on, each option of each parameter, with None and texts too. An option other than a
tensor is an object, which torch stores as a pickle. From another program's folder torch.load(weights_only=True) reads
it, which runs no code; it is taken if it is a number.
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.checkpoints.dcp import read_object, read_part
from hqsweep.checkpoints.dcp_metadata import Place, Stored, objects_of
from hqsweep.errors import UserError
from hqsweep.recipe.roles import clean_name

Optimizer = torch.optim.Optimizer
Params = Mapping[str, nn.Parameter]

PARAMS = "params"
"""The key of a group's parameters, which torch's flattened state has no option of."""
LEAD = "param_groups."
"""The beginning of a name under optimizer that is an option's."""
INITIAL_RATE = "initial_lr"
"""The option that torch's schedules of learning rates add to each group. torchtitan, which has one, asks for it."""
KERNELS = ("foreach", "fused", "capturable", "differentiable")
"""The options that choose how a step is computed. The loading program chooses them itself."""


def flat_options(params: Params, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return "param_groups.NAME.lr" and so on -> each option of a parameter: a number, a text, None, or a container of
    these."""
    names = {id(p): name for name, p in params.items()}
    flat = {}
    for group in optimizer.param_groups if optimizer else ():
        options = {key: _stored(value) for key, value in group.items() if key != PARAMS and _is_plain(value)}
        if "lr" in options:
            options.setdefault(INITIAL_RATE, _number(optimizer.defaults.get("lr", group["lr"])))
        for name in (names[id(p)] for p in group[PARAMS] if id(p) in names):
            flat |= {f"{LEAD}{name}.{key}": value for key, value in options.items()}
    return flat


def groups_of(params: Params, optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """For each group of the optimizer the names of its parameters, and the options that are numbers."""
    names = {id(p): name for name, p in params.items()}
    return [
        {
            "params": [names[id(p)] for p in group[PARAMS] if id(p) in names],
            "options": {key: _number(value) for key, value in group.items() if _is_number(value)},
        }
        for group in (optimizer.param_groups if optimizer else ())
    ]


def one_group(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the group that each rank has: a pipeline stage has only its own parameters."""
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part["params"])
    return {"params": list(names), "options": parts[0]["options"]}


def saved_groups(
    folder: Path, stored: Mapping[str, Stored], params: Params, optimizer: Optimizer | None
) -> list[dict[str, Any]]:
    """The groups in another program's folder, with one parameter each: for every group of the optimizer its first
    parameter that has options in the folder. Left out are options that choose kernels, and options that the optimizer
    does not have. A warning for bytes that are not a number."""
    if optimizer is None:
        return []
    names, saved = {id(p): name for name, p in params.items()}, _saved_options(folder, stored)
    groups = []
    for group in optimizer.param_groups:
        name = next((names[id(p)] for p in group[PARAMS] if names.get(id(p)) in saved), None)
        places = {key: place for key, place in saved.get(name, {}).items() if key in group and key not in KERNELS}
        values = {key: _read(folder, *place) for key, place in places.items()}
        options = {key: _number(value) for key, value in values.items() if _is_number(value)}
        groups.append({"params": [name], "options": options})
    return groups


def load_options(groups: list[dict[str, Any]], params: Params, optimizer: Optimizer | None) -> None:
    """Give each group of the optimizer the options from the saved group that has the same parameters."""
    names = {id(p): name for name, p in params.items()}
    options = {name: group["options"] for group in groups for name in group["params"]}
    for group in optimizer.param_groups if optimizer else ():
        first = next((names[id(p)] for p in group[PARAMS] if names.get(id(p)) in options), None)
        for key, value in options.get(first, {}).items():
            old = group.get(key)
            if isinstance(old, Tensor):
                old.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _saved_options(folder: Path, stored: Mapping[str, Stored]) -> dict[str, dict[str, tuple[str, Stored | Place]]]:
    """Clean name of a parameter -> "lr" and so on -> the saved name of the option, and its place in the folder."""
    options: dict[str, dict[str, tuple[str, Stored | Place]]] = {}
    for saved, place in {**stored, **objects_of(folder)}.items():
        if saved.startswith(lead := f"optimizer.{LEAD}"):
            name, _, key = saved.removeprefix(lead).rpartition(".")
            options.setdefault(clean_name(name), {})[key] = saved, place
    return options


def _read(folder: Path, saved: str, place: Stored | Place) -> Any:
    """An option; None, with a warning, where its bytes are none, or not there."""
    try:
        return read_part(folder, saved, place) if isinstance(place, Stored) else read_object(folder, saved, place)
    except (UserError, OSError) as error:
        warnings.warn(f"load_sharded: {error}; the optimizer keeps its own", stacklevel=2)
        return None


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str) or _is_number(value)


def _stored(value: Any) -> Any:
    """An option as torch has it: a tensor stays one, but not within a tuple or list."""
    return value.detach() if isinstance(value, Tensor) else _number(value, tuple if isinstance(value, tuple) else list)


def _number(value: Any, kind: type = list) -> Any:
    """A value without tensors; its tuples and lists become instances of `kind`."""
    if isinstance(value, tuple | list):
        return kind(_number(entry, kind) for entry in value)
    return value.item() if isinstance(value, Tensor) else value
