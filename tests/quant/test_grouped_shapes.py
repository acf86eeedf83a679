"""Groups of members of any shapes: each has the bytes that ops.quantize gives of it alone, and golden ones."""

import pickle
from dataclasses import replace

import pytest
import torch
from cases import DELAYED, NAMES, QUANTIZERS, SOME, WHOLE_BLOCKS, crossed
from support.golden.golden_cases import (
    FEW_QUANTIZER_CASES,
    Arrays,
    as_matrix,
    check_encoded,
    directions,
    format_of,
    golden_buffers,
)
from support.quant.shape_groups import KEY, SHAPES, alone, assert_members, group, slot_states, tensors

from hqsweep.formats import Identity
from hqsweep.ops.layout import Shapes
from hqsweep.quant import GroupedTensor, HybridQuantizer, hybrid
from hqsweep.quant.group import quantize_group
from hqsweep.quant.operand import flatten, unflatten

UNEVEN = [name for name, shapes in SHAPES.items() if len({k for _, k in shapes}) > 1]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
TEXTS = [*QUANTIZERS, "mxfp8|fp8_delayed@rowwise_dequantized"]


@pytest.mark.feature("A28")
@devices
@pytest.mark.parametrize(("text", "name"), crossed(TEXTS, SHAPES))
def test_members_have_the_bytes_of_ops_quantize_of_them_alone(name, text, device):
    """Given as tensors, and as a flat buffer with room to spare."""
    quantizer, x = HybridQuantizer.parse(text), tensors(SHAPES[name])
    expected = alone(x, quantizer, states=quantizer.delayed)
    flat = torch.cat([part.flatten() for part in x] + [torch.full((7,), torch.nan, dtype=torch.bfloat16)]).to(device)
    inputs = ([part.to(device) for part in x], {}), (flat, {"shapes": SHAPES[name]})
    for source, how in inputs:
        states = slot_states(quantizer, len(x), device)
        w = GroupedTensor.quantize(source, quantizer, key=KEY, states=states, **how)
        assert w.shape == ((3, 32, 48) if name == "uniform" else (sum(part.numel() for part in x),))
        for direction in ("rowwise", "columnwise"):
            assert_members(getattr(w, direction), expected, direction)
        assert [tuple(member.shape) for member in w.members] == SHAPES[name] and w.experts == len(x)
        for member, single in zip(w.members, expected, strict=True):
            values = quantizer.rowwise.decode(single.rowwise, tuple(member.shape)).to(member.dtype)
            assert torch.equal(member.dequantize().cpu(), values)
        assert torch.equal(w.dequantize().flatten(), torch.cat([m.dequantize().flatten() for m in w.members]))
        for state, part, single in zip(states or (), x, expected, strict=bool(states)):
            for direction, own in state.states.items():
                dequantized = direction == "columnwise" and quantizer.columnwise_source == "rowwise_dequantized"
                read = quantizer.rowwise.decode(single.rowwise, tuple(part.shape)).bfloat16() if dequantized else part
                assert own.history[0] == (read.abs().amax() if part.numel() else 0)


@pytest.mark.feature("A28")
@devices
@pytest.mark.parametrize("text", TEXTS)
def test_one_direction_alone_is_that_of_both(text, device):
    """Rows alone are one call wherever their blocks fill them. Exact operands are those of the members' codes."""
    quantizer = HybridQuantizer.parse(text)
    for name in UNEVEN:
        shapes = Shapes.of(SHAPES[name])
        flat = torch.cat([part.flatten() for part in tensors(SHAPES[name])]).to(device)

        def quantized(shapes=shapes, flat=flat, **wanted):
            options = {"keys": [KEY.under(str(e)) for e in range(shapes.count)]}
            return quantize_group(
                flat, shapes, quantizer, **options, states=slot_states(quantizer, shapes.count, device), **wanted
            )

        both = quantized()
        for direction, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
            codes, exact = (quantized(**{direction: output, other: None}) for output in ("codes", "exact"))
            assert getattr(codes, other) is None and getattr(exact, other) is None
            expected, codes, exact = (getattr(group, direction) for group in (both, codes, exact))
            again = unflatten(*pickle.loads(pickle.dumps(flatten(codes))))
            for buffer, flat_buffer in expected.buffers.items():
                assert torch.equal(codes.buffers[buffer], flat_buffer), (name, direction)
                assert torch.equal(again.members[1].buffers[buffer], expected.members[1].buffers[buffer])
            alone = [member.operand() for member in expected.members]
            assert_exact(exact.members, alone)
            assert_exact(expected.operand().members, alone)


