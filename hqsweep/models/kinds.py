"""Kinds of modules that convert() takes, models that it refuses, and modules that it leaves.

A converted module has QuantizedModules for its products (PARTS), outside of its tree of modules and its state_dict: the
part of a linear is one, mlp.experts has two. Parts hold quantizers, states of delayed scaling and cached operands, and
no parameter; parameters stay in the module. The code that computes a part's product calls conversion.note_call(part),
and passes its result through conversion.watched(part, y).

convert() swaps the class of a module, so that its state_dict, parameters, ties, hooks, copies and isinstance are
unchanged. A parameter of another class would break ties and be replaced by load_state_dict(assign=True). A `forward` in
the instance would, in a copy of the module, go on computing with the original.

A model is refused where a swap would be without effect, or wrong, and would pass unnoticed.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization

from hqsweep.errors import UserError
from hqsweep.nn.core.module import PARTS, QuantizedModule
from hqsweep.parallel.wire.local import is_spread
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.products import GemmModule
from hqsweep.recipe.roles import clean_name
from hqsweep.torch_private import ConvNd, NormBase


class Kind:
    """One kind of module. A subclass has no state, and implements all methods that raise NotImplementedError here."""

    name: str
    """The kind's name in Conversion.modules."""
    option: str | None = None
    """The argument of convert() that decides whether modules of this kind are taken; None: they always are."""

    def matches(self, module: nn.Module) -> bool:
        """Whether the module is of this kind, converted or not."""
        raise NotImplementedError

    def wanted(self, recipe: AnyRecipe) -> bool:
        """Whether modules of this kind are taken if the option is None."""
        return True

    def fault(self, module: nn.Module) -> str | None:
        """Return why this module of the kind cannot be taken; None if it can."""
        return None

    def check(self, module: nn.Module, name: str) -> None:
        """UserError for a module that the recipe applies to, and that must not be skipped without a word."""

    def gemm_modules(self, module: nn.Module, name: str) -> Sequence[GemmModule]:
        """The module's products, with names and shapes: one for each part."""
        raise NotImplementedError

    def parts(self, module: nn.Module, name: str, recipe: AnyRecipe) -> Sequence[QuantizedModule]:
        """The module's parts by a recipe that counts no layers, in the order of gemm_modules. It reads no values of
        parameters."""
        raise NotImplementedError

    def held_fault(self, module: nn.Module, part: QuantizedModule) -> str | None:
        """Why the weight of a part, its `weight_name`, stays plain where weights are held quantized; None: it need
        not."""
        return None

    def swap(self, module: nn.Module) -> None:
        """Have the module compute by its parts, which it has by now. It must not fail."""
        raise NotImplementedError

    def restore(self, module: nn.Module) -> None:
        """Undo swap. It must not fail after check_restore."""
        raise NotImplementedError

    def check_restore(self, module: nn.Module) -> None:
        """UserError where restore cannot be done."""

    def swapped(self, model: nn.Module) -> None:
        """This is called after the swaps of a model that has modules of this kind."""

    def restored(self, model: nn.Module) -> None:
        """This is called after the restores of a model that had modules of this kind."""


def parts_of(module: nn.Module) -> tuple[QuantizedModule, ...]:
    """The parts of a converted module; () for any other."""
    return module.__dict__.get(PARTS, ())


PLAIN = "_hqsweep_plain"
"""The attribute of a swapped class itself: the class that computes by parts, and the class that both replace."""
FORWARD = "_old_forward"
"""The attribute of a module in which accelerate keeps its forward; another forward in the instance calls it."""


def swapped_class(converted: type, plain: type) -> type[nn.Module]:
    """The class of `converted` on top of `plain`; `converted` itself where it is made for `plain`. torch.compile guards
    classes, so there is one for each pair.

    torch's parametrizations give every module a class of its own. That class stays on top: torch adds and removes its
    properties, and takes its first base for the class without them.
    """
    if not _is_parametrized(plain):
        return _swapped_class(converted, plain)
    own = {name: value for name, value in plain.__dict__.items() if name not in ("__dict__", "__weakref__")}
    return type(plain.__name__, (swapped_class(converted, plain.__bases__[0]),), {**own, PLAIN: (converted, plain)})


def _is_parametrized(plain: type) -> bool:
    """Whether torch.nn.utils.parametrize made the class, for one module."""
    return getattr(plain.__dict__.get("__getstate__"), "__module__", None) == register_parametrization.__module__


@cache
def _swapped_class(converted: type, plain: type) -> type[nn.Module]:
    if plain_class(converted) is plain:
        return converted
    contents = {"__reduce__": _reduce, "__module__": converted.__module__, PLAIN: (converted, plain)}
    return type(f"{converted.__name__}[{plain.__name__}]", (converted, plain), contents)


