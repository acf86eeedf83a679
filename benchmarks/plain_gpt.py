"""The GPT of hqsweep.train.model in plain torch, as a user would write it: what a step of ours is timed beside.

RMSNorm, rotary positions, SwiGLU, scaled_dot_product_attention, an untied head; FP32 parameters and residual stream,
products in bfloat16 by autocast. Experts are torch._grouped_mm over tokens in the order of experts. The same weights
give the same loss (tests/benchmarks/test_plain_gpt.py). Shapes: B batch, T context, D dim, E experts, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.config.model import ModelConfig, expert_width, ffn_width, has_experts
from hqsweep.config.train import TrainConfig

Batch = tuple[Tensor, Tensor]
EPSILON = 1e-5


class RowwiseLinear(nn.Linear):
    """The linear of torchao's recipe rowwise, without a bias: x [..., K] -> [..., N] in bfloat16, by FP8 products."""

    def forward(self, x: Tensor) -> Tensor:
        y = RowwiseProducts.apply(x.flatten(0, -2).bfloat16(), self.weight.bfloat16())
        return y.view(*x.shape[:-1], -1)


class RowwiseProducts(torch.autograd.Function):
    """x [M, K], w [N, K] -> x @ w.T. Operands have a scale per row; only forward accumulates fast, as in torchao."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        (a, a_scale), (b, b_scale) = scaled_rows(x), scaled_rows(w)
        return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return scaled_later(dy, w.t()), scaled_later(dy.t(), x.t())


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] as E4M3 codes, and the factors [M, 1] that decode them: powers of two."""
    amax = x.abs().amax(1, keepdim=True).double()
    scale = torch.exp2(torch.floor(torch.log2((448.0 / amax.clamp(min=1e-12)).float())))
    codes = (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.contiguous(), scale.reciprocal()


def scaled_later(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [N, K].T with the scales after the product: torch's kernel with scales is slow without fast sums."""
    (a, a_scale), (b, b_scale) = scaled_rows(a), scaled_rows(b)
    one = a_scale.new_ones(())
    y = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
    return (y * (a_scale * b_scale.t())).bfloat16()


def with_rowwise(model: "PlainGPT") -> "PlainGPT":
    """The model with RowwiseLinear for all linears of its blocks."""
    for module in model.blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = RowwiseLinear
    return model


class Attention(nn.Module):
    """x [B, T, D] -> [B, T, D], causal, over heads whose pairs are turned by cos and sin [T, D / heads / 2]."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) of x [..., T, E] turned; the first of all pairs come before the second."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Mlp(nn.Module):
    """x [..., D] -> fc2(silu(gate) * up) with gate, up = fc1(x)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 2 * ffn, bias=False), nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)


class Experts(nn.Module):
    """x [B, T, D] -> the weighted sum over top_k of E SwiGLUs of each token, and the loss of the balance []."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, dim, ffn = config.experts, config.dim, expert_width(config)
        self.top_k = config.top_k
        self.router = nn.Parameter(torch.randn(count, dim) * 0.02)
        self.fc1 = nn.Parameter(torch.randn(count, 2 * ffn, dim) * dim**-0.5)
        self.fc2 = nn.Parameter(torch.randn(count, dim, ffn) * ffn**-0.5)
        self.shared = Mlp(dim, ffn) if config.shared_expert else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, count = x.flatten(0, 1), len(self.router)
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.softmax(rows.float() @ self.router.T, dim=-1)
        top, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = top / top.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        tokens = (chosen.flatten().unsqueeze(-1) == torch.arange(count, device=x.device)).sum(dim=0)
        offsets = tokens.cumsum(0).int()
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        copies = rows.to(torch.bfloat16).unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        gate, up = grouped(Permute.apply(copies, order, inverse), self.fc1, offsets).chunk(2, -1)
        parts = Permute.apply(grouped(F.silu(gate) * up, self.fc2, offsets), inverse, order)
        y = (parts.view(len(rows), self.top_k, -1) * weights.unsqueeze(-1)).sum(dim=1)
        if self.shared is not None:
            y = y + self.shared(rows)
        balance = count * (tokens / chosen.numel() * probabilities.mean(dim=0)).sum()
        return y.view(x.shape), balance


class Permute(torch.autograd.Function):
    """x[order]; backward gathers by the inverse, where autograd of indexing would add to rows one after the other."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy[inverse], None, None


def grouped(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Rows of x by expert, up to its offset, times weights [E, N, K] transposed."""
    return torch._grouped_mm(x, weights.to(x.dtype).transpose(1, 2), offs=offsets)


class Block(nn.Module):
    """x + attention, then x + MLP or experts, each behind a norm; and the loss of the balance, 0 without experts."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(config.dim, eps=EPSILON) for _ in range(2))
        self.attn = Attention(config.dim, config.heads)
        mixed = has_experts(config, layer)
        self.mlp = Experts(config) if mixed else Mlp(config.dim, ffn_width(config))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.attn(self.norm1(x), cos, sin)
        y = self.mlp(self.norm2(x))
        y, balance = y if isinstance(y, tuple) else (y, None)
        return x + y, balance


class PlainGPT(nn.Module):
    """inputs, targets, int64 [B, T] -> the loss []: mean cross entropy, plus the weighted loss of the balance."""

    def __init__(self, config: ModelConfig, vocabulary: int, context: int) -> None:
        super().__init__()
        self.load_balance = config.load_balance
        self.embedding = nn.Embedding(vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=EPSILON)
        self.head = nn.Linear(config.dim, vocabulary, bias=False)
        width = config.dim // config.heads
        frequency = config.rope_base ** (-torch.arange(0, width, 2) / width)
        angle = torch.arange(context)[:, None] * frequency
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, balances = self.embedding(inputs), []
        for block in self.blocks:
            x, balance = block(x, self.cos, self.sin)
            if balance is not None:
                balances.append(balance)
        loss = F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())
        return loss + self.load_balance * torch.stack(balances).mean() if balances else loss


def plain_step(
    model: PlainGPT, batch: Callable[[], Batch], train: TrainConfig, *, compiled: bool
) -> Callable[[], Tensor]:
    """A step of the model on the next batch: forward, loss, backward, clip, AdamW; it returns the loss."""
    device = model.cos.device.type
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.lr, betas=(train.beta1, train.beta2), eps=1e-8, fused=device == "cuda"
    )
    forward = torch.compile(model) if compiled else model

    def step() -> Tensor:
        inputs, targets = (tokens.to(device, non_blocking=True) for tokens in batch())
        with torch.autocast(device, torch.bfloat16):
            loss = forward(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
