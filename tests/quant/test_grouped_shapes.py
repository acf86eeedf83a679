"""Groups of members of any shapes: each has the bytes that ops.quantize gives of it alone, and golden ones."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from golden_cases import QUANTIZER_CASES, Arrays, as_matrix, check_encoded, directions, format_of, golden_buffers
from group_tensors import assert_same_bytes
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats import Identity, RngKey
from hqsweep.gemm_grouped import grouped_plan, mm_t_tokens, mm_t_weights
from hqsweep.jobs.inputs import draw
from hqsweep.ops import grouped as grouped_ops
from hqsweep.ops.grouped_shapes import Shapes
from hqsweep.ops.quantize import quantize
from hqsweep.optim import FusedAdam
from hqsweep.quant import GroupedTensor, HybridQuantizedTensor, HybridQuantizer, grouped_operand
from hqsweep.quant.delayed import DelayedState, SlotStates
from hqsweep.quant.grouped_operand import flatten_group, quantize_group, unflatten_group
from hqsweep.quant.serialize import load_safetensors, save_safetensors

SHAPES = {
    "uniform": [(32, 48)] * 3,
    "first": [(32, 48), (16, 48), (64, 48)],
    "last": [(32, 48), (32, 16), (32, 160)],
    "both": [(32, 48), (144, 16), (16, 128)],
    "empty": [(0, 32), (32, 48), (16, 0), (48, 16), (0, 16)],
    "no rows": [(32, 48), (0, 48), (16, 48)],
    "wide": [(16, 128), (32, 384), (16, 256)],
}
UNEVEN = [name for name, shapes in SHAPES.items() if len({k for _, k in shapes}) > 1]
KEY = RngKey(seed=3, slot="experts/weight", step=5)
FORMATS = [
    "bf16", "fp16", "fp32", "bf16|fp32", "fp8_current", "fp8_current+e5m2+pow2", "fp8_block", "fp8_block+2d",
    "fp8_block+fp32_scale", "mxfp8", "mxfp8+2d", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4", "nvfp4+2d", "nvfp4+rht",
    "nvfp4+sr", "nvfp4+4over6", "nvfp4+rht+sr", "nvfp4+row_scaled|mxfp8", "bf16|nvfp4+rht+sr", "mxfp8|bf16",
    "nvfp4+row_scaled|mxfp8@rowwise_dequantized", "nvfp4+sr|mxfp8@rowwise_dequantized", "fp8_current|fp8_block",
    "mxfp8|bf16@rowwise_dequantized", "bf16|bf16@rowwise_dequantized", "fp16|fp32@rowwise_dequantized",
    "fp8_delayed", "fp8_delayed|mxfp8", "mxfp8|fp8_delayed@rowwise_dequantized",
]  # fmt: skip
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
cases = pytest.mark.parametrize("name", SHAPES)
formats = pytest.mark.parametrize("text", FORMATS)


def tensors(shapes, seed=0, dtype=torch.bfloat16):
    """Of different sizes, so that a shared scale would be seen."""
    return [draw("heavy", *s, seed + e).to(dtype) * 10.0 ** (2 * e - 2) for e, s in enumerate(shapes)]


def slot_states(quantizer, count, device="cpu"):
    """Of each member: an amax of its own, of earlier steps."""
    made = []
    for expert in range(count):
        own = {}
        for direction in ("rowwise", "columnwise"):
            if hasattr(getattr(quantizer, direction), "history"):
                state = own[direction] = DelayedState(getattr(quantizer, direction).history, device)
                state.amax.fill_(3.0 + expert)
        made.append(SlotStates(states=own, step=2, record=True))
    return made if quantizer.delayed else None


def alone(x, quantizer, states=False, key=KEY, **wanted):
    """ops.quantize of each tensor, and of nothing else: (rowwise, columnwise) of every one."""
    made = []
    for expert, part in enumerate(x):
        keys, grids = quantizer.direction_keys(key.under(str(expert))), {}
        formats = {d: getattr(quantizer, d) if wanted.get(d, True) else None for d in ("rowwise", "columnwise")}
        if states:
            amax = torch.full((1, 1), 3.0 + expert)  # what slot_states remembers
            grids = {f"{d}_grid": {"s": amax} for d, f in formats.items() if hasattr(f, "history")}
        options = {f"{d}_key": own for d, own in keys.items()} | grids
        made.append(quantize(part, **formats, columnwise_source=quantizer.columnwise_source, **options))
    return made


def assert_members(group, expected, direction):
    """The bytes, and where they lie: one after the other in one buffer for each of the format's."""
    for name in group.format.layout:
        address = group.buffers[name].data_ptr()
        for own, single in zip(group.members, expected, strict=True):
            got, wanted = own.buffers[name].cpu(), getattr(single, direction)[name]
            assert got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(got, wanted), name
            assert own.buffers[name].data_ptr() == address or not got.numel()
            address += got.nbytes
        flat = group.buffers[name]
        assert address == flat.data_ptr() + flat.nbytes


