"""Adam's moments of a checkpoint in an optimizer.

They are stored by names (torchtitan, torch.distributed.checkpoint) or by indices. An index is the place of a parameter
among all groups, in the order of the saved optimizer. The usual orders are tried, and the first in which every shape
fits is taken.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.checkpoints import dcp, deepspeed, torch_file
from hqsweep.checkpoints.checkpoint import Checkpoint, first_names
from hqsweep.checkpoints.names import Piece, Pieces, joined
from hqsweep.errors import UserError
from hqsweep.optim import MASTER, FusedAdam
from hqsweep.recipe.roles import clean_name

MOMENTS = ("exp_avg", "exp_avg_sq")
OTHERS = ("step", MASTER)
"""The entries that a state may hold beside moments."""
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""The names of parameters that do not decay in Hugging Face's Trainer (Trainer.get_decay_parameter_names), lower
case."""
Moments = dict[str, dict[str, Tensor]]
Order = list[list[str]]
"""The names of parameters by the group that they are in."""


def load_moments(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pieces: Pieces,
    weights: Mapping[str, Tensor],
) -> tuple[Callable[[], None] | None, int]:
    """A function that writes the moments into the optimizer, after all checks, and the number of parameters that they
    are for; None and 0 where the checkpoint has none. FusedAdam's masters become the checkpoint's weights.

    Raises UserError for a state that is not Adam's, or does not fit the model.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    params = {clean_name(name): p for name, p in model.named_parameters() if id(p) in held}
    moments: Moments = {}
    if checkpoint.optimizer != "none":
        moments = _moments(checkpoint, params, optimizer, pieces)
        lacking = [name for name in params if name not in moments]
        if lacking:
            raise UserError(
                f"{checkpoint.path}: its optimizer's state lacks {len(lacking)} of {len(params)} parameters:"
                f" {first_names(lacking)}; load the weights alone"
            )
        for name, p in params.items():
            _check(checkpoint, name, moments[name], p)

    def write() -> None:
        state = optimizer.state_dict()
        names = {id(p): name for name, p in params.items()}
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(p))
            new = {key: moments[name][key] for key in MOMENTS} if name in moments else {}
            if new:
                new["step"] = torch.as_tensor(moments[name]["step"], dtype=torch.float32).reshape(())
            if isinstance(optimizer, FusedAdam) and name in weights and optimizer.master_param(p) is not p:
                new[MASTER] = moments.get(name, {}).get(MASTER, weights[name]).to(torch.float32)
            if MASTER in new and "step" not in new:  # as before a first step
                new |= {key: torch.zeros_like(new[MASTER]) for key in MOMENTS} | {"step": torch.zeros(())}
            if new:
                state["state"][index] = new
        optimizer.load_state_dict(state)

    return write, len(params) if moments else 0


def _moments(checkpoint: Checkpoint, params: Mapping[str, Tensor], optimizer: Any, pieces: Pieces) -> Moments:
    """Name of a parameter -> its moments; UserError for a state whose order is not known."""
    path = checkpoint.moments[0] if checkpoint.moments else checkpoint.path
    if deepspeed.is_part(path):
        shapes = {name: shape for name, (shape, _) in checkpoint.tensors.items()}
        shapes |= {name: tuple(p.shape) for name, p in params.items()}
        return _by_names(checkpoint, deepspeed.read_moments(checkpoint.moments, shapes), params, pieces)
    if path.is_dir():
        return _by_names(checkpoint, dcp.read_moments(path), params, pieces)
    document = torch_file.read_file(path)
    if checkpoint.moments:
        document = {"optimizer": document}
    state = torch_file.optimizer_state(document)
    if state is None:
        raise UserError(f"{path}: it holds no state of an optimizer; load the weights alone")
    groups = _groups(state, path)
    if all(isinstance(key, str) for key in state["state"]):
        named = {clean_name(name): dict(values) for name, values in state["state"].items()}
        return _by_names(checkpoint, named, params, pieces)
    if all("param_names" in group for group in state["param_groups"]):
        named = [clean_name(str(name)) for group in state["param_groups"] for name in group["param_names"]]
        by_name = {
            name: state["state"].get(i, {}) for name, i in zip(named, (i for g in groups for i in g), strict=True)
        }
        return _by_pieces(checkpoint, by_name, pieces)
    _check_adam(checkpoint, "its first parameter", next(iter(state["state"].values())))
    indexed = {i: state["state"].get(i, {}) for group in groups for i in group}
    orders = _orders(checkpoint, _as_saved(checkpoint, params, pieces), params, optimizer)
    found = _by_indices(groups, indexed, orders, params, pieces)
    if found is None:
        sizes = " and ".join(str(len(group)) for group in groups)
        raise UserError(
            f"{path}: its optimizer's state is by indices, of groups of {sizes} parameters, in no order that is known"
            f" for the {len(params)} of the model; load the weights alone"
        )
    return found


def _by_indices(
    groups: list[list[Any]],
    indexed: Mapping[Any, Mapping[str, Any]],
    orders: Iterator[Order],
    params: Mapping[str, Tensor],
    pieces: Pieces,
) -> Moments | None:
    """Return the moments by the first order of parameters in which every shape fits; None if none does."""
    for order in orders:
        if [len(names) for names in order] == [len(group) for group in groups]:
            pairs = dict(zip((name for names in order for name in names), indexed.values(), strict=True))
            permuted = {name: _of_one(pieces.get(name), values) for name, values in pairs.items()}
            if all(_fits(values, params[name]) for name, values in permuted.items()):
                return permuted
    return None


def _groups(state: Mapping[str, Any], path: Any) -> list[list[Any]]:
    try:
        return [list(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError):
        raise UserError(f"{path}: its optimizer's state has no param_groups; load the weights alone") from None


def _as_saved(checkpoint: Checkpoint, params: Mapping[str, Tensor], pieces: Pieces) -> dict[str, Tensor]:
    """The parameters in the order of the model that was saved, which under other names may be another one. A file of
    safetensors has its tensors in alphabetical order."""
    if checkpoint.kind == "safetensors":
        return dict(params)
    places = {name: place for place, name in enumerate(checkpoint.tensors)}
    sources = {name: pieces[name].sources[0] if name in pieces else name for name in params}
    return dict(sorted(params.items(), key=lambda item: places.get(sources[item[0]], len(places))))


def _orders(
    checkpoint: Checkpoint, saved: Mapping[str, Tensor], params: Mapping[str, Tensor], optimizer: Any
) -> Iterator[Order]:
    """Yield the usual orders of parameters.

    They are: the given optimizer's; one group; the groups of Hugging Face's Trainer (with decay, then without);
    matrices before vectors.
    """
    names = {id(p): name for name, p in params.items()}
    own = [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
    trainer = _split(saved, lambda name, p: not NO_DECAY.search(name.lower()))
    matrices = _split(saved, lambda name, p: p.dim() >= 2)
    orders = [*([own] if list(saved) == list(params) else []), [list(saved)], trainer, matrices]
    yield from [trainer, *orders] if checkpoint.kind == "safetensors" else orders


def _split(params: Mapping[str, Tensor], first: Callable[[str, Tensor], bool]) -> Order:
    return [
        [name for name, p in params.items() if first(name, p)],
        [name for name, p in params.items() if not first(name, p)],
    ]


def _of_one(piece: Piece | None, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moments of a parameter in the order of its weight."""
    make = piece.make if piece is not None and len(piece.sources) == 1 else lambda tensor: tensor
    return {key: make(value) if key in MOMENTS else value for key, value in values.items()}


