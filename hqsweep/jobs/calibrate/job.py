"""calibrate: do quantizers and autograd agree with theory?

sqnr        error of every format on matrices of known distributions: theory, published values, an independent emulation
row median  the same for the median SQNR of a row, where rows have scales of their own
gemm        error of the three products of a Linear, predicted from the errors of their operands
teacher     the loss floor of a quantized student of a linear teacher, predicted from the errors of x and w

Parity proves that implementations agree; calibrate finds a fault that all of them share.
"""

from pathlib import Path

import torch

from hqsweep.config.job import CalibrateConfig
from hqsweep.jobs.calibrate.sqnr import sqnr_rows
from hqsweep.jobs.calibrate.teacher import gemm_rows, teacher_row
from hqsweep.jobs.sink import Sink
from hqsweep.ops.fingerprint import kernel_digest
from hqsweep.train.build import pick_device

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
