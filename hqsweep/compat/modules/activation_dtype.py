"""The dtype of a call under TransformerEngine's names: modules compute and return in the dtype of their activations.

This package's own linears read and write one dtype, bfloat16 by default. Here a call takes the dtype of its input, or
the dtype of torch.autocast inside one; parameters keep theirs. "bf16" in a recipe means that nothing is quantized, so
it stands for the dtype of the call, unless a quantizer asks for bfloat16 by name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format, Identity
from hqsweep.nn.core.context import Context
from hqsweep.nn.core.guards import in_autocast
from hqsweep.nn.core.options import held_in
from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.linears import LinearBase
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.parallel.wire.local import local as stored
from hqsweep.quant.delayed import FIRST_TURN
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import LinearQuantizers, slots

FORMATS = {
    torch.float32: Identity(name="fp32"),
    torch.float16: Identity(name="fp16"),
    torch.bfloat16: Identity(name="bf16"),
}
"""Dtype of activations -> the format of an unquantized operand."""
BF16 = FORMATS[torch.bfloat16]


@dataclass(frozen=True, kw_only=True)
class ToBF16(Identity):
    """bfloat16 that a quantizer asks for by its dtype: values are rounded to it, for activations of any dtype."""


def params_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a module's parameters: torch's default where none is given."""
    return _checked("torch.get_default_dtype()", "the dtype", torch.get_default_dtype()) if dtype is None else dtype


def activations(where: str, x: Tensor) -> Tensor:
    """The input of a module in the dtype that it computes in. UserError for an input of another dtype than float32,
    float16 and bfloat16."""
    _checked(where, "the input", x.dtype)
    if in_autocast(x.device):
        return in_dtype(x, _checked(where, "torch.autocast", torch.get_autocast_dtype(x.device.type)))
    return x


def _checked(where: str, what: str, dtype: torch.dtype) -> torch.dtype:
    if dtype not in FORMATS:
        raise UserError(f"{where}: {what} is {dtype}; it takes float32, float16 or bfloat16")
    return dtype


def quantizer_in(quantizer: HybridQuantizer, dtype: torch.dtype) -> HybridQuantizer:
    """The quantizer of a slot for activations in dtype. Operands in high precision keep that dtype."""
    if type(quantizer) is not HybridQuantizer:
        return quantizer
    row, column = (_format_in(f, dtype) for f in (quantizer.rowwise, quantizer.columnwise))
    if row is quantizer.rowwise and column is quantizer.columnwise:
        return quantizer
    return HybridQuantizer(row, column, quantizer.columnwise_source)


def _format_in(format: Format, dtype: torch.dtype) -> Format:
    if isinstance(format, ToBF16):
        return BF16
    return FORMATS[dtype] if format == BF16 and dtype is not torch.bfloat16 else format


def _with_turn(context: Context) -> Context:
    """The context of a call with a weight in fp8_delayed. Outside of autocast and of steps the call quantizes nothing,
    so that any number may stand for its step."""
    return context if context.step is not None or context.turn is not None else replace(context, turn=FIRST_TURN)


@contextmanager
def built_in(dtype: torch.dtype) -> Iterator[None]:
    """Build held quantized weights inside from values in dtype, by quantizer_in()."""
    with held_in(lambda quantizer: quantizer_in(quantizer, dtype)):
        yield


def cycled(roles: Sequence[QuantizerRole | None], count: int | None) -> list[QuantizerRole | None]:
    """`count` roles, which begin again after the last one; None: each once."""
    return [roles[i % len(roles)] for i in range(len(roles) if count is None else count)]


class InActivationDtype(LinearBase):
    """One or several linears. Each call is in the dtype of its input."""

    _last: tuple[LinearQuantizers, torch.dtype, HybridQuantizer | None, LinearQuantizers] | None = None
    """The last call: its section, its dtype, the quantizer of its held weight, and the resulting section."""

    def take(self, x: Tensor) -> Tensor:
        """x in the dtype of a call with it, which becomes the module's."""
        x = activations(self.name, x)
        self.set_dtype(x.dtype)
        return x

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the calls that follow."""
        if dtype is not self.dtype:
            self.dtype = dtype

    weights: Sequence[Tensor]
    """The weight of a linear, or the weights of experts."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        link_states(self.weights, self.states)  # which a weight in another dtype, or on another device, has lost
        return self

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int | None = None) -> list[QuantizerRole | None]:
        """The roles of the forward or backward slots, the boundary's last; num_quantizers of them, again and again."""
        return cycled(super().get_quantizer_roles(fwd=fwd), num_quantizers)

    def active_quantizers(self) -> LinearQuantizers:
        return self._in_dtype(super().active_quantizers())

    def call_facts(self) -> dict[str, Any]:
        facts = super().call_facts()
        held = stored(self.weights[0])
        if isinstance(held, HybridQuantizedTensor) and held.quantizer.delayed:
            facts["context"] = _with_turn(facts["context"])
        return facts | {"quantizers": self._in_dtype(facts["quantizers"])}

    def _in_dtype(self, section: LinearQuantizers) -> LinearQuantizers:
        weight = stored(self.weights[0])
        held = weight.quantizer if isinstance(weight, HybridQuantizedTensor) else None
        if held is None and self.dtype is torch.bfloat16:
            return section
        last = self._last
        if last is None or last[0] is not section or last[1] is not self.dtype or last[2] is not held:
            own = {slot: quantizer for slot, quantizer in slots(section).items() if quantizer is not None}
            changed = {slot: quantizer_in(quantizer, self.dtype) for slot, quantizer in own.items()}
            alike = held is not None and held in [quantizer_in(section.weight, dtype) for dtype in FORMATS]
            if alike or (held is not None and section.identity is not None):
                changed["weight"] = held  # built in another dtype, or multiplied as it is held
            self._last = last = section, self.dtype, held, replace(section, **changed)
        return last[3]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_last": None}
