"""The modules with products that follow from the section `model`, without building one."""

from hqsweep.config.model import ModelConfig, expert_width, ffn_width, has_experts
from hqsweep.recipe.roles import HEAD
from hqsweep.recipe.validate import GemmModule, attention_module, grouped_linear_module, linear_module

Shape = tuple[str, int, int]
"""Name, in_features and out_features of a linear."""


def linear_shapes(config: ModelConfig, vocab_size: int) -> list[Shape]:
    """Every linear of the GPT but grouped ones, in order, without building it."""
    dim, shapes = config.dim, []
    for i in range(config.layers):
        shapes += [(f"layers.{i}.attn.qkv", dim, 3 * dim), (f"layers.{i}.attn.proj", dim, dim)]
        if not has_experts(config, i):
            shapes += _mlp_shapes(f"layers.{i}.mlp", dim, ffn_width(config))
        elif config.shared_expert:
            shapes += _mlp_shapes(f"layers.{i}.mlp.shared", dim, expert_width(config))
    return [*shapes, (HEAD, dim, vocab_size)]


def grouped_shapes(config: ModelConfig) -> list[Shape]:
    """Every grouped linear of the GPT, with the features of each expert, in order."""
    layers, width = (i for i in range(config.layers) if has_experts(config, i)), expert_width(config)
    return [shape for i in layers for shape in _mlp_shapes(f"layers.{i}.mlp", config.dim, width)]


def _mlp_shapes(name: str, dim: int, hidden: int) -> list[Shape]:
    return [(f"{name}.fc1", dim, 2 * hidden), (f"{name}.fc2", hidden, dim)]


def gemm_modules(config: ModelConfig, vocab_size: int, batch: int, context: int) -> list[GemmModule]:
    """Every module of the GPT with matrix products, for a step of batch x context tokens, without building it."""
    linears = [linear_module(*shape, batch * context) for shape in linear_shapes(config, vocab_size)]
    linears += [grouped_linear_module(*shape) for shape in grouped_shapes(config)]
    head_dim = config.dim // config.heads
    return linears + [attention_module(f"layers.{i}.attn.dpa", head_dim, context) for i in range(config.layers)]
