"""Options of TransformerEngine's linears: returned biases and norms, named rows, gradients that wait."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep import compat
from hqsweep.compat import Float8CurrentScaling, autocast

K, N, M = 64, 96, 32


def rows(seed: int = 0) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def built(kind: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    module = getattr(compat, kind)(*([2] if kind == "GroupedLinear" else []), K, N, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if "bias" in name or options.get("zero_centered_gamma") else 1.0, 0.3)
    return module


def call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, [12, 20]) if isinstance(module, compat.GroupedLinear) else module(x)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_returned_and_not_added(kind, dtype):
    x = rows().to(dtype)
    module, summed = built(kind, return_bias=True, params_dtype=dtype), built(kind, params_dtype=dtype)
    y, bias = module(x)
    assert bias.dtype is dtype and torch.equal(bias, module.bias)
    assert torch.equal(y + bias, summed(x))
    assert built(kind, return_bias=True, bias=False)(rows())[1] is None


def test_experts_return_a_list_of_biases():
    module, summed = built("GroupedLinear", return_bias=True), built("GroupedLinear")
    y, biases = call(module, rows())
    assert all(map(torch.equal, biases, (module.bias0, module.bias1)))
    expected = call(summed, rows())
    assert torch.equal(y[:12] + biases[0], expected[:12]) and torch.equal(y[12:] + biases[1], expected[12:])


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centered", [False, True])
def test_a_norm_is_returned_and_its_gain_may_be_centered(normalization, centered):
    module = built("LayerNormLinear", normalization=normalization, zero_centered_gamma=centered,
                   return_layernorm_output=True, return_bias=True)  # fmt: skip
    x = rows()
    y, bias, normed = module(x)
    gain = module.layer_norm_weight + centered
    expected = (
        F.layer_norm(x, (K,), gain, module.layer_norm_bias)
        if module.layer_norm_bias is not None
        else F.rms_norm(x, (K,), gain, 1e-5)
    )
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(y, expected @ module.weight.t())
    parameters = [x, *module.parameters()]
    own = torch.autograd.grad(y.sum() + bias.sum() + normed.square().sum(), parameters)
    plain = (expected @ module.weight.t()).sum() + module.bias.sum() + expected.square().sum()
    for a, b in zip(own, torch.autograd.grad(plain, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    module.reset_parameters()
    assert module.norm.weight.unique().tolist() == [0.0 if centered else 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_centered_gain_is_not_rounded(dtype):
    """1 + weight is in float32, in modules and in operations."""
    op = compat.ops.RMSNorm(K, zero_centered_gamma=True, dtype=dtype)
    module = compat.LayerNormLinear(K, N, normalization="RMSNorm", zero_centered_gamma=True, params_dtype=dtype,
                                    return_layernorm_output=True)  # fmt: skip
    x = rows().detach().to(dtype)
    for norm, call in ((op, op), (module.norm, lambda x: module(x)[1])):
        torch.nn.init.constant_(norm.weight, 2.0**-13)
        expected = F.rms_norm(x.double(), (K,), torch.full((K,), 1 + 2.0**-13).double(), 1e-5)
        assert torch.equal(call(x), expected.to(dtype))
        gain = torch.ones(K).double()  # as 1 + 2^-13 is in 16 bits
        assert not torch.equal(expected.to(dtype), F.rms_norm(x.double(), (K,), gain, 1e-5).to(dtype))


@pytest.mark.parametrize("split", [("a", "b", "c"), {"a": 16, "b": 80}])
def test_rows_have_names_and_are_saved_under_them(split):
    module = built("Linear", parameters_split=split)
    sizes = list(split.values()) if isinstance(split, dict) else [32] * 3
    assert [tuple(getattr(module, f"{name}_weight").shape) for name in split] == [(size, K) for size in sizes]
    assert torch.equal(torch.cat([getattr(module, f"{name}_bias") for name in split]), module.bias)
    state = compat.transformer_engine_state_dict(module)
    assert set(state) == {f"{name}_{kind}" for name in split for kind in ("weight", "bias")} | {"_extra_state"}
    fresh = built("Linear", parameters_split=split)
    nn.init.zeros_(fresh.weight)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.weight, module.weight)
    with pytest.raises(AttributeError, match="d_weight"):
        module.d_weight  # noqa: B018


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear"])
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["high precision", "fp8"])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_weights_wait_for_backward_dw(kind, recipe, fused):
    late = built(kind, delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    now = built(kind, fuse_wgrad_accumulation=fused)
    xs = [rows(seed) for seed in (1, 2)]
    for module in (late, now):
        for weight in module.weights:
            weight.main_grad = torch.zeros_like(weight)
        for x in xs:
            with autocast(enabled=recipe is not None, recipe=recipe):
                call(module, x).square().sum().backward()
    assert late.need_backward_dw() and not now.need_backward_dw()
    gradients = [weight.grad for weight in late.weights]
    assert gradients == [None] * len(gradients)
    for _ in range(3):  # one more than waits
        late.backward_dw()
        now.backward_dw()
    own, theirs = (dict(module.named_parameters()) for module in (late, now))
    for name, parameter in own.items():
        for which in ("grad", "main_grad"):
            a, b = (getattr(p, which, None) for p in (parameter, theirs[name]))
            assert (a is None and b is None) or torch.equal(a, b), (name, which)


def test_deferred_initialization_does_nothing():
    module = built("LayerNormLinear")
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    module.reset_parameters(defer_init=True)
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
