"""LayerNormMLP: norm, linear, activation, linear."""

import torch
from torch import Tensor

from hqsweep.nn.core.options import LayerNormLinearOptions, MLPOptions
from hqsweep.nn.core.residual import AddsBranch, Branch, whole
from hqsweep.nn.linear.activation import ACTIVATIONS, activate
from hqsweep.nn.linear.layernorm_linear import LayerNormLinear
from hqsweep.nn.linear.linear import Linear
from hqsweep.nn.linear.mlp_function import joined, joins
from hqsweep.ops.model.activation import INPUTS
from hqsweep.recipe.argument import RecipeArgument, whole_recipe
from hqsweep.recipe.roles import QuantizerRole


class LayerNormMLP(AddsBranch):
    """x [..., D] -> fc2(activation(fc1(norm(x)))) [..., D]; `ffn` is the width of fc2's input.

    The activation is computed in float32. The linears are named `name`.fc1 and `name`.fc2.
    """

    def __init__(
        self,
        dim: int,
        ffn: int,
        *,
        name: str,
        recipe: RecipeArgument,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        options: MLPOptions = MLPOptions(),
    ) -> None:
        super().__init__()
        if options.activation not in ACTIVATIONS:
            raise ValueError(f"{name}: activation is {options.activation!r}; allowed: {', '.join(ACTIVATIONS)}")
        self.activation, times = options.activation, INPUTS[options.activation]
        shared = {"recipe": whole_recipe(recipe, name), "bias": bias, "dtype": dtype}
        norm = LayerNormLinearOptions(normalization=options.normalization)
        self.fc1 = LayerNormLinear(dim, times * ffn, name=f"{name}.fc1", options=norm, **shared)
        self.fc2 = Linear(ffn, dim, name=f"{name}.fc2", **shared)

    def get_quantizer_roles(self, *, fwd: bool) -> list[QuantizerRole | None]:
        """Return the roles of fc1, then the roles of fc2."""
        return self.fc1.get_quantizer_roles(fwd=fwd) + self.fc2.get_quantizer_roles(fwd=fwd)

    def forward(self, x: Tensor) -> Tensor:
        return whole(self._added(x, None)[1])

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Branch]:
        if joins(self.fc1, self.fc2, self.activation, x):
            total, h, known = self.fc1.normed(x, branch)
            return total, joined(self.fc1, h, self.fc2, self.activation, known)
        total, z = self.fc1.added(x, branch)
        return total, self.fc2.branch(activate(z, self.activation))
