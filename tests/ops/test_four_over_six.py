"""4over6 on a GPU, where the fast encoder encodes both candidates of a segment, makes the bytes of the CPU."""

import pytest
import torch
from support.ops.calls import quantize

from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import DISTRIBUTIONS, draw

FORMATS = ("nvfp4+4over6", "nvfp4+4over6+mse", "nvfp4+4over6+max448", "nvfp4+2d+4over6", "nvfp4+2d+4over6+mse")
PAIRS = [(text, text) for text in (*FORMATS, "nvfp4+4over6+fast_error")]
PAIRS += [
    ("nvfp4+4over6", "mxfp8"),
    ("nvfp4+sr", "nvfp4+4over6"),
    ("fp8_current", "nvfp4+2d+4over6"),
    (FORMATS[0], None),
]
KEYS = {f"{direction}_key": RngKey(seed=3, slot="t", step=5) for direction in ("rowwise", "columnwise")}


def tensors(operand):
    held = operand if isinstance(operand, dict) else {"matrix": operand.matrix, "factor": operand.factor}
    return {name: tensor.cpu() for name, tensor in held.items() if tensor is not None}


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_gpu_makes_the_bytes_of_the_cpu(pair, distribution):
    """Whole tiles and parts of them, codes and exact operands, and amaxes at both ends of float32's range."""
    row, column = (text and parse(text) for text in pair)
    for rows, cols in ((256, 128), (144, 256), (16, 128), (48, 80)):
        x = draw(distribution, rows, cols)
        for factor in (1.0, 2.0**-100, 2.0**90):
            values = (x.float() * factor).bfloat16()
            for output in ("codes", "exact"):
                options = {"rowwise_output": output, "columnwise_output": output, **KEYS}
                host, device = (quantize(t, row, column, **options) for t in (values, values.cuda()))
                for ours, theirs in zip(device[:2], host[:2], strict=True):
                    if theirs is None:
                        continue
                    ours, theirs = tensors(ours), tensors(theirs)
                    for name, expected in theirs.items():
                        same = torch.equal(ours[name].float().nan_to_num(7), expected.float().nan_to_num(7))
                        assert same, (name, rows, cols, factor, output)


@pytest.mark.gpu
@pytest.mark.parametrize("text", FORMATS)
def test_columns_of_decoded_rows(text):
    x = draw("heavy", 272, 256)
    for column in (text, "mxfp8"):
        host, device = (
            quantize(t, parse(text), parse(column), columnwise_source="rowwise_dequantized") for t in (x, x.cuda())
        )
        for ours, theirs in zip(device[:2], host[:2], strict=True):
            assert all(torch.equal(ours[name].cpu(), theirs[name]) for name in theirs)
