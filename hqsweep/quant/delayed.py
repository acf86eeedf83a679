"""The memory of delayed scaling: amaxes of earlier steps, with one state per direction of a slot.

TransformerEngine updates all states at the end of a step. Here a state ends its step when a later step first uses it.
So all microbatches of a step, and recomputations, use the same scale and add to the same amax. No call has to end a
step.

With torch.distributed, a recorded amax is at once reduced to the maximum over ranks. Every rank then has the same
states at any time, for the next step, an evaluation or a checkpoint. This requires that all ranks call the same modules
in the same order, as data parallelism does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, Format, Fp8Delayed
from hqsweep.formats.fp8 import end_step
from hqsweep.ops.library import in_backward
from hqsweep.ops.quantize.amax import Search, find_amax
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.splits import Splits
from hqsweep.torch_private import active_ddp_module, foreach_copy_, foreach_maximum_, foreach_zero_

NO_STEP = -1
"""The step in a checkpoint for a state that has recorded nothing, or only for a future step."""
FIRST_TURN = 2**40
"""The first of the numbers by which autocasts count in place of steps."""


class DelayedState(nn.Module):
    """History float32 [L] and amax float32 [1, 1], as in end_step; `step` is the step of history[0].

    The step is a Python number, which the device need not deliver; in a state_dict it is a tensor. It is None before
    the first step. For a tensor held as codes it is also None from a write until the next step that uses it.
    """

    history: Tensor
    amax: Tensor
    is_local: bool = False
    """Whether every rank keeps its own amaxes, as with +local_amax."""

    def __init__(self, length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(length, dtype=torch.float32, device=device))
        self.register_buffer("amax", torch.zeros(1, 1, dtype=torch.float32, device=device))
        self.step: int | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply fn to the buffers (nn.Module's hook for to(), half() and to_empty()), but keep amaxes in float32.

        A state that leaves the meta device is reset.
        """
        was_meta = self.history.is_meta
        for name, tensor in list(self._buffers.items()):
            moved = fn(tensor)
            self._buffers[name] = moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
        if was_meta and not self.history.is_meta:
            self.reset_parameters()
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load the state, or reset it if the checkpoint lacks it, as after a training in other formats."""
        if not any(key.startswith(prefix) for key in state_dict):
            self.reset_parameters()
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, tensor in self._buffers.items():  # load_state_dict(assign=True) can bring another dtype
            self._buffers[name] = tensor.to(torch.float32)

    def reset_parameters(self) -> None:
        """Forget everything, as after Module.to_empty."""
        self.history.zero_()
        self.amax.zero_()
        self.step = None

    def get_extra_state(self) -> Tensor:
        return torch.tensor(NO_STEP if self.step is None else self.step, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        step = min(int(state), FIRST_TURN - 1)  # a loaded turn is none of this process
        self.step = None if step == NO_STEP else step


def amaxes_at(states: Sequence[DelayedState], step: int | None, format: Fp8Delayed) -> list[Tensor]:
    """Return float32 [1, 1] for each state: the amax that sets the scale at this step. No state changes.

    step=None means the time after the last step.
    """
    others = [state for state in states if step is None or state.step != step]
    ended = iter(_ended(others, format)[1]) if others else iter(())
    return [state.amax if step is not None and state.step == step else next(ended) for state in states]


def begin(states: Sequence[DelayedState], step: int, format: Fp8Delayed) -> None:
    """Begin `step` in each state, and end the step before it.

    UserError for a backward pass whose step has already ended, so that its scale is gone.
    """
    later = next((state.step for state in states if state.step is not None and state.step > step), None)
    if later is not None and in_backward():
        raise UserError(
            f"fp8_delayed: backward of step {step} comes after a call of step {later}, whose history it would change;"
            " run backward of a step before the next step begins"
        )
    _end([state for state in states if state.step != step], step, format)


def rewrite(states: Sequence[DelayedState], format: Fp8Delayed) -> None:
    """Prepare a write of tensors held as codes: end the step that used the old values, and drop values that no step
    used."""
    _end([state for state in states if state.step is not None], None, format)
    foreach_zero_([state.history[:1] for state in states])


def _end(states: Sequence[DelayedState], step: int | None, format: Fp8Delayed) -> None:
    """End the step of each state and set the next one, `step`, with as few operations as for one state."""
    if states:
        histories, amaxes = _ended(states, format)
        foreach_copy_([state.history for state in states], histories)
        foreach_copy_([state.amax for state in states], amaxes)
    for state in states:
        state.step = step


def _ended(states: Sequence[DelayedState], format: Fp8Delayed) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return (histories, amaxes) after end_step, without writing them."""
    rule = {"most_recent": format.most_recent, "skip_nonfinite": format.skip_nonfinite}
    if len(states) == 1:
        history, amax = end_step(states[0].history, states[0].amax, **rule)
        return [history], [amax]
    histories, amaxes = torch.stack([s.history for s in states]), torch.stack([s.amax for s in states])
    histories, amaxes = end_step(histories, amaxes, **rule)
    return histories.unbind(), amaxes.unbind()


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotStates:
    """The states of one slot, with the options of one call."""

    states: Mapping[str, DelayedState]
    """Direction -> state, for directions whose format is delayed."""
    step: int | None = None
    """The training step. None outside of training, which counts as after the last step."""
    record: bool = False
    """Whether this call belongs to the training. Otherwise no state changes."""
    held: bool = False
    """Whether a tensor held as codes is written, which happens once between two steps that use it."""
    group: Any = None
    """The process group whose ranks share amaxes; None: all ranks."""
    parts: Any = None
    """The process group whose ranks each have a part of the tensor; None: every rank has the whole."""

    def use(self) -> None:
        """Record that a training step uses a held tensor."""
        if self.record:
            for state in self.states.values():
                state.step = self.training_step()

    def written(self) -> Self:
        """Return the states as a held tensor uses them while it is written."""
        return replace(self, record=True, held=True)

    def training_step(self) -> int:
        """Return the training step. UserError if there is none."""
        if self.step is None:
            raise UserError(
                "fp8_delayed counts the steps of a training; call the model inside hqsweep.nn.quantization(step=...),"
                " or under no_grad"
            )
        return self.step

    def delayed(self, formats: Mapping[str, Format | None]) -> dict[str, Fp8Delayed]:
        """Return the formats that have a state, by direction."""
        return {d: f for d, f in formats.items() if f and f.delayed and d in self.states}