def assert_exact(members, expected):
    for own, wanted in zip(members, expected, strict=True):
        assert torch.equal(own.matrix.float(), wanted.matrix.float()) and own.divisor == wanted.divisor
        assert (own.factor is None) == (wanted.factor is None)
        assert own.factor is None or torch.equal(own.factor, wanted.factor)


@pytest.mark.parametrize("text", [text for text in SOME if not text.endswith("_row")])  # whose rows have other widths
def test_rows_alone_are_one_call(text, monkeypatch):
    quantizer, x = HybridQuantizer.parse(text), tensors(SHAPES["wide"])
    expected, calls = alone(x, quantizer, columnwise=False), []
    for function in ("quantize", "quantize_plain"):
        monkeypatch.setattr(hybrid, function, _counted(getattr(hybrid, function), calls))
    monkeypatch.setattr("hqsweep.ops.quantize.quantize.of_member", lambda *_: pytest.fail("a call for one member"))
    w = GroupedTensor.quantize(x, quantizer, key=KEY, directions=("rowwise",))
    assert_members(w.rowwise, expected, "rowwise")
    assert len(calls) == 1


def _counted(function, calls):
    def counted(*arguments, **options):
        calls.append(function)
        return function(*arguments, **options)

    return counted


@pytest.mark.feature("A28")
@devices
@pytest.mark.parametrize("case", FEW_QUANTIZER_CASES, ids=lambda case: case["id"])
def test_a_member_among_others_of_unlike_shapes_has_the_golden_bytes(case, device):
    """TransformerEngine's, in both directions and, of rows, without the other one, which is another path."""
    arrays = Arrays(case)
    x = as_matrix(arrays.raw(case["input_key"]))
    wanted = [d for d in directions(arrays) if d == "rowwise" or "row_scaled" not in str(format_of(case, d))]
    quantizer = HybridQuantizer(
        *(format_of(case, d) if d in wanted else Identity(name="fp32") for d in ("rowwise", "columnwise"))
    )
    others = [part.to(x.dtype) * 1024 for part in tensors([(16, 3 * x.shape[1]), (0, 16), (32, 16)])]
    members = [part.to(device) for part in (others[0], others[1], x, others[2])]
    for chosen in {tuple(wanted), tuple(wanted[:1])}:
        w = GroupedTensor.quantize(members, quantizer, directions=chosen)
        for direction in chosen:
            own = getattr(w, direction).members[2]
            golden = golden_buffers(case, arrays, direction, own.format, *own.shape)
            check_encoded(case, arrays, direction, {n: b.cpu() for n, b in own.buffers.items()}, golden)


def test_packed_buffers_may_have_room():
    operands = quantize_group(
        torch.cat([x.flatten() for x in tensors(SHAPES["both"])]), Shapes.of(SHAPES["both"]), group().quantizer
    )
    for direction in ("rowwise", "columnwise"):
        own = getattr(operands, direction)
        longer = {name: torch.cat([flat, flat.new_full((5,), 77)]) for name, flat in own.buffers.items()}
        roomy = replace(own, buffers=longer)
        for a, b in zip(roomy.members, own.members, strict=True):
            assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in b.buffers)
        assert torch.equal(roomy.operand().matrix, own.operand().matrix)


class Doubled(HybridQuantizer):
    """A quantizer of somebody else, with a quantize of its own."""

    def quantize(self, x, **options):
        return super().quantize(x * 2, **options)


@pytest.mark.parametrize("directions", [("rowwise", "columnwise"), ("rowwise",)])
def test_a_quantizer_with_a_quantize_of_its_own_is_called_for_each_member(directions):
    plain = HybridQuantizer.parse("mxfp8")
    w = GroupedTensor.quantize(tensors(SHAPES["wide"]), Doubled(plain.rowwise, plain.columnwise), directions=directions)
    for direction in directions:
        assert_members(getattr(w, direction), alone([x * 2 for x in tensors(SHAPES["wide"])], plain), direction)


@pytest.mark.parametrize("text", [name for name in NAMES if name not in (*WHOLE_BLOCKS, DELAYED)])
def test_blocks_may_be_partly_filled(text):
    """Shapes that no block divides."""
    shapes, quantizer = [(33, 50), (1, 7), (40, 129)], HybridQuantizer.parse(text)
    x = tensors(shapes, dtype=torch.float32)
    w, expected = GroupedTensor.quantize(x, quantizer), alone(x, quantizer)
    for direction in ("rowwise", "columnwise"):
        assert_members(getattr(w, direction), expected, direction)
    rows = GroupedTensor.quantize(x, quantizer, directions=("rowwise",))
    assert_members(rows.rowwise, expected, "rowwise")
