"""transformer_engine.pytorch.LayerNormMLP, by its name: two linears of compat, fc1 and fc2, and an activation."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from hqsweep.compat.modules.activation_dtype import cycled
from hqsweep.compat.modules.activations import activation_of, inputs
from hqsweep.compat.modules.linear import LayerNormLinear, Linear
from hqsweep.compat.modules.over_ranks import OverRanks, shared
from hqsweep.compat.signatures import LAYERNORM_MLP, OF_MLP_CALL
from hqsweep.nn.core.residual import Branch
from hqsweep.nn.layernorm_linears import LayerNormMLP as _LayerNormMLP
from hqsweep.nn.layernorm_linears import joins
from hqsweep.ops.elementwise import INPUTS
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.recipe.roles import QuantizerRole


class _Gated(LayerNormLinear):
    """The first linear of a gated activation, whose weight has the gate above the rest."""

    pieces = 2


class LayerNormMLP(OverRanks, _LayerNormMLP):
    """fc2(activation(fc1(norm(x)))), in high precision outside of autocast.

    With set_parallel_mode the ranks of tp_group have an equal number of inner features each, as in Linear: fc1 by
    column and fc2 by row. activation: a name of TransformerEngine's, computed in float32. init_method draws the weight
    of fc1, and output_layer_init_method the weight of fc2, whole on every rank. With return_bias a call returns y
    without the bias of fc2, and that bias; with return_layernorm_output also the norm, last. checkpoint has no effect.
    UserError for an unsupported option that would change a number.
    """

    KEYS: ClassVar[Mapping[str, str]] = {
        "layer_norm_weight": "fc1.layer_norm_weight", "layer_norm_bias": "fc1.layer_norm_bias",
        "fc1_weight": "fc1.weight", "fc1_bias": "fc1.bias", "fc2_weight": "fc2.weight", "fc2_bias": "fc2.bias",
    }  # fmt: skip

    @LAYERNORM_MLP.builds
    def __init__(self, hidden_size: int, ffn_hidden_size: int, *positional: Any, **arguments: Any) -> None:
        nn.Module.__init__(self)
        given = LAYERNORM_MLP.given(positional, arguments)
        self.activation, name = given["activation"], given["name"] or "layernorm_mlp"
        self._activate = activation_of("LayerNormMLP", self.activation, given["activation_params"])
        self.check_ranks(given)
        first, inner = (_Gated if inputs(self.activation) == 2 else LayerNormLinear), inputs(self.activation)
        both = shared(given) | {"delay_wgrad_compute": given["delay_wgrad_compute"]}
        modes = {"init_method": given["init_method"], "parallel_mode": "column"}
        names = ("normalization", "eps", "zero_centered_gamma")
        norm = {n: given[n] for n in (*names, "return_layernorm_output", "return_layernorm_output_gathered")}
        self.fc1 = first(hidden_size, inner * ffn_hidden_size, name=f"{name}.fc1", **modes, **norm, **both)
        modes = {"init_method": given["output_layer_init_method"], "parallel_mode": "row"}
        both["return_bias"] = given["return_bias"]
        self.fc2 = Linear(ffn_hidden_size, hidden_size, name=f"{name}.fc2", **modes, **both)
        self.fc1.has_extra_state = self.fc2.has_extra_state = False  # the module's has the columns of both

    def forward(self, inp: Tensor, *positional: Any, **arguments: Any) -> Any:
        """forward(inp). is_first_microbatch has no effect: quantization(cache_weights=True) keeps the operands of
        unchanged weights."""
        if positional or arguments:
            OF_MLP_CALL.given(positional, arguments)
        if not (self.fc1.return_layernorm_output or self.fc2.return_bias):
            return super().forward(inp)
        x = self.take(inp)
        z, *normed = self.fc1(x) if self.fc1.return_layernorm_output else (self.fc1(x),)
        y = self.fc2(in_dtype(self._activate(z), x.dtype))
        return (*(y if isinstance(y, tuple) else (y,)), *normed)

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int | None = None) -> list[QuantizerRole | None]:
        """The roles of fc1, then of fc2, num_quantizers of them. A boundary between both has its reader's role."""
        first, second = (fc.get_quantizer_roles(fwd=fwd) for fc in (self.fc1, self.fc2))
        if fwd:
            first[-1] = second[0]
        else:
            second[-1] = first[0]
        return cycled(first + second, num_quantizers)

    def backward_dw(self) -> None:
        """Compute the gradients of both weights that wait, as Linear.backward_dw()."""
        self.fc2.backward_dw()
        self.fc1.backward_dw()

    def need_backward_dw(self) -> bool:
        """Whether backward leaves gradients of weights to backward_dw()."""
        return self.fc1.need_backward_dw()

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Branch]:
        x = self.take(x)
        at_once = self.activation in INPUTS and not self.need_backward_dw()
        if at_once and joins(self.fc1, self.fc2, self.activation, x):
            return super()._added(x, branch)
        total, z = self.fc1.added(x, branch)
        return total, self.fc2(in_dtype(self._activate(z), x.dtype))

    def products(self) -> Sequence[str]:
        return ("fc1.states.", "fc2.states.")
