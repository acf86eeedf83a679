"""The operands that may meet in a GEMM.

x [M, K], w [N, K], y [M, N]:
  fprop  y  = x @ w.T   reads input rowwise,       weight rowwise       (blocks along K)
  dgrad  dx = dy @ w    reads grad_output rowwise, weight columnwise    (blocks along N)
  wgrad  dw = dy.T @ x  reads grad_output columnwise, input columnwise  (blocks along M)

Attention of one head, q, k, v [T, E], s = softmax(q @ k.T) [T, T], do [T, E], dp the gradient of q @ k.T [T, T]:
  qk  q @ k.T     reads qkv rowwise, qkv rowwise       pv  s @ v      reads s rowwise, qkv columnwise
  ds  do @ v.T    reads do rowwise, qkv rowwise        dv  s.T @ do   reads s columnwise, do columnwise
  dq  dp @ k      reads dp rowwise, qkv columnwise     dk  dp.T @ q   reads dp columnwise, qkv columnwise
"""

from collections.abc import Sequence
from typing import Protocol

GEMMS = {
    "fprop": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
}
"""GEMM of a linear -> the (tensor, direction) of its two operands a and b in mm_t(a, b)."""

DPA_GEMMS = {
    "qk": (("qkv", "rowwise"), ("qkv", "rowwise")),
    "pv": (("s", "rowwise"), ("qkv", "columnwise")),
    "ds": (("do", "rowwise"), ("qkv", "rowwise")),
    "dv": (("s", "columnwise"), ("do", "columnwise")),
    "dq": (("dp", "rowwise"), ("qkv", "columnwise")),
    "dk": (("dp", "columnwise"), ("qkv", "columnwise")),
}
"""GEMM of dot-product attention -> the (tensor, direction) of its operands."""

MODULE_GEMMS = {"linear": GEMMS, "grouped_linear": GEMMS, "dpa": DPA_GEMMS}


class Scaled(Protocol):
    """A format as a product sees it: a formats.Format, or a torch-free FormatText."""

    rht: int
    rht_signed: bool
    rht_drawn: bool
    two_d: bool
    scaling: str | None
    high_precision: bool


def pair_fault(slots: Sequence[str], formats: tuple[Scaled, Scaled], gemm_mode: str) -> str | None:
    """Return why a product of two operands is impossible in a mode (exact, strict, native), or None. Sizes do not
    matter.

    slots: the operands' names for the message.
    """
    fault = mathematical_fault(*formats)
    if fault or gemm_mode == "exact":
        return cannot_meet(slots, fault)
    return cannot_meet(slots, hardware_fault(*formats), gemm_mode)


def cannot_meet(slots: Sequence[str], fault: str | None, gemm_mode: str = "") -> str | None:
    """Return a fault as a sentence; None for None."""
    mode = f" under gemm={gemm_mode}" if gemm_mode else ""
    return f"{slots[0]} cannot meet {slots[1]}{mode}: {fault}" if fault else None


OUTSIDE = ("tensor", "row")
"""The scalings that multiply a finished product, by one factor or by a factor for each row and column."""


def same_scaling(a: Scaled, b: Scaled) -> bool:
    """Return whether one product scales both operands alike."""
    outside = a.scaling in OUTSIDE and b.scaling in OUTSIDE
    return outside or (a.scaling is not None and a.scaling == b.scaling)


def mathematical_fault(a: Scaled, b: Scaled) -> str | None:
    """Return why the product of the two would be wrong in any arithmetic, or None."""
    transform = [(f.rht, f.rht_signed, f.rht_drawn) for f in (a, b)]
    if transform[0] != transform[1] and a.rht and b.rht:
        kinds = ["with drawn" if drawn else "with" if signed else "without" for _, signed, drawn in transform]
        named = [f"of {f.rht} {kind} signs" for f, kind in zip((a, b), kinds, strict=True)]
        return f"the Hadamard transforms differ ({named[0]}, {named[1]}), so they do not cancel"
    if transform[0] != transform[1]:
        return "the random Hadamard transform must be on both operands or on neither, or it does not cancel"
    return None


def hardware_fault(a: Scaled, b: Scaled) -> str | None:
    """Return why no hardware GEMM takes the two (gemm=strict), or None.

    Tensor cores scale both operands in one way: by a scalar for per-tensor FP8 and E2M1 (any mix of elements: PTX
    tcgen05.mma.kind::f8f6f4), also by a scalar per row of an operand, in blocks of 1x128 or 128x128 (not 128x128 on
    both sides, as TransformerEngine's cuBLAS call), in 32-blocks with E8M0 scales for MX (any mix: kind::mxf8f6f4), or
    in 16-blocks with E4M3 scales for NVFP4. High precision needs one dtype.
    """
    if a.high_precision and b.high_precision:
        return None if a == b else "a GEMM takes one dtype"
    if a.scaling == b.scaling == "block" and a.two_d and b.two_d:
        return "128x128 tiles on both sides have no hardware GEMM"
    return None if same_scaling(a, b) else "their scaling modes differ"
