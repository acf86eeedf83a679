"""Options of the modules' constructors: what is seldom set, as one frozen value for each kind of module.

Sizes, name, recipe and dtype are arguments of every constructor, and so is bias where no more than two sizes stand
before it; `options=` takes the rest.
"""

from dataclasses import dataclass

EPSILON = 1e-5
"""The number that is added to the mean square, or the variance, of a norm."""


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Options of Linear."""

    save_original_input: bool = False
    """A hint to keep x for backward instead of its columnwise operand, for an x that somebody else keeps anyway; a
    quantizer that does not make that operand from x alone vetoes it."""
    fuse_wgrad_accumulation: bool = False
    """Add dw in FP32 to weight.main_grad, and give autograd none."""


@dataclass(frozen=True, kw_only=True)
class GroupedLinearOptions(LinearOptions):
    """Options of GroupedLinear."""

    bias: bool = False
    single_grouped_weight: bool = False
    """One parameter `weight` [E, N, K] instead of weight0, weight1, ..."""
    single_grouped_bias: bool = False
    """One parameter `bias` [E, N] instead of bias0, bias1, ..."""
    plan_capability: tuple[int, int] | None = None
    """The compute capability whose plans are followed, if not that of x's device; torch has their kernels for a CPU,
    too."""


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
    """The base of the rotary positions of queries and keys; None: no positions."""
    is_causal: bool = True
    quantize_boundaries: bool = False
    """Round what dpa and proj, and in backward dpa and qkv, quantize to their format where it is made, as
    TransformerEngine's fp8_mha does; queries and keys that are turned afterwards are left as they are."""


@dataclass(frozen=True, kw_only=True)
class MLPOptions:
    """Options of LayerNormMLP."""

    activation: str = "swiglu"
    """"swiglu" or "gelu"."""
    normalization: str = "RMSNorm"
    """"RMSNorm" or "LayerNorm"."""


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(AttentionOptions, MLPOptions):
    """Options of TransformerLayer: those of its attention and of its MLP."""

    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """Options of LayerNormMoE."""

    experts: int
    top_k: int
    """The number of experts that a token goes to."""
    shared_expert: bool = False
    """Whether a SwiGLU of all tokens is added."""


@dataclass(frozen=True, kw_only=True)
class MoELayerOptions(AttentionOptions, MoEOptions):
    """Options of MoELayer: those of its attention and of its mixture."""
