"""Embeddings and norm gains in a recipe's format."""

import torch

from hqsweep.formats import RngKey, parse
from hqsweep.nn.core.rounding import rounded
from hqsweep.quant import HybridQuantizer

KEY = RngKey(seed=0, slot="norm/norm/weight", step=0)


def test_fp32_is_the_weight_itself():
    weight = torch.randn(32)
    assert rounded(weight, HybridQuantizer.parse("fp32"), KEY) is weight


def test_values_are_the_formats_and_gradients_pass_through():
    weight = torch.randn(8, 64, requires_grad=True)
    format = parse("mxfp4")
    seen = rounded(weight, HybridQuantizer.parse("mxfp4"), KEY)
    assert torch.equal(seen, format.decode(format.encode(weight.detach()), (8, 64)))
    seen.backward(torch.full((8, 64), 3.0))
    assert torch.equal(weight.grad, torch.full((8, 64), 3.0))
