"""The compiled kernels against the reference, byte for byte, over random cases of each format.

Hypothesis draws formats, dtype, distribution and a seed; each draw becomes many small matrices that differ in shape,
strides, outputs and given amaxes (fuzz_cases.py). Nothing is excluded and nothing has a tolerance: the order of the
sums in the Hadamard transform and in 4over6 is part of the formats here (formats/hadamard.py, nvfp4_scales.py), so the
three implementations agree on them too; what other orders can change is bounded by tests/formats/test_golden.py.
A failure prints the case: `check(Case(...))` is the same failure again. HQSWEEP_FUZZ_QUANTIZE=10000 makes that many
cases a format on the CPU instead of the usual ones.
"""

import os

import pytest
import torch
from cases import HIGH
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.fuzz import instruction_sets
from support.fuzz.fuzz_cases import DISTRIBUTIONS, DTYPES, NAMES, Case, differences, reference, tensor, texts, variants
from support.ops.calls import quantize

CPU_CASES = int(os.environ.get("HQSWEEP_FUZZ_QUANTIZE", 400))
GPU_CASES, SHARDS, BATCH = 2_000, 4, 10
PARTNERS = {name: texts(name) for name in (*NAMES, *HIGH)}


@st.composite
def draws(draw, name: str) -> dict:
    """A format of that name in one direction, and in the other nothing, or any format at all."""
    texts_of = [draw(st.sampled_from(PARTNERS[name])), None]
    if draw(st.integers(0, 2)):
        texts_of[1] = draw(st.sampled_from(PARTNERS[draw(st.sampled_from(sorted(PARTNERS)))]))
    if draw(st.booleans()):
        texts_of.reverse()
    row, column = texts_of
    return {
        "row": row,
        "column": column,
        "dequantized": row is not None and column is not None and draw(st.booleans()),
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "distribution": draw(st.sampled_from(sorted(DISTRIBUTIONS))),
    }


def check(case: Case, device: str = "cpu") -> None:
    """One case by the kernel on a device and by the reference on the CPU."""
    x = tensor(case)
    expected = reference(case, x)
    got = call(
        case,
        x if device == "cpu" else tensor(case, device),
        [grid and {k: v.to(device) for k, v in grid.items()} for _, grid in expected],
    )
    wrong = [differences(*pair) for pair in zip((got.rowwise, got.columnwise), (e for e, _ in expected), strict=True)]
    assert wrong == [[], []], f"check({case!r}, {device!r})"


def call(case: Case, x: torch.Tensor, grids: list[dict | None]):
    return quantize(
        x,
        *case.formats(),
        columnwise_source="rowwise_dequantized" if case.dequantized else "original",
        rowwise_output=case.outputs[0],
        columnwise_output=case.outputs[1],
        rowwise_key=case.keys()[0],
        columnwise_key=case.keys()[1],
        rowwise_grid=grids[0],
        columnwise_grid=grids[1],
        backend="auto" if any(format and format.high_precision for format in case.formats()) else "kernel",
    )


def run_cases(name: str, device: str, wanted: int, shard: int = 0) -> None:
    done = 0

    @seed(shard)
    @settings(
        max_examples=wanted // BATCH,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(draws(name), st.integers(0, 2**32 - 1))
    def batch(drawn, number):
        nonlocal done
        with torch.inference_mode():
            for case in variants(drawn, number, BATCH):
                check(case, device)
                done += 1

    batch()
    assert done >= wanted


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", NAMES)
def test_cpu_kernel_equals_reference(name, shard, monkeypatch):
    """The shards share out the instruction sets, the best one first."""
    isas = instruction_sets.available()[::-1]
    instruction_sets.use(monkeypatch, isas[shard % len(isas)])
    run_cases(name, "cpu", -(-CPU_CASES // SHARDS), shard)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_cuda_kernel_equals_reference(name):
    run_cases(name, "cuda", GPU_CASES)
