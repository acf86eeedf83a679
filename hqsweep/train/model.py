"""GPT: RMSNorm, rotary positions, SwiGLU, tied or untied head; every linear reads its quantizers from the recipe.

The residual stream and norms are FP32; linears read and write train.dtype. Attention itself stays in high precision:
FP32 on CPU, train.dtype on CUDA. Shapes: B batch, T context, D dim, H heads, V vocabulary.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.nn.linear import Linear
from hqsweep.nn.module import quantized_modules
from hqsweep.nn.weight import QuantizedWeight
from hqsweep.quant import LinearQuantizers
from hqsweep.quant.recipe import HEAD, HIGH_PRECISION
from hqsweep.quant.roles import module_roles
from hqsweep.quant.schedule import AnyRecipe
from hqsweep.quant.sections import WeightQuantizers

if TYPE_CHECKING:
    from hqsweep.config import ModelConfig

NORM_EPSILON = 1e-5
EMBEDDING_STD = 0.02


def ffn_width(config: "ModelConfig") -> int:
    """Hidden width of SwiGLU: config.ffn, or 8/3 of dim rounded up to a multiple of 32."""
    return config.ffn or -(-8 * config.dim // (3 * 32)) * 32


def linear_shapes(config: "ModelConfig", vocab_size: int) -> list[tuple[str, int, int]]:
    """(name, in_features, out_features) of every linear of the GPT, in order, without building it."""
    dim, hidden, shapes = config.dim, ffn_width(config), []
    for i in range(config.layers):
        shapes += [
            (f"layers.{i}.attn.qkv", dim, 3 * dim),
            (f"layers.{i}.attn.proj", dim, dim),
            (f"layers.{i}.mlp.fc1", dim, 2 * hidden),
            (f"layers.{i}.mlp.fc2", hidden, dim),
        ]
    return [*shapes, (HEAD, dim, vocab_size)]


class Norm(QuantizedWeight):
    """RMSNorm over the last axis in FP32, with a learned gain [D]."""

    module_type = "norm"

    def __init__(self, dim: int, name: str) -> None:
        super().__init__()
        self.name, self.quantizers = name, WeightQuantizers(weight=HIGH_PRECISION["norm"])
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.quantized_weight(), NORM_EPSILON)


class Embedding(QuantizedWeight):
    """Tokens [...] -> rows [..., D] of a table [V, D]."""

    module_type = "embedding"

    def __init__(self, vocab_size: int, dim: int, name: str) -> None:
        super().__init__()
        self.name, self.quantizers = name, WeightQuantizers(weight=HIGH_PRECISION["embedding"])
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        nn.init.normal_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.quantized_weight())


class Attention(nn.Module):
    """Causal self-attention with rotary positions; no bias."""

    def __init__(self, config: "ModelConfig", name: str, make_linear) -> None:
        super().__init__()
        self.heads = config.heads
        self.rope_base = config.rope_base
        self.qkv = make_linear(f"{name}.qkv")
        self.proj = make_linear(f"{name}.proj")

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(x)
        qkv = qkv if qkv.is_cuda else qkv.float()
        qk, v = qkv.view(b, t, 3 * self.heads, d // self.heads).split((2 * self.heads, self.heads), dim=2)
        q, k = rotate(qk, self.rope_base).transpose(1, 2).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864) of x [B, T, H, E]: pair (2i, 2i + 1) turns by t * base^(-2i/E)."""
    t, width = x.shape[1], x.shape[-1]
    frequency = base ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width)
    angle = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202): fc2(silu(g) * u) with [g, u] = fc1(x)."""

    def __init__(self, name: str, make_linear) -> None:
        super().__init__()
        self.fc1 = make_linear(f"{name}.fc1")
        self.fc2 = make_linear(f"{name}.fc2")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).float().chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: "ModelConfig", name: str, make_linear) -> None:
        super().__init__()
        self.attn_norm = Norm(config.dim, f"{name}.attn_norm")
        self.attn = Attention(config, f"{name}.attn", make_linear)
        self.mlp_norm = Norm(config.dim, f"{name}.mlp_norm")
        self.mlp = Mlp(f"{name}.mlp", make_linear)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, T, V] in FP32. set_recipe(model, other) changes the recipe that it is built with."""

    def __init__(self, config: "ModelConfig", vocab_size: int, recipe: AnyRecipe, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = {name: (k, n) for name, k, n in linear_shapes(config, vocab_size)}

        found = recipe.resolve(role for name in shapes for role in module_roles("linear", name))

        def make_linear(name: str) -> Linear:  # with its quantizers, in which quantized_model_init holds the weight
            quantizers = {role.tensor_type: found[role] for role in module_roles("linear", name)}
            return Linear(*shapes[name], name=name, quantizers=LinearQuantizers(**quantizers), dtype=dtype)

        self.embedding = Embedding(vocab_size, config.dim, "embedding")
        self.layers = nn.ModuleList(Block(config, f"layers.{i}", make_linear) for i in range(config.layers))
        self.norm = Norm(config.dim, "norm")
        self.head = make_linear(HEAD)
        self._initialise(config)
        others = (module for module in quantized_modules(self) if not isinstance(module, Linear))
        found |= recipe.resolve(role for module in others for role in module.slot_roles().values())
        for module in quantized_modules(self):
            module.rebuild(found, recipe.gemm)

    def _initialise(self, config: "ModelConfig") -> None:
        """Residual projections shrink with depth (GPT-2); an untied head starts at zero, so the first loss is ln V."""
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        with torch.no_grad():
            for block in self.layers:
                for linear in (block.attn.proj, block.mlp.fc2):
                    linear.weight.mul_((2 * config.layers) ** -0.5)
            self.head.weight.zero_()
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x)).float()

    def linears(self) -> Iterator[Linear]:
        """All linears in order, the head last."""
        return (module for module in self.modules() if isinstance(module, Linear))
