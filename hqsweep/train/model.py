"""GPT, hqsweep's own model, and its adapter for the training loop.

It has RMSNorm, rotary positions, SwiGLU or a mixture of experts, and a tied or untied head. Every linear takes its
quantizers from the recipe. The residual stream and norms are FP32; linears read and write train.dtype. Attention that
the recipe leaves in high precision is FP32 on CPU and train.dtype on CUDA. Shapes: B batch, T context, D dim, V
vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import ModelConfig, expert_width, ffn_width, has_experts
from hqsweep.config.train import Recompute
from hqsweep.nn import quantization, quantized_model_init
from hqsweep.nn.core.module import QuantizedWeight
from hqsweep.nn.core.options import MoELayerOptions, TransformerOptions
from hqsweep.nn.grouped_linear import GroupedLinear
from hqsweep.nn.linear_loss import forms_loss, linear_cross_entropy
from hqsweep.nn.linears import Linear
from hqsweep.nn.norm_embedding import Norm, embedding
from hqsweep.nn.saved_memory import saved_input_bytes
from hqsweep.nn.transformer import LayerNormMoE, MoELayer, TransformerLayer, through
from hqsweep.parallel.shared.tokens import gains_summed_together, whole_features
from hqsweep.parallel.shared.vocabulary import cross_entropy, split_embedding, vocabulary_group
from hqsweep.parallel.wire.local import local, whole_tensor
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.argument import module_quantizers
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.roles import HEAD
from hqsweep.train.adapter import DTYPES, Balance, Losses, Saving

EMBEDDING_STD = 0.02


class Embedding(QuantizedWeight):
    """Tokens [...] -> rows [..., D] of a table [V, D]."""

    module_type = "embedding"

    def __init__(self, vocab_size: int, dim: int, name: str, recipe: AnyRecipe) -> None:
        super().__init__()
        self.name = name
        self.quantizers, _ = module_quantizers(recipe, self.module_type, name)
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        nn.init.normal_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        ranks = self.parallel
        if ranks is None or ranks.part is None:
            return embedding(tokens, self.quantized_weight())
        return split_embedding(tokens, self.quantized_weight(), ranks.part.group, split=ranks.split)


class Head(Linear):
    """The output projection, h [B, T, D] -> logits [B, T, V]."""

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """nn.linear_cross_entropy with this linear."""
        return linear_cross_entropy(h, self, targets)


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, T, V] in FP32. set_recipe(model, other) changes its recipe.

    recompute: what backward computes again instead of keeping it: "none", every "layer", or the core of "attention".
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        recipe: AnyRecipe,
        dtype: torch.dtype,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        recipe = recipe.for_layers(range(config.layers))
        self.embedding = Embedding(vocab_size, config.dim, "embedding", recipe)
        self.layers = nn.ModuleList(_layer(config, i, recipe, dtype) for i in range(config.layers))
        for layer in self.layers:
            layer.recompute = recompute
        self.norm = Norm(config.dim, name="norm", recipe=recipe)
        self.head = Head(config.dim, vocab_size, name=HEAD, recipe=recipe, dtype=dtype)
        self._initialise(config)

    def _initialise(self, config: ModelConfig) -> None:
        """Draw the weights. Residual projections shrink with depth (GPT-2). An untied head starts at zero, so the first
        loss is ln V."""
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        with torch.no_grad():
            for layer in self.layers:
                shared = getattr(layer.mlp, "shared", None)
                for linear in (layer.attn.proj, layer.mlp.fc2, *([shared.fc2] if shared else ())):
                    linear.weight.mul_((2 * config.layers) ** -0.5)
            self.head.weight.zero_()
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.balanced(tokens)[0]

    def balanced(self, tokens: Tensor) -> tuple[Tensor, Balance]:
        """(forward(tokens), how the experts were used)."""
        h, balance = self.hidden(tokens)
        logits, group = self.head(h), vocabulary_group(self.head)
        return (logits if group is None else whole_features(logits, group)).float(), balance

    def loss(self, tokens: Tensor, targets: Tensor, saving: Saving = nullcontext) -> tuple[Tensor, Balance]:
        """(loss, balance): the mean cross entropy of the logits with targets [B, T], float32 [], and how the experts
        were used.

        The logits are computed whole or by chunks (linear_loss.py). saving: the context of the model's forward without
        the loss, whose tensors for backward are gradients.
        """
        with saving():
            h, balance = self.hidden(tokens)
            logits = None if forms_loss(self.head, h) else self.head(h)
        if logits is None:
            return self.head.loss(h, targets), balance
        return cross_entropy(logits, targets, vocabulary_group(self.head)), balance

    def hidden(self, tokens: Tensor) -> tuple[Tensor, Balance]:
        """The head's input [B, T, D] in the head's dtype, and how the experts were used."""
        x = self.embedding(tokens)
        with gains_summed_together(self.layers):
            stream = through(self.layers, x)
        x, losses = stream.x, stream.balances
        loss = torch.stack(losses).mean() if losses else x.new_zeros(())
        h = self.norm.added(x, stream.branch, self.head.dtype)[1]
        return h, Balance(loss=loss, tokens=stream.tokens)

    def linears(self) -> Iterator[Linear]:
        """All linears except grouped ones, in order, the head last."""
        return (module for module in self.modules() if isinstance(module, Linear))

    def grouped_linears(self) -> Iterator[GroupedLinear]:
        """All grouped linears, in order."""
        return (module for module in self.modules() if isinstance(module, GroupedLinear))

    def matrices(self) -> list[Tensor]:
        """The weights of all linears and routers."""
        mixtures = [module for module in self.modules() if isinstance(module, LayerNormMoE)]
        weights = [linear.weight for linear in self.linears()] + [mixture.router.weight for mixture in mixtures]
        return weights + [weight for grouped in self.grouped_linears() for weight in grouped.weights]


class GPTAdapter:
    """The ModelAdapter of hqsweep's own GPT."""

    autocast = why_eager = compiled = None
    facts: Mapping[str, Any] = MappingProxyType({})
    taken = facts
    methods = ("loss",)

    def __init__(self, model: GPT, config: ModelConfig) -> None:
        self.model, self.load_balance, self.top_k = model, config.load_balance, config.top_k
        self.has_aux = any(isinstance(module, LayerNormMoE) for module in model.modules())

    def losses(self, inputs: Tensor, targets: Tensor, saving: Saving = nullcontext) -> Losses:
        """Return the losses. The minimized loss is the cross entropy plus load_balance times the loss of the
        balance."""
        loss, balance = self.model.loss(inputs, targets, saving)
        minimized = loss + self.load_balance * balance.loss if balance.tokens else loss
        return Losses(cross_entropy=loss, minimized=minimized, balance=balance)

    def begin(self, key: tuple[int, int, int]) -> None:
        """Do nothing: the model draws no numbers from torch's generator."""

    def evaluating(self) -> AbstractContextManager:
        """A context without effect: the model computes the same in evaluations."""
        return nullcontext()

    def decayed(self) -> list[Tensor]:
        """The matrices. Gains and embeddings do not decay."""
        table = getattr(self.model.embedding, "weight", None)  # later stages of a pipeline have none
        return [weight for weight in self.model.matrices() if weight is not table]

    def saved_inputs(self, tokens: int) -> Iterator[tuple[str, float]]:
        for linear in self.model.linears():
            yield linear.name, saved_input_bytes(linear, tokens)
        for grouped in self.model.grouped_linears():
            yield grouped.name, saved_input_bytes(grouped, tokens * self.top_k)

    def originals(self, master: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        masters = {linear.name: master(linear.weight) for linear in self.model.linears() if _is_held(linear.weight)}
        for grouped in filter(lambda grouped: _is_held(grouped.weight), self.model.grouped_linears()):
            masters |= {f"{grouped.name}.{e}": w for e, w in enumerate(whole_tensor(master(grouped.weight)))}
        return masters

    def state(self) -> dict[str, Any]:
        """{}: state_dict() has the whole state."""
        return {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the model's code is hqsweep's."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass

    def unused(self) -> list[str]:
        """[]: each module computes in every step."""
        return []


def _is_held(weight: Tensor) -> bool:
    """Whether a weight, or this rank's part of it, is held quantized."""
    return isinstance(local(weight), HybridQuantizedTensor)


def _layer(config: ModelConfig, index: int, recipe: AnyRecipe, dtype: torch.dtype) -> TransformerLayer | MoELayer:
    shared = {"name": f"layers.{index}", "recipe": recipe, "dtype": dtype}
    if not has_experts(config, index):
        options = TransformerOptions(rope_base=config.rope_base)
        return TransformerLayer(config.dim, ffn_width(config), config.heads, options=options, **shared)
    experts = {"experts": config.experts, "top_k": config.top_k, "shared_expert": config.shared_expert}
    options = MoELayerOptions(rope_base=config.rope_base, **experts)
    return MoELayer(config.dim, expert_width(config), config.heads, options=options, **shared)


def build_model(config: ConvergenceConfig, vocab_size: int, recipe: AnyRecipe) -> GPT:
    """The model, with weights that depend on the seed alone. The caller's random state is restored.

    With model.quantized_weights they start from the same values, and training gives the same bytes. A held weight is
    quantized from its master once a step, other weights from the same values at every use. Only +sr on weights draws
    other bits.
    """
    held = quantized_model_init(enabled=config.model.quantized_weights, preserve_high_precision_init_val=True)
    with torch.random.fork_rng(devices=[]), quantization(seed=config.seed), held:
        torch.manual_seed(config.seed)
        model = GPT(config.model, vocab_size, recipe, DTYPES[config.train.dtype], config.train.recompute)
        if config.model.init_noise:
            perturb(model, config.model.init_noise)
        return model


@torch.no_grad()
def perturb(model: GPT, noise: float) -> None:
    """Multiply every parameter by 1 + noise * eps, eps ~ N(0, 1) from torch's generator, drawn after the initial
    weights.

    noise = 0.01 is a harmless change of the size of quantization noise.
    """
    for parameter in model.parameters():
        parameter.mul_(1 + noise * torch.randn(parameter.shape))
