"""Tensors by the names of their formats: asked by isinstance, and made of buffers."""

import pytest
import torch

from hqsweep import compat
from hqsweep.compat import DType
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw

KINDS = {
    "Float8Tensor": lambda: compat.Float8CurrentScalingQuantizer(DType.kFloat8E4M3),
    "Float8BlockwiseQTensor": lambda: compat.Float8BlockQuantizer(DType.kFloat8E4M3),
    "MXFP8Tensor": lambda: compat.MXFP8Quantizer(DType.kFloat8E4M3),
    "NVFP4Tensor": compat.NVFP4Quantizer,
    "IdentityTensor": compat.IdentityQuantizer,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_tensor_has_the_name_of_its_format_alone(name):
    tensor = KINDS[name]()(torch.ones(128, 128))
    assert [kind for kind in KINDS if isinstance(tensor, getattr(compat, kind))] == [name]
    assert isinstance(tensor, compat.QuantizedTensor) and isinstance(tensor, compat.HybridQuantizedTensor)
    assert isinstance(tensor, getattr(compat, f"{name}Storage")) and not isinstance(
        torch.ones(1), getattr(compat, name)
    )


def test_other_names_make_no_tensor():
    with pytest.raises(UserError, match="MXFP8Tensor is asked by isinstance only"):
        compat.MXFP8Tensor()


def test_two_formats_have_the_names_of_their_sub_storages():
    quantizer = compat.HybridQuantizer(
        rowwise_quantizer=KINDS["NVFP4Tensor"](), columnwise_quantizer=KINDS["MXFP8Tensor"]()
    )
    tensor = quantizer(torch.ones(128, 128))
    assert not any(isinstance(tensor, getattr(compat, kind)) for kind in KINDS)
    assert isinstance(tensor.rowwise_sub_storage, compat.NVFP4Tensor)
    assert isinstance(tensor.columnwise_sub_storage, compat.MXFP8Tensor)


def test_held_weights_have_these_names_too():
    with compat.quantized_model_init(recipe="mxfp8"):
        module = compat.Linear(64, 96)
    assert isinstance(module.weight, compat.MXFP8Tensor) and not isinstance(module.bias, compat.QuantizedTensor)


def test_what_an_internal_quantizer_returns_has_the_name_of_a_storage_only():
    for name, make in KINDS.items():
        quantizer = make()
        quantizer.internal = True
        for made in (quantizer(torch.ones(128, 128)), quantizer.make_empty((128, 128), device="cpu")):
            assert isinstance(made, getattr(compat, f"{name}Storage"))
            assert not isinstance(made, getattr(compat, name))


@pytest.mark.parametrize("shape", [(12, 16), (3, 4, 16)])
def test_float8_tensor_of_buffers_has_their_values_in_each_direction(shape):
    x = draw("heavy", 12, 16).reshape(shape)
    known = compat.Float8CurrentScalingQuantizer(DType.kFloat8E5M2)(x)
    options = {"shape": shape, "dtype": x.dtype, "fp8_dtype": DType.kFloat8E5M2, "fp8_scale_inv": known._scale_inv}
    row = compat.Float8Tensor(data=known._data, **options)
    column = compat.Float8Tensor(data=None, data_transpose=known._transpose, **options)
    assert isinstance(row, compat.Float8Tensor) and row._data.data_ptr() == known._data.data_ptr()
    assert (row._transpose, column._data) == (None, None) and column._transpose_invalid is False
    for made in (row, column):
        assert made.shape == x.shape and torch.equal(made.dequantize(), known.dequantize())
    storage = compat.Float8TensorStorage(
        data=None, data_transpose=known._transpose, fake_dtype=x.dtype, **{n: options[n] for n in list(options)[2:]}
    )
    assert storage.shape == x.shape and torch.equal(storage.dequantize(), known.dequantize())


def test_float8_tensor_of_a_quantizer_is_written_under_its_scale():
    scale, amax = torch.full([1], 4.0), torch.zeros(1)
    quantizer = compat.Float8Quantizer(scale, amax, DType.kFloat8E4M3)
    known = quantizer(torch.ones(16, 16))
    made = compat.Float8Tensor(
        (16, 16), torch.float32, data=known._data.clone(), fp8_scale_inv=known._scale_inv, quantizer=quantizer
    )
    quantizer.update_quantized(torch.full((16, 16), 3.0), made)
    assert made._quantizer is quantizer and torch.equal(made.dequantize(), torch.full((16, 16), 3.0))


def test_float8_tensor_of_buffers_that_do_not_fit_gets_a_sentence():
    ones = torch.ones(1)
    with pytest.raises(UserError, match="Float8Tensor: fp8_scale_inv, and data or data_transpose are missing"):
        compat.Float8Tensor((16, 16), torch.float32, fp8_scale_inv=ones)
    with pytest.raises(UserError, match=r"Float8Tensor: buffer rowwise_q .* is torch.float32"):
        compat.Float8Tensor((16, 16), torch.float32, data=torch.ones(16, 16), fp8_scale_inv=ones)
    with pytest.raises(UserError, match=r"Float8Tensor: fp8_dtype is DType.kFloat4E2M1; it takes"):
        data = torch.zeros(16, 16, dtype=torch.uint8)
        compat.Float8Tensor((16, 16), data=data, fp8_scale_inv=ones, fp8_dtype=DType.kFloat4E2M1)
    with pytest.raises(UserError, match=r"Float8Tensor: data \[16, 8\] does not have the 256 elements of \[16, 16\]"):
        compat.Float8Tensor((16, 16), data=data[:, :8], fp8_scale_inv=ones)


def test_identity_tensor_of_values_has_a_nominal_dtype():
    values = torch.randn(4, 8)
    storage = compat.IdentityTensorStorage(hp_data=values, fake_dtype=torch.bfloat16)
    assert storage.dtype is torch.bfloat16 and torch.equal(storage.dequantize(), values.bfloat16())
    assert isinstance(storage, compat.IdentityTensor) and storage._hp_data.data_ptr() == values.data_ptr()
    with pytest.raises(UserError, match="IdentityTensor: hp_data is None; it takes float32, float16 or bfloat16"):
        compat.IdentityTensor((4, 8), torch.float32)
