"""The base of quantizers by TransformerEngine's names: objects that are called, subclassed and changed.

A quantizer's `frozen` is the HybridQuantizer of hqsweep.quant with its options; all numbers come from that. Attributes
may be assigned, and the next use follows them. A factory's answer is read once, when the slot is made; the GEMM then
decides which directions are made.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from hqsweep.compat.arguments import shown
from hqsweep.compat.modules.activation_dtype import quantizer_in
from hqsweep.errors import UserError
from hqsweep.formats import Format, Fp8Current, RngKey
from hqsweep.quant import HybridOperand, HybridQuantizedTensor, Operand
from hqsweep.quant import HybridQuantizer as Frozen
from hqsweep.quant.hybrid import DIRECTIONS
from hqsweep.recipe.roles import QuantizerRole

OURS = "hqsweep.compat."
QUANTIZING = ("quantize_impl", "quantize", "__call__")
"""Methods whose replacement in a subclass changes numbers."""


def te_device_type() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Quantizer:
    """The base of all quantizers, also of a user's own. quantizer(x) is x [..., cols] as a quantized tensor.

    A subclass may replace quantize_impl(); modules then call it once for each operand. internal and optimize_for_gemm
    have no effect but that the results of an internal quantizer have no gradients.
    """

    block = 1
    """is_quantizable() asks for rows and columns that are multiples of this."""
    rowwise_gather_only = False
    requantizes_alike = True
    internal: bool = False
    optimize_for_gemm: bool = False

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    @property
    def frozen(self) -> Frozen:
        """The frozen quantizer of these options. UserError for options that do not exist here."""
        format = self._format()
        return Frozen(format.rowwise_form, format)

    @property
    def rowwise(self) -> Format:
        """The format of rowwise operands."""
        return self._format().rowwise_form

    @property
    def columnwise(self) -> Format:
        """The format of columnwise operands."""
        return self.frozen.columnwise

    def quantizer(self, role: QuantizerRole) -> Frozen:
        """The frozen quantizer of a slot; it calls a subclass's own quantize_impl()."""
        return self.frozen if self.is_plain else Called.of(self)

    @property
    def has_format(self) -> bool:
        """Whether a format is known before the first call."""
        return type(self)._format is not Quantizer._format or type(self).frozen is not Quantizer.frozen

    @property
    def is_plain(self) -> bool:
        """Whether the frozen quantizer makes the same bytes: no subclass has replaced a method that quantizes."""
        own = [vars(cls) for cls in type(self).__mro__ if not cls.__module__.startswith(OURS)]
        return not any(name in names for names in own for name in QUANTIZING)

    def __call__(self, tensor: Tensor) -> Tensor:
        """quantize(tensor)."""
        return self.quantize(tensor)

    def quantize(self, tensor: Tensor, *, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The quantized tensor, through which gradients pass unchanged; with out, out after update_quantized().

        UserError for a dtype other than the tensor's.
        """
        if dtype is not None and dtype is not tensor.dtype:
            raise UserError(f"quantize: dtype is {dtype} for a tensor of {tensor.dtype}; cast it before")
        if out is not None:
            return self.update_quantized(tensor, out)
        if torch.is_grad_enabled() and tensor.requires_grad and not self.internal:
            return self._made(_Quantize.apply(tensor, self.quantize_impl))
        with torch.no_grad():
            return self._made(self.quantize_impl(tensor))

    def quantize_impl(self, tensor: Tensor) -> Tensor:
        """The quantized tensor in the directions of the usages. +sr draws its seed from torch's CPU generator."""
        frozen = quantizer_in(self._of_call(), tensor.dtype)
        if not self._directions():
            return self.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        options = {"directions": self._directions(), "key": drawn_key(frozen)}
        return HybridQuantizedTensor.quantize(tensor.detach(), frozen, **options)

    def multi_quantize(self, list_of_tensors: Iterable[Tensor]) -> list[Tensor]:
        """quantize() of each."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(self, src: Tensor, dst: Tensor, *, noop_flag: Tensor | None = None) -> Tensor:
        """Write src into the directions that dst holds, and return dst.

        Nothing is written where noop_flag is not 0, for which the host waits. UserError for a dst of other formats.
        """
        kind = type(self).__name__
        if not isinstance(dst, HybridQuantizedTensor):
            raise UserError(f"{kind}: dst is {shown(dst)}; it takes a quantized tensor")
        frozen = quantizer_in(self._of_call(), dst.dtype)
        if dst.quantizer not in (frozen, self._of_call()):
            raise UserError(f"{kind} of {frozen} cannot update a tensor in {dst.quantizer}")
        return dst.quantize_(src.detach(), key=drawn_key(frozen), noop_flag=noop_flag)

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Tensor:
        """A quantized tensor of this shape with uninitialised buffers; device: te_device_type() by default.

        Without a usage it holds no operand.
        """
        options = {"dtype": dtype, "device": device or te_device_type(), "directions": self._directions() or DIRECTIONS}
        made = HybridQuantizedTensor.empty(tuple(shape), quantizer_in(self._of_call(), dtype), **options)
        if not self._directions():
            made.clear()
        return self._made(made.pin_memory() if pin_memory else made).requires_grad_(requires_grad)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Set which directions calls make; None leaves one as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Direction -> whether calls make it."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Self:
        """A quantizer with the same attributes."""
        return copy.copy(self)

    def calibrate(self, tensor: Tensor) -> None:
        """Nothing: no state to calibrate."""

    def is_requantization_safe(self) -> bool:
        """Whether quantizing a tensor again gives the same value."""
        return self.requantizes_alike

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether ranks gather rowwise operands only."""
        return self.rowwise_gather_only

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether TransformerEngine gathers the tensor in codes: its rows and columns are whole blocks."""
        if self.block == 1:
            return True
        return inp.ndim > 1 and not (inp.shape[-1] % self.block or inp.shape[:-1].numel() % self.block)

    def _format(self) -> Format:
        raise UserError(
            f"{type(self).__name__}: a Quantizer of its own has no format here; derive it from IdentityQuantizer or"
            " another quantizer of hqsweep.compat"
        )

    def _made(self, tensor: Tensor) -> Tensor:
        """The tensor, whose _quantizer is a copy of this one; views and copies of the tensor have the frozen one."""
        if isinstance(tensor, HybridQuantizedTensor):
            tensor._quantizer = self.copy()
        return tensor

    def _of_call(self) -> Frozen:
        """The frozen quantizer of a direct call."""
        return self.frozen

    def _directions(self) -> tuple[str, ...]:
        return tuple(direction for direction, used in self.get_usages().items() if used)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Frozen):
            return self.is_plain and self.frozen == other
        if type(self) is not type(other) or not type(self).__module__.startswith(OURS):
            return self is other
        return vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __str__(self) -> str:
        return str(self.frozen)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={shown(value)}' for name, value in vars(self).items())})"


class OfFrozen(Quantizer):
    """A quantizer of hqsweep.quant as a part of a HybridQuantizer."""

    def __init__(self, frozen: Frozen) -> None:
        super().__init__(rowwise=True, columnwise=True)
        if type(frozen) is not Frozen:
            raise UserError(
                f"HybridQuantizer: {type(frozen).__name__} may quantize by a method of its own, and only formats are"
                " taken from a part; derive it from a quantizer of hqsweep.compat"
            )
        self._frozen = frozen

    @property
    def frozen(self) -> Frozen:
        return self._frozen

    @property
    def rowwise(self) -> Format:
        return self._frozen.rowwise

    def is_requantization_safe(self) -> bool:
        return not (self._frozen.stochastic or self._frozen.delayed)


@dataclass(frozen=True)
class Called(Frozen):
    """The quantizer of a slot whose operands come from calls of a user's object."""

    own: Any = None
    """The Quantizer that is called once for each tensor, with the usages that the product needs."""

    @classmethod
    def of(cls, own: Quantizer) -> Self:
        """UserError for one that rounds stochastically, since it does not know the slot's key."""
        frozen = own.frozen
        if frozen.stochastic:
            raise UserError(
                f"{type(own).__name__}: {frozen} rounds stochastically, and its own quantize_impl() does not know the"
                " key of the slot; leave stochastic rounding out, or do not replace quantize_impl()"
            )
        row, column = (
            Fp8Current(element_name=format.element_name) if format.delayed else format  # its scale is the caller's
            for format in (frozen.rowwise, frozen.columnwise)
        )
        return cls(row, column, frozen.columnwise_source, own)

    def quantize(self, x: Tensor, *, rowwise: Any = "codes", columnwise: Any = "codes", **_: Any) -> HybridOperand:
        """The operands of own's tensor. UserError where it is no quantized tensor, or lacks a wanted direction."""
        self.own.set_usage(rowwise=rowwise is not None, columnwise=columnwise is not None)
        with torch.no_grad():
            made = quantized(self.own, self.own.quantize(x))
        row, column = self._wanted(made, "rowwise", rowwise), self._wanted(made, "columnwise", columnwise)
        return HybridOperand(rowwise=row, columnwise=column)

    def _wanted(self, made: HybridQuantizedTensor, direction: str, output: str | None) -> Any:
        operand: Operand | None = getattr(made, direction)
        if output is None:
            return None
        if operand is None:
            raise UserError(f"{type(self.own).__name__}: quantize() made no {direction} operand, which a product reads")
        return operand.operand() if output == "exact" else operand


def quantized(owner: Quantizer, made: Any) -> HybridQuantizedTensor:
    """The result of an own quantize(). UserError where it is no quantized tensor."""
    if not isinstance(made, HybridQuantizedTensor):
        raise UserError(f"{type(owner).__name__}: quantize() returned {shown(made)}; it must return a quantized tensor")
    return made


class _Quantize(torch.autograd.Function):
    """Forward: the quantized tensor. Backward: the gradient unchanged."""

    @staticmethod
    def forward(ctx, x: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
        return quantize(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def drawn_key(frozen: Frozen) -> RngKey | None:
    """A key from torch's CPU generator, for a quantizer that draws random bits outside of modules."""
    return RngKey(seed=int(torch.randint(2**31, ())), slot="quantizer", step=0) if frozen.stochastic else None
