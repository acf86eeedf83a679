"""Four levels at which a recipe targets quantizers: the whole model, a type of module, names by a glob, one tensor.

    python examples/targeting.py

prints which formats the products of four layers read, forward and backward. The same choice is written twice, as the
mapping that a YAML recipe holds and as a Python function; the two resolve to equal quantizers.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import Tensor, nn

from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear, Linear, set_recipe
from hqsweep.nn.core.module import quantized_modules
from hqsweep.recipe import CustomRecipe, QuantizerRole, Recipe
from hqsweep.recipe.pairs import GEMMS

WIDTH, TOKENS, EXPERTS = 64, 128, 2
SPLITS = [96, 32]
RECIPE = {
    "linear": "mxfp8",
    "grouped_linear": "nvfp4|mxfp8",
    "overrides": [
        {"name": "*.2", "linear": "fp8_current|nvfp4"},
        {"name": "layers.3", "linear": {"input": "mxfp8", "weight": "bf16", "grad_output": "mxfp8"}},
    ],
}
"""The last override that matches a module decides."""


def qfactory(role: QuantizerRole) -> str:
    """RECIPE as a function."""
    if role.name == "layers.3" and role.tensor_type == "weight":  # one tensor of one module
        return "bf16"
    if fnmatchcase(role.name, "*.2"):  # modules by name
        return "fp8_current|nvfp4"
    if role.module_type == "grouped_linear":  # a type of module
        return "nvfp4|mxfp8"
    return "mxfp8"  # everything else


class Model(nn.Module):
    """Four layers of which the second one is of experts."""

    def __init__(self) -> None:
        super().__init__()
        layers = [Linear(WIDTH, WIDTH, name=f"layers.{i}", recipe="bf16") for i in (0, 2, 3)]
        layers.insert(1, GroupedLinear(EXPERTS, WIDTH, WIDTH, name="layers.1", recipe="bf16"))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, SPLITS) if isinstance(layer, GroupedLinear) else layer(x)
        return x


def products(model: nn.Module) -> Iterator[tuple[str, str, str, str]]:
    """Module, product, and the formats of its two operands."""
    for module in quantized_modules(model):
        for gemm, operands in GEMMS.items():
            a, b = (getattr(getattr(module.quantizers, tensor), direction) for tensor, direction in operands)
            yield module.name, gemm, str(a), str(b)


def main() -> None:
    model, other = Model(), Model()
    set_recipe(model, Recipe.from_config(RECIPE))
    set_recipe(other, CustomRecipe(qfactory=qfactory))
    assert list(products(model)) == list(products(other))
    model(draw("normal", TOKENS, WIDTH)).sum().backward()
    for row in products(model):
        print("{:10} {:6} {:12} x {}".format(*row))


if __name__ == "__main__":
    main()
