"""transformer_engine.pytorch.Linear and LayerNormLinear, by their names, and the part of a weight that each rank has.

Every rank draws the whole weight alike, and keeps its part as a tensor of its own, plain or held quantized.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.compat.activation_dtype import InActivationDtype, built_in, params_dtype
from hqsweep.compat.arguments import LAYERNORM_LINEAR, LINEAR, OF_LINEAR_CALL
from hqsweep.compat.checkpoint_keys import TakesKeys
from hqsweep.errors import UserError
from hqsweep.nn.core.context import high_precision
from hqsweep.nn.core.options import LayerNormLinearOptions, LinearOptions
from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.core.residual import Branch
from hqsweep.nn.linear.layernorm_linear import LayerNormLinear as _LayerNormLinear
from hqsweep.nn.linear.linear import Linear as _Linear
from hqsweep.parallel.shards.held_part import become_part
from hqsweep.parallel.shared.exchange import LinearShare
from hqsweep.parallel.shared.linear import TensorParallel
from hqsweep.quant.tensor import HybridQuantizedTensor

TOKENS = 0
"""The axis along which tokens lie split: tensors are [sequence, batch, features]."""


class _Shared(TakesKeys, InActivationDtype):
    """Base of linears with TransformerEngine's arguments, for tensor parallelism: a rank has its part of the
    parameters, plain or held quantized, and exchanges results over the group."""

    pieces: int = 1
    """The number of matrices in the weight, one below the other. A rank has its part of each."""

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
        axis = {"column": 1, "row": 0, None: 0}[mode]
        if sizes[axis] // self.pieces % self._ranks:
            what = ("in_features", "out_features")[axis]
            raise UserError(f"{kind}: {what}={sizes[axis]} does not divide by tp_size={self._ranks}")
        own = [size // self._ranks if i == axis else size for i, size in enumerate(sizes)]
        state, fields = torch.get_rng_state(), {"name": arguments["name"], "bias": bool(arguments["bias"])}
        with built_in(dtype):
            base.__init__(self, *own, recipe=high_precision(), dtype=dtype, options=options, **fields)
        if arguments["params_dtype"] is not None:
            self.to(dtype)
        if self._ranks > 1 or draw is not None:
            torch.set_rng_state(state)
            self._whole, self._draw = sizes, draw
        if group is not None:
            self.set_tensor_parallel_group(group)
        elif self._ranks == 1 and draw is not None:
            self._take_part(0)

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

    def reset_parameters(self) -> None:
        """Draw the weight again, and zero the bias."""
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

    def _take_part(self, rank: int) -> None:
        """This rank's part of a weight that every rank draws whole."""
        whole = drawn_whole(self._draw, *self._whole, self.weight.dtype)
        link_part(self.name, self.weight, self.parallel)
        link_states([self.weight], self.states)  # which a weight in another dtype has lost
        write_part(self.weight, part_of(whole, self._mode, rank, self._ranks, self.pieces))


