"""The tensors, by name, that make up a checkpoint of a training over any number of ranks.

Weights stand under the names of the plain model, each as its FP32 master where it has one, and tied ones under each of
their names. Moments and options stand under optimizer, as torchtitan names them. The rest stands under hqsweep, is
small, and is equal on all ranks: histories of delayed scaling, and one text of numbers, with the keys of random bits,
the options of the optimizer's groups, and the caller's own. Histories of +local_amax and states of generators belong to
a rank, and stand under its number. Everything that is read again is a tensor, because any other object is a pickle.
Such are the options under optimizer, which torch reads.

Codes of held weights are made again from their masters. Weights without a master are stored as codes and scales,
unchanged, in tensors of bytes. Each rank of a sharding gives the bytes that it would send for a gather. All ranks give
equally many: together they are a tensor uint8 [ranks * bytes] that any number of ranks reads.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.checkpoints.dcp import TIED
from hqsweep.checkpoints.sharded_options import flat_options, groups_of, one_group
from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.models.held import held_parts
from hqsweep.nn.core.delayed import DelayedStates, ExpertStates
from hqsweep.nn.core.module import PARTS
from hqsweep.nn.grouped_linear import GroupedLinear
from hqsweep.optim import MASTER
from hqsweep.parallel.shards.shard import Cut, buffer_cuts
from hqsweep.parallel.wire.collectives import gathered
from hqsweep.parallel.wire.local import is_in_pieces, is_spread, local, spread_like, type_of_spread, whole_tensor
from hqsweep.quant.delayed import DelayedState
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.tensor import KINDS, HybridQuantizedTensor
from hqsweep.quant.usage import Metadata
from hqsweep.recipe.roles import clean_name

Optimizer = torch.optim.Optimizer

OWN = "hqsweep"
"""The top name of entries beside weights and moments: "facts", and tensors under the other names."""
FACTS, DELAYED, RANDOM, EXTRA, PLANES = "facts", "delayed", "random", "extra", "planes"
LOCAL_DELAYED = "local_delayed"
"""The name of histories that belong to one rank; the rank's number follows."""
RANKS = "ranks"
"""The text's key for the number of ranks."""
TENSOR = "tensor"
"""The key of a tensor in the text of extra: {"tensor": "extra.a.b"} names a tensor under hqsweep."""


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name in the plain model -> parameter, as it is sharded; tied ones once."""
    model.state_dict()  # whose hooks have FSDP2 go back to shards, and modules make their states
    return {clean_name(name): p for name, p in model.named_parameters()}


def tied_names(model: nn.Module, params: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return alias -> name, for every further name of a tied parameter in a state_dict."""
    names = {id(p): name for name, p in params.items()}
    every = [(name, names[id(p)]) for name, p in model.named_parameters(remove_duplicate=False)]
    there = model.state_dict().keys() if len(every) > len(params) else ()
    tied = {clean_name(name): first for name, first in every if name in there}
    return {name: first for name, first in tied.items() if name not in params}


@dataclass(frozen=True, kw_only=True, eq=False)
class Collected:
    """The state that one rank has to save."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    options: dict[str, Any]
    """The options of the optimizer's groups, flattened."""
    beside: dict[str, Tensor]
    facts: dict[str, Any]
    """The numbers and texts; parameters and keys are this rank's."""


def collect(model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any], rank: int) -> Collected:
    """Return the state of a rank, collected without communication. UserError for a state that cannot be saved."""
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
    tied = tied_names(model, params)
    weights |= buffers_of(model) | {name: weights[first] for name, first in tied.items()}
    beside |= {f"{TIED}.{name}": torch.ones(1, dtype=torch.uint8) for name in tied}
    if taken := {"optimizer", OWN} & {name.partition(".")[0] for name in weights}:
        raise UserError(
            f"save_sharded: the model has a module {taken.pop()!r}, a name that the checkpoint needs itself"
        )
    own, of_rank = local_leads(model), f"{LOCAL_DELAYED}.{rank}"
    for name, value in delayed_tensors(model).items():
        beside[f"{of_rank if name.startswith(own) else DELAYED}.{name}"] = value
    beside |= {f"{RANDOM}.{rank}.{device}": state for device, state in generators().items()}
    facts = {"held": held, "groups": groups_of(params, optimizer), EXTRA: _as_text(extra, EXTRA, beside)}
    moments, options = dict(_moments(params, optimizer)), flat_options(params, optimizer)
    return Collected(weights=weights, moments=moments, options=options, beside=beside, facts=facts)


