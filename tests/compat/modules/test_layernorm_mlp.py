"""LayerNormMLP by TransformerEngine's arguments: activations, results, gradients that wait."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep import compat
from hqsweep.compat import Float8CurrentScaling, autocast

D, W, M = 64, 96, 32


def rows(seed: int = 0) -> Tensor:
    return torch.randn(M, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def built(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return compat.LayerNormMLP(D, W, **options)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gated(function):
    return lambda z: function(z[..., :W]) * z[..., W:]


def clamped(z: Tensor) -> Tensor:
    gate, linear = z[..., :W].clamp(max=0.5), z[..., W:].clamp(-0.5, 0.5)
    return gate * torch.sigmoid(1.5 * gate) * (linear + 1)


ACTIVATIONS = {
    "gelu": tanh_gelu, "qgelu": lambda z: z * torch.sigmoid(1.702 * z), "relu": F.relu,
    "srelu": lambda z: F.relu(z) ** 2, "silu": F.silu, "geglu": gated(tanh_gelu), "glu": gated(torch.sigmoid),
    "qgeglu": gated(lambda z: z * torch.sigmoid(1.702 * z)), "reglu": gated(F.relu), "swiglu": gated(F.silu),
    "sreglu": gated(lambda z: F.relu(z) ** 2), "clamped_swiglu": clamped,
}  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_theirs(activation):
    params = {"limit": 0.5, "alpha": 1.5} if activation == "clamped_swiglu" else None
    module, x = built(activation=activation, activation_params=params), rows()
    h = F.layer_norm(x, (D,), module.layer_norm_weight, module.layer_norm_bias)
    z = ACTIVATIONS[activation](F.linear(h, module.fc1_weight, module.fc1_bias))
    expected = F.linear(z, module.fc2_weight, module.fc2_bias)
    torch.testing.assert_close(module(x), expected)
    parameters = [x, *module.parameters()]
    own = torch.autograd.grad(module(x).square().sum(), parameters)
    for a, b in zip(own, torch.autograd.grad(expected.square().sum(), parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_results_come_in_the_order_of_theirs():
    module, summed, x = built(return_bias=True, return_layernorm_output=True), built(), rows()
    nn.init.normal_(module.fc2.bias)
    summed.load_state_dict(module.state_dict())
    y, bias, normed = module(x)
    assert torch.equal(bias, module.fc2_bias) and torch.equal(y + bias, summed(x))
    torch.testing.assert_close(normed, F.layer_norm(x, (D,), module.layer_norm_weight, module.layer_norm_bias))
    y, bias = built(return_bias=True)(x)
    assert torch.equal(y + bias, built()(x))
    y, normed = built(return_layernorm_output=True, zero_centered_gamma=True)(x)
    assert torch.equal(y, built(zero_centered_gamma=True)(x)) and normed.shape == x.shape


def test_gradients_of_both_weights_wait():
    late, now, x = built(delay_wgrad_compute=True), built(), rows()
    for module in (late, now):
        with autocast(recipe=Float8CurrentScaling()):
            module(x).square().sum().backward()
    assert late.fc1.weight.grad is None and late.fc2.weight.grad is None and late.fc1.bias.grad is not None
    assert late.need_backward_dw()
    late.backward_dw()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(late.parameters(), now.parameters(), strict=True))


def test_roles_come_in_the_order_of_its_slots():
    module, linear = compat.LayerNormMLP(64, 128, name="mlp"), compat.Linear(64, 64, name="l")
    forward = [(role and f"{role.name} {role.tensor_type}") for role in module.get_quantizer_roles(fwd=True)]
    assert forward == ["mlp.fc1 input", "mlp.fc1 weight", "mlp.fc2 input", "mlp.fc2 input", "mlp.fc2 weight", None]
    backward = module.get_quantizer_roles(fwd=False, num_quantizers=5)
    assert [role and role.name for role in backward] == ["mlp.fc1", None, "mlp.fc2", "mlp.fc1", "mlp.fc1"]
    linear.output_quantizer_role = compat.QuantizerRole("dpa", "qkv", "d")
    roles = linear.get_quantizer_roles(fwd=True, num_quantizers=4)
    assert [role.tensor_type for role in roles] == ["input", "weight", "qkv", "input"]