@devices
@formats
@cases
def test_members_have_the_bytes_of_ops_quantize_of_them_alone(name, text, device):
    """Given as tensors, and as a flat buffer with room to spare."""
    quantizer, x = HybridQuantizer.parse(text), tensors(SHAPES[name])
    expected = alone(x, quantizer, states=quantizer.delayed)
    flat = torch.cat([part.flatten() for part in x] + [torch.full((7,), torch.nan, dtype=torch.bfloat16)]).to(device)
    given = ([part.to(device) for part in x], {}), (flat, {"shapes": SHAPES[name]})
    for source, how in given:
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


@devices
@formats
def test_one_direction_alone_is_that_of_both(text, device):
    """Rows alone are one call wherever their blocks fill them. Exact operands are those of the members' codes."""
    quantizer = HybridQuantizer.parse(text)
    for name in UNEVEN:
        shapes = Shapes.of(SHAPES[name])
        flat = torch.cat([part.flatten() for part in tensors(SHAPES[name])]).to(device)

        def made(shapes=shapes, flat=flat, **wanted):
            options = {"keys": [KEY.under(str(e)) for e in range(shapes.count)]}
            return quantize_group(
                flat, shapes, quantizer, **options, states=slot_states(quantizer, shapes.count, device), **wanted
            )

        both = made()
        for direction, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
            codes, exact = (made(**{direction: output, other: None}) for output in ("codes", "exact"))
            assert getattr(codes, other) is None and getattr(exact, other) is None
            expected, codes, exact = (getattr(group, direction) for group in (both, codes, exact))
            again = unflatten_group(*pickle.loads(pickle.dumps(flatten_group(codes))))
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


@pytest.mark.parametrize("text", ["bf16", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "nvfp4+sr"])
def test_rows_alone_are_one_call(text, monkeypatch):
    quantizer, x = HybridQuantizer.parse(text), tensors(SHAPES["wide"])
    expected, calls = alone(x, quantizer, columnwise=False), []
    for module in (grouped_ops, grouped_operand):
        monkeypatch.setattr(module, "quantize_grouped", _counted(module.quantize_grouped, calls))
    monkeypatch.setattr(grouped_ops, "quantize", lambda *_, **__: pytest.fail("a call for one member"))
    w = GroupedTensor.quantize(x, quantizer, key=KEY, directions=("rowwise",))
    assert_members(w.rowwise, expected, "rowwise")
    assert len(calls) == 1


def _counted(function, calls):
    def counted(*arguments, **options):
        calls.append(function)
        return function(*arguments, **options)

    return counted


def golden_cases():
    """The first two of every pair of formats."""
    found = {}
    for case in QUANTIZER_CASES:
        formats = tuple(str(format_of(case, d)) for d in directions(Arrays(case)))
        found.setdefault(formats, []).append(case)
    return [case for cases in found.values() for case in cases[:2]]


