"""Test matrices that expose faults in quantizers: named distributions, seeded by name and shape."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Fp8Delayed, parse

Draw = Callable[[torch.Generator, int, int], Tensor]


def _normal(g: torch.Generator, rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, generator=g)


def _heavy(g: torch.Generator, rows: int, cols: int) -> Tensor:
    """Log-normal magnitudes: a few elements determine every scale."""
    return _normal(g, rows, cols) * torch.exp(2.5 * _normal(g, rows, cols))


def _row_scaled(g: torch.Generator, rows: int, cols: int) -> Tensor:
    """Rows from 1e-4 to 1e4, which per-tensor scales and 2D tiles lose."""
    return _normal(g, rows, cols) * 10 ** (8 * torch.rand(rows, 1, generator=g) - 4)


def _tiny(g: torch.Generator, rows: int, cols: int) -> Tensor:
    """Values around the smallest normal number of FP32, subnormals included."""
    return _normal(g, rows, cols) * 2.0**-126


def _huge(g: torch.Generator, rows: int, cols: int) -> Tensor:
    return _normal(g, rows, cols) * 2.0**122


def _zeros(g: torch.Generator, rows: int, cols: int) -> Tensor:
    """Normal with zero blocks, rows and negative zeros."""
    x = _normal(g, rows, cols)
    x[:, : cols // 2] = 0.0
    x[rows // 2 :] *= torch.randint(0, 2, (rows - rows // 2, 1), generator=g).float()
    return torch.where(torch.rand(rows, cols, generator=g) < 0.1, -0.0, x)


def _spike(g: torch.Generator, rows: int, cols: int) -> Tensor:
    """One element 1e6 times the rest: block scales underflow."""
    x = _normal(g, rows, cols) * 1e-3
    x[rows // 2, cols // 2] = 1e4
    return x


def _ties(g: torch.Generator, rows: int, cols: int) -> Tensor:
    """Multiples of 1/8 up to 6, with an exact 6 in each row: every second one is a tie for some element type."""
    x = torch.randint(-48, 49, (rows, cols), generator=g) / 8.0
    x[:, ::16] = 6.0
    return x


def _pow2(g: torch.Generator, rows: int, cols: int) -> Tensor:
    """Powers of two and their neighbours: the edges of scale rounding."""
    exponent = torch.randint(-12, 13, (rows, cols), generator=g).float()
    return torch.exp2(exponent) * (1 + 2.0**-7 * torch.randint(-1, 2, (rows, cols), generator=g))


def _nonfinite(g: torch.Generator, rows: int, cols: int) -> Tensor:
    """Normal with a NaN and infinities of both signs."""
    x = _normal(g, rows, cols)
    x[0, 0], x[rows // 2, cols // 3], x[-1, -1] = torch.nan, torch.inf, -torch.inf
    return x


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _normal,
    "heavy": _heavy,
    "row_scaled": _row_scaled,
    "tiny": _tiny,
    "huge": _huge,
    "zeros": _zeros,
    "spike": _spike,
    "ties": _ties,
    "pow2": _pow2,
    "nonfinite": _nonfinite,
}


def draw(distribution: str, rows: int, cols: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a CPU tensor [rows, cols]; the same bits for the same arguments."""
    name = f"{distribution} {rows} {cols} {seed}"
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little"))
    return DISTRIBUTIONS[distribution](generator, rows, cols).to(dtype)


def check_format(text: str, shape: list[int], job: str) -> None:
    """Raise UserError unless the format exists and fits both orientations of the shape. job: starts the key."""
    where = f"{job}.formats"
    try:
        format = parse(text)
        if isinstance(format, Fp8Delayed):
            raise UserError(
                f"'{text}' takes its scale from a training; its kernels are those of fp8_current, so give that"
            )
        where = f"{job}.shapes: {shape} does not fit {text}"
        format.check_shape(*shape)
        format.check_shape(*reversed(shape))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
