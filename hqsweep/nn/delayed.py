"""The states of delayed scaling that a module holds, which its state_dict carries."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hqsweep.formats import Fp8Delayed
from hqsweep.quant.delayed import DelayedState, SlotStates
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer


class DelayedStates(nn.ModuleDict):
    """ "input_rowwise" -> DelayedState, for each slot and direction in fp8_delayed.

    A state is made when it is first used, lives through changes of recipe for as long as its slot and direction stay
    fp8_delayed with a history of the same length, and is given up by keep(). An autocast under which a slot is not
    delayed leaves it alone.
    """

    def of(
        self,
        slot: str,
        quantizer: HybridQuantizer | None,
        *,
        device: torch.device,
        step: int | None = None,
        record: bool = False,
    ) -> SlotStates | None:
        """The states of a slot for one call; None where no direction is delayed."""
        if quantizer is None or not quantizer.delayed:
            return None
        return slots_of([self], slot, quantizer, device=device, step=step, record=record)[0]

    def keep(self, quantizers: Mapping[str, HybridQuantizer | None]) -> None:
        """Give up the states that these quantizers, by slot, have no use for."""
        formats = {f"{slot}_{d}": getattr(q, d) for slot, q in quantizers.items() if q for d in DIRECTIONS}
        for name in list(self):
            if not (name in formats and formats[name].delayed and _fits(self[name], formats[name].history)):
                del self[name]

    def state(self, name: str, format: Fp8Delayed, device: torch.device) -> DelayedState:
        """The state of that name, made if it is not there or has another length."""
        found = self._modules.get(name)
        if found is not None and _fits(found, format.history) and found.history.device == device:
            return found
        with torch.inference_mode(False):  # a training may go on with what an evaluation made
            if found is not None and _fits(found, format.history):
                return found.to(device)
            self[name] = DelayedState(format.history, device)
        return self[name]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Have the states that the checkpoint has, and no others."""
        found = {
            key.removeprefix(prefix).removesuffix(".history"): tensor
            for key, tensor in state_dict.items()
            if key.startswith(prefix) and key.endswith(".history")
        }
        for name in [name for name in self if name not in found]:
            del self[name]
        for name, history in found.items():
            if name not in self or not _fits(self[name], len(history)):
                self[name] = DelayedState(len(history), history.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


def slots_of(
    owners: Sequence[DelayedStates],
    slot: str,
    quantizer: HybridQuantizer,
    *,
    device: torch.device,
    step: int | None,
    record: bool,
) -> list[SlotStates]:
    """DelayedStates.of for each of several owners, such as experts, and a quantizer that is delayed."""
    formats = {direction: getattr(quantizer, direction) for direction in DIRECTIONS}
    delayed = [(d, f"{slot}_{d}", f) for d, f in formats.items() if f.delayed]
    each = [{direction: own.state(name, f, device) for direction, name, f in delayed} for own in owners]
    return [SlotStates(states=states, step=step, record=record) for states in each]


def _fits(state: DelayedState, length: int) -> bool:
    return len(state.history) == length