@devices
@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["id"])
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


def group(text="mxfp8", name="both", seed=0, **options):
    return GroupedTensor.quantize(tensors(SHAPES[name], seed), HybridQuantizer.parse(text), key=KEY, **options)


some = pytest.mark.parametrize("text", ["bf16", "fp8_current|mxfp8", "nvfp4+sr", "nvfp4|mxfp8@rowwise_dequantized"])


@some
@cases
def test_it_is_written_in_place(name, text):
    """As a whole, from tensors and member by member; addresses stay."""
    w = group(text, name)
    before = {buffer: flat.data_ptr() for buffer, flat in w.buffers.items()}
    for given in (tensors(SHAPES[name], 1), torch.cat([x.flatten() for x in tensors(SHAPES[name], 1)]).view(w.shape)):
        assert w.quantize_(given, key=KEY) is w
        assert_same_bytes(w, group(text, name, 1))
        w.zero_()
    for expert, (member, x) in enumerate(zip(w.members, tensors(SHAPES[name], 2), strict=True)):
        assert member.quantize_(x, key=KEY.under(str(expert))) is member
    assert_same_bytes(w, group(text, name, 2))
    assert before == {buffer: flat.data_ptr() for buffer, flat in w.buffers.items()}


@some
def test_operations_of_torch(text):
    """What changes it returns itself; copies, moves and pickles have its bytes."""
    w = nn.Parameter(group(text))
    size = w.numel()
    with torch.no_grad():
        for written, value in (
            (lambda: w.fill_(0.5), 0.5), (lambda: w.mul_(2), 1.0), (lambda: w.copy_(torch.zeros(size)), 0.0),
            (lambda: nn.init.constant_(w, 0.25), 0.25), (lambda: w.zero_(), 0.0),
        ):  # fmt: skip
            assert written() is w and torch.equal(w.dequantize().float(), torch.full((size,), value))
    assert nn.init.normal_(w) is w and 0.9 < w.dequantize().std() < 1.1
    held = w.detach()
    back = held.to(torch.float32).to(torch.bfloat16)
    for same in (held.clone(), copy.deepcopy(held), held.view(-1), held[:], back, pickle.loads(pickle.dumps(held))):
        assert isinstance(same, GroupedTensor) and same.metadata == held.metadata
        assert_same_bytes(same, held)
    other = group(text, seed=1)
    assert other.copy_(held) is other
    assert_same_bytes(other, held)
    zeros = held.new_zeros(held.shape)
    assert zeros.metadata.shapes == held.metadata.shapes and not zeros.dequantize().any()
    assert torch.empty_like(held).buffers.keys() == held.buffers.keys()
    shapes = SHAPES["both"][::-1]  # as many elements, of other members: values are copied, and no bytes
    turned = GroupedTensor.quantize(tensors(shapes), held.quantizer, key=KEY)
    assert turned.copy_(held) is turned
    key = replace(KEY, step=6) if held.quantizer.stochastic else None
    expected = GroupedTensor.quantize(held.dequantize(), held.quantizer, shapes=shapes, key=key)
    assert_same_bytes(turned, expected)


