"""What is kept for backward, in bytes: measured, and as it follows from the formats."""

import pytest
import torch

from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, LinearOptions, TransformerLayer, quantized_model_init
from hqsweep.nn.layers.saved_memory import SavedBytes, saved_input_bytes
from hqsweep.recipe import Recipe

BYTES = {  # (quantizers, save_original_input) -> bytes an element of x [32, 64]
    ("mxfp8", False): 1 + 1 / 32,
    ("mxfp8", True): 2,
    ("nvfp4|mxfp8", True): 2,
    ("nvfp4|mxfp8@rowwise_dequantized", True): 1 + 1 / 32,  # vetoes
    ("mxfp8|nvfp4", False): 0.5 + 1 / 16 + 4 / (32 * 64),
    ("fp8_current", False): 1 + 4 / (32 * 64),
    ("bf16", False): 2,
}


@pytest.mark.feature("F41")
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("quantizers", "original"), BYTES, ids=str)
def test_bytes_per_element_saved_for_backward(quantizers, original, held):
    options = LinearOptions(save_original_input=original)
    with quantized_model_init(enabled=held):
        module = Linear(64, 96, name="layer", recipe=quantizers, bias=True, options=options)
    saved = SavedBytes(module)
    with saved.counting():
        module(draw("normal", 32, 64))
    assert saved.nbytes / (32 * 64) == BYTES[quantizers, original] == saved_input_bytes(module, 32)


def test_a_layer_keeps_less_in_lower_formats():
    nbytes = {}
    for linear in ("bf16", "mxfp8", "bf16|nvfp4"):
        layer = TransformerLayer(64, 128, 2, name="l", recipe=Recipe.from_config({"linear": linear}))
        saved = SavedBytes(layer)
        with saved.counting():
            layer(torch.randn(2, 32, 64))
        nbytes[linear] = saved.nbytes
    inputs = 2 * 32 * (3 * 64 + 128)  # elements of the inputs of the four linears
    assert nbytes["bf16"] - nbytes["mxfp8"] == inputs * (2 - 1 - 1 / 32)
    assert nbytes["bf16"] - nbytes["bf16|nvfp4"] == inputs * (2 - 0.5 - 1 / 16) - 4 * 4
