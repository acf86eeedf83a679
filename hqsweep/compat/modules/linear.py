"""transformer_engine.pytorch.Linear and LayerNormLinear by their names, and what they share."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.compat.checkpoint_keys import TakesKeys
from hqsweep.compat.modules.activation_dtype import InActivationDtype, built_in, params_dtype
from hqsweep.compat.modules.later_gradients import LaterGradients
from hqsweep.compat.modules.parts import check_ranks, drawn_whole, link_part, materialize, part_of, ranks_of, write_part
from hqsweep.compat.signatures import LAYERNORM_LINEAR, LINEAR, OF_LINEAR_CALL
from hqsweep.errors import UserError
from hqsweep.nn.core.call import NOTHING, KnownInput, LinearCall
from hqsweep.nn.core.context import high_precision
from hqsweep.nn.core.options import LayerNormLinearOptions, LinearOptions
from hqsweep.nn.core.residual import Branch
from hqsweep.nn.layernorm_linears import LayerNormLinear as _LayerNormLinear
from hqsweep.nn.linears import Linear as _Linear
from hqsweep.nn.linears import linear_product
from hqsweep.nn.norm_embedding import Norm
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.parallel.shared.linear import TensorParallel

TOKENS = 0
"""The axis along which tokens lie split: tensors are [sequence, batch, features]."""


class SharedLinear(LaterGradients, TakesKeys, InActivationDtype):
    """Base of linears with TransformerEngine's arguments, for tensor parallelism: a rank has its part of the
    parameters, plain or held quantized, and exchanges results over the group."""

    pieces: int = 1
    """The number of equal matrices in the weight, one below the other. A rank has its part of each."""
    return_bias = False

    @property
    def weights(self) -> Sequence[Tensor]:
        return [self.weight]

    def _build(
        self,
        base: type[_Linear],
        sizes: tuple[int, int],
        options: LinearOptions,
        arguments: dict[str, Any],
    ) -> None:
        kind, mode = base.__name__, arguments["parallel_mode"]
        group, ranks, draw = arguments["tp_group"], arguments["tp_size"], arguments["init_method"]
        dtype = params_dtype(arguments["params_dtype"])
        self._ranks = ranks_of(ranks, group)
        if self._ranks > 1 and mode is None:
            raise UserError(f"{kind}: tp_size={self._ranks} without a parallel_mode; give 'column' or 'row'")
        self._mode, self._sequence = mode, bool(arguments["sequence_parallel"]) and self._ranks > 1
        self._split(kind, sizes[1], arguments["parameters_split"])
        axis = {"column": 1, "row": 0, None: 0}[mode]
        if sizes[axis] // self.pieces % self._ranks:
            what = ("in_features", "out_features")[axis]
            raise UserError(f"{kind}: {what}={sizes[axis]} does not divide by tp_size={self._ranks}")
        if arguments["return_bias"] and arguments["bias"] and self._ranks > 1:
            raise UserError(
                f"{kind}: return_bias=True has no counterpart here with tp_size={self._ranks}; leave it out"
            )
        own = [size // self._ranks if i == axis else size for i, size in enumerate(sizes)]
        state, fields = torch.get_rng_state(), {"name": arguments["name"], "bias": bool(arguments["bias"])}
        with built_in(dtype):
            base.__init__(self, *own, recipe=high_precision(), dtype=dtype, options=options, **fields)
        self.return_bias = bool(arguments["return_bias"])
        self.delay_wgrad(bool(arguments["delay_wgrad_compute"]), self._ranks)
        if arguments["params_dtype"] is not None:
            self.to(dtype)
        if self._ranks > 1 or draw is not None:
            torch.set_rng_state(state)
            self._whole, self._draw = sizes, draw
        if group is not None:
            self.set_tensor_parallel_group(group)
        elif self._ranks == 1 and draw is not None:
            self._take_part(0)

    def _split(self, kind: str, rows: int, split: Any) -> None:
        """Note the names of the rows that parameters_split gives. UserError for sizes that do not add up."""
        if split is None:
            return
        names = list(split)
        sizes = list(split.values()) if isinstance(split, Mapping) else [rows // len(names)] * len(names)
        if sum(sizes) != rows or len(set(names)) < len(names):
            raise UserError(f"{kind}: parameters_split has {dict(zip(names, sizes, strict=True))} of {rows} rows")
        if self._mode == "column" and self._ranks > 1:
            if len(set(sizes)) > 1:
                raise UserError(f"{kind}: parts of {sizes} rows have no counterpart here with tp_size={self._ranks}")
            self.pieces = len(names)
            sizes = [size // self._ranks for size in sizes]
        self.split = dict(zip(names, sizes, strict=True))

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the ranks that share the linear, whose weight becomes this rank's part. UserError for another number of
        ranks than tp_size."""
        if tp_group is None or tp_group.size() == 1:
            if self._ranks == 1 and getattr(self, "_draw", None) is not None:
                self._take_part(0)
            return
        if tp_group.size() != self._ranks:
            raise UserError(f"{self.name}: a tp_group of {tp_group.size()} ranks, where tp_size is {self._ranks}")
        sequence = TOKENS if self._sequence else None
        self.parallel = TensorParallel(group=tp_group, mode=self._mode, sequence=sequence, pieces=self.pieces)
        self._take_part(tp_group.rank())

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the weight again, and zero the bias. defer_init: do nothing."""
        if defer_init:
            return
        materialize(self)
        state = torch.get_rng_state()
        super().reset_parameters()
        if hasattr(self, "_whole") and (self._ranks == 1 or self.parallel is not None):
            torch.set_rng_state(state)
            self._take_part(0 if self.parallel is None else self.parallel.group.rank())

    def linear_facts(self) -> dict[str, Any]:
        """Linear.linear_facts(). UserError where no group says which ranks share the linear."""
        if self._ranks > 1:
            check_ranks(self.name, self._ranks, self.parallel)
            link_part(self.name, self.weight, self.parallel)  # which load_state_dict may have replaced
        return super().linear_facts()

    def _product(self, x: Tensor, known: KnownInput = NOTHING) -> Tensor:
        if self.return_bias and self.bias is not None:
            return linear_product(LinearCall(**self.linear_facts()), x, self.weight, None, known)
        return super()._product(x, known)

    def with_bias(self, y: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """y, or with return_bias (y, bias): the bias in y's dtype, or None."""
        if not self.return_bias:
            return y
        return y, None if self.bias is None else self.bias.to(y.dtype)

    def _take_part(self, rank: int) -> None:
        """This rank's part of a weight that every rank draws whole."""
        whole = drawn_whole(self._draw, *self._whole, self.weight.dtype)
        link_part(self.name, self.weight, self.parallel)
        write_part(self.weight, part_of(whole, self._mode, rank, self._ranks, self.pieces))


