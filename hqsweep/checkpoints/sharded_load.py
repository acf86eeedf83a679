"""load_sharded: read what save_sharded wrote on any number of ranks into a training on any other number."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.checkpoints.checkpoint import Checkpoint, first_names
from hqsweep.checkpoints.dcp import Box, inspect_tensors, read_part
from hqsweep.checkpoints.dcp_metadata import Stored
from hqsweep.checkpoints.sharded_options import load_options, saved_groups
from hqsweep.checkpoints.sharded_state import (
    DELAYED,
    EXTRA,
    FACTS,
    LOCAL_DELAYED,
    OWN,
    PLANES,
    RANDOM,
    RANKS,
    buffers_of,
    delayed_leads,
    delayed_owners,
    from_text,
    key_of,
    local_leads,
    parameters_of,
    take_,
    tied_names,
    whole_of,
)
from hqsweep.checkpoints.weights import refuse_shape, refuse_strange
from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.nn.core.parameter import note_update
from hqsweep.optim.adam import MASTER, OWN_MASTERS, FusedAdam
from hqsweep.parallel.shared.held import link_held
from hqsweep.parallel.wire.collectives import count_in, gathered, rank_in, together
from hqsweep.parallel.wire.local import is_in_pieces, is_spread, local, spread_like, spread_out, write_held
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.roles import clean_name
from hqsweep.torch_private import local_box

Optimizer = torch.optim.Optimizer | None


def box_of(tensor: Tensor) -> Box:
    """This rank's part of a DTensor, whatever its placements; all of a plain tensor."""
    if not is_spread(tensor):
        return Box(offsets=(0,) * tensor.dim(), shape=tuple(tensor.shape))
    shape, offsets = local_box(tensor)
    return Box(offsets=offsets, shape=shape)


@torch.no_grad()
def load_sharded(
    model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str], *, group: Any = None
) -> dict[str, Any]:
    """Give a training the state that save_sharded wrote, in place, and return its `extra`; all ranks of `group` call
    it. Every rank reads its own part: the number of ranks, the mesh and the placements may have changed.

    Training continues with the same bytes, and with torch's generators on ranks that were there. A folder of torchtitan
    with the model's own names is read too: weights, moments, and options such as rates, betas and decay. An option that
    is not a number is left with a warning; everything else begins anew. optimizer: None for the weights alone.

    Raises UserError on all ranks, before anything is written: for names and shapes that are not the model's, for an
    incomplete checkpoint, and for histories of +local_amax from another number of ranks. It raises UserError later for
    bytes that are not a tensor; the model must then be loaded again.
    """
    extra, held = load_but_codes(model, optimizer, folder, group=group)
    for weight in held:
        encode_again(weight)
    return extra


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """A weight that is held quantized, whose codes are still to be made."""

    parameter: nn.Parameter
    value: Tensor
    """The values from which this rank's part is quantized."""
    key: RngKey | None
    """The key of its last quantization."""
    quantizer: str | None
    """The quantizer in which the checkpoint had it; None in a folder of another program."""


def load_but_codes(
    model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str], *, group: Any = None
) -> tuple[dict[str, Any], list[Held]]:
    """Run load_sharded, except that held weights with masters get no codes. Return these weights in parameter order.

    Ranks quantize them together in this order.
    """
    folder = Path(folder)
    content = together(lambda: Content.of(folder), group)
    params, buffers = parameters_of(model), buffers_of(model)
    tied = tied_names(model, params)
    everywhere = {name for names in gathered([*params, *buffers, *tied], group) for name in names}
    together(lambda: content.check({**params, **buffers}, everywhere), group)
    together(lambda: content.check_tied(tied, params), group)
    rank, ranks = rank_in(group), count_in(group)
    together(lambda: content.check_ranks(local_leads(model), ranks), group)
    return together(lambda: _load(content, model, params, optimizer, rank, ranks), group)


