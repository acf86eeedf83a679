"""calibrate: do quantizers and autograd agree with theory?

sqnr        error of every format on matrices of known distributions: theory, published values, an independent emulation
row median  the same for the median SQNR of a row, where rows have scales of their own
gemm        error of the three products of a Linear, predicted from the errors of their operands
teacher     the loss floor of a quantized student of a linear teacher, predicted from the errors of x and w

Parity proves that implementations agree; calibrate finds a fault that all of them share.

The teacher is y = W x with x ~ N(0, 1) in 128 dimensions and 64 outputs, no noise. The student's linear quantizes x
and w, so its relative error cannot be below NSR_x + NSR_w, where NSR = 10^(-SQNR / 10) on N(0, 1) for the rowwise
formats. Training adds 0.8 to 1.35 dB, because straight-through gradients park weights at the edges of their rounding
intervals. This was measured with an independent emulation of seven recipes, 3 seeds each; standard deviations were up
to 0.3 dB.

`gemm` are the three products of one Linear on N(0, 1) matrices. The relative errors of independent operands add up
there, too.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hqsweep.config.job import CalibrateConfig
from hqsweep.formats import Format, RngKey
from hqsweep.jobs.calibrate.sqnr import Expectation, calibration_row, draw, expectations, sqnr_rows
from hqsweep.jobs.sink import Sink
from hqsweep.nn import Linear, quantization
from hqsweep.ops.fingerprint import kernel_digest
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.stats import output_error
from hqsweep.optim import FusedAdam
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.sections import LinearQuantizers
from hqsweep.train.build import pick_device

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
