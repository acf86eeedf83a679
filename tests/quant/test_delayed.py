"""States of delayed scaling: when a step ends, what is recorded, and by which scale each direction is encoded."""

import copy

import pytest
import torch
from cases import REPRESENTATIVE

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.splits import Splits
from hqsweep.quant import HybridQuantizer
from hqsweep.quant.delayed import DelayedState, SlotStates, begin, grids_of

FP8, KEY = parse("fp8_delayed+history4"), RngKey(seed=0, slot="test", step=0)
MOST_RECENT = parse("fp8_delayed+history4+most_recent")


def states(quantizer, step=1, record=True, **own):
    slots = {d: getattr(quantizer, d) for d in ("rowwise", "columnwise")}
    slots = {d: own.get(d) or DelayedState(f.history) for d, f in slots.items() if hasattr(f, "history")}
    return SlotStates(states=slots, step=step, record=record)


def at(slot, step, record=True):
    return SlotStates(states=slot.states, step=step, record=record)


def matrix(amax, seed=0):
    x = draw("normal", 32, 64, seed).clamp(-0.5, 0.5)
    x[3, 5] = -amax
    return x


def scale_amax(operand):
    """The amax that a scale_inv comes from; 448 where the scale is 1."""
    return operand.buffers["s"].item() * operand.format.element.max


@pytest.mark.feature("F22")
def test_a_scale_comes_from_the_largest_amax_of_earlier_steps():
    quantizer = HybridQuantizer.parse("fp8_delayed+history4")
    slot, seen = states(quantizer), []
    for step, amax in enumerate([8.0, 2.0, 1.0, 1.0, 1.0, 4.0, 1.0], start=1):
        operands = quantizer.quantize(matrix(amax), states=at(slot, step))
        assert operands.rowwise.buffers["s"] == operands.columnwise.buffers["s"].item()
        seen.append(scale_amax(operands.rowwise))
    assert seen == pytest.approx([448, 8, 8, 8, 8, 2, 4])  # of four entries one is of the present step
    last = slot.states["rowwise"]
    assert last.step == 7 and last.history.tolist() == [1.0, 1.0, 1.0, 4.0]


def test_the_most_recent_amax_alone():
    quantizer = HybridQuantizer.parse("fp8_delayed+e5m2+most_recent+history1")
    slot = states(quantizer)
    seen = [scale_amax(quantizer.quantize(matrix(a), states=at(slot, s)).rowwise) for s, a in ((1, 8), (2, 2), (3, 1))]
    assert seen == pytest.approx([57344, 8, 2])


def frozen_amaxes(format, amaxes):
    quantizer = HybridQuantizer.parse(format)
    slot = states(quantizer)
    return [scale_amax(quantizer.quantize(matrix(a), states=at(slot, s)).rowwise) for s, a in enumerate(amaxes, 1)]


def test_an_inf_keeps_the_scale_for_as_long_as_the_history_has_it_and_is_skipped_on_request():
    inf = float("inf")
    seen = frozen_amaxes("fp8_delayed+history3", [8.0, inf, 4.0, 2.0, 2.0, 2.0, 2.0])
    assert seen == pytest.approx([448, 8, 8, 8, 8, 4, 2])  # step 2's inf holds the scale of steps 3 to 5
    seen = frozen_amaxes("fp8_delayed+history3+most_recent", [8.0, inf, 4.0, 2.0])
    assert seen == pytest.approx([448, 8, 8, 4])
    for option in ("", "+most_recent"):
        seen = frozen_amaxes(f"fp8_delayed+history3{option}+skip_nonfinite", [8.0, inf, 4.0, 2.0, 2.0, 2.0, 2.0])
        without = frozen_amaxes(f"fp8_delayed+history3{option}", [8.0, 4.0, 2.0, 2.0, 2.0, 2.0])
        assert seen == [*without[:2], *without[1:]]  # as if the step had not been
    assert frozen_amaxes("fp8_delayed+skip_nonfinite", [inf, 2.0, 1.0])[2] == pytest.approx(2)


def test_microbatches_of_a_step_share_a_scale_and_add_to_one_amax():
    quantizer = HybridQuantizer.parse("fp8_delayed")
    slot = states(quantizer)
    for amax in (3.0, 7.0, 5.0):
        assert scale_amax(quantizer.quantize(matrix(amax), states=at(slot, 1)).rowwise) == 448
    assert slot.states["rowwise"].history[0] == slot.states["columnwise"].history[0] == 7
    assert scale_amax(quantizer.quantize(matrix(1.0), states=at(slot, 2)).rowwise) == pytest.approx(7)