@dataclass(frozen=True, kw_only=True, eq=False)
class Content:
    """A folder of torch.distributed.checkpoint, with its small tensors read."""

    checkpoint: Checkpoint
    stored: Mapping[str, Stored]
    facts: Mapping[str, Any] | None
    """The entries of save_sharded's text; None in a folder of another program."""

    @classmethod
    def of(cls, folder: Path) -> "Content":
        """The content of a folder; UserError for an incomplete checkpoint."""
        if not folder.is_dir():
            raise UserError(f"load_sharded: '{folder}' is not there; give a folder of torch.distributed.checkpoint")
        checkpoint, stored = inspect_tensors(folder)
        checkpoint.check()
        facts = None
        if (name := f"{OWN}.{FACTS}") in stored:
            try:
                facts = loads(read_part(folder, name, stored[name]).numpy().tobytes())
            except ValueError as error:
                raise UserError(f"{folder}: its {name} is no text ({error}); copy or save it again") from None
        return cls(checkpoint=checkpoint, stored=stored, facts=facts)

    def check(self, wanted: Mapping[str, Tensor], everywhere: set[str]) -> None:
        """UserError unless the checkpoint has the model's tensors; `wanted` are this rank's."""
        there, path = self.checkpoint.tensors, self.checkpoint.path
        if lacking := [name for name in wanted if name not in there]:
            raise UserError(
                f"{path}: it lacks {len(lacking)} of the {len(wanted)} tensors of the model: {first_names(lacking)};"
                " give the checkpoint of this model"
            )
        if strange := [name for name in there if name not in everywhere]:
            refuse_strange(self.checkpoint, strange, wanted)
        for name, value in wanted.items():
            if there[name][0] != tuple(value.shape):
                refuse_shape(self.checkpoint, name, there[name][0], tuple(value.shape))

    def check_tied(self, tied: Mapping[str, str], params: Mapping[str, Tensor]) -> None:
        """UserError where another program wrote two values for tensors that the model ties."""
        there = self.checkpoint.tensors
        for name, first in tied.items() if self.facts is None else ():
            both = [self.weight(each, params[first]) for each in (name, first) if there.get(each) == there[first]]
            if name in there and not (len(both) == 2 and torch.equal(*both)):
                raise UserError(f"{self.checkpoint.path}: the model ties {name} and {first}, which differ there")

    def check_ranks(self, own: tuple[str, ...], ranks: int) -> None:
        """Raise UserError if each rank has its own states, and another number of ranks wrote them."""
        stored, saved = f"{OWN}.{LOCAL_DELAYED}.", self._saved_by
        names = (n.removeprefix(stored).partition(".")[2] for n in self.stored if n.startswith(stored))
        if saved != ranks and any(name.startswith(own) for name in names):
            raise UserError(
                f"{self.checkpoint.path}: +local_amax keeps amaxes of each rank, and {saved} ranks wrote it, but"
                f" {ranks} load it; take {saved}, or a format without +local_amax"
            )

    def part(self, saved: str, like: Tensor) -> Tensor:
        """This rank's part of a model's tensor."""
        if is_in_pieces(like):
            whole = read_part(self.checkpoint.path, saved, self.stored[saved]).to(like.device)
            return local(spread_out(whole, like))
        return read_part(self.checkpoint.path, saved, self.stored[saved], box_of(like)).to(like.device)

    def weight(self, name: str, like: Tensor) -> Tensor:
        """This rank's part of a model's tensor."""
        return self.part(self.checkpoint.saved_as[name], like)

    def beside(self, lead: str) -> dict[str, Tensor]:
        """The tensors under hqsweep whose names begin so, by the rest of their names."""
        lead = f"{OWN}.{lead}."
        tensors = {name: tensor for name, tensor in self.stored.items() if name.startswith(lead)}
        return {n.removeprefix(lead): read_part(self.checkpoint.path, n, tensor) for n, tensor in tensors.items()}

    def delayed_of(self, rank: int, ranks: int, shared: tuple[str, ...]) -> dict[str, Tensor]:
        """The states of delayed scaling that only this one of `ranks` had, less those whose names begin as in `shared`;
        none where another number of ranks wrote them."""
        of_rank = self.beside(f"{LOCAL_DELAYED}.{rank}") if self._saved_by == ranks else {}
        return {name: state for name, state in of_rank.items() if not name.startswith(shared)}

    @property
    def _saved_by(self) -> int | None:
        """The number of ranks that wrote the folder; None where that is not known."""
        return (self.facts or {}).get(RANKS)

    def moments(self, name: str) -> dict[str, str]:
        """The entries "exp_avg" and so on of a parameter -> their saved names."""
        return self._moments.get(name, {})

    @cached_property
    def _moments(self) -> Mapping[str, Mapping[str, str]]:
        moments: dict[str, dict[str, str]] = {}
        for saved in self.stored:
            if saved.startswith(lead := "optimizer.state."):
                name, _, key = saved.removeprefix(lead).rpartition(".")
                moments.setdefault(clean_name(name), {})[key] = saved
        return moments