class Linear(SharedLinear, _Linear):
    """y = x @ weight.T (+ bias), in high precision outside of autocast, in the dtype of x.

    Arguments are TransformerEngine's, by name or in its order; some have no effect here and are hints. tp_group,
    tp_size, parallel_mode: "column" has out_features / tp_size on each rank, "row" in_features / tp_size. The group
    exchanges as in hqsweep.parallel.tensor's styles, and may come later by set_tensor_parallel_group.
    sequence_parallel: tokens of x ("column") or y ("row") [sequence, ...] lie split over the group.
    fuse_wgrad_accumulation: dw is added to weight.main_grad. delay_wgrad_compute: dw waits for backward_dw().
    init_method draws the whole weight [out_features, in_features], alike on ranks whose generators are equal; each rank
    keeps its part. params_dtype: the dtype of parameters and their gradients; None: torch's default dtype.
    parameters_split: names of rows, as in TransformerEngine's state_dict; there is one parameter `weight`, and
    NAME_weight are its rows. return_bias: a call returns (y, bias), without the sum. UserError for an unsupported
    option that would change a number.
    """

    @LINEAR.builds
    def __init__(self, in_features: int, out_features: int, *positional: Any, **arguments: Any) -> None:
        given = LINEAR.given(positional, arguments)
        options = LinearOptions(
            fuse_wgrad_accumulation=bool(given["fuse_wgrad_accumulation"]),
            save_original_input=bool(given["save_original_input"]),
        )
        self._build(_Linear, (in_features, out_features), options, given | {"name": given["name"] or "linear"})

    def forward(self, inp: Tensor, *positional: Any, **arguments: Any) -> Any:
        """forward(inp). is_first_microbatch has no effect: quantization(cache_weights=True) keeps the operands of
        unchanged weights. UserError for fp8_output and fp8_grad."""
        if positional or arguments:
            OF_LINEAR_CALL.given(positional, arguments, self.name)
        return self.with_bias(super().forward(self.take(inp)))


class CenteredNorm(Norm):
    """A norm whose gain is 1 + weight."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        nn.init.zeros_(self.weight)

    def quantized_weight(self) -> Tensor:
        return centered_gain(super().quantized_weight())

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

    @LAYERNORM_LINEAR.builds
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


def centered_gain(weight: Tensor) -> Tensor:
    """1 + weight, in float32 for a weight in any dtype."""
    return in_dtype(weight, torch.float32) + 1


def centered(norm: Norm, width: int) -> CenteredNorm:
    """A norm like another, with a gain of 1 + weight, in the dtype of its parameters."""
    kind = "RMSNorm" if norm.bias is None else "LayerNorm"
    options = {"normalization": kind, "epsilon": norm.epsilon, "recipe": high_precision()}
    return CenteredNorm(width, name=norm.name, **options).to(norm.weight.dtype)
