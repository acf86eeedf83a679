"""The values of the members of a group, decoded at once, are those of each by itself."""

import pytest
import torch

from hqsweep.formats import parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.layout import GroupLayout, member_buffers
from hqsweep.ops.quantize.dequantize import dequantize, dequantize_members
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.splits import Splits

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "fp8_block", "fp8_current", "nvfp4+row_scaled"])
def test_values_are_those_of_each_member(device, text):
    splits, format = Splits.of([32, 0, 96, 16], 144), parse(text)
    x = draw("heavy", 144, 64, 5).to(device)
    buffers, layout = quantize(x, Target(format), splits=splits).rowwise, GroupLayout.of(splits, 64, columnwise=False)
    values = dequantize_members(buffers, format, layout, torch.bfloat16)
    members = zip(member_buffers(buffers, format, layout), layout.shapes, strict=True)
    alone = [dequantize(own, format, shape, torch.bfloat16) for own, shape in members]
    assert torch.equal(values, torch.cat(alone)) and values.any()
