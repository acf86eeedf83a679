"""What quantization notes of NaN and inf: which slot, direction and kind, in which formats, and what is said of it."""

import math
import warnings

import pytest
import torch
from cases import KERNELS, REPRESENTATIVE, crossed

from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.quantize import nonfinite as module
from hqsweep.ops.quantize.nonfinite import Seen, counted, for_slot, nonfinite
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.splits import Splits
from hqsweep.quant import HybridQuantizer

INF, NAN = math.inf, math.nan
FORMATS = [text for text in REPRESENTATIVE if text in KERNELS and "delayed" not in text]


@pytest.fixture(autouse=True)
def anew():
    nonfinite(forget=True)
    yield
    nonfinite(forget=True)


def met(text, x, *, splits=None, backend="auto"):
    """What is noted of x in a format, of both directions; nobody is warned."""
    row, column = parse(text).rowwise_form, parse(text).columnwise_form
    key = RngKey(seed=0, slot="t", step=0)
    keys = [key] * splits.count if splits else key
    with counted(), for_slot("layer", "input", HybridQuantizer(row, column), x):
        quantize(x, Target(row, key=keys), Target(column, key=keys), splits=splits, backend=backend)
    return {(seen.slot, seen.kind) for seen in nonfinite(forget=True)}


def spoiled(value, dtype=torch.bfloat16, shape=(160, 96), at=(150, 70), device="cpu"):
    x = draw("normal", *shape, 0).to(dtype)
    x[at] = value
    return x.to(device)


BOTH = {"layer.input.rowwise", "layer.input.columnwise"}


WAYS = [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.float16, "auto"), (torch.bfloat16, "reference")]


@pytest.mark.parametrize(("text", "way"), crossed(FORMATS, WAYS), ids=str)
def test_a_nan_and_an_inf_are_noted_in_both_directions(text, way):
    dtype, backend = way
    assert met(text, spoiled(1.0, dtype), backend=backend) == set()
    for at in ((0, 0), (150, 70), (159, 95)):
        found = met(text, spoiled(NAN, dtype, at=at), backend=backend)
        assert found == {(slot, "nan") for slot in BOTH}
        found = met(text, spoiled(-INF, dtype, at=at), backend=backend)
        transformed = "rht" in text and backend == "auto"  # inf - inf
        assert {(slot, "inf") for slot in BOTH if not (transformed and slot.endswith("columnwise"))} <= found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", FORMATS)
def test_the_kernels_of_a_gpu_note_what_those_of_the_cpu_note(text, dtype):
    for shape in ((160, 96), (256, 256), (128, 64), (384, 48)):  # general, fast, mx and flat kernels
        for at in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 2)):
            for value in (NAN, INF, 1.0):
                x = spoiled(value, dtype, shape, at)
                found = met(text, x.cuda())
                if "current" not in text or value is not NAN:  # FP8 keeps its NaN, which nothing has to tell
                    assert found == met(text, x), (shape, at, value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("text", ["nvfp4", "mxfp4", "mxfp8", "fp8_block", "nvfp4+sr"])
def test_the_rows_of_experts_are_of_one_slot(text, device):
    splits = Splits.of([64, 32, 0, 32], 128)
    for value in (NAN, 1.0):
        x = spoiled(value, shape=(128, 96), at=(70, 3), device=device)
        assert met(text, x, splits=splits) == ({(slot, "nan") for slot in BOTH} if value is NAN else set())


def test_each_direction_is_told_by_its_own_format():
    x = spoiled(NAN)
    with counted(), for_slot("layer", "input", HybridQuantizer.parse("mxfp8|nvfp4"), x):
        quantize(x, parse("mxfp8"), parse("nvfp4"))
    row, column = nonfinite()
    assert row == Seen("layer.input.rowwise", "nan", "mxfp8", False)
    assert column == Seen("layer.input.columnwise", "nan", "nvfp4", True)
    assert "reaches the outputs" in row.sentence() and "to a number" in column.sentence(" at step 3")


@pytest.mark.parametrize("text", FORMATS)
def test_what_a_format_keeps_is_what_its_values_say(text):
    format = parse(text)
    if format.rht or format.stochastic:
        return
    for value, kept in ((NAN, format.keeps_nan), (INF, format.keeps_inf)):
        x = spoiled(value, torch.float32)
        decoded = format.decode(format.encode(x), tuple(x.shape))
        assert bool(decoded[150, 70].isfinite()) == (not kept)


def test_nobody_s_calls_are_not_noted_and_a_slot_is_said_once(monkeypatch):
    quantize(spoiled(NAN), parse("nvfp4"))
    assert nonfinite() == []
    with pytest.warns(RuntimeWarning, match=r"layer.input.rowwise \(nvfp4\): a NaN was quantized to a number, as"):
        _call("layer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _call("layer")
    with pytest.warns(RuntimeWarning, match="other.input.rowwise"):
        _call("other")
    monkeypatch.setattr(module, "MOST_TOLD", 2)
    with pytest.warns(RuntimeWarning, match="more than 2 slots have met such"):
        _call("third")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _call("fourth")
    assert len(nonfinite()) == 4


def _call(name):
    x = spoiled(NAN)
    with for_slot(name, "input", HybridQuantizer.parse("nvfp4"), x):
        quantize(x, parse("nvfp4"))