@some
@pytest.mark.parametrize("name", ["first", "both", "empty"])
def test_files_and_states(name, text, tmp_path):
    """State dicts go to a group of the same members and to plain values, and from them."""

    def module(weight):
        made = nn.Module()
        made.weight = nn.Parameter(weight)
        return made

    source, target, plain = (module(group(text, name, seed)) for seed in (0, 1, 2))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    save_safetensors(source.state_dict(), tmp_path / "w.safetensors")
    for state in (torch.load(file, weights_only=True), load_safetensors(tmp_path / "w.safetensors")):
        assert state["weight"].metadata == source.weight.metadata
        target.weight.data.zero_()
        target.load_state_dict(state)
        assert_same_bytes(target.weight.detach(), source.weight.detach())
    plain.weight = nn.Parameter(torch.zeros_like(source.weight.dequantize()))
    plain.load_state_dict(source.state_dict())
    assert torch.equal(plain.weight, source.weight.dequantize())
    target.load_state_dict({"weight": torch.ones_like(plain.weight)})
    assert torch.equal(target.weight.dequantize(), torch.ones_like(plain.weight))
    apart = {f"weight{e}": member for e, member in enumerate(source.weight.detach().members)}
    save_safetensors(apart, tmp_path / "apart.safetensors")
    members = [load_safetensors(tmp_path / "apart.safetensors")[name] for name in apart]
    together = GroupedTensor.packed(members)
    assert_same_bytes(together, source.weight.detach())
    assert together.metadata == source.weight.metadata


def test_the_optimizer_keeps_masters_of_all_members():
    x = [part.float() for part in tensors(SHAPES["both"])]
    options = {"key": KEY, "preserve_high_precision_init_val": True}
    w = nn.Parameter(GroupedTensor.quantize(x, HybridQuantizer.parse("nvfp4+sr"), **options))
    assert all(map(torch.equal, [member.high_precision_init_val for member in w.members], x))
    assert torch.equal(GroupedTensor.packed(w.members).high_precision_init_val, w.high_precision_init_val)
    plain = nn.Parameter(torch.cat([part.flatten() for part in x]))
    ours, theirs = FusedAdam([w], lr=0.1), torch.optim.AdamW([plain], lr=0.1)
    for seed in range(2):
        gradient = draw("normal", 1, w.numel(), seed).view(-1).float()
        w.grad, plain.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    assert torch.equal(ours.master_param(w), plain.detach())
    masters = Shapes.of(SHAPES["both"]).parts(plain.detach())
    expected = GroupedTensor.quantize(masters, w.quantizer, key=replace(KEY, step=7))
    assert_same_bytes(w.detach(), expected)


@some
def test_memory_is_used_again_for_other_shapes(text):
    """What stands behind the members stays as it is, and so do addresses."""
    large = group(text, "wide")
    for name in ("both", "uniform", "wide"):
        for flat in large.buffers.values():
            flat.view(torch.uint8).fill_(0x55)
        small = large.reused_for(SHAPES[name])
        small.quantize_(tensors(SHAPES[name]), key=KEY)
        assert_same_bytes(small, group(text, name))
        for buffer, flat in large.buffers.items():
            used = small.buffers[buffer]
            assert used.data_ptr() == flat.data_ptr()
            assert bool((flat[used.numel() :].view(torch.uint8) == 0x55).all())
    with pytest.raises(UserError, match=r"take \d+ entries of rowwise_q, and the group has \d+"):
        large.reused_for([(1024, 32), (16, 16)])


def test_packed_buffers_may_have_room():
    made = quantize_group(
        torch.cat([x.flatten() for x in tensors(SHAPES["both"])]), Shapes.of(SHAPES["both"]), group().quantizer
    )
    for direction in ("rowwise", "columnwise"):
        own = getattr(made, direction)
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


def test_no_product_takes_members_of_unlike_widths(monkeypatch):
    """On the loop and by a kernel, of codes and of exact operands; nor weights of unlike shapes."""
    monkeypatch.setattr("hqsweep.gemm_grouped.has_kernel", lambda device, majors: True)
    w, x, uneven = (group(name=name) for name in ("both", "uniform", "first"))
    for equal in (False, True):
        how = grouped_plan(w.quantizer.rowwise, w.quantizer.rowwise, "cpu", equal_splits=equal)
        for plan in (how, replace(how, kernel=None)):
            for a, b in ((w, x), (x, w)):
                for product, direction in ((mm_t_tokens, "rowwise"), (mm_t_weights, "columnwise")):
                    a_group, b_group = getattr(a, direction), getattr(b, direction)
                    for left, right in ((a_group, b_group), (a_group.operand(), b_group.operand())):
                        with pytest.raises(
                            UserError, match=r"one width, and member 1 is \[144, 16\], member 0 \[32, 48"
                        ):
                            product(left, right, plan, out_dtype=torch.bfloat16)
            with pytest.raises(UserError, match=r"one shape, and member 1 is \[16, 48\], member 0 \[32, 48\]"):
                mm_t_tokens(x.rowwise, uneven.rowwise, plan, out_dtype=torch.bfloat16)


