"""The compiled extension as functions on tensors: which formats it takes, and the call with pointers, shapes and strides.

The extension does not link to torch (one build serves every torch), so this is the only place where tensors become
addresses. Bytes equal the reference's; tests and the parity job hold that.
"""

from functools import cache

import torch
from torch import Tensor

from hqsweep.formats import MX, NVFP4, ExactOperand, Format, Fp8Block, Fp8Current, RngKey

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@cache
def extension():
    """The compiled module hqsweep._C, or None when it was not built."""
    try:
        from hqsweep import _C
    except ImportError:
        return None
    return _C


@cache
def cpu_spec(format: Format) -> dict[str, object] | None:
    """Keyword arguments that describe a format to quantize_cpu, or None for a format without a kernel (Identity)."""
    match format:
        case Fp8Current() | Fp8Block():
            spec = {"pow2": format.pow2, "amax_epsilon": format.amax_epsilon}
            spec |= {"family": "current" if isinstance(format, Fp8Current) else "block", "element": format.element_name}
        case MX():
            spec = {"family": "mx", "element": format.element_name}
        case NVFP4():
            error = {"mae": 1, "mse": 2}[format.error_mode] if format.four_over_six else 0
            spec = {"family": "nvfp4", "element": "e2m1", "four_over_six": error, "fast_error": format.fast_error}
            spec |= {"row_scaled": format.row_scaled, "rht": format.rht, "rht_sign": format.rht_signed}
            spec |= {"sr": format.sr, "e4m3_max": format.scale_max}
        case _:
            return None
    return spec | {"tile_rows": format.tile[0], "tile_cols": format.tile[1]}


def supports(x: Tensor, format: Format) -> bool:
    """Whether encode and exact_operand below take this input."""
    return x.device.type == "cpu" and x.numel() > 0 and x.dtype in DTYPES and cpu_spec(format) is not None and extension() is not None


def encode(x: Tensor, format: Format, key: RngKey | None) -> dict[str, Tensor]:
    """[rows, cols] on CPU, any strides -> packed buffers of the format's layout."""
    buffers = format.empty(*x.shape, x.device)
    _launch(x, format, key, buffers, None)
    return buffers


def exact_operand(x: Tensor, format: Format, key: RngKey | None) -> ExactOperand:
    """[rows, cols] on CPU -> the operand of gemm=exact with a float32 matrix, written without packing codes."""
    format.check_shape(*x.shape)
    matrix = torch.empty(x.shape, dtype=torch.float32)
    factors = {n: torch.empty(b.shape(*x.shape), dtype=b.dtype) for n, b in format.layout.items() if _is_factor(format, n)}
    _launch(x, format, key, factors, matrix)
    divisor = 6.0 * format.scale_max if isinstance(format, NVFP4) else 1.0
    return ExactOperand(matrix, next(iter(factors.values()), None), divisor)


def _is_factor(format: Format, name: str) -> bool:
    return name == "g" or (name == "s" and isinstance(format, Fp8Current))


def _launch(x: Tensor, format: Format, key: RngKey | None, buffers: dict[str, Tensor], exact: Tensor | None) -> None:
    if key is None and getattr(format, "sr", False):
        raise ValueError(f"{format}: encode needs an RngKey")
    words = (*key.words, key.step) if key else (0, 0, 0)
    pointer = {name: tensor.data_ptr() for name, tensor in buffers.items()}
    extension().quantize_cpu(
        src_ptr=x.data_ptr(),
        dtype=DTYPES[x.dtype],
        rows=x.shape[0],
        cols=x.shape[1],
        row_stride=x.stride(0),
        col_stride=x.stride(1),
        **cpu_spec(format),
        key0=words[0],
        key1=words[1],
        step=words[2],
        q_ptr=pointer.get("q", 0),
        s_ptr=pointer.get("s", 0),
        g_ptr=pointer.get("g", 0),
        exact_ptr=exact.data_ptr() if exact is not None else 0,
        amax_ptr=0,
        threads=torch.get_num_threads(),
    )
