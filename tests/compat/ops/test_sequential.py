"""A Sequential of operations is the modules of the same weights, in high precision and quantized, to the bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep import compat
from hqsweep.compat import (
    CustomRecipe,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    autocast,
    nvfp4_factory,
    ops,
    quantized_model_init,
)
from hqsweep.errors import UserError
from hqsweep.nn import quantization
from hqsweep.quant import HybridQuantizedTensor

D, W, M = 64, 96, 32


def rows(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(M, D, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def mlp(norm: type = ops.LayerNorm, bias: bool = True, dtype: torch.dtype = torch.float32) -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        norm(D, dtype=dtype),
        ops.Linear(D, 2 * W, bias=bias, dtype=dtype),
        ops.SwiGLU(),
        ops.Linear(W, D, bias=bias, dtype=dtype),
    )


def randomized(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, float("bias" not in name), 0.2)
    return model


RECIPES = {
    "high precision": None, "fp8": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling(),
    "nvfp4": CustomRecipe(nvfp4_factory),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_module_of_the_same_weights(recipe, dtype, bias):
    model = randomized(mlp(dtype=dtype, bias=bias))
    module = compat.LayerNormMLP(D, W, activation="swiglu", bias=bias, params_dtype=dtype)
    named = dict(model.named_parameters())
    pairs = {
        "fc1.weight": "1.basic_ops.0.weight", "fc1.bias": "1.basic_ops.1.bias", "fc1.norm.weight": "0.weight",
        "fc2.weight": "3.basic_ops.0.weight", "fc2.bias": "3.basic_ops.1.bias", "fc1.norm.bias": "0.bias",
    }  # fmt: skip
    theirs = dict(module.named_parameters())
    for key, parameter in theirs.items():
        parameter.data.copy_(named[pairs[key]])
    for index, linear in ((1, module.fc1), (3, module.fc2)):
        model[index].basic_ops[0].name = linear.name  # of the random bits
    results = []
    for built in (model, module):
        x = rows(dtype=dtype)
        with quantization(seed=1, step=2), autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            y = built(x)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for key, parameter in theirs.items():
        assert torch.equal(parameter.grad, named[pairs[key]].grad), key


def test_kernels_of_several_operations_change_nothing(monkeypatch):
    """With and without the fusions, to the bit."""
    model, results = randomized(mlp()), []
    for kernels in (compat.ops.sequential.KERNELS, ()):
        monkeypatch.setattr("hqsweep.compat.ops.sequential.KERNELS", kernels)
        model = ops.Sequential(*model)
        x = rows()
        with autocast(recipe=MXFP8BlockScaling()):
            y = model(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_modules_of_torch_stand_between():
    torch.manual_seed(0)
    model = ops.Sequential(nn.Linear(D, W), ops.GELU(), nn.Linear(W, D), ops.ConstantScale(2.0))
    x = rows()
    expected = 2 * model[2](F.gelu(model[0](x), approximate="tanh"))
    torch.testing.assert_close(model(x), expected)


def test_it_is_a_list_of_modules():
    a, b, c = ops.GELU(), ops.ReLU(), nn.Identity()
    model = ops.Sequential({"first": a, "second": b})
    assert list(model._modules) == ["first", "second"] and len(model) == 2
    model.append(c).insert(1, ops.SiLU())
    assert [type(m).__name__ for m in model] == ["GELU", "SiLU", "ReLU", "Identity"]
    assert model.pop(-1) is c and model[0] is a and isinstance(model[:1], ops.Sequential)
    model[1] = c
    del model[0]
    assert list(model) == [c, b] and [*(model + ops.Sequential(a))] == [c, b, a]
    model += [a]
    assert len(model) == 3
    with pytest.raises(IndexError, match="Attempted to access index 3"):
        model[3]
    assert torch.equal(model(torch.tensor([-1.0, 0.0])), torch.zeros(2))


def test_branches_are_extra_inputs_and_outputs():
    torch.manual_seed(0)
    fc1 = ops.Sequential(ops.LayerNorm(D), ops.MakeExtraOutput(), ops.Linear(D, 2 * W), ops.SwiGLU())
    fc2 = ops.Sequential(ops.Linear(W, D), ops.AddExtraInput())
    x = rows()
    z, residual = fc1(x)
    y = fc2(z, residual)
    torch.testing.assert_close(residual, F.layer_norm(x, (D,)))
    plain = ops.Sequential(fc1[0], fc1[2], fc1[3], fc2[0])
    torch.testing.assert_close(y, plain(x) + F.layer_norm(x, (D,)))
    with pytest.raises(UserError, match="the operations take 1 extra inputs, and got 0"):
        fc2(z)
    with pytest.raises(UserError, match="Sequential: 1 extra inputs too many"):
        fc1(x, x)


def test_weights_are_held_and_checkpoints_have_their_keys():
    with quantized_model_init(recipe=MXFP8BlockScaling()):
        held = mlp()
    model, x = mlp(), rows()
    assert [name for name, p in held.named_parameters() if isinstance(p, HybridQuantizedTensor)] == [
        "1.basic_ops.0.weight", "3.basic_ops.0.weight"
    ]  # fmt: skip
    with autocast(recipe=MXFP8BlockScaling()):
        assert torch.equal(held(x), model(x))
    fresh = mlp()
    nn.init.zeros_(fresh[1].weight)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x))


def test_linears_are_named_by_their_place_and_have_roles():
    model = mlp()
    assert [m.name for m in model.modules() if isinstance(m, ops.BasicLinear)] == ["1.linear", "3.linear"]
    linear = model[1].basic_ops[0]
    linear.name = "fc1"
    assert [role.tensor_type for role in linear.get_quantizer_roles("forward")] == ["input", "weight"]
    assert [role.tensor_type for role in linear.get_quantizer_roles("backward")] == ["grad_output"]
    asked = []
    with autocast(recipe=CustomRecipe(lambda role: asked.append(role) or "mxfp8")):
        model(rows())
    names = {role.name for role in asked if role is not None}
    assert names == {"fc1", "3.linear"}


def test_arguments_of_one_operation_reach_it():
    class Times(ops.BasicOperation):
        def run(self, x: Tensor, by: float = 1.0) -> Tensor:
            return x * by

    times, x = Times(), rows()
    model = ops.Sequential(ops.Identity(), times)
    assert torch.equal(model(x, op_kwargs={1: {"by": 3.0}}), x * 3)
    assert torch.equal(model(x, op_kwargs={times: {"by": 2.0}}), x * 2) and torch.equal(times(x, by=4.0), x * 4)
    with pytest.raises(UserError, match="op_kwargs has an operation that is not in it"):
        model(x, op_kwargs={ops.GELU(): {}})
    with pytest.raises(UserError, match="op_kwargs are for a BasicOperation, not for Linear"):
        ops.Sequential(ops.Linear(D, D))(x, op_kwargs={0: {}})
