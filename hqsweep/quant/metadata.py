"""What a HybridQuantizedTensor is beside its buffers and its shape, and which buffers that takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import Operand


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Frozen and hashable, so that a compiler can guard it. Buffers are named "rowwise_q" and so on."""

    quantizer: HybridQuantizer
    directions: tuple[str, ...]
    """Those that are held, of "rowwise" and "columnwise"."""
    matrix: tuple[int, int]
    """Shape of what is encoded: the leading axes of the logical shape folded."""
    dtype: torch.dtype
    """Of the logical tensor: what dequantize() gives, and gradients have."""
    source_dtype: torch.dtype
    """What values are rounded to before they are quantized."""
    key: RngKey | None = None
    """That of the last quantization, where the quantizer rounds stochastically."""
    shares_scale: bool = False
    """A part of a tensor that has entries in common with the rest, such as the scale of the tensor: not writable."""

    @property
    def extent(self) -> tuple:
        """What two tensors of one quantizer have in common where one can take the other's bytes."""
        return (self.matrix,)

    @property
    def is_stochastic(self) -> bool:
        """Whether a direction draws random bits."""
        return any(getattr(self.quantizer, direction).stochastic for direction in DIRECTIONS)

    @property
    def stored(self) -> list[tuple[str, str]]:
        """(direction, buffer) of each buffer held. One matrix serves both directions of an identity."""
        q = self.quantizer
        one = q.rowwise.high_precision and q.rowwise == q.columnwise
        held = self.directions[:1] if one else self.directions
        return [(direction, name) for direction in held for name in getattr(q, direction).layout]

    def shape(self, direction: str) -> tuple[int, int]:
        """Of the matrix that the direction's operand encodes."""
        rows, cols = self.matrix
        return (rows, cols) if direction == "rowwise" else (cols, rows)

    def check_shape(self, direction: str) -> None:
        """UserError for a matrix that the format of the direction cannot hold."""
        getattr(self.quantizer, direction).check_shape(*self.shape(direction))

    def buffer(self, direction: str, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """dtype and shape of one buffer; UserError for a matrix that the format cannot hold."""
        format = getattr(self.quantizer, direction)
        return format.layout[name].dtype, format.shapes(*self.shape(direction))[name]

    def empty(self, device: torch.device | str) -> dict[str, Tensor]:
        """Uninitialised buffers; UserError for a shape that a format cannot hold."""
        made = {}
        for direction in self.directions:
            self.check_shape(direction)
        for direction, name in self.stored:
            dtype, shape = self.buffer(direction, name)
            made[f"{direction}_{name}"] = torch.empty(shape, dtype=dtype, device=device)
        return made

    def check(self, buffers: Mapping[str, Tensor]) -> None:
        """UserError for buffers that are missing, or have another shape or dtype than the formats say."""
        for direction, name in self.stored:
            wanted = self.buffer(direction, name)
            tensor = buffers.get(f"{direction}_{name}")
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != wanted:
                got = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise UserError(
                    f"buffer {direction}_{name} of a tensor in {self.quantizer} is {got}; it takes {wanted[0]}"
                    f" {wanted[1]}"
                )

    def operand(self, buffers: Mapping[str, Tensor], direction: str) -> Operand | None:
        """The operand of one direction, or None where it is not held."""
        if direction not in self.directions:
            return None
        own = {name: buffers[f"{d}_{name}"] for d, name in self.stored if d == direction}
        own = own or {"q": buffers["rowwise_q"].t()}  # an identity, whose one matrix is the rowwise one
        format = getattr(self.quantizer, direction)
        return Operand(format=format, shape=self.shape(direction), dtype=self.source_dtype, buffers=own)

    def describe(self) -> dict[str, Any]:
        """Text and numbers from which parse() makes an equal value."""
        key = self.key
        return {
            "quantizer": str(self.quantizer),
            "directions": list(self.directions),
            "matrix": list(self.matrix),
            "dtype": str(self.dtype).removeprefix("torch."),
            "source_dtype": str(self.source_dtype).removeprefix("torch."),
            "key": key and [key.seed, key.slot, key.step],
            "shares_scale": self.shares_scale,
        }

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> "Metadata":
        """Inverse of describe(); UserError for a quantizer that does not parse."""
        key = described["key"]
        return cls(
            quantizer=HybridQuantizer.parse(described["quantizer"]),
            directions=tuple(described["directions"]),
            matrix=tuple(described["matrix"]),
            dtype=getattr(torch, described["dtype"]),
            source_dtype=getattr(torch, described["source_dtype"]),
            key=key and RngKey(seed=key[0], slot=key[1], step=key[2]),
            shares_scale=described["shares_scale"],
        )
