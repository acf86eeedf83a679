"""What a format does to matrices of known distributions, against theory and against what others measured.

normal, laplace, t5, t3   independent draws, for which jobs/sqnr_theory.py integrates the error
outlier_channels          N(0, 1) with one channel in a hundred 30 times as large
token_scale_S             N(0, 1) with a factor exp(S z) for each row, z at the quantiles of N(0, 1) in random order
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hqsweep.config.job import CALIBRATE_DISTRIBUTIONS
from hqsweep.formats import Format, RngKey, parse
from hqsweep.jobs.calibrate.row import Expectation, calibration_row
from hqsweep.jobs.calibrate.sqnr_tables import ROWS, emulated_db, published_db
from hqsweep.jobs.calibrate.sqnr_theory import theoretical_sqnr_db
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target

ROUNDED_DB = 0.1
"""The tolerance, in dB, for the rounding of published numbers, and for one draw."""
CHOICE_DB = {"outlier_channels": 0.2, "token_scale_2": 0.2}
"""The tolerance of the emulation, in dB, for which few channels or rows are the large ones, and where their scales
fall."""
DRAW_DB = {"normal": 0.05, "laplace": 0.05, "t5": 0.06, "t3": 0.4}
"""The tolerance of theory, in dB, for one draw of 2 million: t3 has no fourth moment, so that its own power is
uncertain."""


def _outlier_channels(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    x = rng.standard_normal((rows, cols))
    x[:, rng.choice(cols, max(1, cols // 100), replace=False)] *= 30
    return x


def _token_scale(sigma: float) -> Callable[[np.random.Generator, int, int], np.ndarray]:
    def draw(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
        z = rng.permutation(stats.norm.ppf((np.arange(rows) + 0.5) / rows))
        return rng.standard_normal((rows, cols)) * np.exp(sigma * z)[:, None]

    return draw


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "normal": lambda rng, rows, cols: rng.standard_normal((rows, cols)),
    "laplace": lambda rng, rows, cols: rng.laplace(size=(rows, cols)),
    "t5": lambda rng, rows, cols: rng.standard_t(5, (rows, cols)),
    "t3": lambda rng, rows, cols: rng.standard_t(3, (rows, cols)),
    "outlier_channels": _outlier_channels,
    "token_scale_2": _token_scale(2),
    "token_scale_4": _token_scale(4),
}
assert tuple(DISTRIBUTIONS) == CALIBRATE_DISTRIBUTIONS, "the names stand in config/job.py, in this order"


def draw(distribution: str, rows: int, cols: int, seed: int) -> Tensor:
    """float32 [rows, cols]; the same bits for the same arguments."""
    name = int.from_bytes(hashlib.sha256(distribution.encode()).digest()[:4], "little")
    values = DISTRIBUTIONS[distribution](np.random.default_rng([seed, name]), rows, cols)
    return torch.from_numpy(values).float()


def sqnr_rows(
    formats: Sequence[str], distribution: str, shape: tuple[int, int], seed: int, device: torch.device
) -> Iterator[dict[str, object]]:
    """Rows of every format on one matrix, one for each number that there is to hold it against."""
    x = draw(distribution, *shape, seed).to(device)
    for format in map(parse, formats):
        key = RngKey(seed=seed, slot=f"calibrate/{distribution}", step=0)
        measured = quantize(x, Target(format, key=key), statistics=True).rowwise_statistics.row()
        known = list(expectations(format, distribution, shape, measured["amax"]))
        for expected in known or [None]:
            yield calibration_row("sqnr", str(format), distribution, measured["sqnr_db"], expected, measured)
        if (median := ROWS.get(distribution, {}).get(str(format))) is not None:
            expected = Expectation.around("emulated", median, 2 * ROUNDED_DB)
            yield calibration_row(
                "row median", str(format), distribution, measured["row_sqnr_db_median"], expected, measured
            )


def expectations(
    format: Format, distribution: str, shape: tuple[int, int], amax: float | None = None
) -> Iterator[Expectation]:
    """Theory (of matrices with this amax, or of all), what was published, and an independent emulation, as far as they
    speak of the format."""
    if (theory := theoretical_sqnr_db(format, distribution, *shape, amax)) is not None:
        yield Expectation.around("theory", theory, DRAW_DB[distribution])
    if (published := published_db(str(format), distribution)) is not None:
        yield Expectation.around("published", published, ROUNDED_DB)
    if (emulated := emulated_db(str(format), distribution)) is not None:
        mean, deviation = emulated
        yield Expectation.around("emulated", mean, ROUNDED_DB + CHOICE_DB.get(distribution, 0) + 3 * deviation)