def _by_names(checkpoint: Checkpoint, named: Moments, params: Mapping[str, Tensor], pieces: Pieces) -> Moments:
    """Moments by names of the model, or of the checkpoint's weights. A family may save weights by other names; its
    optimizers still use the model's own."""
    if named.keys() >= params.keys() and not any(name in pieces and pieces[name].permuted for name in params):
        for name in params:
            _check_adam(checkpoint, name, named[name])
        return {name: named[name] for name in params}
    return _by_pieces(checkpoint, named, pieces)


def _by_pieces(checkpoint: Checkpoint, named: Moments, pieces: Pieces) -> Moments:
    """Moments by names of the model, without parameters that the model does not have."""
    moments: Moments = {}
    for name, piece in pieces.items():
        if not all(source in named for source in piece.sources):
            continue
        first = named[piece.sources[0]]
        _check_adam(checkpoint, piece.sources[0], first)
        parts = {key: {source: named[source][key] for source in piece.sources} for key in MOMENTS}
        moments[name] = {key: joined(piece, tensors) for key, tensors in parts.items()} | {"step": first.get("step")}
    return moments


def _check_adam(checkpoint: Checkpoint, name: str, values: Mapping[str, Any]) -> None:
    """UserError for the state of another optimizer."""
    strange = [key for key in values if key not in (*MOMENTS, *OTHERS)]
    if strange or not all(key in values for key in MOMENTS):
        raise UserError(
            f"{checkpoint.path}: the optimizer's state of {name} holds {', '.join(map(str, values))}, which is not"
            " Adam's; load the weights alone"
        )


def _fits(values: Mapping[str, Any], p: Tensor) -> bool:
    masters = [MASTER] if MASTER in values else []
    return all(isinstance(values.get(key), Tensor) and values[key].shape == p.shape for key in [*MOMENTS, *masters])


def _check(checkpoint: Checkpoint, name: str, values: Mapping[str, Any], p: Tensor) -> None:
    """UserError for moments of another shape, or without a count of steps."""
    if not _fits(values, p):
        raise UserError(
            f"{checkpoint.path}: the moments of {name} are not of its shape {list(p.shape)}; load the weights alone"
        )
    if not isinstance(values.get("step"), Tensor | int | float):
        raise UserError(f"{checkpoint.path}: the moments of {name} have no count of steps; load the weights alone")
