"""What delayed scaling remembers: the amaxes of earlier steps, one state for each direction of a slot.

TransformerEngine updates all states at the end of a step. Here a state ends its step when it is next used, at another
step, so that all microbatches of a step, and a recomputation within it, quantize under the same scale and add to the
same amax, and nobody has to say that a step is over.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, Format, Fp8Delayed, RngKey
from hqsweep.formats.delayed import end_step
from hqsweep.ops.plan import plan_of
from hqsweep.ops.quantize import find_amax

NO_STEP = -1
"""In a checkpoint: nothing was recorded, or only for a step to come."""


class DelayedState(nn.Module):
    """history float32 [L] and amax float32 [1, 1], as end_step has them; `step` is that of history[0].

    The step is a Python number, so that no device is waited for; a state_dict has it as a tensor. It is None before the
    first one, and for a tensor that is held as codes until a step uses what was written.
    """

    history: Tensor
    amax: Tensor

    def __init__(self, length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(length, device=device))
        self.register_buffer("amax", torch.zeros(1, 1, device=device))
        self.step: int | None = None

    def amax_at(self, step: int | None, format: Fp8Delayed) -> Tensor:
        """float32 [1, 1]: what a quantization at this step scales by; None comes after all steps. Changes nothing."""
        if step is not None and step == self.step:
            return self.amax
        return end_step(self.history, self.amax, most_recent=format.most_recent)[1]

    def begin(self, step: int, format: Fp8Delayed) -> None:
        """Make `step` the present one: another one ends."""
        if step != self.step:
            self._end(format)
            self.step = step

    def rewrite(self, format: Fp8Delayed) -> None:
        """Before a tensor that is held as codes is written: the step in which its values were used ends; values that no
        step has used are forgotten."""
        if self.step is not None:
            self._end(format)
            self.step = None
        self.history[:1].zero_()

    def _end(self, format: Fp8Delayed) -> None:
        history, amax = end_step(self.history, self.amax, most_recent=format.most_recent)
        self.history.copy_(history)
        self.amax.copy_(amax)

    def reset_parameters(self) -> None:
        """Forget everything, as after Module.to_empty."""
        self.history.zero_()
        self.amax.zero_()
        self.step = None

    def get_extra_state(self) -> Tensor:
        return torch.tensor(NO_STEP if self.step is None else self.step)

    def set_extra_state(self, state: Tensor) -> None:
        step = int(state)
        self.step = None if step == NO_STEP else step


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotStates:
    """The states of one slot, as one call uses them."""

    states: Mapping[str, DelayedState]
    """Direction -> state, where the direction's format is delayed."""
    step: int | None
    """Of the training; None outside of one, which is after its last step."""
    record: bool
    """Whether this call is part of the training; without it no state changes."""
    held: bool = False
    """Whether a tensor that is held as codes is written: once between two steps that use it."""

    def use(self) -> None:
        """A step of the training uses a tensor that is held."""
        if self.record:
            for state in self.states.values():
                state.step = self._step()

    def grids(self, formats: Mapping[str, Format | None]) -> dict[str, Buffers]:
        """Keyword arguments of ops.quantize: the amaxes under which these directions are encoded.

        UserError for a call that is to be recorded and has no step.
        """
        used = {d: (self.states[d], f) for d, f in self._delayed(formats).items()}
        if self.record:
            for state, format in used.values():
                state.rewrite(format) if self.held else state.begin(self._step(), format)
        return {f"{d}_grid": {"s": state.amax_at(self.step, format)} for d, (state, format) in used.items()}

    def note(self, x: Tensor, formats: Mapping[str, Format | None], source: str, key: RngKey | None) -> None:
        """Merge the amaxes of x [rows, cols], as ops.quantize encoded it, into the histories; key: the rowwise one."""
        outs = {f"out_{d}": self.states[d].history[:1] for d in self._delayed(formats)}
        if not (self.record and outs):
            return
        row, given = formats["rowwise"], None
        if source == "rowwise_dequantized" and "out_columnwise" in outs:
            name = plan_of(row).amax_name
            if "out_rowwise" in outs:
                given = self.states["rowwise"].amax
            elif name:  # found once more, to decode by
                outs["out_rowwise"] = torch.zeros(row.layout[name].shape(*x.shape), device=x.device)
        find_amax(
            x.detach(),
            row,
            formats["columnwise"],
            columnwise_source=source,
            rowwise_key=key,
            rowwise_amax=given,
            **outs,
        )

    def _step(self) -> int:
        if self.step is None:
            raise UserError(
                "fp8_delayed counts the steps of a training; call the model inside hqsweep.nn.quantization(step=...),"
                " or under no_grad"
            )
        return self.step

    def _delayed(self, formats: Mapping[str, Format | None]) -> dict[str, Fp8Delayed]:
        return {d: f for d, f in formats.items() if isinstance(f, Fp8Delayed) and d in self.states}
