"""MultiheadAttention: norm, qkv linear, rotary positions, dot-product attention, output linear."""

from dataclasses import replace

import torch
from torch import Tensor

from hqsweep.nn.attention.attention import DotProductAttention
from hqsweep.nn.attention.rope import attend_joined, split_heads, takes_joined
from hqsweep.nn.core.context import recomputed
from hqsweep.nn.core.module import QuantizedModule
from hqsweep.nn.core.options import AttentionOptions, LayerNormLinearOptions
from hqsweep.nn.core.residual import AddsBranch, Branch, is_observed, whole
from hqsweep.nn.linear.layernorm_linear import LayerNormLinear
from hqsweep.nn.linear.linear import Linear
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
