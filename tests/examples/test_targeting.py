"""examples/targeting.py: every product of the four layers multiplies the bytes of the level that is meant for it."""

import runpy
from pathlib import Path

import pytest
import torch

from hqsweep.formats import ExactOperand, parse
from hqsweep.formats.inputs import draw
from hqsweep.nn import set_recipe
from hqsweep.nn.core.call import LinearCall
from hqsweep.quant.operand import Operand
from hqsweep.recipe import CustomRecipe, Recipe

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/targeting.py"))
RECIPES = {
    "sections": Recipe.from_config(EXAMPLE["RECIPE"]),
    "factory": CustomRecipe(qfactory=EXAMPLE["qfactory"]),
}
FORMATS = {
    "layers.0": {"fprop": ("mxfp8", "mxfp8"), "dgrad": ("mxfp8", "mxfp8"), "wgrad": ("mxfp8", "mxfp8")},
    "layers.1": {"fprop": ("nvfp4", "nvfp4"), "dgrad": ("nvfp4", "mxfp8"), "wgrad": ("mxfp8", "mxfp8")},
    "layers.2": {
        "fprop": ("fp8_current", "fp8_current"),
        "dgrad": ("fp8_current", "nvfp4"),
        "wgrad": ("nvfp4", "nvfp4"),
    },
    "layers.3": {"fprop": ("mxfp8", "bf16"), "dgrad": ("mxfp8", "bf16"), "wgrad": ("mxfp8", "mxfp8")},
}
"""Level by level: the model's, the module type's, that of a glob, and one tensor."""


@pytest.mark.feature("F14", "F168")
@pytest.mark.parametrize("how", RECIPES)
def test_every_product_multiplies_the_bytes_of_its_level(how, monkeypatch):
    torch.manual_seed(0)
    model, read, tensors = EXAMPLE["Model"](), {}, {}
    set_recipe(model, RECIPES[how])
    original = LinearCall.product

    def product(call, gemm, a, b, out_dtype):
        read[call.layer.split()[0], gemm] = [members(a), members(b)]
        return original(call, gemm, a, b, out_dtype)

    def keep(layer, args, y):
        tensors[layer.name] = {"x": args[0].detach()}
        y.register_hook(lambda gradient: tensors[layer.name].__setitem__("dy", gradient))

    monkeypatch.setattr(LinearCall, "product", product)
    for layer in model.layers:
        layer.register_forward_hook(keep)
    x = draw("normal", EXAMPLE["TOKENS"], EXAMPLE["WIDTH"]).requires_grad_()
    y = model(x)
    y.backward(draw("normal", *y.shape, seed=1).to(y.dtype))
    for layer in model.layers:
        splits = EXAMPLE["SPLITS"] if layer.name == "layers.1" else [len(x)]
        weights = layer.weights if layer.name == "layers.1" else [layer.weight]
        experts = zip(*(tensors[layer.name][name].split(splits) for name in ("x", "dy")), weights, strict=True)
        for expert, (own_x, own_dy, w) in enumerate(experts):
            w = w.detach().to(own_x.dtype)
            operands = {"fprop": (own_x, w), "dgrad": (own_dy, w.t()), "wgrad": (own_dy.t(), own_x.t())}
            for gemm, pair in operands.items():
                for got, matrix, text in zip(read[layer.name, gemm], pair, FORMATS[layer.name][gemm], strict=True):
                    assert_operand_of(got[expert], matrix, text, f"{layer.name} {gemm} {text}")
    assert len(read) == 12


def test_it_prints_what_it_says(capsys):
    EXAMPLE["main"]()
    expected = [
        f"{layer:10} {gemm:6} {a:12} x {b}" for layer, gemms in FORMATS.items() for gemm, (a, b) in gemms.items()
    ]
    assert capsys.readouterr().out.splitlines() == expected


def members(operand):
    return operand.members if hasattr(operand, "members") else [operand]


def assert_operand_of(got: Operand | ExactOperand, matrix: torch.Tensor, text: str, where: str) -> None:
    """The exact operand that the reference of the format makes of the matrix, to the bit."""
    format = parse(text)
    got = got.operand() if isinstance(got, Operand) else got  # saved for backward as codes
    expected = format.operand(format.encode(matrix), tuple(matrix.shape))
    assert torch.equal(got.matrix.float(), expected.matrix.float()) and got.divisor == expected.divisor, where
    assert (got.factor is None) == (expected.factor is None), where
    assert got.factor is None or torch.equal(got.factor, expected.factor), where