class Linear(_Shared, _Linear):
    """y = x @ weight.T (+ bias), in high precision outside of autocast, in the dtype of x.

    Arguments are TransformerEngine's, by name or in its order; some have no effect here and are hints. tp_group,
    tp_size, parallel_mode: "column" has out_features / tp_size on each rank, "row" in_features / tp_size. The group
    exchanges as in hqsweep.parallel.tensor's styles, and may come later by set_tensor_parallel_group.
    sequence_parallel: tokens of x ("column") or y ("row") [sequence, ...] lie split over the group.
    fuse_wgrad_accumulation: dw is added to weight.main_grad. init_method draws the whole weight [out_features,
    in_features], alike on ranks whose generators are equal; each rank keeps its part. params_dtype: the dtype of
    parameters and their gradients; None: torch's default dtype. UserError for an unsupported option that would change a
    number.
    """

    def __init__(self, in_features: int, out_features: int, *positional: Any, **arguments: Any) -> None:
        given = LINEAR.given(positional, arguments)
        options = LinearOptions(
            fuse_wgrad_accumulation=bool(given["fuse_wgrad_accumulation"]),
            save_original_input=bool(given["save_original_input"]),
        )
        self._build(_Linear, (in_features, out_features), options, given | {"name": given["name"] or "linear"})

    def forward(self, inp: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        """forward(inp). is_first_microbatch has no effect: quantization(cache_weights=True) keeps the operands of
        unchanged weights. UserError for fp8_output and fp8_grad."""
        if positional or arguments:
            OF_LINEAR_CALL.given(positional, arguments, self.name)
        return super().forward(self.take(inp))


class LayerNormLinear(_Shared, _LayerNormLinear):
    """Linear of a norm of x, by the same arguments and eps and normalization. Its gain is `norm.weight`. With
    sequence_parallel gradients of the norm come from this rank's tokens alone. Its parameters then have the attribute
    sequence_parallel, by which Megatron sums them."""

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
        for parameter in self.norm.parameters():
            parameter.sequence_parallel = self._sequence

    def reset_parameters(self) -> None:
        """Draw the weight again, zero both biases, and set the gain to 1."""
        super().reset_parameters()
        if hasattr(self, "norm"):  # which is built after the linear
            nn.init.ones_(self.norm.weight)
            if self.norm.bias is not None:
                nn.init.zeros_(self.norm.bias)

    def forward(self, inp: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        """forward(inp), as Linear's."""
        if positional or arguments:
            OF_LINEAR_CALL.given(positional, arguments, self.name)
        return super().forward(inp)

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
        return super()._added(self.take(x), branch)


def drawn_whole(draw: Callable[[Tensor], Any] | None, inputs: int, outputs: int, dtype: torch.dtype) -> Tensor:
    """A weight [outputs, inputs] in dtype by `draw`, or as Linear draws it without, in float32."""
    whole = torch.empty(outputs, inputs, dtype=torch.float32 if draw is None else dtype)
    with torch.no_grad():
        if draw is None:
            nn.init.normal_(whole, std=1 / math.sqrt(inputs))
        else:
            draw(whole)
    return whole


def part_of(whole: Tensor, mode: str | None, rank: int, ranks: int, pieces: int = 1) -> Tensor:
    """A rank's part of a weight [N, K]: columns ("row"), or rows of each piece; pieces lie one below the other."""
    if mode == "row":
        return whole.chunk(ranks, 1)[rank]
    return whole.unflatten(0, (pieces, -1)).chunk(ranks, 1)[rank].flatten(0, 1)


def link_part(name: str, weight: Tensor, parallel: LinearShare | None) -> None:
    """Make a held weight this rank's part, so that writes have the bytes of the whole. Nothing changes where the weight
    is plain, or ranks do not share it. UserError, with the module's name, for a part that cuts a block."""
    if parallel is None or not isinstance(weight, HybridQuantizedTensor):
        return
    if weight.part is not None and weight.part.group is parallel.group:
        return
    try:
        become_part(weight, parallel.part_of("weight"))
    except UserError as error:
        raise UserError(f"{name}: weight: {error}") from None


@torch.no_grad()
def write_part(weight: Tensor, values: Tensor) -> None:
    """Give a weight its first values; one that is held quantized draws the random bits of its first writing."""
    if isinstance(weight, HybridQuantizedTensor):
        weight.quantize_(values, key=weight.metadata.key)
    else:
        weight.copy_(values)


def ranks_of(tp_size: int, tp_group: Any) -> int:
    """How many ranks share a module."""
    return tp_size if tp_group is None else tp_group.size()


def check_ranks(name: str, ranks: int, parallel: LinearShare | None) -> None:
    """UserError for a call of a module that ranks are to share before it knows which."""
    if parallel is None:
        raise UserError(
            f"{name}: tp_size={ranks}, and no tp_group says which ranks these are; give tp_group, or call"
            " set_tensor_parallel_group before the module"
        )
