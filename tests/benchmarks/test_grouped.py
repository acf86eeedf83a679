"""benchmarks/grouped.py: every case runs, its bytes are those that are written, and a wrong kernel is never timed."""

import pytest
import torch
from support.benchmarks.host_clock import HostClock

from benchmarks import grouped, grouped_linear
from hqsweep.nn.core.call import LinearCall
from hqsweep.ops.layout import PackedExact
from hqsweep.quant.hybrid import DIRECTIONS

SIZES = (0, 32, 64, 0, 16)


def grouped_step():
    return grouped_linear.GroupedStep(2, 32, 64, 96, "cpu", HostClock())


@pytest.mark.parametrize("case", list(grouped_linear.cases()), ids=str)
def test_a_step_beside_torchs_products(case):
    step = grouped_step()
    row = step.measure(case, lambda: step.dy.clone(), 2 * step.dy.nbytes)
    assert row["us"] > 0 and row["floor_us"] >= row["products_us"] > 0 and row["torch_us"] > 0
    assert not case.on_device or row["products_us"] == row["torch_us"]
    assert ("pass" in row) == (case.recipe in grouped_linear.WITH_GOAL) == ("goal" in row)
    assert step.x.grad is not None


def test_the_floor_of_a_step_counts_every_operand():
    step, bytes_of = grouped_step(), {}
    for case in grouped_linear.cases():
        bytes_of[case.recipe, case.weights] = step.bytes_beside(case)
    x, w, dy = (2 * t.numel() for t in (step.x, step.w, step.dy))  # exact operands have 2 bytes an element, too
    codes = 64 * 64 + 64 * 64 // 32
    assert bytes_of["bf16", "each step"] == 0
    assert bytes_of["mxfp8", "kept"] == 3 * x + 2 * codes + 3 * dy
    assert bytes_of["mxfp8", "each step"] == bytes_of["mxfp8", "kept"] + 4 * w
    assert bytes_of["mxfp8", "once a step"] == bytes_of["mxfp8", "kept"] + 3 * w
    assert bytes_of["nvfp4", "each step"] - bytes_of["nvfp4", "kept"] == 6 * w
    assert bytes_of["nvfp4", "once a step"] - bytes_of["nvfp4", "kept"] == 4 * w


@pytest.mark.parametrize(("weights", "calls"), [("each step", [1, 1]), ("once a step", [2]), ("kept", [])])
@pytest.mark.parametrize("on_device", [False, True])
def test_weights_are_quantized_as_often_as_the_row_says(weights, calls, on_device, monkeypatch):
    """In the second step; a call for both directions is one."""
    directions, real = [], LinearCall.quantize

    def spy(self, tensor, x, **options):
        if tensor == "weight":
            directions.append(sum(options.get(direction) is not None for direction in DIRECTIONS))
        return real(self, tensor, x, **options)

    monkeypatch.setattr(LinearCall, "quantize", spy)
    step = grouped_step().ours(grouped_linear.StepCase(recipe="mxfp8", weights=weights, on_device=on_device))
    step()
    directions.clear()
    step()
    assert directions == calls


def test_both_ways_of_torch_are_the_same_products():
    step = grouped_step()
    step.plain()
    x, w = step.x.detach(), step.w.detach()
    y = torch._grouped_mm(x, w.mT, offs=step.offsets)
    for ours, theirs in zip(step.batched(), (y, step.x.grad, step.w.grad), strict=True):
        torch.testing.assert_close(ours.view_as(theirs), theirs, rtol=2**-7, atol=1e-2 * float(theirs.abs().max()))


@pytest.fixture
def group():
    return grouped.Group(SIZES, 64, "cpu", HostClock())


@pytest.mark.parametrize("case", grouped.CASES, ids=lambda case: case.name)
def test_every_case_runs_and_counts_its_bytes(case, group):
    row = group.quantize(case)
    assert row["us"] > 0 and row["loop_us"] > 0 and ("pass" in row) == (case.goal is not None)
    outputs, written = group.grouped(case)(), 0
    for result in (outputs.rowwise, outputs.columnwise):
        if isinstance(result, PackedExact):
            tensors = [result.matrix] if result.factor is None else [result.matrix, result.factor]
        else:
            tensors = [] if result is None else list(result.values())
        amaxes = 4 * len(SIZES) if case.has_amax and tensors and len(tensors) == 3 else 0  # not written anew
        written += sum(t.nbytes for t in tensors) - amaxes
    assert group.bytes_moved(case) == case.passes * group.x.nbytes + written


def test_bytes_that_differ_are_never_timed(group, monkeypatch):
    other = grouped.Group(SIZES, 64, "cpu", HostClock())
    other.x = other.x * 3
    monkeypatch.setattr(group, "grouped", other.grouped)
    monkeypatch.setattr(group.clock, "medians", lambda _: pytest.fail("timed"))
    for case in grouped.CASES:
        with pytest.raises(AssertionError, match="wise differs from a call for each expert; nothing was timed"):
            group.quantize(case)


@pytest.mark.parametrize("multiple", [1, 32])
def test_uneven_experts_are_all_the_rows_there_are(multiple):
    sizes = grouped.uneven(128, 65536, multiple)
    assert len(sizes) == 128 and sum(sizes) == 65536 and sizes[:8] == (0,) * 8
    assert min(sizes[8:]) > 0 and all(size % multiple == 0 for size in sizes) and max(sizes) > 4 * min(sizes[8:])


def test_offsets_are_timed_beside_torchs():
    assert set(grouped.offsets(HostClock(), 16, "cpu")) == {"us", "torch_us", "launch_us"}
