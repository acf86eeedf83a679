"""transformer_engine.pytorch.LayerNormLinear, by its name."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from hqsweep.compat.modules.linear import SharedLinear
from hqsweep.compat.signatures import LAYERNORM_LINEAR, OF_LINEAR_CALL
from hqsweep.errors import UserError
from hqsweep.nn.core.context import high_precision
from hqsweep.nn.core.options import LayerNormLinearOptions
from hqsweep.nn.core.residual import Branch
from hqsweep.nn.layers.norm import Norm
from hqsweep.nn.linear.layernorm_linear import LayerNormLinear as _LayerNormLinear


class CenteredNorm(Norm):
    """A norm whose gain is 1 + weight."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        nn.init.zeros_(self.weight)

    def quantized_weight(self) -> Tensor:
        return super().quantized_weight() + 1

    def reset_parameters(self) -> None:
        """Set the gain to one, the bias to zero."""
        super().reset_parameters()
        nn.init.zeros_(self.weight)


class LayerNormLinear(SharedLinear, _LayerNormLinear):
    """Linear of a norm of x, by the same arguments and eps and normalization. Its gain is `norm.weight`, or 1 plus that
    with zero_centered_gamma. return_layernorm_output: a call returns also the norm, last. With sequence_parallel
    gradients of the norm come from this rank's tokens alone. Its parameters then have the attribute sequence_parallel,
    by which Megatron sums them."""

    KEYS: ClassVar[Mapping[str, str]] = {"layer_norm_weight": "norm.weight", "layer_norm_bias": "norm.bias"}

    def __init__(self, in_features: int, out_features: int, *positional: Any, **arguments: Any) -> None:
        given = LAYERNORM_LINEAR.given(positional, arguments)
        if given["parallel_mode"] == "row":
            raise UserError("LayerNormLinear: parallel_mode='row' would give its norm parts of rows; give 'column'")
        options = LayerNormLinearOptions(
            fuse_wgrad_accumulation=bool(given["fuse_wgrad_accumulation"]),
            normalization=given["normalization"],
            epsilon=given["eps"],
        )
        given["name"] = given["name"] or "layernorm_linear"
        self._build(_LayerNormLinear, (in_features, out_features), options, given)
        if given["zero_centered_gamma"]:
            self.norm = centered(self.norm, in_features)
        self.return_layernorm_output = bool(given["return_layernorm_output"])
        if self._sequence and given["return_layernorm_output_gathered"]:
            raise UserError(
                "LayerNormLinear: return_layernorm_output_gathered=True has no counterpart here with"
                " sequence_parallel; leave it out"
            )
        for parameter in self.norm.parameters():
            parameter.sequence_parallel = self._sequence

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the weight again, zero both biases, and set the gain to 1. defer_init: do nothing."""
        super().reset_parameters(defer_init)
        if hasattr(self, "norm") and not defer_init:  # which is built after the linear
            self.norm.reset_parameters()

    def forward(self, inp: Tensor, *positional: Any, **arguments: Any) -> Any:
        """forward(inp), as Linear's."""
        if positional or arguments:
            OF_LINEAR_CALL.given(positional, arguments, self.name)
        if self.return_layernorm_output:
            y, h = self.with_norm(inp)
            y = self.with_bias(y)
            return (*y, h) if isinstance(y, tuple) else (y, h)
        return self.with_bias(super().forward(inp))

    def with_norm(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y, and the norm of x in the dtype of the call."""
        _, h = self.norm.added(self.take(x), None, self.dtype)
        return self._product(h), h

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
        return super()._added(self.take(x), branch)


def centered(norm: Norm, width: int) -> CenteredNorm:
    """A norm like another, with a gain of 1 + weight, in the dtype of its parameters."""
    kind = "RMSNorm" if norm.bias is None else "LayerNorm"
    options = {"normalization": kind, "epsilon": norm.epsilon, "recipe": high_precision()}
    return CenteredNorm(width, name=norm.name, **options).to(norm.weight.dtype)
