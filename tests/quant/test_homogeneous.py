"""Experts of a group have equal quantizers, and the message says in what one differs."""

from dataclasses import dataclass

import pytest

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.quant import HybridQuantizer
from hqsweep.quant.homogeneous import homogeneous

MXFP8 = HybridQuantizer.parse("mxfp8")


@dataclass(frozen=True)
class Scaled(HybridQuantizer):
    """A quantizer of somebody else."""

    factor: float = 1.0


def scaled(factor):
    return Scaled(parse("mxfp8"), parse("mxfp8"), factor=factor)


@pytest.mark.parametrize(
    ("first", "other", "difference"),
    [
        (MXFP8, scaled(1.0), r"the kind of quantizer \(Scaled and HybridQuantizer\)"),
        (scaled(1.0), scaled(2.0), "its fields"),
        (MXFP8, HybridQuantizer.parse("mxfp8|bf16"), "high precision of its columnwise operand"),
        (MXFP8, HybridQuantizer.parse("fp8_block|mxfp8"), "the family of its rowwise operand"),
        (MXFP8, HybridQuantizer.parse("mxfp8|mxfp8+2d"), "the options of its columnwise operand"),
        (MXFP8, HybridQuantizer.parse("mxfp8+e5m2|mxfp8"), "the options of its rowwise operand"),
        (MXFP8, HybridQuantizer.parse("mxfp8@rowwise_dequantized"), "columnwise_source"),
    ],
)
def test_what_differs_is_named(first, other, difference):
    with pytest.raises(UserError, match=rf"^here: input of expert 2 differs from that of expert 0 in {difference}: "):
        homogeneous([first, first, other], "here: input")


def test_equal_quantizers_are_one():
    """Also where each was parsed by itself; states of delayed scaling are no part of them."""
    for text in ("fp8_delayed|mxfp8", "nvfp4+sr", "bf16|nvfp4@rowwise_dequantized"):
        quantizers = [HybridQuantizer.parse(text) for _ in range(3)]
        assert homogeneous(quantizers, "here: input") is quantizers[0]
    assert homogeneous([scaled(2.0), scaled(2.0)], "here: input").factor == 2.0
