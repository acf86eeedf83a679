"""Names of quantized tensors, for isinstance."""

import pytest
import torch

from hqsweep import compat
from hqsweep.compat import DType
from hqsweep.errors import UserError

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
    with pytest.raises(UserError, match=f"{name} is asked by isinstance only"):
        getattr(compat, name)()


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
