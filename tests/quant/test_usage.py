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
    for kind in (UserError, RuntimeError):
        with pytest.raises(kind, match=r"rowwise usage is asked of a tensor in .* that holds no rowwise sub-storage"):
            tensor.update_usage(rowwise_usage=True, columnwise_usage=False)
    assert tensor.columnwise is not None
    tensor.update_usage(columnwise_usage=False)
    assert tensor.get_usages() == dict.fromkeys(BOTH, False) and "rowwise=None, columnwise=None" in repr(tensor)


def test_a_sub_storage_stays_the_same_object_while_its_memory_does():
    tensor = quantized()
    row = tensor.rowwise_sub_storage
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
    tensor.quantize_(torch.ones(64, 96))
    assert tensor.rowwise_sub_storage is row and torch.equal(row.dequantize(), tensor.dequantize())
    tensor.hold({name: buffer.clone() for name, buffer in tensor.buffers.items()})
    assert tensor.rowwise_sub_storage is not row
    assert tensor.rowwise_sub_storage._rowwise_data is tensor.rowwise.buffers["q"]


def test_fields_have_their_private_names_to_read():
    x = draw("normal", 64, 128)
    tensor = HybridQuantizedTensor.quantize(x, HybridQuantizer.parse("mxfp8|nvfp4"))
    assert (
        tensor._rowwise_data is tensor.rowwise.buffers["q"]
        and tensor._columnwise_data is tensor.columnwise.buffers["q"]
    )
    assert tensor._rowwise_scale_inv is tensor._scale_inv is tensor.rowwise.buffers["s"]
    assert torch.equal(tensor._amax_columnwise, tensor.columnwise.buffers["g"].view(1)) and tensor._amax_rowwise is None
    assert tensor._quantizer == tensor.quantizer and not tensor._transpose_invalid
    alone = tensor._rowwise_storage
    assert alone._data is not None and alone._transpose is None and alone._transpose_invalid
    assert torch.equal(alone.dequantize(), tensor.dequantize())
    assert not hasattr(tensor, "_no_such_field")


@pytest.mark.parametrize(
    "use",
    [
        torch.Tensor.detach,
        lambda tensor: tensor + 1,
        lambda tensor: tensor.dequantize(),
        lambda tensor: tensor.quantize_(torch.ones(64, 96)),
        lambda tensor: tensor.prepare_for_saving(),
    ],
)
def test_a_tensor_without_operands_is_neither_read_nor_written(use):
    tensor = quantized()
    tensor.clear()
    tensor.clear()
    assert tensor.get_data_tensors() == (None, None) and tensor.rowwise_sub_storage is None
    with pytest.raises(UserError, match=r"holds no rowwise operand after clear\(\) or prepare_for_saving\(\)"):
        use(tensor)


@pytest.mark.parametrize("text", ["nvfp4|mxfp8", "fp8_current", "mxfp8|bf16", "bf16"])
def test_saved_buffers_come_back_from_a_list(text):
    tensor = quantized(text)
    values, view, codes = tensor.dequantize(), tensor.detach(), tensor.get_data_tensors()
    saved, itself = tensor.prepare_for_saving()
    assert itself is tensor and tensor.rowwise is None and torch.equal(view.dequantize(), values)
    assert itself.restore_from_saved([*saved, "next"]) == ["next"]
    assert torch.equal(tensor.dequantize(), values)
    assert all(a is b for a, b in zip(tensor.get_data_tensors(), codes, strict=True))


def test_data_tensors_are_the_codes_of_the_directions():
    tensor, plain, high = quantized(), quantized("mxfp8"), quantized("bf16")
    row, column = tensor.rowwise.buffers["q"], tensor.columnwise.buffers["q"]
    data = tensor.get_data_tensors()
    assert data[0] is row and data[3] is column and data[1] is data[2] is None
    of_parts = (part.get_data_tensors() for part in (tensor.rowwise_sub_storage, tensor.columnwise_sub_storage))
    assert [code for codes in of_parts for code in codes if code is not None] == [row, column]
    assert plain.get_data_tensors()[1] is plain.get_data_tensors(rowwise_data=False) is plain.columnwise.buffers["q"]
    assert high.get_data_tensors()[1] is None and high.get_data_tensors(columnwise_data=False) is high._hp_data
    with pytest.raises(UserError, match="give True to one"):
        plain.get_data_tensors(rowwise_data=False, columnwise_data=False)