def test_nothing_changes_without_recording():
    quantizer = HybridQuantizer.parse("fp8_delayed|fp8_delayed+e5m2@rowwise_dequantized")
    slot = states(quantizer)
    quantizer.quantize(matrix(3.0), states=at(slot, 1))
    before = copy.deepcopy({d: s.state_dict() for d, s in slot.states.items()})
    seen = [quantizer.quantize(matrix(9.0), states=at(slot, s, record=False)).rowwise for s in (1, 2, 5, None)]
    assert [scale_amax(row) for row in seen] == pytest.approx([448, 3, 3, 3])  # within the step, and after it
    statistics = quantizer.statistics(matrix(9.0), states=at(slot, 2))
    assert statistics["rowwise"]["scale_max"] == pytest.approx(3 / 448)
    for direction, state in slot.states.items():
        assert all(torch.equal(t, before[direction][name]) for name, t in state.state_dict().items())


def test_a_step_that_sees_only_zeros_is_no_step():
    quantizer = HybridQuantizer.parse("fp8_delayed+history4")
    slot = states(quantizer)
    for step, amax in ((1, 2.0), (2, 0.0), (3, 0.0)):
        operands = quantizer.quantize(matrix(amax) * (amax > 0), states=at(slot, step))
    assert scale_amax(operands.rowwise) == pytest.approx(2)
    assert slot.states["rowwise"].history.tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("row", [text for text in REPRESENTATIVE if not parse(text).rht])
def test_the_columnwise_amax_is_that_of_what_is_encoded(row):
    """From the dequantized row: with saturation under fp8_delayed, with rounding elsewhere."""
    quantizer = HybridQuantizer.parse(f"{row}|fp8_delayed+e5m2@rowwise_dequantized")
    slot = states(quantizer)
    for step, amax in ((1, 3.3), (2, 7.7)):
        operands = quantizer.quantize(matrix(amax), key=KEY, states=at(slot, step))
        assert slot.states["columnwise"].history[0] == operands.rowwise.dequantize().abs().max()
    assert scale_amax(operands.columnwise) == pytest.approx(3.3, rel=0.1)
    if row == "fp8_delayed":
        assert slot.states["columnwise"].history[0] < 4 < slot.states["rowwise"].history[0]


@pytest.mark.parametrize("text", ["fp8_delayed|fp8_current", "mxfp8|fp8_delayed", "fp8_delayed|nvfp4+rht"])
def test_only_what_is_made_is_recorded_and_other_directions_are_as_without(text):
    quantizer, x = HybridQuantizer.parse(text), matrix(3.0)
    slot = states(quantizer)
    ((direction, state),) = slot.states.items()
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}[direction]
    operands = getattr(quantizer.quantize(x, **{direction: None}, states=slot), other)
    alone = HybridQuantizer(*[getattr(quantizer, other)] * 2) if "rht" not in text else None
    if alone:
        expected = getattr(alone.quantize(x, **{direction: None}), other)
        assert all(torch.equal(t, operands.buffers[name]) for name, t in expected.buffers.items())
    assert state.step is None and not state.history.any()
    quantizer.quantize(x, states=slot)
    assert state.step == 1 and state.history[0] == 3


def test_without_states_or_without_a_step_it_is_refused():
    quantizer, x = HybridQuantizer.parse("mxfp8|fp8_delayed"), matrix(1.0)
    with pytest.raises(UserError, match=r"quantize: columnwise fp8_delayed takes its scale from .* give states"):
        quantizer.quantize(x)
    with pytest.raises(UserError, match=r"fp8_delayed counts the steps of a training; .*quantization\(step=...\)"):
        quantizer.quantize(x, states=states(quantizer, step=None))


def test_state_dict_has_the_step():
    state = DelayedState(4)
    assert state.state_dict().keys() == {"history", "amax", "_extra_state"}
    begin([state], 7, FP8)
    state.history[0] = 5.0
    other = DelayedState(4)
    other.load_state_dict(state.state_dict())
    assert other.step == 7 and torch.equal(other.history, state.history)
    other.load_state_dict(DelayedState(4).state_dict())
    assert other.step is None