def test_what_takes_one_shape_is_refused():
    w, message = group(), r"of one shape, and member 1 is \[144, 16\], member 0 \[32, 48\]"
    for refused in (
        lambda: w.view(2, -1), lambda: w[5:], lambda: w.unbind(), lambda: w.split(100), lambda: w[0],
        lambda: w.as_strided((w.numel() // 16, 16), (16, 1)),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            refused()
    with pytest.raises(UserError, match=r"expert 1 is \(144, 16\), and expert 0 \(32, 48\); one parameter \[E, N, K\]"):
        GroupedTensor.of(w.members)
    # as many elements as three experts [32, 48] have: still no parameter [E, N, K]
    three = GroupedTensor.quantize(tensors([(16, 48), (48, 48), (96, 16)]), w.quantizer)
    with pytest.raises(
        UserError, match=r"a view \[3, 32, 48\] of a group .* member 1 is \[48, 48\], member 0 \[16, 48"
    ):
        three.view(3, 32, 48)


def test_what_is_given_wrongly_is_named():
    quantizer, x = HybridQuantizer.parse("nvfp4"), tensors(SHAPES["both"])
    with pytest.raises(UserError, match="expert 1: nvfp4: the contracted axis has 8 elements"):
        GroupedTensor.quantize(tensors([(16, 32), (16, 8)]), quantizer)
    with pytest.raises(UserError, match=r"expert 1: .* takes a multiple of 16 columns"):
        quantize_group(torch.zeros(640), Shapes.of([(16, 32), (16, 8)]), quantizer)
    with pytest.raises(UserError, match="a buffer of 4 elements for members of 5888"):
        GroupedTensor.quantize(torch.zeros(4), quantizer, shapes=SHAPES["both"])
    with pytest.raises(UserError, match=r"member 2 of a group is torch.float32 on cpu, and member 0 torch.bfloat16"):
        GroupedTensor.quantize([*x[:2], x[2].float()], quantizer)
    with pytest.raises(UserError, match=r"member 1 of a group has the shape \[2304\]"):
        GroupedTensor.quantize([x[0], x[1].flatten()], quantizer)
    with pytest.raises(UserError, match="shapes are for a flat buffer"):
        GroupedTensor.quantize(x, quantizer, shapes=SHAPES["both"])
    with pytest.raises(UserError, match=r"shapes \[\(32, 48\)\] for members of shapes \[\(32, 48\), \(144, 16\)"):
        group().quantize_(x[:1])
    with pytest.raises(UserError, match=r"expert 1 is torch.float32"):
        GroupedTensor.packed([HybridQuantizedTensor.quantize(v, quantizer) for v in (x[0], x[1].float())])


@pytest.mark.parametrize("text", ["fp8_current", "fp8_block", "mxfp8", "mxfp6_e2m3", "bf16"])
def test_blocks_may_be_partly_filled(text):
    """Shapes that no block divides."""
    shapes, quantizer = [(33, 50), (1, 7), (40, 129)], HybridQuantizer.parse(text)
    x = tensors(shapes, dtype=torch.float32)
    w, expected = GroupedTensor.quantize(x, quantizer), alone(x, quantizer)
    for direction in ("rowwise", "columnwise"):
        assert_members(getattr(w, direction), expected, direction)
    rows = GroupedTensor.quantize(x, quantizer, directions=("rowwise",))
    assert_members(rows.rowwise, expected, "rowwise")
