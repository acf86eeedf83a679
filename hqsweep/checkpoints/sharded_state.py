"""What a checkpoint of a training over any number of ranks is made of, as tensors by name.

Weights stand under the names of the plain model, each as its FP32 master where it has one; moments under optimizer, as
torchtitan names them. The rest, under hqsweep, is small and equal on all ranks: the histories of delayed scaling, and
one text of numbers: keys of random bits, options of the optimizer's groups, what the caller adds. All are tensors, as
an object that is none would be a pickle. Codes of held weights are made again from their masters; only those of a
weight without any are there as they are.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.checkpoints.planes import planes_of
from hqsweep.dist.agreed import gathered
from hqsweep.dist.local import is_in_pieces, local, spread_like, whole_tensor
from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.models.names import clean_name
from hqsweep.nn.delayed import DelayedStates, ExpertStates
from hqsweep.nn.grouped_linear import GroupedLinear
from hqsweep.nn.module import PARTS
from hqsweep.optim import MASTER
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.tensor import HybridQuantizedTensor

Optimizer = torch.optim.Optimizer
Params = Mapping[str, nn.Parameter]

OWN = "hqsweep"
"""What stands beside weights and moments: "facts", and tensors under the other names."""
FACTS, DELAYED, RANDOM, EXTRA, PLANES = "facts", "delayed", "random", "extra", "planes"
TENSOR = "tensor"
"""In the text of extra, {"tensor": "extra.a.b"} stands for a tensor by its name under hqsweep."""


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name in the plain model -> parameter, as it is sharded; tied ones once."""
    model.state_dict()  # whose hooks have FSDP2 go back to shards, and modules make their states
    return {clean_name(name): p for name, p in model.named_parameters()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Collected:
    """What one rank has to save."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    beside: dict[str, Tensor]
    facts: dict[str, Any]
    """Numbers and texts; parameters and keys are those of this rank."""


def collect(model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any], rank: int) -> Collected:
    """All of a rank, without a word to others. UserError for what cannot be saved."""
    params = parameters_of(model)
    weights, held, beside = {}, {}, {}
    for name, p in params.items():
        state = optimizer.state.get(p, {}) if optimizer else {}
        weights[name] = _value(p, state.get(MASTER))
        if isinstance(own := local(p), HybridQuantizedTensor):
            has_value = MASTER in state or own.high_precision_init_val is not None
            described, planes = ({}, {}) if has_value else planes_of(p)
            beside |= {f"{PLANES}.{name}.{buffer}": plane for buffer, plane in planes.items()}
            held[name] = {"key": key_numbers(own.metadata.key), "quantizer": str(own.quantizer), **described}
    weights |= buffers_of(model)
    if taken := {"optimizer", OWN} & {name.partition(".")[0] for name in weights}:
        raise UserError(
            f"save_sharded: the model has a module {taken.pop()!r}, a name that the checkpoint needs itself"
        )
    beside |= {f"{DELAYED}.{name}": value for name, value in delayed_tensors(model).items()}
    beside |= {f"{RANDOM}.{rank}.{device}": state for device, state in generators().items()}
    facts = {"held": held, "groups": _groups(params, optimizer), EXTRA: _as_text(extra, EXTRA, beside)}
    return Collected(weights=weights, moments=dict(_moments(params, optimizer)), beside=beside, facts=facts)


def joined(own: Collected, group: Any) -> dict[str, Any]:
    """What torch.distributed.checkpoint is given: this rank's tensors, and a text of the facts of all ranks."""
    each = gathered(own.facts, group)
    facts = own.facts | {
        "held": {name: told for facts in each for name, told in facts["held"].items()},
        "groups": [_one_group(parts) for parts in zip(*(facts["groups"] for facts in each), strict=True)],
    }
    text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    weights, moments = ({n: _storable(x) for n, x in each.items()} for each in (own.weights, own.moments))
    return weights | {"optimizer": moments, OWN: own.beside | {FACTS: text}}


def _storable(x: Tensor) -> Tensor:
    """A tensor of which ranks hold pieces, whole; any other as it is."""
    return whole_tensor(x) if is_in_pieces(x) else x


def generators() -> dict[str, Tensor]:
    """Device -> the state of torch's generator there."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {"cpu": torch.get_rng_state()} | cuda


def _value(p: nn.Parameter, master: Tensor | None) -> Tensor:
    """What a weight is made of again, cut as it is: its master, or what one would start from."""
    own = local(p)
    if master is not None or not isinstance(own, HybridQuantizedTensor):
        return p.detach() if master is None else master
    preserved = own.high_precision_init_val
    value = own.dequantize(torch.float32) if preserved is None else preserved.to(p.device, torch.float32)
    return spread_like(p, value.view(own.shape).detach())


def _moments(params: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """ "state.NAME.exp_avg" and so on: every tensor that the optimizer keeps of a parameter but its master."""
    for name, p in params.items():
        for key, value in (optimizer.state.get(p, {}) if optimizer else {}).items():
            if isinstance(value, Tensor) and key != MASTER:
                yield f"state.{name}.{key}", value


def _groups(params: Params, optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Of each group of the optimizer the names of its parameters and its options that are numbers."""
    names = {id(p): name for name, p in params.items()}
    return [
        {
            "params": [names[id(p)] for p in group["params"] if id(p) in names],
            "options": {key: _number(value) for key, value in group.items() if _is_number(value)},
        }
        for group in (optimizer.param_groups if optimizer else ())
    ]


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def _number(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_number(each) for each in value]
    return value.item() if isinstance(value, Tensor) else value


def _one_group(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One group, of what each rank has of it: a stage of a pipeline has its own parameters."""
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part["params"])
    return {"params": list(names), "options": parts[0]["options"]}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a state_dict by their names in the plain model, without states of delayed scaling."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    leads = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, DelayedStates))
    held = {name: value for name, value in model.state_dict().items() if name not in params}
    return {
        clean_name(name): value
        for name, value in held.items()
        if isinstance(value, Tensor) and not (leads and name.startswith(leads))
    }


def delayed_owners(model: nn.Module) -> dict[str, DelayedStates | ExpertStates]:
    """Name -> the states of delayed scaling of a module, or of a part of a converted one."""
    found: dict[str, DelayedStates | ExpertStates] = {}
    for name, module in model.named_modules():
        if isinstance(module, DelayedStates):
            found[clean_name(name)] = module
        for part in getattr(module, PARTS, ()):
            found[f"{part.name}.states"] = part.states
    return found


def delayed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The states of delayed scaling: "NAME.states.input_rowwise.history" and so on; but those of held weights of
    experts that another rank writes, which it notes alone."""
    owners, elsewhere = delayed_owners(model), _written_elsewhere(model)
    every = {f"{name}.{key}": value for name, states in owners.items() for key, value in states.state_dict().items()}
    return {name: value for name, value in every.items() if not (elsewhere and name.startswith(elsewhere))}


def _written_elsewhere(model: nn.Module) -> tuple[str, ...]:
    """What the names of these states begin with."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear) and isinstance(own := local(module.weights[0]), GroupedTensor):
            first = own.metadata.content.first
            written = {str(expert) for expert in range(first, first + own.experts)}
            others = [expert for expert, _ in module.states.named_children() if expert not in written]
            found += [f"{clean_name(name)}.states.{expert}.weight_" for expert in others]
    return tuple(found)


def _as_text(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON takes it; its tensors go to `tensors`. UserError for anything else."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {TENSOR: name}
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str) or key == TENSOR]:
            raise UserError(f"save_sharded: {name} has the key {strange[0]!r}; it takes texts other than {TENSOR!r}")
        return {key: _as_text(each, f"{name}.{key}", tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise UserError(
        f"save_sharded: {name} is a {type(value).__name__}; it takes numbers, texts, None, tensors, lists, and mappings"
    )


def from_text(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of _as_text; tuples have become lists."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensors[value[TENSOR]]
        return {key: from_text(each, tensors) for key, each in value.items()}
    return [from_text(each, tensors) for each in value] if isinstance(value, list) else value


def key_numbers(key: RngKey | None) -> list[Any] | None:
    """A key of random bits, as a text has it."""
    return key and [key.seed, key.slot, key.step]


def key_of(numbers: list[Any] | None) -> RngKey | None:
    """Inverse of key_numbers."""
    return numbers and RngKey(seed=numbers[0], slot=numbers[1], step=numbers[2])
