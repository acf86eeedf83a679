"""What modules ask of ranks: hqsweep.nn knows these protocols, and hqsweep.parallel has the classes.

A module has an attribute `parallel`, which hqsweep.parallel sets. None, the default, means that this rank has all of
the module.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hqsweep.ops.quantize.request import Output
from hqsweep.ops.stats import Sums
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.operand import HybridOperand, Operand

Codes = MutableMapping[str, Operand]
"""Tensor of a linear -> its rowwise operand, where its rows have come as codes; whoever reads it takes it out."""


class Part(Protocol):
    """Where the part of a rank lies in a matrix [rows, cols] that ranks share."""

    axis: int
    """The axis of the matrix that is cut."""
    runs: int
    """The number of pieces, each with a place of its own in the matrix, that the part consists of."""

    def quantize(
        self,
        quantizer: Any,
        x: Tensor,
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
        key: Any = None,
        states: SlotStates | None = None,
    ) -> HybridOperand:
        """quantizer.quantize() of the part x, with the bytes that it has in the matrix. A collective for an amax.

        quantizer: a HybridQuantizer, here and below.
        """

    def sums(self, quantizer: Any, x: Tensor, key: Any = None, states: SlotStates | None = None) -> Mapping[str, Sums]:
        """quantizer.sums() of the part x, quantized as quantize() does."""


class GradientReader(Protocol):
    """Whoever takes the gradient of a branch as soon as the norm that reads the branch knows it."""

    def prepare(self) -> None:
        """Do what needs no gradient, before other ranks are waited for."""

    def place(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Where to write the gradient, of the shape of `like` and of a dtype; None: anywhere."""

    def tell(self, gradient: Tensor) -> None:
        """Take the gradient."""


class Summands(Protocol):
    """A branch [..., D] that is a sum over ranks, which the next norm adds up as it reads it."""

    own: Tensor
    """This rank's summand."""
    rank: int
    writer: GradientReader | None

    def received(self) -> Tensor:
        """[W - 1, ..., D]: the summands of the other ranks."""

    def total(self) -> Tensor:
        """The sum."""


class DeferredGradient(Protocol):
    """The gradient of a norm's output, where the linear that alone reads the output may leave a sum to the norm."""

    is_taken: bool
    """Whether the norm's backward takes what the linear leaves. The norm sets it."""

    def take(self, dh: Tensor | None) -> tuple[Tensor, int] | tuple[()]:
        """The summands of the other ranks, and the number of this rank; nothing for a gradient that is whole."""

    def sending(self, x: Tensor, dtype: torch.dtype) -> AbstractContextManager[Sequence[Tensor]]:
        """Memory of other ranks, of the shape of x and a dtype, into which the norm writes its output, too."""


class LinearRanks(Protocol):
    """How the ranks of a group share a linear, and compute with it."""

    mode: str
    """"column": a rank has output features; "row": a rank has input features."""
    sequence: int | None
    """The axis of x, or of y, along which tokens lie split over ranks; None: every rank has all tokens."""

    def product(self, linear: nn.Module, x: Tensor, known: Any) -> Tensor:
        """y of x [..., K], which begins a call. known: a KnownInput."""

    def branch(self, linear: nn.Module, x: Tensor) -> Tensor | Summands:
        """product() for a norm that reads y next."""

    def normed(self, linear: nn.Module, x: Tensor, branch: Any) -> tuple[Tensor, Tensor, Any]:
        """LayerNormLinear.normed() of this rank's tokens."""

    def joins(self, fc1: nn.Module, fc2: nn.Module, kind: str, x: Tensor) -> bool:
        """Whether mlp() takes x: a rank's part of the activation between the linears is quantized alone."""

    def mlp(self, fc1: nn.Module, x: Tensor, fc2: nn.Module, kind: str, known: Any) -> Tensor | Summands:
        """fc2(activation(fc1(x))) as one autograd function."""

    def attend(self, proj: nn.Module, qkv: Tensor, heads: int, base: float | None, causal: bool) -> Any:
        """proj(attention of qkv), where the attention is computed by the rows of each rank; None where it is not."""

    def cross_entropy(self, head: nn.Module, h: Tensor, targets: Tensor, chunk: int | None) -> Tensor:
        """linear_cross_entropy() of h [..., K] with targets."""

    def layer_call(self, layer: nn.Module, shape: Sequence[int]) -> AbstractContextManager:
        """A context for a call of a transformer layer with x [*shape, D], whose first linear this is."""


class ExpertRanks(Protocol):
    """How ranks share a grouped linear: the features of each expert, or the experts."""

    def own(self, grouped: nn.Module) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """This rank's parts of the weights and of the biases, as products take them."""

    def product(self, grouped: nn.Module, x: Tensor, splits: Any, parameters: Any, codes: Codes | None) -> Tensor:
        """y of the rows x [M, K]. codes: of x and of the gradient of y, where rows come as codes."""


class MixtureRanks(Protocol):
    """How ranks share the experts of a mixture."""

    def mixed(self, mixture: nn.Module, routing: Any, h: Tensor) -> Tensor:
        """The sums over the experts of rows h [M, D], each rank's tokens at their experts."""


class SplitTokens(Protocol):
    """How tokens lie split over ranks that each compute what follows with every token."""

    def whole(self, x: Tensor) -> Tensor:
        """x of the tokens of all ranks."""

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of an x that all ranks have alike."""


class WeightRanks(Protocol):
    """How ranks share the parameters of a module whose weight is no GEMM operand."""

    part: Part | None
    """This rank's part of the weight; None: each rank has all of it."""

    def own(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, as forward reads it."""


class AttentionRanks(Protocol):
    """How ranks share attention."""

    tokens: object | None
    """The ranks that have some of the tokens each; None: each rank has all tokens of its heads."""

    def call(self, facts: Mapping[str, Any], batch: int) -> Any:
        """The AttentionCall, with these fields, of this rank's heads of so many sequences."""

    def whole_sequences(self, qkv: Tensor) -> Tensor:
        """qkv [B, t, C] of each of W ranks -> [B, W * t, C]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        """Attention from this rank's tokens of q, k, v [B, H, T, E] to all."""
