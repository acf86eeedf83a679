"""The quantizer of weights, views and copies: TransformerEngine's classes of the tensor's formats."""

import pytest
import torch

from hqsweep import compat
from hqsweep.compat import CustomRecipe, DType, HybridQuantizer, IdentityQuantizer, MXFP8Quantizer
from hqsweep.formats.inputs import draw
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.quant import HybridQuantizer as Frozen

TEXTS = {
    "fp8_current+e5m2+pow2": "Float8CurrentScalingQuantizer",
    "fp8_block+2d": "Float8BlockQuantizer",
    "fp8_block+fp32_scale": "Float8BlockQuantizer",
    "mxfp8+2d": "MXFP8Quantizer",
    "mxfp6_e2m3": "OfFrozen",
    "nvfp4+4over6+mse": "NVFP4Quantizer",
    "nvfp4+2d": "NVFP4Quantizer",
    "bf16": "IdentityQuantizer",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_view_has_a_quantizer_of_its_formats_that_writes_the_same_bytes(text):
    x, y = draw("heavy", 64, 128), draw("normal", 64, 128)
    tensor = HybridQuantizedTensor.quantize(x, Frozen.parse(text))
    quantizer = tensor._quantizer
    assert tensor._quantizer is quantizer and type(quantizer) is HybridQuantizer
    for part in (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer):
        assert type(part).__name__ == TEXTS[text]
    quantizer.update_quantized(y, tensor)
    known = HybridQuantizedTensor.quantize(y, Frozen.parse(text))
    assert all(torch.equal(tensor.buffers[name], known.buffers[name]) for name in known.buffers)


def test_usages_are_the_held_directions():
    with compat.quantized_model_init(recipe="nvfp4|mxfp8"):
        weight = compat.Linear(64, 96).weight
    assert weight._quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    assert isinstance(weight._quantizer.columnwise_quantizer, MXFP8Quantizer)
    view = weight.detach()
    view.update_usage(rowwise_usage=False)
    made = view._quantizer(torch.ones(96, 64))
    assert view._quantizer.get_usages() == made.get_usages() == {"rowwise": False, "columnwise": True}


def test_a_weight_whose_slot_calls_a_users_quantizer_has_a_copy_of_that():
    class Doubled(MXFP8Quantizer):
        def quantize_impl(self, tensor):
            return super().quantize_impl(2 * tensor)

    doubled = Doubled(DType.kFloat8E4M3)
    recipe = CustomRecipe(lambda role: doubled if role and role.tensor_type == "weight" else IdentityQuantizer())
    with compat.quantized_model_init(recipe=recipe):
        weight = compat.Linear(64, 64).weight
    assert type(weight._quantizer) is Doubled and weight._quantizer is not doubled
