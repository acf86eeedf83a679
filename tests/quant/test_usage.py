"""The directions of a quantized tensor, read apart and dropped by TransformerEngine's names."""

import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer

BOTH = {"rowwise": True, "columnwise": True}


def quantized(text="nvfp4|mxfp8", **options):
    return HybridQuantizedTensor.quantize(draw("heavy", 64, 96), HybridQuantizer.parse(text), **options)


@pytest.mark.parametrize("text", ["nvfp4|mxfp8", "fp8_current", "mxfp8|bf16", "bf16"])
def test_a_sub_storage_is_one_direction_in_the_same_memory(text):
    tensor = quantized(text)
    row, column = tensor.rowwise_sub_storage, tensor.columnwise_sub_storage
    assert (row.get_usages(), column.get_usages()) == ({**BOTH, "columnwise": False}, {**BOTH, "rowwise": False})
    assert torch.equal(row.dequantize(), tensor.rowwise.dequantize())
    assert torch.equal(column.dequantize(), tensor.columnwise.dequantize().t())
    assert row.rowwise.buffers["q"].data_ptr() == tensor.rowwise.buffers["q"].data_ptr()
    assert column.columnwise.buffers["q"].data_ptr() == tensor.columnwise.buffers["q"].data_ptr()
    alone = quantized(text, directions=["columnwise"])
    assert alone.rowwise_sub_storage is None and torch.equal(alone.dequantize(), column.dequantize())


def test_update_usage_drops_what_is_false_and_nothing_before_a_fault():
    tensor = quantized()
    tensor.update_usage()
    tensor.update_usage(rowwise_usage=True)
    assert tensor.get_usages() == BOTH
    tensor.update_usage(rowwise_usage=False)
    assert tensor.get_usages() == {**BOTH, "rowwise": False} and tensor.rowwise is None
    with pytest.raises(UserError, match=r"rowwise usage is asked of a tensor in .* that holds no rowwise"):
        tensor.update_usage(rowwise_usage=True, columnwise_usage=False)
    with pytest.raises(UserError, match="would be left; keep one direction"):
        tensor.update_usage(columnwise_usage=False)
    assert tensor.columnwise is not None


def test_fields_have_their_private_names_to_read():
    x = draw("normal", 64, 128)
    tensor = HybridQuantizedTensor.quantize(x, HybridQuantizer.parse("mxfp8|nvfp4"))
    assert (
        tensor._rowwise_data is tensor.rowwise.buffers["q"]
        and tensor._columnwise_data is tensor.columnwise.buffers["q"]
    )
    assert tensor._rowwise_scale_inv is tensor._scale_inv is tensor.rowwise.buffers["s"]
    assert tensor._amax_columnwise is tensor.columnwise.buffers["g"] and tensor._amax_rowwise is None
    assert tensor._quantizer == tensor.quantizer and not tensor._transpose_invalid
    alone = tensor._rowwise_storage
    assert alone._data is not None and alone._transpose is None and alone._transpose_invalid
    assert torch.equal(alone.dequantize(), tensor.dequantize())
    assert not hasattr(tensor, "_no_such_field")
