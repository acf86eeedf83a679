"""calibrate: do quantizers and autograd agree with theory?

sqnr        error of every format on matrices of known distributions: theory, published values, an independent emulation
row median  the same for the median SQNR of a row, where rows have scales of their own
gemm        error of the three products of a Linear, predicted from the errors of their operands
teacher     the loss floor of a quantized student of a linear teacher, predicted from the errors of x and w

Parity proves that implementations agree; calibrate finds a fault that all of them share.

The distributions of `sqnr`:

normal, laplace, t5, t3   independent draws, for which jobs/sqnr_theory.py integrates the error
outlier_channels          N(0, 1) with one channel in a hundred 30 times as large
token_scale_S             N(0, 1) with a factor exp(S z) for each row, z at the quantiles of N(0, 1) in random order

The teacher is y = W x with x ~ N(0, 1) in 128 dimensions and 64 outputs, no noise. The student's linear quantizes x
and w, so its relative error cannot be below NSR_x + NSR_w, where NSR = 10^(-SQNR / 10) on N(0, 1) for the rowwise
formats. Training adds 0.8 to 1.35 dB, because straight-through gradients park weights at the edges of their rounding
intervals. This was measured with an independent emulation of seven recipes, 3 seeds each; standard deviations were up
to 0.3 dB.

`gemm` are the three products of one Linear on N(0, 1) matrices. The relative errors of independent operands add up
there, too.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hqsweep.config.job import CALIBRATE_DISTRIBUTIONS, CalibrateConfig
from hqsweep.formats import Format, RngKey, parse
from hqsweep.jobs.sink import Sink
from hqsweep.jobs.sqnr_theory import theoretical_sqnr_db
from hqsweep.nn import Linear, quantization
from hqsweep.ops.fingerprint import kernel_digest
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.stats import output_error
from hqsweep.optim import FusedAdam
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.sections import LinearQuantizers
from hqsweep.train.build import pick_device

STATISTICS = ("row_sqnr_db_median", "row_sqnr_db_p5", "underflow_pct")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """An expected number of decibels, its origin (theory, published, emulated, predicted), and the range that
    passes."""

    source: str
    expected_db: float
    low_db: float
    high_db: float

    @classmethod
    def around(cls, source: str, expected_db: float, tolerance_db: float) -> Self:
        return cls(
            source=source, expected_db=expected_db, low_db=expected_db - tolerance_db,
            high_db=expected_db + tolerance_db,
        )  # fmt: skip


def calibration_row(
    check: str,
    subject: str,
    case: str,
    measured_db: float,
    expected: Expectation | None,
    statistics: Mapping[str, float] | None = None,
) -> dict[str, object]:
    """Return a row with PASS from low_db to high_db, else FAIL; SKIP without an expectation.

    statistics: the statistics of the matrix. Median and 5th percentile of the rows' SQNR, and the underflow, are
    kept.
    """
    row: dict[str, object] = {"check": check, "subject": subject, "case": case, "measured_db": measured_db}
    row |= {name: statistics[name] if statistics else None for name in STATISTICS}
    if expected is None:
        nothing = dict.fromkeys(("source", "expected_db", "low_db", "high_db"))
        return row | nothing | {"status": "SKIP", "note": "no closed form and no published value"}
    good = expected.low_db <= measured_db <= expected.high_db
    note = None if good else (
        f"measured {measured_db:.2f} dB; {expected.source} {expected.expected_db:.2f} dB, which allows"
        f" {expected.low_db:.2f} to {expected.high_db:.2f}"
    )  # fmt: skip
    limits = {"expected_db": expected.expected_db, "low_db": expected.low_db, "high_db": expected.high_db}
    finite = {name: value if math.isfinite(value) else None for name, value in limits.items()}
    return row | finite | {"source": expected.source, "status": "PASS" if good else "FAIL", "note": note}


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
"""Format -> SQNR of the distribution. Formats whose tensor scale underflows half of the rows are left out, because
their median depends on one draw of the largest magnitude."""


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


ROUNDED_DB = 0.1
"""The tolerance, in dB, for the rounding of published numbers, and for one draw."""
CHOICE_DB = {"outlier_channels": 0.2, "token_scale_2": 0.2}
"""The tolerance of the emulation, in dB. It covers which channels or rows are large, and where their scales fall."""
DRAW_DB = {"normal": 0.05, "laplace": 0.05, "t5": 0.06, "t3": 0.4}
"""The tolerance of theory, in dB, for one draw of 2 million. t3 has no fourth moment, so its power is uncertain."""


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
    """The rows of every format on one matrix: one row for each expectation."""
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
    """The expectations for a format, as far as they exist: theory, a published number, and an independent emulation.

    Theory is for matrices with this amax, or for all matrices.
    """
    if (theory := theoretical_sqnr_db(format, distribution, *shape, amax)) is not None:
        yield Expectation.around("theory", theory, DRAW_DB[distribution])
    if (published := published_db(str(format), distribution)) is not None:
        yield Expectation.around("published", published, ROUNDED_DB)
    if (emulated := emulated_db(str(format), distribution)) is not None:
        mean, deviation = emulated
        yield Expectation.around("emulated", mean, ROUNDED_DB + CHOICE_DB.get(distribution, 0) + 3 * deviation)


DIM, OUTPUTS, BATCH, LR = 128, 64, 512, 3e-3
GEMM_DIM = 1024
PARKING_DB = (0.8, 1.35)
SPREAD_DB = 0.3
"""The spread of floors between seeds, in dB."""
GEMM_DB = 0.15
"""The tolerance, in dB, for products of errors, and for the correlation of rounding errors with values."""
EXACT_DB = 100.0
"""The SQNR that FP32 must reach; its prediction is infinite."""


def teacher_row(name: str, section: dict[str, str], steps: int, seed: int, device: torch.device) -> dict[str, object]:
    """Train a student and compare its floor with the prediction."""
    quantizers = LinearQuantizers.parse(section, f"calibrate.students.{name}")
    floor = loss_floor_db(quantizers, steps, seed, device)
    predicted = _sum_db(_nsr(quantizers.input.rowwise), _nsr(quantizers.weight.rowwise))
    near, far = PARKING_DB
    low = EXACT_DB if math.isinf(predicted) else predicted - far - SPREAD_DB
    high = predicted - near + SPREAD_DB
    expected = Expectation(source="predicted", expected_db=predicted, low_db=low, high_db=high)
    return calibration_row("teacher", name, "loss floor", floor, expected)


def loss_floor_db(quantizers: LinearQuantizers, steps: int, seed: int, device: torch.device) -> float:
    """-10 log10 of the relative squared error that Adam reaches while its rate falls linearly to 0."""
    generator = torch.Generator().manual_seed(seed)
    teacher, first = (torch.randn(OUTPUTS, DIM, generator=generator) / math.sqrt(DIM) for _ in range(2))
    teacher, student = teacher.to(device), _linear(quantizers, first, device)
    optimizer = FusedAdam(student.parameters(), lr=LR, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / steps)
        x = torch.randn(BATCH, DIM, generator=generator).to(device)
        with quantization(seed=seed, step=step):
            loss = (student(x) - x @ teacher.t()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.randn(16 * BATCH, DIM, generator=generator).to(device)
    with torch.no_grad(), quantization(seed=seed, step=steps):
        return output_error(x @ teacher.t(), student(x))["sqnr_db"]


def gemm_rows(name: str, section: dict[str, str], seed: int, device: torch.device) -> Iterator[dict[str, object]]:
    """The rows of y, dx and dw of a Linear [1024, 1024] against float64, for 1024 tokens."""
    quantizers = LinearQuantizers.parse(section, f"calibrate.students.{name}")
    x, w, dy = (draw("normal", GEMM_DIM, GEMM_DIM, seed + i).to(device) for i in range(3))
    module, x = _linear(quantizers, w, device), x.requires_grad_()
    with quantization(seed=seed):
        y = module(x)
    y.backward(dy)
    exact = {"y": x.double() @ w.double().t(), "dx": dy.double() @ w.double(), "dw": dy.double().t() @ x.double()}
    results = {"y": y, "dx": x.grad, "dw": module.weight.grad}
    q = quantizers
    nsr = {
        "y": (_nsr(q.input.rowwise), _nsr(q.weight.rowwise)),
        "dx": (_nsr(q.grad_output.rowwise), _column_nsr(q.weight)),
        "dw": (_column_nsr(q.grad_output), _column_nsr(q.input)),
    }
    for gemm, expected in exact.items():
        predicted = _sum_db(*nsr[gemm])
        limits = Expectation.around("predicted", predicted, GEMM_DB)
        if math.isinf(predicted):
            limits = Expectation(source="predicted", expected_db=predicted, low_db=EXACT_DB, high_db=predicted)
        yield calibration_row(
            "gemm", name, gemm, output_error(expected.detach(), results[gemm].detach())["sqnr_db"], limits
        )


def _linear(quantizers: LinearQuantizers, w: Tensor, device: torch.device) -> Linear:
    """A linear with float32 inputs and outputs, so that only the recipe rounds."""
    module = Linear(w.shape[1], w.shape[0], name="student", recipe=quantizers, dtype=torch.float32).to(device)
    with torch.no_grad():
        module.weight.copy_(w)
    return module


def _nsr(format: Format) -> float:
    """10^(-SQNR / 10) on N(0, 1), from the first expectation, or measured where there is none."""
    if str(format) == "fp32":
        return 0.0
    known = next(expectations(format, "normal", (GEMM_DIM, GEMM_DIM)), None)
    if known is not None:
        return 10 ** (-known.expected_db / 10)
    key = RngKey(seed=0, slot="calibrate", step=0)
    quantized = quantize(draw("normal", GEMM_DIM, GEMM_DIM, 0), Target(format, key=key), statistics=True)
    return 10 ** (-quantized.rowwise_statistics.row()["sqnr_db"] / 10)


def _column_nsr(quantizer: HybridQuantizer) -> float:
    """The error of the columnwise operand. Made from the rowwise operand, it has the rowwise error as well."""
    twice = quantizer.columnwise_source == "rowwise_dequantized"
    return _nsr(quantizer.columnwise) + (_nsr(quantizer.rowwise) if twice else 0.0)


def _sum_db(*nsr: float) -> float:
    """-10 log10 of the sum; inf for an empty one."""
    return -10 * math.log10(sum(nsr)) if sum(nsr) else math.inf


DISTRIBUTION_STEPS = 500
"""Steps of a student that take about as long as the errors on one distribution."""


def run(config: CalibrateConfig, sink: Sink, workspace: Path) -> None:
    """All distributions, then all students; a miss is a row, not an exception."""
    section, seed = config.calibrate, config.seed
    device = pick_device(section.device)
    sink.rewind({})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    sink.manifest(device=name, kernel_digest=kernel_digest(device))
    work = [DISTRIBUTION_STEPS] * len(section.distributions) + [section.steps] * len(section.students)
    parts = [sum(work[:i]) / sum(work) for i in range(len(work))]

    def begin(i: int, phase: str) -> None:
        sink.phase(phase)
        sink.progress(i, len(work), None, None, part=parts[i])

    for i, distribution in enumerate(section.distributions):
        begin(i, f"errors on {distribution}")
        sink.rows("calibrate", list(sqnr_rows(section.formats, distribution, tuple(section.shape), seed, device)))
    for i, (name, quantizers) in enumerate(section.students.items(), start=len(section.distributions)):
        begin(i, f"student {name}")
        sink.rows("calibrate", [*gemm_rows(name, quantizers, seed, device)])
        sink.rows("calibrate", [teacher_row(name, quantizers, section.steps, seed, device)])
    sink.progress(len(work), len(work), None, None)
