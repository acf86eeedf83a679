"""The protocols by which modules of hqsweep.nn use ranks; hqsweep.parallel has the classes.

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
"""Tensor of a linear -> its rowwise operand, if its rows have arrived as codes. The reader removes it."""


class Part(Protocol):
    """The place of a rank's part in a matrix [rows, cols] that ranks share."""

    axis: int
    """The axis of the matrix that is cut."""
    runs: int
    """The number of pieces of the part, each with a separate place in the matrix."""

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
    """Receives the gradient of a branch as soon as the norm that reads the branch has it."""

    def prepare(self) -> None:
        """Do work that needs no gradient, before the wait for other ranks."""

    def place(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return where to write the gradient, with the shape of `like` and a dtype; None: anywhere."""

    def tell(self, gradient: Tensor) -> None:
        """Take the gradient."""


class Summands(Protocol):
    """A branch [..., D] that is a sum over ranks. The next norm adds it up as it reads it."""

    own: Tensor
    """This rank's summand."""
    rank: int
    writer: GradientReader | None

    def received(self) -> Tensor:
        """[W - 1, ..., D]: the summands of the other ranks."""

    def total(self) -> Tensor:
        """The sum."""


class DeferredGradient(Protocol):
    """The gradient of a norm's output. The linear that alone reads the output may defer a sum to the norm."""

    is_taken: bool
    """Whether the norm's backward takes the deferred sum. The norm sets it."""

    def take(self, dh: Tensor | None) -> tuple[Tensor, int] | tuple[()]:
        """Return the summands of the other ranks, and the number of this rank; () for a whole gradient."""

    def sending(self, x: Tensor, dtype: torch.dtype) -> AbstractContextManager[Sequence[Tensor]]:
        """Return memory of other ranks, with the shape of x and a dtype. The norm writes its output there, too."""


class LinearRanks(Protocol):
    """How the ranks of a group share a linear, and compute with it."""

    mode: str
    """"column": a rank has output features; "row": a rank has input features."""
    sequence: int | None
    """The axis of x, or of y, along which tokens are split over ranks; None: every rank has all tokens."""

    def product(self, linear: nn.Module, x: Tensor, known: Any) -> Tensor:
        """Return y of x [..., K], as a new call. known: a KnownInput."""

    def branch(self, linear: nn.Module, x: Tensor) -> Tensor | Summands:
        """Return product() for a norm that reads y next."""

    def normed(self, linear: nn.Module, x: Tensor, branch: Any) -> tuple[Tensor, Tensor, Any]:
        """Return LayerNormLinear.normed() for this rank's tokens."""

    def joins(self, fc1: nn.Module, fc2: nn.Module, kind: str, x: Tensor) -> bool:
        """Return whether mlp() takes x: a rank's part of the activation between the linears is quantized alone."""

    def mlp(self, fc1: nn.Module, x: Tensor, fc2: nn.Module, kind: str, known: Any) -> Tensor | Summands:
        """Return fc2(activation(fc1(x))), as one autograd function."""

    def attend(self, proj: nn.Module, qkv: Tensor, heads: int, base: float | None, causal: bool) -> Any:
        """Return proj(attention of qkv), with attention computed by the rows of each rank; None if that is not
        possible."""

    def cross_entropy(self, head: nn.Module, h: Tensor, targets: Tensor, chunk: int | None) -> Tensor:
        """Return linear_cross_entropy() of h [..., K] with targets."""

    def layer_call(self, layer: nn.Module, shape: Sequence[int]) -> AbstractContextManager:
        """Return a context for a call of a transformer layer with x [*shape, D]. This linear is the layer's first
        one."""


class ExpertRanks(Protocol):
    """How ranks share a grouped linear: the features of each expert, or the experts."""

    def own(self, grouped: nn.Module) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return this rank's parts of the weights and of the biases, as products take them."""

    def product(self, grouped: nn.Module, x: Tensor, splits: Any, parameters: Any, codes: Codes | None) -> Tensor:
        """Return y of the rows x [M, K]. codes: codes of x and of the gradient of y, if rows arrive as codes."""


class MixtureRanks(Protocol):
    """How ranks share the experts of a mixture."""

    def mixed(self, mixture: nn.Module, routing: Any, h: Tensor) -> Tensor:
        """Return the sums over the experts of rows h [M, D]. Each rank's tokens go to their experts."""


class SplitTokens(Protocol):
    """How tokens are split over ranks that each compute later results for every token."""

    def whole(self, x: Tensor) -> Tensor:
        """Return x of the tokens of all ranks."""

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's part of an x that is equal on all ranks."""


class WeightRanks(Protocol):
    """How ranks share the parameters of a module whose weight no GEMM reads."""

    part: Part | None
    """This rank's part of the weight; None: each rank has all of it."""

    def own(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter, as forward reads it."""


class AttentionRanks(Protocol):
    """How ranks share attention."""

    tokens: object | None
    """The ranks with some of the tokens each; None: each rank has all tokens of its heads."""

    def call(self, facts: Mapping[str, Any], batch: int) -> Any:
        """Return an AttentionCall with these fields, for this rank's heads. batch: the number of sequences."""

    def whole_sequences(self, qkv: Tensor) -> Tensor:
        """Return [B, W * t, C] from qkv [B, t, C] of each of W ranks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        """Return attention of this rank's tokens of q to all tokens. q, k, v: [B, H, T, E]."""
