"""SQNRs that others measured, in dB, to compare ours with.

PUBLISHED  mean squared errors on N(0, 1) of Quartet II, arXiv 2601.22813, table 1, in units of 1e-3
EMULATED   an emulation of these formats that shares no code with this package, whose casts were compared with ml_dtypes
           bit for bit: means of 5 draws of 512 x 4096, and in brackets standard deviations of 0.1 dB and more
ROWS       the same emulation's median SQNR of a row where every token has a scale of its own, by the logarithm's sigma
"""

import math

PUBLISHED_MSE = {"nvfp4": 9.0, "nvfp4+4over6+mse": 7.6, "nvfp4+2d": 12.4}
COLUMNS = ("normal", "laplace", "t5", "t3", "outlier_channels", "token_scale_2")
TABLE = """
bf16                    55.59 55.6 55.6 55.6      55.6      55.6
fp8_current             31.54 31.5 31.5 31.7(0.2) 31.6      31.6(0.1)
fp8_current+e5m2        25.56 25.6 25.6 25.6(0.1) 25.5      25.6
fp8_block               31.52 31.5 31.5 31.6(0.1) 31.5      31.5
fp8_block+fp32_scale    31.79 32.1 32.2 33.1(0.2) 36.9(0.3) 31.8
fp8_block+2d            31.52 31.5 31.5 31.6(0.1) 31.5      31.5
fp8_block+2d+fp32_scale 31.55 31.5 31.6 31.9(0.2) 31.6      31.7
mxfp8                   31.52 31.5 31.5 31.6(0.1) 31.5      31.5
mxfp8+e5m2              25.54 25.6 25.6 25.5(0.1) 25.6      25.6
mxfp8+floor             30.64 30.0 30.1 29.4(0.4) 28.1      30.3(0.1)
mxfp8+even              31.18 30.8 30.8 30.6(0.1) 29.7      30.9(0.2)
mxfp4                   18.76 17.6 17.5 16.5(0.1) 16.2      18.7
mxfp4+floor             18.79 17.9 18.0 17.0(0.1) 15.8      18.7
mxfp4+even              19.03 18.1 18.2 17.2(0.1) 16.5      19.0
nvfp4                   20.44 20.7 20.7 20.9(0.2) 21.8      20.4
nvfp4+2d                19.07 17.8 17.3 14.9(0.1) 16.5(0.1) 18.2(0.8)
nvfp4+rht               20.44 20.3 20.4 20.2(0.2) 19.0(0.1) 20.4
nvfp4+sr                17.25 17.4 17.4 17.5      17.5      17.2(0.1)
nvfp4+2d+sr             15.97 14.7 14.2 11.6      12.0(0.1) 14.2(1.0)
nvfp4+row_scaled        20.43 20.7 20.7 21.0(0.2) 21.8      20.4
nvfp4+4over6+mse        21.21 21.2 21.2 21.3(0.1) 22.0      21.2
"""
ROWS: dict[str, dict[str, float]] = {
    "token_scale_2": {
        "fp8_current": 31.5, "fp8_current+e5m2": 25.6, "fp8_block+2d": 31.5, "fp8_block+fp32_scale": 31.8,
        "mxfp8": 31.5, "nvfp4": 20.4, "nvfp4+row_scaled": 20.4, "nvfp4+2d": 0.2,
    },
    "token_scale_4": {
        "fp8_current+e5m2": 25.5, "fp8_block+fp32_scale": 31.8, "mxfp8": 31.5, "nvfp4+row_scaled": 20.4,
        "nvfp4+2d": 0.0,
    },
}  # fmt: skip
"""Format -> SQNR of the distribution. A format whose tensor scale underflows half of the rows is left out: its median
depends on one draw of the largest magnitude."""


def published_db(format: str, distribution: str) -> float | None:
    """The SQNR of Quartet II on N(0, 1), or None."""
    mse = PUBLISHED_MSE.get(format) if distribution == "normal" else None
    return None if mse is None else -10 * math.log10(mse * 1e-3)


def emulated_db(format: str, distribution: str) -> tuple[float, float] | None:
    """(mean, standard deviation), or None."""
    return EMULATED.get((format, distribution))


def _cell(text: str) -> tuple[float, float]:
    mean, _, deviation = text.rstrip(")").partition("(")
    return float(mean), float(deviation or 0)


EMULATED = {
    (name, column): _cell(cell)
    for name, *cells in map(str.split, TABLE.strip().splitlines())
    for column, cell in zip(COLUMNS, cells, strict=True)
}