def test_metadata_has_the_fields_of_a_constructor():
    metadata = quantized("mxfp8").get_metadata()
    assert list(metadata)[:4] == ["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"]
    assert metadata["fake_dtype"] is torch.bfloat16 and metadata["row_scaled_nvfp4"] is False
    assert sorted(quantized().get_metadata()) == ["columnwise_storage", "fake_dtype", "quantizer", "rowwise_storage"]
    options = quantized("nvfp4+row_scaled|nvfp4+2d", directions=["rowwise"])
    assert options._row_scaled_nvfp4 and not options._is_2D_scaled and not options._nvfp4_use_4over6
    assert quantized("nvfp4|nvfp4+2d+4over6", directions=["columnwise"])._is_2D_scaled


def test_codes_have_the_axes_of_the_tensor():
    for text, last in (("fp8_current", 96), ("nvfp4", 48)):
        tensor = HybridQuantizedTensor.quantize(draw("normal", 64, 96).view(2, 32, 96), HybridQuantizer.parse(text))
        assert tensor._rowwise_data.shape == (2, 32, last) and torch.equal(
            tensor._rowwise_data.view(64, -1), tensor.rowwise.buffers["q"]
        )
    tensor = HybridQuantizedTensor.quantize(
        draw("normal", 64, 96).view(2, 32, 96), HybridQuantizer.parse("fp8_current")
    )
    assert torch.equal(tensor._transpose, tensor._data.permute(2, 0, 1)) and tensor._scale_inv.shape == (1,)
    assert tensor.view(-1, 96)._transpose.shape == (96, 64)
    row = HybridQuantizedTensor.quantize(torch.ones(64, 32), HybridQuantizer.parse("nvfp4+row_scaled|nvfp4"))
    assert row._amax_rowwise.shape == (64,)


@pytest.mark.parametrize("shape", [(), (1,), (311,)])
def test_a_tensor_of_fewer_axes_is_one_row(shape):
    x = torch.linspace(-3, 3, 311)[: max(shape, default=1)].view(shape)
    tensor = HybridQuantizedTensor.quantize(x, HybridQuantizer.parse("fp8_current"))
    row = HybridQuantizedTensor.quantize(x.view(1, -1), HybridQuantizer.parse("fp8_current"))
    assert tensor.shape == tensor._data.shape == tensor.dequantize().shape == shape
    assert torch.equal(tensor.dequantize().view(1, -1), row.dequantize())
    assert torch.equal(tensor.view(1, -1).dequantize(), row.dequantize())


def test_parts_of_one_row_are_rows():
    tensor = HybridQuantizedTensor.quantize(torch.arange(64.0), HybridQuantizer.parse("mxfp8"), directions=["rowwise"])
    first, last = tensor.chunk(2)
    assert first.shape == (32,) and torch.equal(torch.cat([first.dequantize(), last.dequantize()]), tensor.dequantize())
    with pytest.raises(UserError, match="cuts a block"):
        tensor.chunk(4)


@pytest.mark.parametrize("text", ["nvfp4|mxfp8", "bf16"])
def test_make_like_is_another_tensor_of_the_same_memory(text):
    tensor = quantized(text)
    other = HybridQuantizedTensor.make_like(tensor, dtype=torch.float32, requires_grad=True)
    assert other is not tensor and other.dtype is torch.float32 and other.requires_grad
    assert other.get_data_tensors()[0] is tensor.get_data_tensors()[0]
    assert torch.equal(other.dequantize(), tensor.dequantize(torch.float32))


def test_high_precision_values_keep_their_axes_in_the_columnwise_direction():
    tensor = quantized("mxfp8|bf16")
    column = tensor.columnwise_sub_storage
    assert column._hp_data.shape == tensor.shape and torch.equal(column._hp_data, column.dequantize())
