"""The layers of a transformer: attention, and an MLP or a mixture of experts, each added to the residual stream.

MultiheadAttention   norm, qkv linear, rotary positions, dot-product attention, output linear
TransformerLayer     attention and MLP
mixture of experts   an MLP that sends each token to k of E experts (grouped linears), and a layer with one

StreamLayer has the residual stream and the recomputation that all layers share; a stack of layers is a whole model's,
or one pipeline stage's.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.core.context import current, recomputed
from hqsweep.nn.core.module import QuantizedModule
from hqsweep.nn.core.options import (
    AttentionOptions,
    GroupedLinearOptions,
    LayerNormLinearOptions,
    MoELayerOptions,
    MoEOptions,
    TransformerOptions,
)
from hqsweep.nn.core.residual import AddsBranch, Branch, StreamLayer, add_branch, is_observed, whole, with_sum
from hqsweep.nn.core.wire import MixtureRanks, SplitTokens
from hqsweep.nn.dot_product_attention import DotProductAttention
from hqsweep.nn.grouped_linear import GroupedLinear
from hqsweep.nn.layernorm_linears import LayerNormLinear, LayerNormMLP, activate, joined, joins
from hqsweep.nn.linears import Linear
from hqsweep.nn.norm_embedding import Norm
from hqsweep.nn.rope import attend_joined, split_heads, takes_joined
from hqsweep.nn.router import Router, Routing, moves_by_kernels
from hqsweep.ops.splits import PaddedSplits, Splits
from hqsweep.recipe.argument import RecipeArgument, whole_recipe
from hqsweep.recipe.roles import QuantizerRole


class MultiheadAttention(AddsBranch):
    """Self-attention x [B, T, D] -> [B, T, D] over H heads of width E = D / H.

    Submodules are named `name`.qkv, `name`.dpa and `name`.proj. If recipe is a section, or its text, it applies to the
    linears, and dpa stays in high precision.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        name: str,
        recipe: RecipeArgument,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        options: AttentionOptions = AttentionOptions(),
    ) -> None:
        super().__init__()
        self.heads, self.rope_base, self.is_causal = heads, options.rope_base, options.is_causal
        self.quantize_boundaries = options.quantize_boundaries
        recipe = whole_recipe(recipe, name)
        norm = LayerNormLinearOptions(normalization=options.normalization)
        shared = {"recipe": recipe, "bias": bias, "dtype": dtype}
        self.qkv = LayerNormLinear(dim, 3 * dim, name=f"{name}.qkv", options=norm, **shared)
        self.dpa = DotProductAttention(name=f"{name}.dpa", recipe=recipe, dtype=dtype)
        self.proj = Linear(dim, dim, name=f"{name}.proj", **shared)

    def forward(self, x: Tensor, checkpoint_core_attention: bool = False) -> Tensor:
        """Return the output [B, T, D]. checkpoint_core_attention: recompute everything between the two linears in
        backward."""
        return whole(self._added(x, None, checkpoint_core_attention)[1])

    def _added(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool = False) -> tuple[Tensor, Branch]:
        if self.quantize_boundaries:
            self._wire_boundaries()
        total, qkv = self.qkv.added(x, branch)
        if checkpoint_core_attention:
            return total, self.proj.branch(recomputed(self._core, qkv))
        in_place = not is_observed(self.qkv)  # who observes the linear may keep its output
        if self.proj.parallel is not None and in_place and self._is_joined(qkv):
            y = self.proj.parallel.attend(self.proj, qkv, self.heads, self.rope_base, self.is_causal)
            if y is not None:
                return total, y
        return total, self.proj.branch(self._core(qkv, in_place=in_place))

    def _core(self, qkv: Tensor, *, in_place: bool = False) -> Tensor:
        """Return attention [B, T, D] of qkv [B, T, 3 D]. in_place: qkv is not read again."""
        b, t = qkv.shape[:2]
        if self.dpa.splits_tokens:
            qkv, in_place = self.dpa.parallel.whole_sequences(qkv), False
        if in_place and self._is_joined(qkv):
            return attend_joined(qkv, self.heads, self.rope_base, self.is_causal)
        qkv = qkv if qkv.is_cuda else qkv.float()  # CPUs have no fast attention in bfloat16
        q, k, v = split_heads(qkv, self.heads, self.rope_base, in_place=in_place)
        y = self.dpa(q, k, v, is_causal=self.is_causal)
        return y.transpose(1, 2).reshape(b, t, qkv.shape[2] // 3)

    def _is_joined(self, qkv: Tensor) -> bool:
        return takes_joined(self.dpa, qkv, self.heads, self.rope_base, self.is_causal)

    def _wire_boundaries(self) -> None:
        """Give each tensor between the modules its reader's role, or None if the reader uses high precision."""
        self._wire(self.dpa, "output", self.proj, "input")
        self._wire(self.proj, "grad_input", self.dpa, "do")
        if self.rope_base is None:
            self._wire(self.qkv, "output", self.dpa, "qkv")
            self._wire(self.dpa, "grad_input", self.qkv, "grad_output")

    def _wire(self, writer: QuantizedModule, slot: str, reader: QuantizedModule, tensor: str) -> None:
        low = not getattr(reader.active_quantizers(), tensor).rowwise.high_precision
        role = QuantizerRole(reader.module_type, tensor, reader.name) if low else None
        setattr(writer, writer.BOUNDARIES[slot], role)
        quantizer = getattr(reader.quantizers, tensor) if low else None
        if getattr(writer.quantizers, slot) != quantizer:
            writer.quantizers = replace(writer.quantizers, **{slot: quantizer})


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The residual stream x + branch [B, T, D], whose last sum the reader adds, and the routing of expert layers.

    balances: float32 [] per layer with experts; tokens: int64 [E] per layer with experts.
    """

    x: Tensor
    branch: Branch
    balances: list[Tensor]
    tokens: list[Tensor]


def _after(layer: nn.Module, x: Tensor, branch: Branch) -> tuple[Any, ...]:
    """Return (x, branch, *routing) after a layer.

    A wrapper around a layer (torch's checkpoint_wrapper, torch.compile) also has the layer's methods. They would skip
    the wrapper, so it is called instead.
    """
    if isinstance(layer, StreamLayer):
        return layer.residual(x, branch)
    return with_sum(layer(add_branch(x, branch)))


def through(layers: Iterable[nn.Module], x: Tensor) -> Stream:
    """Return the Stream of x [B, T, D] after TransformerLayers and MoELayers."""
    branch, balances, tokens = None, [], []
    for layer in layers:
        x, branch, *routed = _after(layer, x, branch)
        if routed:
            balances.append(routed[0])
            tokens.append(routed[1])
    return Stream(x=x, branch=branch, balances=balances, tokens=tokens)


class TransformerLayer(StreamLayer):
    """x [B, T, D] -> x + attn(x), then x + mlp(x), both starting with a norm. The residual stream keeps x's dtype.

    Submodules are named `name`.attn and `name`.mlp. If recipe is a section, or its text, it applies to the linears of
    both.
    """

    def __init__(
        self,
        dim: int,
        ffn: int,
        heads: int,
        *,
        name: str,
        recipe: RecipeArgument,
        dtype: torch.dtype = torch.bfloat16,
        options: TransformerOptions = TransformerOptions(),
    ) -> None:
        super().__init__()
        shared = {"recipe": whole_recipe(recipe, name), "bias": options.bias, "dtype": dtype, "options": options}
        self.attn = MultiheadAttention(dim, heads, name=f"{name}.attn", **shared)
        self.mlp = LayerNormMLP(dim, ffn, name=f"{name}.mlp", **shared)

    def _residual(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool) -> tuple[Tensor, Branch]:
        ranks = self.attn.qkv.parallel
        with nullcontext() if ranks is None else ranks.layer_call(self, x.shape[:-1]):
            x, branch = self.attn.added(x, branch, checkpoint_core_attention)
            return self.mlp.added(x, branch)


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
