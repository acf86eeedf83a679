"""Attention of Hugging Face's models by recipe.dpa, through its AttentionInterface.

A module's forward calls the attention function that config._attn_implementation names. This name is replaced by the
name of a function here. It runs hqsweep's attention for converted modules. For other modules, and in high precision, it
calls the earlier function. Each earlier function has a new name here, under which its masks are made: an unknown name
would have none at all.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.conversion import note_call, watched
from hqsweep.models.kinds import Kind, parts_of
from hqsweep.nn.core.guards import outside_autocast
from hqsweep.nn.dot_product_attention import AttentionCall, DotProductAttention, quantized_attention
from hqsweep.nn.sdpa import attend, way_back
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.products import GemmModule, attention_module

PREFIX = "hqsweep_"
"""The beginning of a name, before the name of the implementation that it leaves in place: hqsweep_sdpa,
hqsweep_eager."""
TAKEN = ("sdpa", "eager")
"""The implementations whose masks are per position."""
REFUSED = {
    "softcap": "soft-caps its scores",
    "position_bias": "adds a bias to its scores",
    "cache": "reads a paged cache",
}
"""Arguments that change attention and that hqsweep's attention lacks -> their effect."""
LEAVE = "change the model's config, or leave attention in high precision (attention=False, or recipe.dpa=bf16)"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The changes of the scores before the softmax."""

    mask: Tensor | None
    """[B or 1, 1 or H, T, T]: bool, True where a position is attended to, or floats that are added."""
    is_causal: bool
    """Whether, without a mask, a position attends to none after it."""
    scale: float | None
    sinks: Tensor | None
    """[H]: a logit of each head that takes part in the softmax and has no value."""


class AttentionPart(DotProductAttention):
    """The attention of one module, by recipe.dpa."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register()  # in a process that has a converted model from elsewhere

    @outside_autocast
    def product(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, dtype: torch.dtype) -> Tensor:
        """Return attention [B, H, T, F] in dtype, of q [B, H, T, E], k [B, G, T, E] and v [B, G, T, F].

        Heads of one of the G groups read the same k and v. A narrower v, or q and k, is padded with zeros, which change
        no product. UserError for another number of keys than queries, and for a T that blocks do not divide.
        """
        if q.shape[-2] != k.shape[-2]:
            raise UserError(
                f"{self.name} dpa: {q.shape[-2]} queries and {k.shape[-2]} keys, as with a cache of keys, where"
                " attention takes as many of both; pass use_cache=False, or revert the model to generate"
            )
        scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        groups, values = q.shape[1] // k.shape[1], v.shape[-1]
        width = max(q.shape[-1], values)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        mask = None if scores.mask is None else scores.mask.expand(len(q), -1, -1, -1)
        call = AttentionCall(**(self.call_facts() | {"dtype": dtype}), causal=scores.is_causal, scale=scale)
        return quantized_attention(q, k, v, call, mask=mask, sinks=scores.sinks)[..., :values]