@pytest.mark.gpu
def test_gpu_states_are_those_of_the_cpu():
    quantizer = HybridQuantizer.parse("fp8_delayed+history3|fp8_delayed+e5m2+history3@rowwise_dequantized")
    slots = {device: states(quantizer) for device in ("cpu", "cuda")}
    for step, distribution in enumerate(("normal", "heavy", "nonfinite", "tiny", "zeros"), start=1):
        operands = {}
        for device, slot in slots.items():
            for state in slot.states.values():
                state.to(device)
            operands[device] = quantizer.quantize(draw(distribution, 48, 80).to(device), states=at(slot, step))
        for direction in ("rowwise", "columnwise"):
            a, b = (getattr(operands[device], direction).buffers for device in slots)
            assert all(torch.equal(t.view(torch.uint8), b[name].cpu().view(torch.uint8)) for name, t in a.items())
            a, b = (slot.states[direction].history.cpu() for slot in slots.values())
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.feature("F83")
@pytest.mark.parametrize("format", [FP8, MOST_RECENT], ids=str)
@pytest.mark.parametrize("held", [False, True])
def test_states_of_a_group_go_on_as_each_by_itself(format, held):
    """Some at the present step already, some that never saw an amax, one with an infinite one."""
    formats = {"rowwise": format, "columnwise": None}
    together, alone = ([DelayedState(format.history) for _ in range(5)] for _ in range(2))
    amaxes = torch.tensor([[1.0, 4.0, 0.5], [0.0, 0.0, 0.0], [2.0, torch.inf, 3.0], [3.0, 0.0, 1.0], [7.0, 8.0, 9.0]])
    for step, column in enumerate(amaxes.t()):
        early = (alone[3], together[3]) if step == 1 else ()
        for state in early:
            begin([state], step, format)
        grids = grids_of([slot(state, step, held) for state in together], formats)["rowwise"]
        expected = [grids_of([slot(state, step, held)], formats)["rowwise"][0] for state in alone]
        assert all(torch.equal(ours["s"], theirs["s"]) for ours, theirs in zip(grids, expected, strict=True))
        for ours, theirs, amax in zip(together, alone, column, strict=True):
            assert torch.equal(ours.history, theirs.history) and torch.equal(ours.amax, theirs.amax)
            assert ours.step == theirs.step == (None if held else step)
            for state in (ours, theirs):
                state.history[0] = amax
                state.step = step  # of a tensor that is held: a step has used it
    later = [grid["s"] for grid in grids_of([slot(state, None, False) for state in together], formats)["rowwise"]]
    expected = [grids_of([slot(state, None, False)], formats)["rowwise"][0]["s"] for state in alone]
    assert all(map(torch.equal, later, expected)) and len({float(amax) for amax in later}) >= 3


def slot(state, step, held):
    return SlotStates(states={"rowwise": state}, step=step, record=step is not None, held=held)


@pytest.mark.parametrize(
    "text",
    [
        "fp8_delayed",
        "mxfp8|fp8_delayed",
        "fp8_delayed|fp8_delayed+e5m2@rowwise_dequantized",
        "nvfp4|fp8_delayed@rowwise_dequantized",
        "nvfp4+row_scaled|fp8_delayed@rowwise_dequantized",
        "mxfp8|fp8_delayed@rowwise_dequantized",
    ],
)
def test_slots_of_a_group_note_what_each_notes_of_its_own_rows(text):
    """The rowwise scale saturates, so that a wrong one shows in what is decoded."""
    quantizer, rows = HybridQuantizer.parse(text), (32, 0, 96)
    x = draw("heavy", sum(rows), 64, 3)
    together, alone = ([states(quantizer, step=1) for _ in rows] for _ in range(2))
    for slot in (*together, *alone):
        for state in slot.states.values():
            state.amax.fill_(x.abs().max() / 3)
            state.step = 1
    splits = Splits.of(rows, len(x))
    quantizer.quantize(x, states=together, splits=splits)
    for slot, (start, end) in zip(alone, splits.spans, strict=True):
        if end > start:
            quantizer.quantize(x[start:end], states=slot)
    for ours, theirs in zip(together, alone, strict=True):
        for direction, state in ours.states.items():
            assert torch.equal(state.history, theirs.states[direction].history), direction
    assert all(float(state.history[0]) > 0 for state in together[2].states.values())
