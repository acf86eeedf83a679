"""transformer_engine.pytorch.Linear by its name, and what it shares with LayerNormLinear."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.compat.checkpoint_keys import TakesKeys
from hqsweep.compat.modules.activation_dtype import InActivationDtype, built_in, params_dtype
from hqsweep.compat.modules.later_gradients import LaterGradients
from hqsweep.compat.modules.parts import check_ranks, drawn_whole, link_part, part_of, ranks_of, write_part
from hqsweep.compat.signatures import LINEAR, OF_LINEAR_CALL
from hqsweep.errors import UserError
from hqsweep.nn.core.call import NOTHING, KnownInput, LinearCall
from hqsweep.nn.core.context import high_precision
from hqsweep.nn.core.options import LinearOptions
from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.linear.linear import Linear as _Linear
from hqsweep.nn.linear.linear import linear_product
from hqsweep.parallel.shared.linear import TensorParallel

TOKENS = 0
"""The axis along which tokens lie split: tensors are [sequence, batch, features]."""


class SharedLinear(LaterGradients, TakesKeys, InActivationDtype):
    """Base of linears with TransformerEngine's arguments, for tensor parallelism: a rank has its part of the
    parameters, plain or held quantized, and exchanges results over the group."""

    pieces: int = 1
    """The number of equal matrices in the weight, one below the other. A rank has its part of each."""
    return_bias = False

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
        link_states([self.weight], self.states)  # which a weight in another dtype has lost
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