class Interface:
    """The function of one name: attention by the part of the module. The implementation in place computes it where the
    module has no part, or all slots of the part are in one high precision."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """q [B, H, T, E], k [B, G, T, E], v [B, G, T, F] -> [B, T, H, F], and the softmax or None."""
        parts = parts_of(module)
        if not parts:
            return self._high_precision(module, q, k, v, attention_mask, **options)
        part = parts[0]
        note_call(part)
        device = q.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
        identity = part.identity()
        if identity is None:
            o = part.product(q, k, v, self._scores(part.name, module, attention_mask, options), dtype)
            return watched(part, o.transpose(1, 2).contiguous()), None
        if identity.dtype is dtype:
            return self._high_precision(module, q, k, v, attention_mask, **options)
        masked = attention_mask is not None and attention_mask.is_floating_point()
        mask = attention_mask.to(identity.dtype) if masked else attention_mask
        with torch.autocast(device, enabled=False):
            rounded = (x.to(identity.dtype) for x in (q, k, v))
            o, s = self._plain(module)(module, *rounded, mask, **options)
        return o.to(dtype), s

    def _high_precision(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention by nn.sdpa's kernels for runs, where it is causal and nothing else; otherwise by the
        earlier function."""
        if self._is_causal_alone(module, q, k, mask, options):
            device, groups = q.device.type, q.shape[1] // k.shape[1]
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
            rows = [x.to(dtype) for x in (q, k, v)]  # as autocast has torch's own attention compute
            rows[1:] = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in rows[1:])
            if way_back(*rows, True) is not None:
                return attend(*rows, is_causal=True).transpose(1, 2).contiguous(), None
        return self._plain(module)(module, q, k, v, mask, **options)

    def _is_causal_alone(
        self, module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> bool:
        """Whether a call is softmax(q k^T / sqrt(E)) v, causal, and torch uses deterministic algorithms."""
        if mask is not None or self.implementation != "sdpa" or not torch.are_deterministic_algorithms_enabled():
            return False
        others = options.get("dropout") or any(options.get(name) is not None for name in (*REFUSED, "s_aux"))
        scale, causal = options.get("scaling"), options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        is_usual = scale is None or math.isclose(scale, q.shape[-1] ** -0.5, rel_tol=1e-6)
        return causal and is_usual and not others and q.shape[-2] == k.shape[-2]

    def _plain(self, module: nn.Module) -> Callable[..., Any]:
        """Return the earlier function; for eager, the function in the file of the module's class."""
        if self.implementation == "eager":
            return _forward_of(module).__globals__["eager_attention_forward"]
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS[self.implementation]

    def _scores(self, name: str, module: nn.Module, mask: Tensor | None, options: dict[str, Any]) -> Scores:
        """Return the scores of a call. UserError, with the module's name, for settings that attention by a recipe
        lacks."""
        asked = [text for argument, text in REFUSED.items() if options.get(argument) is not None]
        asked += [_drops(options["dropout"])] if options.get("dropout") else []
        if asked:
            raise UserError(f"{name} dpa: it {' and '.join(asked)}; {LEAVE}")
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        is_causal = mask is None and self.implementation == "sdpa" and causal
        return Scores(mask=mask, is_causal=is_causal, scale=options.get("scaling"), sinks=options.get("s_aux"))


class AttentionKind(Kind):
    """Modules whose forward asks transformers' AttentionInterface for the function that computes attention."""

    name = "attention"
    option = "attention"

    def matches(self, module: nn.Module) -> bool:
        code = getattr(_forward_of(module), "__code__", None)
        return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names

    def wanted(self, recipe: AnyRecipe) -> bool:
        """Whether the recipe quantizes attention, from the first step or later."""
        return any(map(_quantizes, [recipe, *(change.recipe for change in recipe.schedule)]))

    def check(self, module: nn.Module, name: str) -> None:
        """UserError for a module whose attention is of another kind."""
        faults = list(_faults(module))
        if faults:
            raise UserError(f"convert: attention of {name} {' and '.join(faults)}; {LEAVE}")

    def gemm_modules(self, module: nn.Module, name: str) -> list[GemmModule]:
        return [attention_module(name, _width(module), 0)]

    def parts(self, module: nn.Module, name: str, recipe: AnyRecipe) -> list[AttentionPart]:
        return [AttentionPart(name=name, recipe=recipe)]

    def swap(self, module: nn.Module) -> None:
        """Nothing: `swapped` changes the name that all modules ask for."""

    def restore(self, module: nn.Module) -> None:
        """Nothing, as in swap."""

    def swapped(self, model: nn.Module) -> None:
        register()
        for config in self._configs(model):
            if not config._attn_implementation.startswith(PREFIX):
                config._attn_implementation = PREFIX + config._attn_implementation

    def restored(self, model: nn.Module) -> None:
        for config in self._configs(model):
            config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)

    def _configs(self, model: nn.Module) -> Iterator[Any]:
        """The configs that attention modules ask for the name, each once."""
        modules = (module for module in model.modules() if self.matches(module))
        return iter({id(module.config): module.config for module in modules}.values())


def take_fast_kernels(model: nn.Module) -> None:
    """Have attention that is causal, in high precision and on a GPU take the kernels of nn.sdpa, whose bits
    repeat. In place; no other attention changes."""
    kind = AttentionKind()
    modules = [module for module in model.modules() if kind.matches(module)]
    if modules and all(getattr(module.config, "_attn_implementation", None) in TAKEN for module in modules):
        kind.swapped(model)


def register() -> None:
    """Give transformers the functions and masks of all names."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    for implementation in TAKEN:
        AttentionInterface.register(PREFIX + implementation, Interface(implementation))
        AttentionMaskInterface.register(PREFIX + implementation, ALL_MASK_ATTENTION_FUNCTIONS[implementation])


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward of the module's class, without decorators."""
    return inspect.unwrap(type(module).forward)


def _width(module: nn.Module) -> int:
    """The features of a head; 0 where the module does not say."""
    widths = [getattr(module, name, None) or 0 for name in ("qk_head_dim", "v_head_dim")]
    return max(widths) or getattr(module, "head_dim", None) or 0


def _faults(module: nn.Module) -> Iterator[str]:
    """The properties of the module's attention that ours does not have."""
    config = getattr(module, "config", None)
    implementation = getattr(config, "_attn_implementation", None) or "none"
    if implementation.removeprefix(PREFIX) not in TAKEN:
        yield f"is computed by {implementation}, where attn_implementation takes {' or '.join(TAKEN)}"
    if getattr(module, "is_cross_attention", False):
        yield "attends to another sequence"
    if getattr(module, "reorder_and_upcast_attn", False):
        yield "computes its scores in float32 (reorder_and_upcast_attn)"
    if getattr(module, "attn_logit_softcapping", None):
        yield REFUSED["softcap"]
    dropout = getattr(getattr(module, "attn_dropout", None), "p", None) or getattr(module, "attention_dropout", None)
    if dropout:
        yield _drops(dropout)


def _drops(probability: float) -> str:
    return f"drops out {probability} of its softmax (attention_dropout, attn_pdrop)"


def _quantizes(recipe: AnyRecipe) -> bool:
    if isinstance(recipe, CustomRecipe):
        return recipe.fp8_dpa
    overrides = [override.dpa for override in recipe.overrides if override.dpa is not None]
    return any(section.identity is None for section in (recipe.dpa, *overrides))
