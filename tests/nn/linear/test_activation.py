"""activate: kernels where they are used, torch's operators elsewhere."""

import pytest
import torch

from hqsweep.nn import LayerNormMLP, MLPOptions, quantization
from hqsweep.nn.linear import activation as of_modules
from hqsweep.nn.linear.activation import ACTIVATIONS, activate
from hqsweep.ops.model.activation import INPUTS


@pytest.fixture
def emulated(monkeypatch):
    """The kernels by torch's operators on the CPU; the list has the shapes that they were given."""
    shapes = []

    def forward(z, kind, amax, signs, end):
        assert (amax, signs, end) == (False, None, None)
        shapes.append(tuple(z.shape))
        return [ACTIVATIONS[kind](z.float()).bfloat16()]

    def backward(dh, z, kind, amax, signs, end):
        assert (amax, signs, end) == (False, None, None)
        assert dh.is_contiguous()
        assert dh.dtype == torch.bfloat16
        with torch.enable_grad():
            leaf = z.detach().float().requires_grad_()
            ACTIVATIONS[kind](leaf).backward(dh.float())
        return [leaf.grad.bfloat16()]

    monkeypatch.setattr(of_modules, "activation", forward)
    monkeypatch.setattr(of_modules, "activation_backward", backward)
    monkeypatch.setattr(of_modules, "use_kernels", lambda x: True)
    return shapes


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_shapes_and_gradients_around_the_kernels(emulated, kind):
    values = torch.randn(2, 3, 16 * INPUTS[kind]).bfloat16()
    gradient = torch.randn(2, 16, 3).transpose(1, 2)  # neither contiguous nor bfloat16
    z, plain = values.clone().requires_grad_(), values.clone().requires_grad_()
    h = activate(z, kind)
    h.backward(gradient.bfloat16())
    expected = ACTIVATIONS[kind](plain.float()).bfloat16()
    expected.backward(gradient.bfloat16())
    assert emulated == [(6, 16 * INPUTS[kind])]
    assert torch.equal(h, expected)
    assert torch.equal(z.grad, plain.grad)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_what_the_kernels_do_not_take_is_torchs(emulated, kind):
    for z in (torch.randn(3, 16), torch.randn(3, 12).bfloat16()):
        h = activate(z, kind)
        assert h.dtype == torch.float32
        assert torch.equal(h, ACTIVATIONS[kind](z.float()))
    assert emulated == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_module_with_and_without_kernels(kind):
    """Once rounded to bfloat16, both read the same up to its last place."""
    torch.manual_seed(0)
    mlp = LayerNormMLP(64, 96, name="m", recipe="bf16", options=MLPOptions(activation=kind)).cuda()
    x, results = torch.randn(2, 40, 64, device="cuda"), []
    for kernels in (True, False):
        mlp.zero_grad()
        leaf = x.clone().requires_grad_()
        with quantization(kernels=kernels):
            y = mlp(leaf)
        y.float().square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in mlp.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6 * other.abs().max().item())