def plain_class(swapped: type) -> type | None:
    """The class whose place this one takes; None for any other class, also for one that was derived from a swapped
    one."""
    pair = swapped.__dict__.get(PLAIN)
    return pair and pair[1]


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    return _rebuilt, getattr(type(module), PLAIN), module.__getstate__()


def _rebuilt(converted: type, plain: type) -> nn.Module:
    swapped = swapped_class(converted, plain)
    return swapped.__new__(swapped)


class SwapKind(Kind):
    """A kind whose modules have their class swapped. A subclass sets `converted`."""

    converted: type
    """The class whose forward computes by parts."""

    def swap(self, module: nn.Module) -> None:
        _give_class(module, swapped_class(self.converted, type(module)))

    def restore(self, module: nn.Module) -> None:
        own = plain_class(type(module))
        if _is_parametrized(own):
            _take_properties(own, type(module))
        _give_class(module, own)

    def check_restore(self, module: nn.Module) -> None:
        if plain_class(type(module)) is None:
            raise UserError(
                f"{parts_of(module)[0].name}: {type(module).__name__} was made of the converted class afterwards, as"
                " parametrizations and FSDP do; undo that before revert"
            )


def _take_properties(own: type, swapped: type) -> None:
    """Parametrizations may have been added and removed while the class was swapped."""
    before, now = ({name: v for name, v in cls.__dict__.items() if isinstance(v, property)} for cls in (own, swapped))
    for name in before.keys() - now.keys():
        delattr(own, name)
    for name in now.keys() - before.keys():
        setattr(own, name, now[name])


def _give_class(module: nn.Module, own: type[nn.Module]) -> None:
    module.__class__ = own
    if FORWARD in module.__dict__:  # accelerate calls the forward that it found
        module.__dict__[FORWARD] = own.forward.__get__(module)


ORDER = "convert first, then torch.compile for each block, then fully_shard or FSDP"


def check_model(model: nn.Module) -> None:
    """UserError for a model that is not an nn.Module, is sharded, or is quantized by another library."""
    if not isinstance(model, nn.Module):
        raise UserError(f"convert: the model is a {type(model).__name__}; it takes an nn.Module")
    fault = next(_faults(model), None)
    if fault:
        raise UserError(f"convert: {fault}")


def _faults(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        at = clean_name(name) or type(model).__name__
        if getattr(module, "is_quantized", False) is True or getattr(module, "hf_quantizer", None) is not None:
            yield f"{at} is quantized by another library ({_quantizer(module)}); load it without quantization_config"
        if is_sharded(module):
            yield f"{at} is sharded by FSDP, whose forward takes other parameters; {ORDER}"
        for parameter_name, parameter in module.named_parameters(recurse=False):
            whose = f"{at}.{parameter_name}"
            if hasattr(parameter, "ds_id"):
                yield f"{whose} is sharded by DeepSpeed's ZeRO-3, which is not supported; use stage 2, DDP or FSDP"
            if is_spread(parameter):
                yield f"{whose} is a DTensor; tensor parallelism is not supported, and for FSDP {ORDER}"


def _quantizer(module: nn.Module) -> str:
    method = getattr(getattr(module, "config", None), "quantization_config", None)
    return str(getattr(method, "quant_method", None) or type(getattr(module, "hf_quantizer", module)).__name__)


def is_sharded(module: nn.Module) -> bool:
    """Asked without importing torch.distributed.fsdp, which who shards a model has imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def instance_fault(module: nn.Module) -> str | None:
    """Why the class of a module cannot be swapped: the instance has a `forward`, which would hide the new class's."""
    if "forward" in module.__dict__ and "_old_forward" not in module.__dict__:
        return "its forward was replaced in the instance, which would pass by the recipe"
    return None


def bypassed(model: nn.Module) -> dict[nn.Module, str]:
    """Return modules whose weights another module reads in evaluation without a call, with a remedy for each."""
    if not torch.backends.mha.get_fastpath_enabled():
        return {}
    why = (
        "nn.TransformerEncoderLayer reads its weight in evaluation and does not call it; with"
        " torch.backends.mha.set_fastpath_enabled(False) before, it is taken"
    )
    layers = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return {linear: why for layer in layers for linear in (layer.linear1, layer.linear2)}


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
    """The multiply-adds of a module by its own weights, without its children, for one row of its input.

    It is the number of elements of these weights: all matrices of nn.LSTM, nn.GRU, nn.RNN, their cells, and
    nn.MultiheadAttention; the weight of a linear, nn.Bilinear or convolution. A row of a convolution is an output
    position (an input position if it is transposed). Stacked weights [E, N, K] count chosen N K: a row takes `chosen`
    of the E experts. In any other class every parameter with two or more axes longer than 1 counts, because the
    products are unknown. Embeddings and norms count 0.
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
    """The multiply-adds of a matrix, or of `chosen` matrices in a stack [E, N, K]."""
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
    """Return why a module stays unconverted though no wanted kind matches; None if it multiplies by no weight.

    others: the kinds that options of convert() exclude.
    """
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
