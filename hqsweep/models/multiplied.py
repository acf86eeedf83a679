"""How much of a model's multiplication a module does, and why convert() leaves a module that does some."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from hqsweep.models.kinds import Kind
from hqsweep.nn.core.module import QuantizedModule
from hqsweep.torch_private import ConvNd, NormBase

OF_A_WEIGHT = (nn.Linear, nn.Bilinear, ConvNd)
"""Classes whose one product is by `weight`."""
OF_MATRICES = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
"""Classes that multiply by each of their own matrices."""
NO_PRODUCT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU, NormBase,
              ParametrizationList)  # fmt: skip
"""Classes whose own parameters are looked up, or scale element by element; of a parametrization, the module counts."""
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
"""The keys by which configs say how many experts a token takes."""


def multiply_adds(module: nn.Module, chosen: int = 1) -> int:
    """The multiply-adds of a module by its own weights, without its children's, for one row of its input.

    It is the number of elements of these weights: of a linear or nn.Bilinear those of the weight; of a convolution
    too, a row being an output position (of a transposed one, an input position); of nn.LSTM, nn.GRU, nn.RNN, their
    cells, and nn.MultiheadAttention those of all their matrices. Of stacked weights [E, N, K] it is chosen N K: a row
    takes `chosen` of the E experts. Of a module of another class every parameter with two or more axes longer than 1
    counts, as nobody knows which are multiplied. Embeddings and norms count 0.
    """
    if isinstance(module, NO_PRODUCT):
        return 0
    if isinstance(module, OF_A_WEIGHT):
        weight = module.weight
        return 0 if nn.parameter.is_lazy(weight) else weight.numel()
    own = [p for p in module.parameters(recurse=False) if not nn.parameter.is_lazy(p) and p.is_floating_point()]
    if isinstance(module, OF_MATRICES):
        return sum(parameter.numel() for parameter in own if parameter.dim() > 1)
    return sum(stack_multiply_adds(parameter, chosen) for parameter in own if _is_matrix(parameter))


def stack_multiply_adds(weight: Tensor, chosen: int) -> int:
    """Those of a matrix, or of `chosen` of the matrices of a stack [E, N, K]."""
    return weight.numel() // len(weight) * min(chosen, len(weight)) if weight.dim() == 3 else weight.numel()


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def experts_per_row(model: nn.Module) -> int:
    """How many experts a token takes, as the config of the model says; 1 where it says nothing."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    found = (getattr(config, key, None) for key in CHOSEN)
    return next((count for count in found if isinstance(count, int) and count > 0), 1)


def why_left(module: nn.Module, others: Sequence[Kind]) -> str | None:
    """Why a module of none of the kinds that are looked for stays as it is; None for one that multiplies by no weight.
    others: the kinds that convert() was told to leave."""
    if not multiply_adds(module):
        return None
    if isinstance(module, QuantizedModule):
        return "it computes by a recipe of its own, which set_recipe changes"
    if option := next((kind.option for kind in others if kind.matches(module)), None):
        return f"{option}=False leaves it"
    if isinstance(module, (*OF_A_WEIGHT, *OF_MATRICES)):
        return f"convert has no products of {_class_of(module)}"
    own = [(name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False) if _is_matrix(p)]
    named = " and ".join(f"{name} {shape}" for name, shape in own)
    return f"what {_class_of(module)} computes of parameters of its own is not known: {named}"


def _class_of(module: nn.Module) -> str:
    kind = type(module)
    return f"nn.{kind.__name__}" if getattr(torch.nn, kind.__name__, None) is kind else kind.__name__
