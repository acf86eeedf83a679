"""Quantizations by the extension with addresses, on the CPU and on a GPU, as the tests of csrc call it."""

from dataclasses import dataclass

import numpy as np
import torch
from cases import COMBINED, KERNELS, REPRESENTATIVE

from hqsweep import _C
from hqsweep.formats import parse

MX = {"family": "mx", "element": "e4m3", "tile_rows": 1, "tile_cols": 32}
NVFP4 = {"family": "nvfp4", "element": "e2m1", "tile_rows": 1, "tile_cols": 16}
CURRENT = {"family": "current", "element": "e4m3", "tile_rows": 0, "tile_cols": 0}
BLOCK = {"family": "block", "element": "e4m3", "tile_rows": 1, "tile_cols": 128, "pow2": True}
WORDS = {"key0": 7, "key1": 9, "step": 2**40 + 3}
"""The words of a key."""


def spec_of(text: str) -> dict[str, object]:
    """What the extension is told of a format, and for one that draws random bits of its key."""
    format = parse(text)
    tile = dict(zip(("tile_rows", "tile_cols"), format.tile, strict=True))
    return format.kernel_fields | tile | (WORDS if format.stochastic else {})


SPECS = {text: spec_of(text) for text in (*REPRESENTATIVE, *COMBINED) if text in KERNELS}


FOUR_BITS = ("e2m1", "e1m2")


@dataclass(frozen=True, kw_only=True)
class Result:
    q: np.ndarray
    s: np.ndarray
    g: np.ndarray
    exact: np.ndarray  # uint16 are bfloat16 bits

    def same_bytes(self, other: "Result") -> bool:
        mine, theirs = vars(self).values(), vars(other).values()
        return all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))


def outputs(shape: tuple[int, int], spec: dict, exact_dtype: type = np.float32) -> Result:
    """Arrays for all results of a call, full of garbage."""
    rows, cols = shape
    packed = 2 if spec["element"] in FOUR_BITS else 1  # codes per byte
    tiles = [-(-n // spec[name]) if spec[name] else 1 for n, name in ((rows, "tile_rows"), (cols, "tile_cols"))]
    return Result(
        q=np.full((rows, cols // packed), 0xAA, np.uint8),
        s=np.full(tiles, 77, np.float32 if spec["family"] in ("current", "block") else np.uint8),
        g=np.full(amaxes(shape, spec), np.nan, np.float32),
        exact=np.full((rows, cols), 0x7FC0 if exact_dtype is np.uint16 else np.nan, exact_dtype),
    )


def amaxes(shape: tuple[int, int], spec: dict) -> int:
    return shape[0] if spec.get("row_scaled") else 1


DTYPES = {"float32": 0, "uint16": 1, "float16": 2}  # uint16 means bfloat16 bits
KEY = tuple(WORDS)
ISAS = _C.build_info()["isas"].split()
ISAS = ISAS[: ISAS.index(_C.build_info()["isa"]) + 1]


def source(x: np.ndarray) -> tuple:
    """dtype, shape and strides of a 2-D array as the extension takes them."""
    return DTYPES[x.dtype.name], *x.shape, *(stride // x.itemsize for stride in x.strides)


def direction(fields: dict, pointers: dict[str, int], exact_dtype: type, amax: int, amax_place: int) -> _C.Direction:
    """A Direction that writes to those addresses; a found amax goes where the format keeps it, or to `found`."""
    key = [fields.get(name, 0) for name in KEY]
    spec = _C.Spec(**{name: value for name, value in fields.items() if name not in KEY})
    scales = pointers["s"]
    keeps = pointers["g"] if fields["family"] == "nvfp4" else 0
    amax_place = 0 if amax else (keeps or amax_place)
    target = (pointers["q"], scales, keeps, pointers["exact"], DTYPES[np.dtype(exact_dtype).name])
    return _C.Direction(spec, *key, amax, amax_place, *target)


def quantize(
    x: np.ndarray,
    *,
    threads: int = 1,
    isa: str = "",
    amax: np.ndarray | None = None,
    exact_dtype: type = np.float32,
    **spec,
) -> Result:
    """Quantize a 2-D array of any strides along its rows on the CPU."""
    result, amax_place = outputs(x.shape, spec, exact_dtype), np.zeros(amaxes(x.shape, spec), np.float32)
    pointers = {name: array.ctypes.data for name, array in vars(result).items()}
    address = 0 if amax is None else amax.ctypes.data
    to = direction(spec, pointers, exact_dtype, address, amax_place.ctypes.data)
    _C.quantize_cpu(x.ctypes.data, *source(x), to, None, False, threads, isa)
    return result


def quantize_on_gpu(x: np.ndarray, *, amax: np.ndarray | None = None, exact_dtype: type = np.float32, **spec) -> Result:
    """quantize() on the GPU: the memory that x spans is copied as it is, so offsets, gaps and strides are kept."""
    span = 1 + sum((n - 1) * stride // x.itemsize for n, stride in zip(x.shape, x.strides, strict=True))
    memory = to_gpu(np.lib.stride_tricks.as_strided(x, (span,), (x.itemsize,)))
    garbage = vars(outputs(x.shape, spec, exact_dtype))
    arrays = {name: to_gpu(array) for name, array in garbage.items()}
    amax_there = None if amax is None else to_gpu(amax)
    amax_place = torch.zeros(amaxes(x.shape, spec), device="cuda")
    pointers = {name: array.data_ptr() for name, array in arrays.items()}
    to = direction(
        spec, pointers, exact_dtype, 0 if amax_there is None else amax_there.data_ptr(), amax_place.data_ptr()
    )
    stream = torch.cuda.current_stream().cuda_stream
    _C.quantize_cuda(memory.data_ptr(), *source(x), to, None, False, stream)
    back = {name: array.cpu().numpy().view(garbage[name].dtype) for name, array in arrays.items()}
    return Result(**{name: array.reshape(garbage[name].shape) for name, array in back.items()})


def to_gpu(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(np.uint8)).cuda()


def to_bf16(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def sample(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Normal values over many binades, with zeros of both signs, as bfloat16 bits."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-20, 20, (rows, cols)))
    x[rng.random((rows, cols)) < 0.02] = -0.0
    return to_bf16(x)
