"""Mixture of experts: an MLP that sends each token to k of E experts (grouped linears), and a layer with one."""

import torch
from torch import Tensor, nn

from hqsweep.nn.attention.multihead_attention import MultiheadAttention
from hqsweep.nn.core.context import current
from hqsweep.nn.core.options import GroupedLinearOptions, MoELayerOptions, MoEOptions
from hqsweep.nn.core.residual import AddsBranch, Branch, StreamLayer
from hqsweep.nn.core.wire import MixtureRanks, SplitTokens
from hqsweep.nn.experts.grouped_linear import GroupedLinear
from hqsweep.nn.experts.router import Router, Routing, moves_by_kernels
from hqsweep.nn.layers.norm import Norm
from hqsweep.nn.linear.linear import Linear
from hqsweep.nn.linear.mlp import activate, joined, joins
from hqsweep.ops.members.splits import PaddedSplits, Splits
from hqsweep.recipe.argument import RecipeArgument, whole_recipe

Routed = tuple[Tensor, Tensor, Tensor]
"""y, then from the routing `balance` float32 [], and `tokens` int64 [E]."""


class SharedExpert(nn.Module):
    """x [M, D] -> fc2(swiglu(fc1(x))) [M, D], for every token; linears `name`.fc1 and `name`.fc2."""

    def __init__(self, dim: int, ffn: int, *, name: str, recipe: RecipeArgument, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1 = Linear(dim, 2 * ffn, name=f"{name}.fc1", recipe=recipe, dtype=dtype)
        self.fc2 = Linear(ffn, dim, name=f"{name}.fc2", recipe=recipe, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if joins(self.fc1, self.fc2, "swiglu", x):
            return joined(self.fc1, x, self.fc2, "swiglu")
        return self.fc2(activate(self.fc1(x), "swiglu"))


class LayerNormMoE(AddsBranch):
    """x [..., D] -> (output float32 [..., D], balance, tokens); the last two as in Routing.

    With h = norm(x), the output is the sum over the top_k experts of h: weight * fc2(swiglu(fc1(h))). shared_expert
    adds a SwiGLU of all tokens.

    fc1 and fc2 are GroupedLinears `name`.fc1 and `name`.fc2 with one weight [E, ...] each. The shared expert is
    `name`.shared, the norm `name`.norm. Norm, Router, activations and the weighted sum are float32. `ffn` is the width
    of each expert. The host waits for the device only where GroupedLinear says so, and under a probe.
    """

    def __init__(
        self,
        dim: int,
        ffn: int,
        *,
        name: str,
        recipe: RecipeArgument,
        dtype: torch.dtype = torch.bfloat16,
        options: MoEOptions,
    ) -> None:
        super().__init__()
        experts, top_k = options.experts, options.top_k
        if not 1 <= top_k <= experts:
            raise ValueError(f"{name}: top_k is {top_k} of {experts} experts; it takes 1 to {experts}")
        self.name = name
        shared = {"recipe": whole_recipe(recipe, name), "dtype": dtype}
        self.norm = Norm(dim, name=f"{name}.norm", recipe=shared["recipe"])
        self.router = Router(dim, experts, top_k)
        single = GroupedLinearOptions(single_grouped_weight=True)
        self.fc1 = GroupedLinear(experts, dim, 2 * ffn, name=f"{name}.fc1", options=single, **shared)
        self.fc2 = GroupedLinear(experts, ffn, dim, name=f"{name}.fc2", options=single, **shared)
        self.shared = SharedExpert(dim, ffn, name=f"{name}.shared", **shared) if options.shared_expert else None
        self.dispatcher: MixtureRanks | None = None
        """Sends tokens to experts on other ranks (hqsweep.parallel.expert)."""
        self.tokens: SplitTokens | None = None
        """How tokens are split over the ranks that share every expert (hqsweep.parallel.tensor); None: each rank has
        all tokens."""

    def forward(self, x: Tensor) -> Routed:
        return self._added(x, None)[1:]

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        total, h = self.norm.added(x, branch)
        if self.tokens is not None:
            h = self.tokens.whole(h)
        shape, h = h.shape, h.flatten(0, -2)
        routing = self.router(h)
        if probe := current().probe:
            probe.experts(self.name, routing.tokens.tolist(), current().microbatch)
        y = self._mixed(routing, h) if self.dispatcher is None else self.dispatcher.mixed(self, routing, h)
        y = y.view(shape)
        return total, y if self.tokens is None else self.tokens.own(y), routing.balance, routing.tokens

    def _mixed(self, routing: Routing, h: Tensor) -> Tensor:
        splits = self._splits(routing, h)
        rows = routing.dispatch(h, self.fc1.dtype, splits)
        rows = self.fc2(activate(self.fc1(rows, splits), "swiglu"), splits)
        return routing.combine(rows, None if self.shared is None else self.shared(h), splits)

    def _splits(self, routing: Routing, h: Tensor) -> Splits:
        """Return the splits of both linears, so that the host waits for the device at most once.

        They are padded already if both linears pad experts that only a device knows, and kernels move the tokens.
        """
        splits = Splits.of(routing.tokens, routing.chosen.numel())
        multiples = {fc.filling_multiple for fc in (self.fc1, self.fc2)}
        if splits.sizes is not None or splits.rows == 0 or len(multiples) > 1 or multiples == {1}:
            return splits
        if not moves_by_kernels(h, self.fc1.dtype):
            return splits
        return PaddedSplits.over(splits, multiples.pop(), h.device)


class MoELayer(StreamLayer):
    """TransformerLayer with a LayerNormMoE: x [B, T, D] -> x + attn(x), then x + mlp(x); and mlp's balance and
    tokens."""

    def __init__(
        self,
        dim: int,
        ffn: int,
        heads: int,
        *,
        name: str,
        recipe: RecipeArgument,
        dtype: torch.dtype = torch.bfloat16,
        options: MoELayerOptions,
    ) -> None:
        super().__init__()
        shared = {"recipe": whole_recipe(recipe, name), "dtype": dtype, "options": options}
        self.attn = MultiheadAttention(dim, heads, name=f"{name}.attn", **shared)
        self.mlp = LayerNormMoE(dim, ffn, name=f"{name}.mlp", **shared)

    def _residual(
        self, x: Tensor, branch: Branch, checkpoint_core_attention: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, branch = self.attn.added(x, branch, checkpoint_core_attention)
        return self.mlp.added(x, branch)
