"""The states of delayed scaling that a module holds, and its state_dict contains."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats import Fp8Delayed
from hqsweep.quant.delayed import DelayedState, SlotStates
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer

EPOCHS = 4
"""Dropped states are kept for this many changes of recipe."""
Quantizers = Mapping[str, HybridQuantizer | None]
"""Slot -> its quantizer, or None."""


class DelayedStates(nn.ModuleDict):
    """ "input_rowwise" -> DelayedState, for each slot and direction in fp8_delayed.

    A module creates the states of its own quantizers when it is built or given a recipe. So the state_dict of a fresh
    module has them; torch.distributed.checkpoint only loads keys that it finds there. A state survives changes of
    recipe while its slot and direction stay fp8_delayed with an equally long history; else keep() drops it. States of a
    recipe under autocast are created at the first call, or by state_dict() inside that autocast. An autocast in which a
    slot is not delayed leaves its states unchanged.
    """

    epoch = 0
    """How often states were dropped. A call notes it in forward, so that backward uses the states of that time."""
    _given_up: tuple[tuple[str, int, DelayedState], ...] = ()
    """(name, the epoch that began without it, state) of the last EPOCHS, earliest first."""
    _is_loaded = False
    """Whether a checkpoint was loaded; a state created from now on was not in it."""

    def of(
        self,
        slot: str,
        quantizer: HybridQuantizer | None,
        *,
        device: torch.device,
        **call: Any,
    ) -> SlotStates | None:
        """Return a slot's states for one call, or None if no direction is delayed. call: step, record and group of
        SlotStates."""
        if quantizer is None or not quantizer.delayed:
            return None
        return slots_of([self], slot, quantizer, device=device, **call)[0]

    def add(self, quantizers: Quantizers) -> None:
        """Create the missing states of these quantizers on torch's default device."""
        needed = _formats(quantizers)
        missing = {n: f for n, f in needed.items() if n not in self or not _fits(self[n], f.history)}
        self._give_up(name for name in missing if name in self)
        with torch.inference_mode(False):  # a training may continue with states made in an evaluation
            for name, format in missing.items():
                self[name] = DelayedState(format.history)
        for name, format in needed.items():
            self[name].is_local = _is_local(name, format)

    def keep(self, quantizers: Quantizers) -> None:
        """Keep the states that these quantizers need, create missing ones, and drop all others."""
        needed = _formats(quantizers)
        self._give_up([name for name in self if name not in needed])
        self.add(quantizers)

    def _give_up(self, names: Iterable[str]) -> None:
        """Drop states, but keep them for backward passes of earlier forwards."""
        dropped = [(name, self._modules.pop(name)) for name in names]
        if not dropped:
            return
        self.epoch += 1
        recent = [given for given in self._given_up if given[1] > self.epoch - EPOCHS]
        self._given_up = (*recent, *((name, self.epoch, state) for name, state in dropped))

    def state(self, name: str, format: Fp8Delayed, device: torch.device, epoch: int | None = None) -> DelayedState:
        """Return the state of that name in an epoch (None: now), created if missing or of another length.

        UserError for an epoch whose states are gone.
        """
        state = self._modules.get(name)
        if epoch is not None and epoch != self.epoch:
            if epoch < self.epoch - EPOCHS:
                raise UserError(
                    f"fp8_delayed: backward of {name} comes after {self.epoch - epoch} changes of recipe, and histories"
                    f" are kept for {EPOCHS}; run backward before the recipe changes again"
                )
            state = next((kept for own, until, kept in self._given_up if own == name and until > epoch), state)
        if state is not None and _fits(state, format.history) and state.history.device == device:
            return state
        with torch.inference_mode(False):
            if state is not None and _fits(state, format.history):
                return state.to(device)
            if self._is_loaded:
                self._is_loaded = False
                warnings.warn(
                    f"fp8_delayed: the checkpoint that was loaded has no history of {format.history} steps for a slot"
                    " that is in use now, which begins anew; to load the states of a recipe under autocast with"
                    " torch.distributed.checkpoint, call state_dict() inside that autocast",
                    stacklevel=2,
                )
            self[name] = DelayedState(format.history, device)
            self[name].is_local = _is_local(name, format)
        return self[name]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load states, and create states that only the checkpoint has. Missing ones are reset (see DelayedState)."""
        histories = {
            key.removeprefix(prefix).removesuffix(".history"): tensor
            for key, tensor in state_dict.items()
            if key.startswith(prefix) and key.endswith(".history")
        }
        for name, history in histories.items():
            if name not in self or not _fits(self[name], len(history)):
                self[name] = DelayedState(len(history), history.device)
        self._is_loaded = True
        super()._load_from_state_dict(state_dict, prefix, *args)


class ExpertStates(nn.ModuleList):
    """The states of delayed scaling per expert: "3.input_rowwise" in a state_dict belongs to expert 3."""

    def __init__(self, experts: int) -> None:
        super().__init__(DelayedStates() for _ in range(experts))

    @property
    def epoch(self) -> int:
        """DelayedStates.epoch, equal for all experts."""
        return next((states.epoch for states in self), 0)  # a part of the experts may lack number 0

    def of(
        self,
        slot: str,
        quantizer: HybridQuantizer | None,
        *,
        device: torch.device,
        **call: Any,
    ) -> list[SlotStates] | None:
        """Return DelayedStates.of() for every expert."""
        if quantizer is None or not quantizer.delayed:
            return None
        return slots_of(self, slot, quantizer, device=device, **call)

    def part(self, first: int, count: int) -> "ExpertStates":
        """Return the states of `count` experts from the given index on; they keep their numbers in a state_dict."""
        part, names = ExpertStates(0), list(self._modules)
        part._modules.update({name: self._modules[name] for name in names[first : first + count]})
        return part

    def numbered(self, first: int, count: int) -> "ExpertStates":
        """Return the states of `count` experts from expert number `first` on; self if these are all."""
        names = list(self._modules)
        return self if count == len(names) else self.part(first - int(names[0]), count)

    def add(self, quantizers: Quantizers) -> None:
        """Run DelayedStates.add() for every expert; all have these quantizers."""
        for states in self:
            states.add(quantizers)

    def keep(self, quantizers: Quantizers) -> None:
        """Run DelayedStates.keep() for every expert; all have these quantizers."""
        for states in self:
            states.keep(quantizers)

    def reset_parameters(self) -> None:
        """Forget everything."""
        for states in self:
            for state in states.values():
                state.reset_parameters()


def slots_of(
    owners: Sequence[DelayedStates],
    slot: str,
    quantizer: HybridQuantizer,
    *,
    device: torch.device,
    epoch: int | None = None,
    **call: Any,
) -> list[SlotStates]:
    """Return DelayedStates.of() for several owners, such as experts, with one delayed quantizer."""
    formats = [(name, name.rpartition("_")[2], f) for name, f in _formats({slot: quantizer}).items()]
    by_owner = [{direction: own.state(name, f, device, epoch) for name, direction, f in formats} for own in owners]
    return [SlotStates(states=states, **call) for states in by_owner]


def _formats(quantizers: Quantizers) -> dict[str, Fp8Delayed]:
    """Return state name -> its delayed format."""
    formats = {f"{slot}_{d}": getattr(q, d) for slot, q in quantizers.items() if q for d in DIRECTIONS}
    return {name: format for name, format in formats.items() if format.delayed}


def _is_local(name: str, format: Fp8Delayed) -> bool:
    """Return whether ranks differ in a state; ranks that have a weight share its state."""
    return format.local_amax and not name.startswith("weight_")


def _fits(state: DelayedState, length: int) -> bool:
    return len(state.history) == length
