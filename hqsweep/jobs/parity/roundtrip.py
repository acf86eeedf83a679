"""The check `roundtrip` of the parity job: what a second quantization of decoded values changes.

A checkpoint that is saved decoded and quantized again on loading changes unless its format is idempotent. A row
compares the second codes of the kernel with the reference's to the byte. Its note says what became of the first ones:

equal bytes              codes and scales are the first ones
equal values             other codes and scales of the same values, such as a block whose scale fell by a power of two
other values, P %        P % of the elements change; rel_l2 is the norm of the change over the values' norm

on the worst of matrices of bfloat16, decoded to float32, in rowwise operands.
"""

import torch
from torch import Tensor

from hqsweep.config.job import ParityConfig
from hqsweep.formats import Format, RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.jobs.parity.compare_bytes import Check, Rows, named_pairs, row, skip
from hqsweep.ops.quantize.dequantize import dequantize
from hqsweep.ops.quantize.quantize import encode

KEY = RngKey(seed=1, slot="roundtrip", step=3)
SHAPE = (128, 256)
FINITE = ("normal", "heavy", "row_scaled", "tiny", "spike", "ties", "pow2")
"""The distributions whose values are finite and no format makes infinite."""


def roundtrip_check(config: ParityConfig, device: torch.device) -> Rows:
    """A row of each format."""
    names = [name for name in config.parity.distributions if name in FINITE] or ["normal"]
    for format in map(parse, config.parity.formats):
        if format.rht:
            yield skip("roundtrip", str(format), "twice", "its decoded values are the transform's")
            continue
        inputs = [draw(name, *SHAPE, config.seed).to(device) for name in names]
        trips = [_trip(x, format, "auto") for x in inputs]
        reference = [_trip(x, format, "reference") for x in inputs]
        pairs = {
            f"{name} {key}": pair
            for name, own, expected in zip(names, trips, reference, strict=True)
            for key, pair in named_pairs(expected[1], own[1]).items()
        }
        told = max((_told(first, second, format) for first, second in trips), key=lambda each: each[0])
        yield row("roundtrip", str(format), "twice", pairs) | {"note": told[1]}


Buffers = dict[str, Tensor]


def _trip(x: Tensor, format: Format, backend: str) -> tuple[Buffers, Buffers]:
    """The codes of x, and the codes of their decoded values."""
    first = encode(x, format, key=KEY, backend=backend)
    values = dequantize(first, format, tuple(x.shape), torch.float32, backend)
    return first, encode(values, format, key=KEY, backend=backend)


def _told(first: Buffers, second: Buffers, format: Format) -> tuple[float, str]:
    """(badness, the note) of a matrix."""
    if all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first):
        return 0.0, "idempotent: equal bytes"
    before, after = (dequantize(buffers, format, SHAPE) for buffers in (first, second))
    changed = (before != after).float().mean().item()
    if not changed:
        return 1e-12, "idempotent: equal values, other codes and scales"
    size = ((before - after).norm() / before.norm()).item()
    return size, f"not idempotent: other values, {100 * changed:.3g} % of the elements, rel_l2 {size:.1e}"


ROUNDTRIP_CHECKS: dict[str, Check] = {"roundtrip": roundtrip_check}