def _load(
    content: Content, model: nn.Module, params: Mapping[str, nn.Parameter], optimizer: Optimizer, rank: int, ranks: int
) -> tuple[dict[str, Any], list[Held]]:
    """Load all but the codes of held weights, which ranks make together."""
    facts, path = content.facts, content.checkpoint.path
    groups = saved_groups(path, content.stored, params, optimizer) if facts is None else facts["groups"]
    for name, buffer in buffers_of(model).items():
        local(buffer).copy_(content.weight(name, buffer))
    _load_delayed(model, content.beside(DELAYED), content.delayed_of(rank, ranks, local_leads(model, local=False)))
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else set()
    values = []
    for name, p in params.items():
        value = content.weight(name, p)
        if id(p) in updated:
            optimizer.state[p] = _state(content, name, p, value, optimizer)
        if isinstance(own := local(p), HybridQuantizedTensor):
            values += _load_held(content, name, p, value)
            if id(p) in updated and MASTER in optimizer.state[p]:
                own.clear_high_precision_init_val()
        else:
            own.copy_(value)
    torch.autograd.graph.increment_version(list(params.values()))
    note_update()
    load_options(groups, params, optimizer)
    if facts is None:
        return {}, values
    _load_generators(content.beside(RANDOM), rank)
    extra = {f"{EXTRA}.{name}": value for name, value in content.beside(EXTRA).items()}
    return from_text(facts[EXTRA], extra), values


def _load_held(content: Content, name: str, p: nn.Parameter, value: Tensor) -> list[Held]:
    """Give a held weight the codes of the checkpoint, if it has some; else return the sources of its codes."""
    own, told = local(p), (content.facts or {}).get("held", {}).get(name)
    if told and "metadata" in told:
        take_(p, whole_of(told, content.beside(f"{PLANES}.{name}"), own.device))
        return []
    if own.high_precision_init_val is None and not content.moments(name):
        own.high_precision_init_val = value.to("cpu", copy=True)
    key = key_of(told["key"]) if told else own.metadata.key
    return [Held(parameter=p, value=value, key=key, quantizer=(told or {}).get("quantizer"))]


def encode_again(held: Held) -> None:
    """Quantize a held weight as the last time: under the amaxes of its delayed scaling, which do not change."""
    own = local(held.parameter)
    slots = own.states if isinstance(own.states, list) else [own.states]
    states = [state for slot in slots if slot for state in slot.states.values()]
    before = [(state, state.history.clone(), state.amax.clone(), state.step) for state in states]
    for state in states:
        state.step = None  # so that none ends its step
    write_held(held.parameter, held.value, held.key)
    for state, history, amax, step in before:
        state.history.copy_(history)
        state.amax.copy_(amax)
        state.step = step


def _state(content: Content, name: str, p: Tensor, value: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state of a parameter; empty before its first step."""
    state: dict[str, Any] = {}
    for key, saved in content.moments(name).items():
        if content.stored[saved].shape == tuple(p.shape) and key != "step":
            state[key] = spread_like(p, content.part(saved, p))
        else:
            state[key] = read_part(content.checkpoint.path, saved, content.stored[saved])
    own_master = p.dtype in OWN_MASTERS and not isinstance(local(p), HybridQuantizedTensor)
    if state and isinstance(optimizer, FusedAdam) and optimizer.master_weights and not own_master:
        state[MASTER] = spread_like(p, value.to(torch.float32, copy=True))
    return state


def _load_delayed(model: nn.Module, shared: Mapping[str, Tensor], of_rank: Mapping[str, Tensor]) -> None:
    """Load the states that all ranks share, and this rank's own states."""
    tensors = {**shared, **of_rank}
    for name, states in delayed_owners(model).items():
        own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        states.load_state_dict(own, strict=False)
    for lead, state in delayed_leads(model).items():
        state.is_local |= f"{lead}history" in of_rank
    link_held(model)


def _load_generators(states: Mapping[str, Tensor], rank: int) -> None:
    if (own := states.get(f"{rank}.cpu")) is not None:
        torch.set_rng_state(own)
    if (own := states.get(f"{rank}.cuda")) is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(own)
