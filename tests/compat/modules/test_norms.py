"""LayerNorm and RMSNorm by TransformerEngine's arguments, against their formulas in float64."""

import pytest
import torch

from hqsweep import compat
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw

NORMS = {"LayerNorm": compat.LayerNorm, "RMSNorm": compat.RMSNorm}


def formula(kind, x, gain, bias, eps):
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double() + (0 if bias is None else bias.double())


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_a_call_is_the_formula_in_the_dtype_of_the_parameters(kind, dtype, centered):
    module = NORMS[kind](32, 1e-3, None, dtype, centered)
    assert torch.equal(module.weight, torch.full((32,), 0.0 if centered else 1.0, dtype=dtype))
    torch.nn.init.normal_(module.weight, std=0.5)
    if module.bias is not None:
        torch.nn.init.normal_(module.bias)
    x = draw("normal", 8, 32)
    expected = formula(kind, x, module.weight.double() + centered, module.bias, 1e-3)
    y = module(x)
    assert y.dtype is dtype
    torch.testing.assert_close(y, expected.to(dtype), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    module.reset_parameters()
    assert module.bias is None or not module.bias.any()


@pytest.mark.parametrize("kind", NORMS)
def test_torch_autocast_decides_the_dtype(kind):
    module, x = NORMS[kind](hidden_size=32), draw("normal", 8, 32).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype is torch.bfloat16 and module(x).dtype is torch.float32
    y.sum().backward()
    assert x.grad.dtype is module.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("kind", NORMS)
def test_options_that_change_no_number_are_taken_and_others_refused(kind):
    module = NORMS[kind]([4, 8], sequence_parallel=True, device="cuda", sm_margin=2, dtype=torch.float16)
    assert module.weight.sequence_parallel and module.weight.dtype is torch.float16 and module.weight.shape == (4, 8)
    for arguments, message in (
        ({}, "normalized_shape is missing"),
        ({"normalized_shape": 4, "eps": -1.0}, "eps is -1.0; it takes a finite number"),
        ({"normalized_shape": 4, "elementwise_affine": True}, "elementwise_affine=True has no counterpart"),
        ({"normalized_shape": 4, "params_dtype": torch.float64}, "params_dtype is torch.float64; it takes float32"),
    ):
        with pytest.raises(UserError, match=f"{kind}: {message}"):
            NORMS[kind](**arguments)
