"""Rarely used constructor options, one frozen class per kind of module.

Sizes, name, recipe and dtype are arguments of every constructor. bias is one too, if at most two sizes come before it.
`options=` takes the rest.
"""

from dataclasses import dataclass

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