def grids_of(slots: Sequence[SlotStates], formats: Mapping[str, Format | None]) -> dict[str, list[Buffers]]:
    """Return direction -> the grid (amax) of each slot, for directions whose format is delayed.

    All slots take step and options from the first one. UserError for a call that shall be recorded but has no step.
    """
    first, grids = slots[0], {}
    for direction, format in first.delayed(formats).items():
        states = [slot.states[direction] for slot in slots]
        if first.record and first.held:
            rewrite(states, format)
        elif first.record:
            begin(states, first.training_step(), format)
        grids[direction] = [{"s": amax} for amax in amaxes_at(states, first.step, format)]
    return grids


def note(
    slots: Sequence[SlotStates],
    x: Tensor,
    splits: Splits | None,
    formats: Mapping[str, Format | None],
    source: str,
    row: Target,
) -> None:
    """Add the amaxes of x [rows, cols], as ops.quantize encoded it, to the slots' histories.

    One search serves all slots. splits: the rows of each slot; None: a single slot. row: the target that encoded the
    rows.
    """
    delayed = slots[0].delayed(formats)
    if not (slots[0].record and delayed):
        return
    x, histories = x.detach(), [slot.states[d].history[:1] for d in delayed for slot in slots]
    dequantized = source == "rowwise_dequantized" and "columnwise" in delayed
    if splits is None:
        outs = dict(zip(delayed, histories, strict=True))
    elif dequantized:
        outs = {direction: x.new_zeros(len(slots), dtype=torch.float32) for direction in delayed}
    else:  # both directions of the original share an amax
        outs = dict.fromkeys(delayed, x.new_zeros(len(slots), dtype=torch.float32))
    if dequantized or splits is None:
        amaxes, scratch = _to_decode_by(slots, x, splits, row) if dequantized else (None, None)
        rowwise = Search(formats["rowwise"], outs.get("rowwise", scratch), amaxes, row.key)
        columnwise = Search(formats["columnwise"], outs.get("columnwise"))
        find_amax(x, rowwise, columnwise, columnwise_source=source, splits=splits)
    else:
        direction, format = next(iter(delayed.items()))
        find_amax(x, Search(format, outs[direction]), splits=splits)
    if splits is not None:
        foreach_maximum_(histories, [amax for d in delayed for amax in outs[d].split(1)])
    _share(slots, delayed)


def _to_decode_by(
    slots: Sequence[SlotStates], x: Tensor, splits: Splits | None, row: Target
) -> tuple[Tensor | None, Tensor | None]:
    """Return (amaxes, scratch): the known rowwise amaxes with which to decode rows, or memory to find them in again.

    Amaxes are known from states or given grids. Both are None for formats without amax.
    """
    format = row.format
    if format.delayed:
        amaxes = [slot.states["rowwise"].amax for slot in slots]
        return (amaxes[0] if splits is None else torch.cat([amax.view(-1) for amax in amaxes])), None
    if not format.amax_name:
        return None, None
    if row.grid is not None:
        given = [row.grid] if splits is None else row.grid
        amaxes = [grid[format.amax_name] for grid in given]
        return (amaxes[0] if splits is None else torch.cat(amaxes).view(-1)), None
    whole = (len(x) if format.row_scaled else len(slots),)
    shape = format.layout[format.amax_name].shape(*x.shape) if splits is None else whole
    return None, x.new_zeros(shape, dtype=torch.float32)


def _share(slots: Sequence[SlotStates], formats: Mapping[str, Fp8Delayed]) -> None:
    """Reduce the amaxes of the present step over the ranks of a group, in one collective for all slots.

    For a weight held as codes, only ranks with parts of it take part: it may be written on those ranks alone, for
    example while a model is built. UserError for +local_amax inside a DistributedDataParallel that broadcasts rank 0's
    states.
    """
    parts = slots[0].parts
    if slots[0].held and parts is not None:
        _largest([slot.states[d].history[:1] for d in formats for slot in slots], parts)
    if slots[0].held or not (dist.is_available() and dist.is_initialized()):
        return
    shared, group = [d for d, format in formats.items() if not format.local_amax], slots[0].group
    parallel = active_ddp_module()
    if len(shared) < len(formats) and parallel is not None and parallel.broadcast_buffers:
        raise UserError(
            "+local_amax keeps amaxes of each rank, but DistributedDataParallel gives all ranks those of rank 0; build"
            " it with broadcast_buffers=False"
        )
    if shared and dist.get_world_size(group) > 1:
        _largest([slot.states[d].history[:1] for d in shared for slot in slots], group)
    if parts is not None and (group is not None or len(shared) < len(formats)):
        _largest([slot.states[d].history[:1] for d in formats for slot in slots], parts)


def _largest(recorded: list[Tensor], group: Any) -> None:
    amaxes = torch.cat(recorded)
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group)
    foreach_copy_(recorded, amaxes.split(1))
