"""Embeddings and norm gains in a recipe's format."""

import torch

from hqsweep.formats import parse
from hqsweep.nn.weight import quantized_weight
from hqsweep.quant import HybridQuantizer, QuantizerRole

ROLE = QuantizerRole("norm", "weight", "norm")


def test_fp32_is_the_weight_itself():
    weight = torch.randn(32)
    assert quantized_weight(weight, HybridQuantizer.parse("fp32"), ROLE) is weight


def test_values_are_the_formats_and_gradients_pass_through():
    weight = torch.randn(8, 64, requires_grad=True)
    format = parse("mxfp4")
    seen = quantized_weight(weight, HybridQuantizer.parse("mxfp4"), ROLE)
    assert torch.equal(seen, format.decode(format.encode(weight.detach()), (8, 64)))
    seen.backward(torch.full((8, 64), 3.0))
    assert torch.equal(weight.grad, torch.full((8, 64), 3.0))
