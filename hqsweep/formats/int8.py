"""INT8 with float32 scales, one per row of the operand, per 1x128 block or per 128x128 tile.

The grid is -127 to 127; codes are sign and magnitude. The scale is S = fl(127 / amax) as for FP8 (formats/fp8.py), and
code = RNE(fl(x * S)), value = fl(code * fl(1 / S)). NaN becomes 127. torchao's int8 training and Jetfire scale so.
"""

from dataclasses import dataclass

from hqsweep.formats.fp8 import Fp8Block, Fp8Row
from hqsweep.formats.spec import INT8_BLOCK, INT8_ROW


@dataclass(frozen=True, kw_only=True)
class Int8Row(Fp8Row):
    """One scale per row of the operand: per token for a rowwise operand, per column of the tensor for a columnwise one.

    operand(): matrix = codes (always exact), factor = scale_inv of each row.
    """

    name = "int8_row"
    family, scaling = INT8_ROW, INT8_ROW.scaling
    keeps_nan = False

    element_name: str = "int8"


@dataclass(frozen=True, kw_only=True)
class Int8Block(Fp8Block):
    """One scale per 1x128 block, or per 128x128 tile with two_d. Partial blocks at the edges use the existing elements.

    operand(): float32, fl(code * scale_inv). With pow2 scales it is bfloat16, and exact as in fp8_block.
    """

    name = "int8_block"
    family, scaling = INT8_BLOCK, INT8_BLOCK.scaling
    keeps_nan = False

    element_name: str = "int8"
    pow2: bool = False
    """Whether scales are truncated to powers of two."""