def joined(own: Collected, group: Any) -> dict[str, Any]:
    """The state for torch.distributed.checkpoint: this rank's tensors, and a text with the facts of all ranks."""
    of_ranks = gathered(own.facts, group)
    facts = own.facts | {
        "held": {name: told for rank in of_ranks for name, told in rank["held"].items()},
        "groups": [one_group(parts) for parts in zip(*(rank["groups"] for rank in of_ranks), strict=True)],
        RANKS: len(of_ranks),
    }
    text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    weights, moments = ({n: _storable(x) for n, x in tensors.items()} for tensors in (own.weights, own.moments))
    return weights | {"optimizer": moments | own.options, OWN: own.beside | {FACTS: text}}


def _storable(x: Tensor) -> Tensor:
    """A tensor that ranks hold in pieces, whole; any other tensor itself."""
    return whole_tensor(x) if is_in_pieces(x) else x


def generators() -> dict[str, Tensor]:
    """Device -> the state of torch's generator there."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {"cpu": torch.get_rng_state()} | cuda


def _value(p: nn.Parameter, master: Tensor | None) -> Tensor:
    """Return the value from which a weight is made again, sharded like it: its master, or a future master's first
    value."""
    own = local(p)
    if master is not None or not isinstance(own, HybridQuantizedTensor):
        return p.detach() if master is None else master
    preserved = own.high_precision_init_val
    value = own.dequantize(torch.float32) if preserved is None else preserved.to(p.device, torch.float32)
    return spread_like(p, value.view(own.shape).detach())


def _moments(params: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """ "state.NAME.exp_avg" and so on -> every tensor that the optimizer keeps of a parameter except its master."""
    for name, p in params.items():
        for key, value in (optimizer.state.get(p, {}) if optimizer else {}).items():
            if isinstance(value, Tensor) and key != MASTER:
                yield f"state.{name}.{key}", value


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
    """Name -> the states of delayed scaling in a module, or in a part of a converted one."""
    owners: dict[str, DelayedStates | ExpertStates] = {}
    for name, module in model.named_modules():
        if isinstance(module, DelayedStates):
            owners[clean_name(name)] = module
        for part in getattr(module, PARTS, ()):
            owners[f"{part.name}.states"] = part.states
    return owners


def delayed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The states of delayed scaling: "NAME.states.input_rowwise.history" and so on. Left out are held weights of
    experts that another rank writes: only that rank has their states complete."""
    owners, elsewhere = delayed_owners(model), _written_elsewhere(model)
    every = {f"{name}.{key}": value for name, states in owners.items() for key, value in states.state_dict().items()}
    return {name: value for name, value in every.items() if not (elsewhere and name.startswith(elsewhere))}


def delayed_leads(model: nn.Module) -> dict[str, DelayedState]:
    """Prefix of the names of a state's tensors, "NAME.states.input_rowwise." -> the state."""
    return {
        f"{owner}.{name}.": state
        for owner, states in delayed_owners(model).items()
        for name, state in states.named_modules()
        if isinstance(state, DelayedState)
    }


def local_leads(model: nn.Module, *, local: bool = True) -> tuple[str, ...]:
    """Prefixes (delayed_leads) of the states that every rank has for itself, or of the others."""
    return tuple(lead for lead, state in delayed_leads(model).items() if state.is_local == local)


