"""The compiled extension as functions on tensors: which inputs it takes, and the call with pointers and strides.

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
def spec(format: Format) -> dict[str, object] | None:
    """Keyword arguments that describe a format to the extension, or None for a format without a kernel (Identity)."""
    match format:
        case Fp8Current() | Fp8Block():
            given = {"pow2": format.pow2, "amax_epsilon": format.amax_epsilon}
            given |= {
                "family": "current" if isinstance(format, Fp8Current) else "block",
                "element": format.element_name,
            }
        case MX():
            given = {"family": "mx", "element": format.element_name}
        case NVFP4():
            error = {"mae": 1, "mse": 2}[format.error_mode] if format.four_over_six else 0
            given = {"family": "nvfp4", "element": "e2m1", "four_over_six": error, "fast_error": format.fast_error}
            given |= {"row_scaled": format.row_scaled, "rht": format.rht, "rht_sign": format.rht_signed}
            given |= {"sr": format.sr, "e4m3_max": format.scale_max}
        case _:
            return None
    return given | {"tile_rows": format.tile[0], "tile_cols": format.tile[1]}


@cache
def has_cuda() -> bool:
    """Whether the extension was built, and with its CUDA kernels."""
    return extension() is not None and extension().build_info()["cuda"]


def supports(x: Tensor, format: Format) -> bool:
    """Whether encode and exact_operand take this input: every format but Identity, on CPU and on CUDA."""
    if x.numel() == 0 or x.dtype not in DTYPES or spec(format) is None:
        return False
    return has_cuda() if x.device.type == "cuda" else x.device.type == "cpu" and extension() is not None


def encode(x: Tensor, format: Format, key: RngKey | None) -> dict[str, Tensor]:
    """[rows, cols] of any strides -> packed buffers of the format's layout, on x's device and current stream."""
    buffers = format.empty(*x.shape, x.device)
    _launch(x, format, key, buffers, None)
    return buffers


def exact_operand(x: Tensor, format: Format, key: RngKey | None) -> ExactOperand:
    """[rows, cols] of any strides -> the operand of gemm=exact, written without packing codes, on x's device.

    The matrix has the dtype that the device multiplies: float32 on CPU; on CUDA bfloat16, rounded to nearest even, and
    float32 only for the format whose product needs it (fp8_block+fp32_scale).
    """
    format.check_shape(*x.shape)
    needs_fp32 = x.device.type == "cpu" or (isinstance(format, Fp8Block) and not format.pow2)
    matrix = torch.empty(x.shape, dtype=torch.float32 if needs_fp32 else torch.bfloat16, device=x.device)
    factors = {
        n: torch.empty(b.shape(*x.shape), dtype=b.dtype, device=x.device)
        for n, b in format.layout.items()
        if _is_factor(format, n)
    }
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
    arguments = {
        "src_ptr": x.data_ptr(),
        "dtype": DTYPES[x.dtype],
        "rows": x.shape[0],
        "cols": x.shape[1],
        "row_stride": x.stride(0),
        "col_stride": x.stride(1),
        **spec(format),
        "key0": words[0],
        "key1": words[1],
        "step": words[2],
        **{f"{name}_ptr": pointer.get(name, 0) for name in ("q", "s", "g")},
        "exact_ptr": exact.data_ptr() if exact is not None else 0,
        "exact_dtype": DTYPES[exact.dtype] if exact is not None else "fp32",
    }
    if x.device.type == "cpu":
        extension().quantize_cpu(**arguments, threads=torch.get_num_threads())
        return
    with torch.cuda.device(x.device):
        extension().quantize_cuda(**arguments, stream=torch.cuda.current_stream().cuda_stream)
