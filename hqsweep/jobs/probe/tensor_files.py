"""Matrices of safetensors files, read in parts: of checkpoints, or of activations that were captured."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hqsweep.errors import UserError, nearest
from hqsweep.ops.stream import CHUNK_ROWS

DTYPES = {"F64": torch.float32, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""dtype in a file -> the dtype in which its values are quantized. Other dtypes are not read."""
CHUNK_ELEMENTS = 2**24
"""The most elements in memory at a time, unless 128 rows have more."""
LEAST = 16
"""The least rows and columns of a tensor that counts as an operand of a GEMM."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A tensor [..., rows, cols] of a file. Its leading axes are folded into rows, as a linear folds them."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype as safetensors names it, such as BF16."""

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]

    def chunks(self) -> Iterator[Tensor]:
        """[rows, cols] parts from top to bottom. Each has a multiple of 128 rows, except the last."""
        inner = math.prod(self.shape[1:-1])
        unit = CHUNK_ROWS // math.gcd(CHUNK_ROWS, inner)
        step = max(1, CHUNK_ELEMENTS // (inner * self.cols * unit)) * unit
        with safe_open(self.file, "pt") as opened:
            part = opened.get_slice(self.name)
            for start in range(0, self.shape[0], step):
                yield part[start : start + step].reshape(-1, self.cols).to(DTYPES[self.dtype])


def find_matrices(path: Path) -> tuple[list[Matrix], list[tuple[str, str]]]:
    """(matrices, others) of a safetensors file, or of all in a folder. others: (name, why not) of tensors that are no
    matrices.

    Raises:
        UserError: nothing there, no safetensors file, a tensor in two of them, or no matrix.
    """
    matrices: dict[str, Matrix] = {}
    others: list[tuple[str, str]] = []
    for file in _files(path):
        try:
            with safe_open(file, "pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, no mapping
                headers = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        except (SafetensorError, OSError) as error:
            raise UserError(f"'{file}' cannot be read as a safetensors file: {error}; give one, or a folder") from None
        for name, (shape, dtype) in headers.items():
            if name in matrices:
                raise UserError(f"tensor '{name}' is in '{matrices[name].file}' and in '{file}'; give one of the files")
            if why := _fault(shape, dtype):
                others.append((name, why))
            else:
                matrices[name] = Matrix(file=file, name=name, shape=shape, dtype=dtype)
    if not matrices:
        seen = "; ".join(f"{name}: {why}" for name, why in others[:3]) or "no tensors"
        raise UserError(f"'{path}' has no matrices of floating-point numbers ({seen})")
    return sorted(matrices.values(), key=_natural), others


def _natural(matrix: Matrix) -> list[str | int]:
    """A key that sorts layers.2 before layers.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", matrix.name)]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"'{path}' does not exist{nearest(path.name, names)}; give a safetensors file, or a folder")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"'{path}' has no .safetensors file; give a folder that has, or a file")
    return files


def _fault(shape: tuple[int, ...], dtype: str) -> str | None:
    """Return why a tensor cannot be an operand; None if it can."""
    if dtype not in DTYPES:
        return f"dtype {dtype}"
    if len(shape) < 2:
        return f"{len(shape)} axes"
    if min(math.prod(shape[:-1]), shape[-1]) < LEAST:
        return f"shape {list(shape)}, fewer than {LEAST} rows or columns"
    return None