def _written_elsewhere(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the states that another rank writes."""
    leads, named = [], list(model.named_modules())
    owners = [(clean_name(name), own.states, own.weights[0]) for name, own in named if isinstance(own, GroupedLinear)]
    owners += [(part.name, part.states, weight) for _, part, weight in held_parts(model)]
    for name, states, weight in owners:
        if isinstance(own := local(weight), GroupedTensor):
            first = own.metadata.content.first
            written = {str(expert) for expert in range(first, first + own.experts)}
            others = [expert for expert, _ in states.named_children() if expert not in written]
            leads += [f"{name}.states.{expert}.weight_" for expert in others]
    return tuple(leads)


def _as_text(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value for JSON; its tensors go to `tensors`. UserError for anything else."""
    if isinstance(value, Tensor):
        if name in tensors:
            raise UserError(f"save_sharded: two tensors are {name}, one by a key with a dot in it; name one otherwise")
        tensors[name] = value.detach()
        return {TENSOR: name}
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str) or key == TENSOR]:
            raise UserError(f"save_sharded: {name} has the key {strange[0]!r}; it takes texts other than {TENSOR!r}")
        return {key: _as_text(entry, f"{name}.{key}", tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(entry, f"{name}.{i}", tensors) for i, entry in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise UserError(
        f"save_sharded: {name} is a {type(value).__name__}; it takes numbers, texts, None, tensors, lists, and mappings"
    )


def from_text(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of _as_text; tuples have become lists."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensors[value[TENSOR]]
        return {key: from_text(entry, tensors) for key, entry in value.items()}
    return [from_text(entry, tensors) for entry in value] if isinstance(value, list) else value


def key_numbers(key: RngKey | None) -> list[Any] | None:
    """A key of random bits as numbers for a text."""
    return key and [key.seed, key.slot, key.step]


def key_of(numbers: list[Any] | None) -> RngKey | None:
    """The inverse of key_numbers."""
    return numbers and RngKey(seed=numbers[0], slot=numbers[1], step=numbers[2])


def planes_of(p: nn.Parameter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A description of the whole tensor and its cut, in texts and numbers, and "rowwise_q" and so on -> its bytes.

    UserError for a cut that fully_shard alone does not make.
    """
    own, (cut, axis) = local(p), _cut_of(p)
    ranks, rank = (p.device_mesh.size(axis), p.device_mesh.get_local_rank(axis)) if axis is not None else (1, 0)
    cuts = buffer_cuts(cut, ranks)
    planes = {name: buffer_cut.pack(own.buffers[name], rank) for name, buffer_cut in cuts.items()}
    if axis is not None:
        options = {"run_check": False}
        placements = [type(each)(0) if i == axis else each for i, each in enumerate(p.placements)]
        planes = {n: type_of_spread().from_local(x, p.device_mesh, placements, **options) for n, x in planes.items()}
    described = {"metadata": cut.metadata.describe(), "kind": type(own).__name__, "dim": cut.dim}
    return described | {"shape": list(cut.shape), "each": cut.each, "ranks": ranks}, planes


def _cut_of(p: nn.Parameter) -> tuple[Cut, int | None]:
    """The cut of a parameter, and the axis of its mesh along which it is cut; None for one that is whole."""
    own = local(p)
    axes = [i for i, cut in enumerate(p.placements) if not cut.is_replicate()] if is_spread(p) else []
    if not axes:
        return Cut.of(own.metadata, own.shape, max(own.shape[0], 1)), None
    if len(axes) > 1 or own.sharding is None or own.part is not None:
        raise UserError(
            f"save_sharded: a weight in {own.quantizer} without a master, of which ranks of tp or ep have parts, is"
            " not saved as codes; give the optimizer that has its master, or build the model with"
            " quantized_model_init(preserve_high_precision_init_val=True)"
        )
    return own.sharding.cut, axes[0]


def whole_of(described: Mapping[str, Any], planes: Mapping[str, Tensor], device: torch.device) -> HybridQuantizedTensor:
    """The whole tensor from this description and these bytes. UserError for bytes that do not fit its formats."""
    metadata, shape = Metadata.parse(described["metadata"]), tuple(described["shape"])
    dim = described.get("dim", described.get("axis", 0) * (len(shape) - 1))  # older files have the matrix's axis
    cuts = buffer_cuts(Cut(metadata, shape, described["each"], dim), described["ranks"])
    buffers = metadata.empty(device)
    for name, buffer in buffers.items():
        plane = planes.get(name)
        if plane is None or plane.numel() != described["ranks"] * cuts[name].nbytes:
            raise UserError(f"{name} of a weight in {metadata.quantizer} has another size than its format says")
        cuts[name].unpack(plane.to(device), buffer)
    return KINDS[described["kind"]](buffers, metadata, shape)


def take_(p: nn.Parameter, whole: HybridQuantizedTensor) -> None:
    """Give a parameter of the same formats this rank's part of the whole. UserError for other formats."""
    own, (cut, axis) = local(p), _cut_of(p)
    if whole.quantizer != own.quantizer or not set(own.metadata.directions) <= set(whole.metadata.directions):
        raise UserError(f"the checkpoint holds a weight in {whole.quantizer}, and the model in {own.quantizer}")
    rank = 0 if axis is None else p.device_mesh.get_local_rank(axis)
    if own.numel():
        own.write_(whole if axis is None else whole.split(cut.each, cut.dim)[rank])
    own.set_key(whole.metadata.key)
