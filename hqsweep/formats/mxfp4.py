"""MXFP4 with the random Hadamard transform and stochastic rounding of nvfp4.

Scales are those of the other Microscaling formats (formats/mx.py), made from the transformed values. Elements are
rounded to nearest, or with +sr as in nvfp4, by the bytes of a key. AMD's MXFP4 training and Quartet use both.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from hqsweep.formats.hadamard import check_signs, transformed
from hqsweep.formats.mx import MX
from hqsweep.formats.nvfp4 import round_four
from hqsweep.formats.random import RngKey
from hqsweep.formats.spec import MXFP4 as SPEC

SEGMENT = 16
"""Random bytes and the least transform come by so many elements."""


@dataclass(frozen=True, kw_only=True)
class MXFP4(MX):
    """mxfp4: E2M1, or E1M2, in blocks of 1x32, or in 32x32 tiles with two_d. Columns must be even; with rht or sr a
    multiple of 16, or of the transform's size.

    Partial blocks at the edges use the existing elements. operand(): code * 2^(e - 127) in bfloat16, as in MX.
    """

    family = SPEC

    name: str = "mxfp4"
    element_name: str = "e2m1"
    """The element of the codes: e2m1, or the uniform grid e1m2."""
    rht: int = 0
    """The size of the random Hadamard transform along the contracted axis that comes first; 0: none. Both operands of a
    product take the same."""
    rht_signed: bool = True
    """Whether the transform has signs, or none."""
    sr: bool = False
    """Whether elements are rounded stochastically, by a key; scales stay RNE."""

    def __post_init__(self) -> None:
        check_signs(self)

    @property
    def stochastic(self) -> bool:
        return self.sr

    @property
    def rowwise_form(self) -> "MXFP4":
        return replace(self, rht=0, rht_signed=True)

    @property
    def kernel_fields(self) -> dict[str, object]:
        return super().kernel_fields | {"rht": self.rht, "rht_sign": self.rht_signed, "sr": self.sr}

    @property
    def column_multiple(self) -> int:
        return max(2, self.rht, SEGMENT if self.sr else 0)

    def basis(self, x: Tensor, key: RngKey | None = None) -> Tensor:
        return transformed(self, x).float()

    def _codes(self, scaled: Tensor, key: RngKey | None) -> Tensor:
        return round_four(scaled, self.element, sr=self.sr, key=key, name=self.text)
