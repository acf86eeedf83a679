"""Norm against torch in float64."""

import pytest
import torch
import torch.nn.functional as F

from hqsweep.nn.norm import EPSILON, Norm
from hqsweep.recipe import Recipe

BF16 = Recipe.from_config({"linear": "bf16"})


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_it_is_torchs_norm_in_float32(normalization):
    norm = Norm(32, name="n", recipe=BF16, normalization=normalization)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x, dy = torch.randn(2, 4, 32).bfloat16().requires_grad_(), torch.randn(2, 4, 32)
    norm(x).backward(dy)
    x64, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    if normalization == "RMSNorm":
        y = F.rms_norm(x64, (32,), weight, EPSILON)
    else:
        y = F.layer_norm(x64, (32,), weight, norm.bias.detach().double(), EPSILON)
        assert torch.allclose(norm.bias.grad, dy.sum((0, 1)), rtol=1e-5)
    y.backward(dy.double())
    assert norm(x).dtype == torch.float32
    torch.testing.assert_close(norm(x).double(), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.weight.grad.double(), weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=2**-8, atol=1e-4)


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ValueError, match="n: normalization is 'BatchNorm'; allowed: RMSNorm, LayerNorm"):
        Norm(32, name="n", recipe=BF16, normalization="BatchNorm")
