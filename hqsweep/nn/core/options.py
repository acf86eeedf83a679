"""Constructor options of modules, and quantized_model_init, under which they hold their weights quantized.

Rarely used options are one frozen class per kind of module, for `options=`. Sizes, name, recipe and dtype are arguments
of every constructor. bias is one too, if at most two sizes come before it.

Modules that are built inside quantized_model_init hold their GEMM weights as quantized operands.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.core.context import as_recipe, current
from hqsweep.nn.core.delayed import DelayedStates, ExpertStates
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import Section

EPSILON = 1e-5
"""Added to the mean square, or variance, of a norm."""


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Options of Linear."""

    save_original_input: bool = False
    """A hint to save x for backward instead of its columnwise operand, for an x that is kept elsewhere anyway.

    It is ignored for quantizers that do not compute that operand from x alone.
    """
    fuse_wgrad_accumulation: bool = False
    """Add dw in FP32 to weight.main_grad, and give autograd no gradient."""


@dataclass(frozen=True, kw_only=True)
class GroupedLinearOptions(LinearOptions):
    """Options of GroupedLinear."""

    bias: bool = False
    single_grouped_weight: bool = False
    """One parameter `weight` [E, N, K] instead of weight0, weight1, ..."""
    single_grouped_bias: bool = False
    """One parameter `bias` [E, N] instead of bias0, bias1, ..."""
    plan_capability: tuple[int, int] | None = None
    """The compute capability whose plans are used; None: of x's device. torch has their kernels for CPUs, too."""


@dataclass(frozen=True, kw_only=True)
class LayerNormLinearOptions(LinearOptions):
    """Options of LayerNormLinear."""

    normalization: str = "RMSNorm"
    """"RMSNorm" or "LayerNorm"."""
    epsilon: float = EPSILON


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of MultiheadAttention."""

    normalization: str = "RMSNorm"
    """"RMSNorm" or "LayerNorm"."""
    rope_base: float | None = None
    """The base of rotary positions; None: no positions."""
    is_causal: bool = True
    quantize_boundaries: bool = False
    """Round tensors to their reader's format at the source, as TransformerEngine's fp8_mha does.

    This covers inputs of dpa and proj, and in backward of dpa and qkv. Queries and keys that are rotated afterwards are
    not rounded.
    """


@dataclass(frozen=True, kw_only=True)
class MLPOptions:
    """Options of LayerNormMLP."""

    activation: str = "swiglu"
    """"swiglu" or "gelu"."""
    normalization: str = "RMSNorm"
    """"RMSNorm" or "LayerNorm"."""


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(AttentionOptions, MLPOptions):
    """Options of TransformerLayer: of its attention and its MLP."""

    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """Options of LayerNormMoE."""

    experts: int
    top_k: int
    """Experts per token."""
    shared_expert: bool = False
    """Whether to add a SwiGLU over all tokens."""


@dataclass(frozen=True, kw_only=True)
class MoELayerOptions(AttentionOptions, MoEOptions):
    """Options of MoELayer: of its attention and its mixture."""


@dataclass(frozen=True)
class _Init:
    recipe: AnyRecipe | None
    preserve: bool
    change: Callable[[HybridQuantizer], HybridQuantizer] = lambda quantizer: quantizer
    """A function from the quantizer of a weight to the quantizer in which it is held."""


_INIT: ContextVar[_Init | None] = ContextVar("hqsweep_quantized_model_init", default=None)


@contextmanager
def quantized_model_init(
    *,
    enabled: bool = True,
    recipe: AnyRecipe | Section | HybridQuantizer | str | Mapping[str, Any] | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Build modules inside with quantized GEMM weights: HybridQuantizedTensor, in both directions of their recipe.

    recipe: as autocast takes it. It gives the quantizers of the held weights by their roles; by default each module's
    own recipe does. Modules of hqsweep.compat have no recipe, so they need one here, and the same one in autocast.
    Biases, gains and embeddings stay unquantized. It works under no_grad and on the meta device, where Module.to_empty
    and reset_parameters follow.
    preserve_high_precision_init_val: keep initial values on the CPU, from which an optimizer starts its masters.
    Random bits of +sr are keyed by the surrounding quantization(). UserError for a recipe that does not parse.
    """
    whole = None if recipe is None else as_recipe(recipe, "quantized_model_init")
    token = _INIT.set(_Init(whole, preserve_high_precision_init_val) if enabled else None)
    try:
        yield
    finally:
        _INIT.reset(token)


@contextmanager
def held_in(change: Callable[[HybridQuantizer], HybridQuantizer]) -> Iterator[None]:
    """Hold weights that are built inside, under quantized_model_init, in the quantizer change(quantizer)."""
    init = _INIT.get()
    token = _INIT.set(init and replace(init, change=change))
    try:
        yield
    finally:
        _INIT.reset(token)


def holds_weights() -> bool:
    """Return whether GEMM weights made now are held quantized: inside quantized_model_init."""
    return _INIT.get() is not None


def gemm_weight(
    weight: Tensor,
    quantizer: HybridQuantizer,
    role: QuantizerRole,
    dtype: torch.dtype,
    states: DelayedStates | ExpertStates,
    kind: type[HybridQuantizedTensor] = HybridQuantizedTensor,
) -> nn.Parameter:
    """Return the parameter of a module: `weight` itself, or inside quantized_model_init its quantized form.

    dtype: the dtype of the module's tensors; weights are rounded to it before they are quantized. states: the module's
    states; for weights [E, N, K] of experts in one parameter, a list of the experts' states. kind: the class of the
    quantized form, GroupedTensor for [E, N, K].
    """
    init = _INIT.get()
    if init is None:
        return nn.Parameter(weight)
    quantizer = init.change(quantizer if init.recipe is None else init.recipe.quantizer(role))
    options = {"source_dtype": dtype, "key": current().key(str(role))}
    options["states"] = states.of("weight", quantizer, device=weight.device)
    options["preserve_high_precision_init_val"] = init.preserve
    held = kind.quantize(weight.detach(), quantizer, **options)
    held.shared.layer = role.name if role.expert is None else f"{role.name}.{role.expert}"
    return nn.Parameter(held)
