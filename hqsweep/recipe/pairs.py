"""Which operands may meet in a GEMM.

x [M, K], w [N, K], y [M, N]:
  fprop  y  = x @ w.T   reads input rowwise,       weight rowwise       (blocks along K)
  dgrad  dx = dy @ w    reads grad_output rowwise, weight columnwise    (blocks along N)
  wgrad  dw = dy.T @ x  reads grad_output columnwise, input columnwise  (blocks along M)

Attention of one head, q, k, v [T, E], s = softmax(q @ k.T) [T, T], do [T, E], dp the gradient of q @ k.T [T, T]:
  qk  q @ k.T     reads qkv rowwise, qkv rowwise       pv  s @ v      reads s rowwise, qkv columnwise
  ds  do @ v.T    reads do rowwise, qkv rowwise        dv  s.T @ do   reads s columnwise, do columnwise
  dq  dp @ k      reads dp rowwise, qkv columnwise     dk  dp.T @ q   reads dp columnwise, qkv columnwise
"""

from hqsweep.formats import Format

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
"""The same for dot-product attention."""

MODULE_GEMMS = {"linear": GEMMS, "grouped_linear": GEMMS, "dpa": DPA_GEMMS}


def same_scaling(a: Format, b: Format) -> bool:
    """Whether one product scales both operands alike."""
    return a.scaling is not None and a.scaling == b.scaling


def mathematical_fault(a: Format, b: Format) -> str | None:
    """Why the product of the two would be wrong in any arithmetic, or None."""
    transform = [(f.rht, f.rht_signed) for f in (a, b)]
    if transform[0] != transform[1]:
        return "the random Hadamard transform must be on both operands or on neither, or it does not cancel"
    return None


def hardware_fault(a: Format, b: Format) -> str | None:
    """Why no hardware GEMM takes the two (gemm=strict), or None.

    Tensor cores scale both operands in one way: a scalar for FP8 and E2M1 per tensor (any mix of elements: PTX
    tcgen05.mma.kind::f8f6f4), 1x128 or 128x128 blocks (not 128x128 on both sides, as TransformerEngine's cuBLAS call),
    32-blocks with E8M0 scales for MX (any mix: kind::mxf8f6f4), 16-blocks with E4M3 scales for NVFP4. High precision
    needs one dtype.
    """
    if a.high_precision and b.high_precision:
        return None if a == b else "a GEMM takes one dtype"
    if a.scaling == b.scaling == "block" and a.two_d and b.two_d:
        return "128x128 tiles on both sides have no hardware GEMM"
    return None if same_scaling(a, b) else "their scaling modes differ"
