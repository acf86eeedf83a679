"""High precision by itself: Identity in one direction of every slot, and mxfp8 in the other, module by module.

The oracle is torch's own matmul on the values of the operands: an operand in high precision is the tensor itself, and
one in mxfp8 is decoded from the codes of the format's reference.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from hqsweep.formats import parse
from hqsweep.formats.inputs import draw
from hqsweep.nn import DotProductAttention, GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from hqsweep.recipe import Recipe

LOW = parse("mxfp8")
TEXTS = {"rowwise": "{high}|mxfp8", "columnwise": "mxfp8|{high}", "both": "{high}"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SPLITS = (32, 0, 64, 32)
NEAR = {"bf16": 4e-3, "fp32": 1e-5}
"""Relative L2 of results that are rounded to bfloat16 is below, and of float32 sums in another order."""
FAR = 1e-2
"""Relative L2 of a product with an operand in mxfp8 is above."""
directions = pytest.mark.parametrize("direction", TEXTS)
dtypes = pytest.mark.parametrize("high", DTYPES)


def rowwise(x, direction):
    """Values of the rowwise operand of x, in float32."""
    return x.float() if direction != "columnwise" else LOW.decode(LOW.encode(x), tuple(x.shape))


def columnwise(x, direction):
    return x.float() if direction != "rowwise" else LOW.decode(LOW.encode(x.t()), tuple(x.t().shape)).t()


def linear_oracle(x, w, dy, direction):
    """y, dx and dw of the three products."""
    return {
        "y": rowwise(x, direction) @ rowwise(w, direction).t(),
        "dx": rowwise(dy, direction) @ columnwise(w, direction),
        "dw": columnwise(dy, direction).t() @ columnwise(x, direction),
    }


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def recorded(module, x):
    """What each linear of a module reads and makes in forward and backward: name -> x, dx, y, dy, w, dw."""
    records = {}

    def keep(record, name):
        def hook(_, __, output):
            record[name] = output.detach()
            output.register_hook(lambda gradient: record.__setitem__(f"d{name}", gradient))

        return hook

    def keep_input(record):
        def hook(_, args):
            record["x"] = args[0].detach()
            args[0].register_hook(lambda gradient: record.__setitem__("dx", gradient))

        return hook

    for name, linear in module.named_modules():
        if isinstance(linear, Linear):
            record = records[name] = {"w": linear.weight.detach().to(linear.dtype)}
            linear.register_forward_hook(keep(record, "y"))
            if isinstance(linear, LayerNormLinear):
                linear.norm.register_forward_hook(keep(record, "x"))
            else:
                linear.register_forward_pre_hook(keep_input(record))
    y = module(x)
    y.backward(draw("normal", *y.shape, seed=1).to(y.dtype))
    for name, record in records.items():
        record["dw"] = module.get_submodule(name).weight.grad
    return records


def assert_products(record, direction, high):
    x, w, dy = (record[name] for name in ("x", "w", "dy"))
    expected, exact = (linear_oracle(x.to(DTYPES[high]), w, dy, each) for each in (direction, "both"))
    lossless = {"rowwise": {"y"}, "columnwise": {"dw"}, "both": {"y", "dx", "dw"}}[direction]
    for name in expected:
        assert distance(record[name], expected[name]) < NEAR[high], name
        assert (distance(record[name], exact[name]) < NEAR[high]) == (name in lossless), name
        assert name in lossless or distance(record[name], exact[name]) > FAR, name


@pytest.mark.feature("F20", "F144", "F150", "F65", "F66")
@dtypes
@directions
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp"])
def test_linears(kind, direction, high):
    text = TEXTS[direction].format(high=high)
    shared = {"name": "m", "recipe": Recipe.from_config({"linear": text}), "dtype": DTYPES[high]}
    build = {
        "linear": lambda: Linear(64, 96, **shared),
        "layernorm_linear": lambda: LayerNormLinear(64, 96, **shared),
        "layernorm_mlp": lambda: LayerNormMLP(64, 96, **shared),
    }
    torch.manual_seed(0)
    records = recorded(build[kind](), draw("normal", 128, 64).to(DTYPES[high]).requires_grad_())
    assert len(records) == (2 if kind == "layernorm_mlp" else 1)
    for record in records.values():
        assert_products(record, direction, high)


@pytest.mark.feature("F150")
@dtypes
@directions
def test_experts(direction, high):
    text = TEXTS[direction].format(high=high)
    torch.manual_seed(0)
    module = GroupedLinear(len(SPLITS), 64, 96, name="m", recipe=text, dtype=DTYPES[high])
    x = draw("normal", sum(SPLITS), 64).to(DTYPES[high]).requires_grad_()
    dy = draw("normal", sum(SPLITS), 96, 1).to(DTYPES[high])
    y = module(x, list(SPLITS))
    y.backward(dy)
    tokens = zip(*(t.split(SPLITS) for t in (x.detach(), x.grad, y.detach(), dy)), module.weights, strict=True)
    for own_x, own_dx, own_y, own_dy, w in tokens:
        if len(own_x):
            record = {"x": own_x, "dx": own_dx, "y": own_y, "dy": own_dy, "w": w.detach().to(y.dtype), "dw": w.grad}
            assert_products(record, direction, high)
        else:
            assert not w.grad.any()


def attention_oracle(q, k, v, do, direction):
    """y, dq, dk and dv of one head; s and dp are rounded to the dtype of q, as the module rounds what it quantizes."""
    scale = 1 / math.sqrt(q.shape[-1])
    s = (rowwise(q, direction) @ rowwise(k, direction).t() * scale).softmax(-1).to(q.dtype)
    ds = rowwise(do, direction) @ rowwise(v, direction).t()
    dp = (s.float() * (ds - (ds * s.float()).sum(-1, keepdim=True))).to(q.dtype)
    return (
        rowwise(s, direction) @ columnwise(v, direction),
        rowwise(dp, direction) @ columnwise(k, direction) * scale,
        columnwise(dp, direction).t() @ columnwise(q, direction) * scale,
        columnwise(s, direction).t() @ columnwise(do, direction),
    )


@pytest.mark.feature("F150")
@dtypes
@directions
def test_attention(direction, high):
    text = TEXTS[direction].format(high=high)
    module = DotProductAttention(name="m", recipe=dict.fromkeys(("qkv", "s", "do", "dp"), text), dtype=DTYPES[high])
    q, k, v, do = (draw("normal", 128, 32, seed).to(DTYPES[high]) for seed in range(4))
    leaves = [t.clone().view(1, 1, 128, 32).requires_grad_() for t in (q, k, v)]
    y = module(*leaves)
    y.backward(do.view_as(y))
    results = [t.view(128, 32) for t in (y.detach(), *(leaf.grad for leaf in leaves))]
    for result, expected in zip(results, attention_oracle(q, k, v, do, direction), strict=True):
        assert distance(result, expected) < (4e-3 if high == "bf16" else 1e-4)
    leaves = [t.float().view(1, 1, 128, 32).requires_grad_() for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves)
    y.backward(do.float().view_as(y))
    for result, exact in zip(results, (y, *(leaf.grad for leaf in leaves)), strict=True):
        error = distance(result, exact.view(128, 32))
        assert error < 8e-3 if direction == "both" else error > FAR
