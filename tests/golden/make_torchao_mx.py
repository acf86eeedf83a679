"""Writes torchao_mx.npz: scales and codes of torchao's to_mx in three scale modes. Needs torchao; no test runs this."""

import json
from pathlib import Path

import numpy as np
import torch
import torchao
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import to_mx

ELEMENTS = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8+e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": DTYPE_FP6_E2M3,
    "mxfp6_e3m2": DTYPE_FP6_E3M2,
    "mxfp4": torch.float4_e2m1fn_x2,
}
MODES = {"": ScaleCalculationMode.RCEIL, "+floor": ScaleCalculationMode.FLOOR, "+even": ScaleCalculationMode.EVEN}
LARGEST = {"e4m3": 448, "e5m2": 57344, "e2m3": 7.5, "e3m2": 28, "e2m1": 6}


def blocks() -> np.ndarray:
    """float32 [n, 32]: each row is one block."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((8, 32))
    rows = [*normal[:2], *normal[2:4] * np.exp2(rng.integers(-20, 21, (2, 32)))]
    rows += [normal[4] * 2.0**k for k in (-147, -140, -130, -127, -125, -120, -116, 80, 124, 126)]  # tiny and huge
    rows += [np.zeros(32), np.where(np.arange(32) % 2, -0.0, 0.0)]
    spike = normal[5].copy()
    spike[7] = 3e4
    rows += [spike, np.full(32, 1.5)]
    for value in (np.inf, -np.inf, np.nan):
        special = normal[6].copy()
        special[11] = value
        rows.append(special)
    rows += [np.where(np.arange(32) == 3, sign * top, normal[7]) for sign, top in ((1, 3.4e38), (-1, 2.0**127))]
    # amax on either side of where a scale changes: max * 2^k (rounded up), 2^k (floor), (2 - half an ulp) * 2^k (even)
    edges = [largest * 2.0**k for largest in LARGEST.values() for k in (-90, -9, 0, 60)]
    edges += [(2 - 2.0 ** -(m + 1)) * 2.0**k for m in (1, 2, 3) for k in (-100, 0, 100)] + [1.0, 2.0**40, 2.0**-126]
    for edge in np.float32(edges):
        for amax in (np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))):
            rows.append(amax * np.clip(normal[len(rows) % 8] / 3, -1, 1))
            rows[-1][len(rows) % 32] = amax * (-1) ** len(rows)
    with np.errstate(over="ignore"):
        return np.stack(rows).astype(np.float32)


def main() -> None:
    versions = {"torchao": torchao.__version__, "torch": torch.__version__, "numpy": np.__version__}
    source = "torchao/prototype/mx_formats/mx_tensor.py:to_mx, eager, CPU, block size 32"
    arrays = {"__meta__": np.array(json.dumps({"versions": versions, "source": source}))}
    fp32 = torch.from_numpy(blocks())
    for dtype, x in (("fp32", fp32), ("bf16", fp32.bfloat16())):
        arrays[f"{dtype}/input"] = (x.view(torch.uint16) if dtype == "bf16" else x).numpy()
        for name, element in ELEMENTS.items():
            for option, mode in MODES.items():
                scale, codes = to_mx(x, element, 32, mode)
                arrays[f"{dtype}/{name}{option}/rowwise_scale"] = scale.view(torch.uint8).numpy()
                arrays[f"{dtype}/{name}{option}/rowwise_data"] = codes.view(torch.uint8).numpy()
    np.savez_compressed(Path(__file__).with_name("torchao_mx.npz"), **arrays)


if __name__ == "__main__":
    main()
