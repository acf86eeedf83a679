"""Number formats: elements, scales, blocks and rounding, each in a pure-torch reference that is exact to the bit.

Names are imported when one of them is first read: hqsweep.formats.spec needs no torch, the rest does.
"""

from typing import Any

__all__ = [
    "MX", "NAMES", "NVFP4", "WHOLE", "Buffer", "Buffers", "ExactOperand", "Format", "Fp8Block", "Fp8Current",
    "Fp8Delayed", "Fp8PerTensor", "Fp8Row", "Identity", "NVFP4Tensor", "RngKey", "RngKeys", "RngNumbers", "bases",
    "numbers_of", "options", "parse", "spellings", "words_of",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hqsweep.formats' has no attribute {name!r}")
    from hqsweep.formats.base import WHOLE, Buffer, Buffers, ExactOperand, Format, bases, parse, spellings
    from hqsweep.formats.fp8 import Fp8Block, Fp8Current, Fp8Delayed, Fp8PerTensor, Fp8Row
    from hqsweep.formats.identity import Identity
    from hqsweep.formats.mx import MX
    from hqsweep.formats.nvfp4 import NVFP4
    from hqsweep.formats.nvfp4_tensor import NVFP4Tensor
    from hqsweep.formats.random import RngKey, RngKeys, RngNumbers, numbers_of
    from hqsweep.formats.spec import NAMES, options, words_of

    exports = (
        MX, NAMES, NVFP4, WHOLE, Buffer, Buffers, ExactOperand, Format, Fp8Block, Fp8Current, Fp8Delayed,
        Fp8PerTensor, Fp8Row, Identity, NVFP4Tensor, RngKey, RngKeys, RngNumbers, bases, numbers_of, options, parse,
        spellings, words_of,
    )  # fmt: skip
    globals().update(zip(__all__, exports, strict=True))
    return globals()[name]
