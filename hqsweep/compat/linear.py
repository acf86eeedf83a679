"""transformer_engine.pytorch.Linear and LayerNormLinear, by their names, on this package's."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.compat.activation_dtype import InActivationDtype, built_in, params_dtype
from hqsweep.compat.checkpoint_keys import TakesKeys
from hqsweep.compat.parts import check_ranks, drawn_whole, link_part, part_of, ranks_of, write_part
from hqsweep.compat.signatures import LAYERNORM_LINEAR, LINEAR, OF_LINEAR_CALL
from hqsweep.errors import UserError
from hqsweep.nn.core.context import HIGH_PRECISION
from hqsweep.nn.core.options import LayerNormLinearOptions, LinearOptions
from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.core.residual import Branch
from hqsweep.nn.linear.layernorm_linear import LayerNormLinear as _LayerNormLinear
from hqsweep.nn.linear.linear import Linear as _Linear
from hqsweep.parallel.shared.linear import TensorParallel

TOKENS = 0
"""The axis along which tokens lie split: tensors are [sequence, batch, features]."""


class _Shared(TakesKeys, InActivationDtype):
    """What tensor parallelism adds to a linear of TransformerEngine's arguments: a rank has parameters of its part,
    whose weight may be held quantized, and exchanges over the group what it computes of them."""

    pieces: int = 1
    """Matrices that lie one below the other in the weight, of each of which a rank has its part."""

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
            base.__init__(self, *own, recipe=HIGH_PRECISION, dtype=dtype, options=options, **fields)
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
        """The ranks that share the linear, whose weight becomes the part of this one. UserError for another number of
        them than tp_size."""
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
        """The weight of this rank, of a whole that is drawn on every one."""
        whole = drawn_whole(self._draw, *self._whole, self.weight.dtype)
        link_part(self.name, self.weight, self.parallel)
        link_states([self.weight], self.states)  # which a weight in another dtype has lost
        write_part(self.weight, part_of(whole, self._mode, rank, self._ranks, self.pieces))


class Linear(_Shared, _Linear):
    """y = x @ weight.T (+ bias), in high precision outside of autocast, in the dtype of x.

    Arguments are those of TransformerEngine, by name or in its order; those that have no effect here are hints.
    tp_group, tp_size, parallel_mode: "column" has out_features / tp_size on each rank, "row" in_features / tp_size; the
    group exchanges as hqsweep.parallel.tensor's styles do, and may come later by set_tensor_parallel_group.
    sequence_parallel: tokens of x ("column") or y ("row") [sequence, ...] lie split over the group.
    fuse_wgrad_accumulation: dw is added to weight.main_grad. init_method draws the whole weight [out_features,
    in_features], alike on ranks whose generators are; each takes its part. params_dtype: the dtype of the parameters
    and of their gradients, torch's default dtype where it is None. UserError for an option that would change a number
    and is not there.
    """

    def __init__(self, in_features: int, out_features: int, *positional: Any, **arguments: Any) -> None:
        given = LINEAR.given(positional, arguments)
        options = LinearOptions(
            fuse_wgrad_accumulation=bool(given["fuse_wgrad_accumulation"]),
            save_original_input=bool(given["save_original_input"]),
        )
        self._build(_Linear, (in_features, out_features), options, given | {"name": given["name"] or "linear"})

    def forward(self, inp: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        """forward(inp). is_first_microbatch has no effect: quantization(cache_weights=True) keeps weights that nobody
        has written. UserError for fp8_output and fp8_grad."""
        if positional or arguments:
            OF_LINEAR_CALL.given(positional, arguments, self.name)
        return super().forward(self.take(inp))


class LayerNormLinear(_Shared, _LayerNormLinear):
    """Linear of a norm of x, by the same arguments and eps and normalization. Its gain is `norm.weight`. With
    sequence_parallel gradients of the norm are those of this rank's tokens, and its parameters have the attribute
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

    def forward(self, inp: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        """forward(inp), as Linear's."""
        if positional or arguments:
            OF_LINEAR_CALL.given(positional, arguments, self.name)
        return super().forward(inp)

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
        return super()._added(self.take(x), branch)
