"""One call decodes the packed operands of all experts to the bytes of a call for each, on the CPU and on a GPU."""

import pytest
import torch
from cases import KERNELS, LOW_BASES, crossed
from support.ops.calls import device_splits, quantize

from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.layout import GroupLayout, member_buffers
from hqsweep.ops.quantize.dequantize import (
    decode,
    decode_into,
    dequantize,
    exact_operand_of,
    exact_operand_of_parts,
)
from hqsweep.ops.splits import Splits
from hqsweep.quant.operand import Operand, narrow

SIXTEENS = (0, 128, 48, 0, 16, 160, 256, 0)
ANY = (37, 0, 1, 128, 131, 300)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.mark.feature("A28")
@devices
@pytest.mark.parametrize(("text", "columnwise", "width"), crossed(KERNELS, [False, True], [256, 48], whole=LOW_BASES))
def test_decoding_at_once_gives_the_bytes_of_each_operand(text, columnwise, width, device):
    """Exact and values, in every dtype, at the places of X's elements."""
    format = parse(text)
    for sizes in (SIXTEENS,) if columnwise and format.column_multiple > 1 else (SIXTEENS, ANY):
        x = draw("heavy", sum(sizes), width, dtype=torch.bfloat16).to(device)
        formats = {"rowwise": None, "columnwise": format} if columnwise else {"rowwise": format}
        keys = [RngKey(seed=7, slot=f"experts/{e}", step=5) for e in range(len(sizes))]
        own = {"rowwise_key": keys, "columnwise_key": keys}
        for splits in (Splits.of(sizes, len(x)), device_splits(sizes, device)):
            operands = quantize(x, splits=splits, **formats, **own)
            packed = operands[columnwise]
            layout = GroupLayout(splits=splits, width=width, columnwise=columnwise)
            buffers = member_buffers(packed, format, layout)
            for exact, dtype in ((True, None), (False, torch.float32), (False, torch.bfloat16), (False, torch.float16)):
                members = [decoded(b, format, s, exact, dtype) for b, s in zip(buffers, layout.shapes, strict=True)]
                wanted = torch.cat([(m.t() if columnwise else m).reshape(-1) for m in members])
                tensors = [packed[name] for name in format.layout]
                actual = decode(tensors, text, len(x), width, exact, wanted.dtype, splits.offsets(x.device), columnwise)
                assert actual.dtype == wanted.dtype and torch.equal(actual.view(torch.uint8), wanted.view(torch.uint8))


@devices
@pytest.mark.parametrize(("text", "rows"), crossed(KERNELS, [128, 48], whole=LOW_BASES))
def test_parts_of_columns_are_decoded_to_the_bytes_of_the_whole(text, rows, device):
    format, x = parse(text), draw("heavy", rows, 3 * 128, dtype=torch.bfloat16).to(device)
    buffers = quantize(x, format, rowwise_key=RngKey(seed=7, slot="s", step=5)).rowwise
    whole = Operand(format=format, shape=(rows, 3 * 128), dtype=x.dtype, buffers=buffers)
    parts = [narrow(whole, 1, start, start + 128).buffers for start in (0, 128, 256)]
    exact = exact_operand_of_parts(parts, format, (rows, 128))
    wanted = whole.operand()
    assert torch.equal(exact.matrix, wanted.matrix) and exact.matrix.dtype == wanted.matrix.dtype
    assert exact.divisor == wanted.divisor
    assert exact.factor is wanted.factor is None or torch.equal(exact.factor, wanted.factor)


@pytest.mark.gpu
def test_gpu_decoding_writes_nothing_beside_its_columns():
    x = draw("heavy", 64, 128, dtype=torch.bfloat16).cuda()
    buffers = list(quantize(x, parse("mxfp8")).rowwise.values())
    out = torch.full((64, 256), 7.0, device="cuda", dtype=torch.bfloat16)
    decode_into(out[:, 64:192], buffers, "mxfp8")
    assert out[:, :64].eq(7).all() and out[:, 192:].eq(7).all() and not out[:, 64:192].eq(7).all()
    with pytest.raises(ValueError, match="rows of floats without gaps"):
        decode_into(out.t()[:64, 64:192], buffers, "mxfp8")


def decoded(buffers, format, shape, exact, dtype):
    return exact_operand_of(buffers, format, shape).matrix if exact else dequantize(buffers, format, shape, dtype)


def test_what_decoding_at_once_refuses():
    format, splits = parse("mxfp8"), Splits.of((32, 16), 48)
    buffers = list(quantize(torch.zeros(48, 32), format, splits=splits).rowwise.values())
    rest, offsets = (48, 32, True, torch.float32), splits.offsets(torch.device("cpu"))
    for message, tensors, starts in (
        (r"buffer q is torch.uint8 \(1535,\) on cpu; it takes 1536", [buffers[0][1:], buffers[1]], offsets),
        (r"buffer s is torch.int32 .* contiguous torch.uint8", [buffers[0], buffers[1].int()], offsets),
        (r"offsets are torch.int32 \(3,\) on cpu; they take int64", buffers, offsets.int()),
        ("expert 0 has rows 0 to 64 of 48", buffers, torch.tensor([0, 64])),
    ):
        with pytest.raises(ValueError, match=message):
            decode(tensors, "mxfp8", *rest, starts)
