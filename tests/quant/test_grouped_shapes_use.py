"""Groups of members of any shapes as parameters: writes, operations of torch, files, optimizers, what is refused."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from cases import SOME, crossed
from support.quant.group_tensors import assert_same_bytes
from support.quant.shape_groups import KEY, SHAPES, group, tensors
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.gemm.grouped import mm_t_tokens, mm_t_weights
from hqsweep.gemm.native import GroupGemm, gemm_plan
from hqsweep.ops.layout import Shapes
from hqsweep.optim import FusedAdam
from hqsweep.quant import GroupedTensor, HybridQuantizedTensor, HybridQuantizer
from hqsweep.quant.group import quantize_group
from hqsweep.quant.serialize import load_safetensors, save_safetensors

cases = pytest.mark.parametrize("name", SHAPES)
some = pytest.mark.parametrize("text", SOME)


@pytest.mark.feature("A28")
@pytest.mark.parametrize(("text", "name"), crossed(SOME, SHAPES, whole=("nvfp4", "fp8_current")))
def test_it_is_written_in_place(name, text):
    """It is written as a whole, from tensors and member by member, and addresses stay."""
    w = group(text, name)
    before = {buffer: flat.data_ptr() for buffer, flat in w.buffers.items()}
    for values in (tensors(SHAPES[name], 1), torch.cat([x.flatten() for x in tensors(SHAPES[name], 1)]).view(w.shape)):
        assert w.quantize_(values, key=KEY) is w
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
            (lambda: w.fill_(0.75), 0.75), (lambda: w.mul_(2), 1.5), (lambda: w.copy_(torch.zeros(size)), 0.0),
            (lambda: nn.init.constant_(w, 0.375), 0.375), (lambda: w.zero_(), 0.0),
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
    assert zeros.metadata.content == held.metadata.content and not zeros.dequantize().any()
    assert torch.empty_like(held).buffers.keys() == held.buffers.keys()
    shapes = SHAPES["both"][::-1]  # as many elements, of other members: values are copied, and no bytes
    turned = GroupedTensor.quantize(tensors(shapes), held.quantizer, key=KEY)
    assert turned.copy_(held) is turned
    key = replace(KEY, step=6) if held.quantizer.stochastic else None
    expected = GroupedTensor.quantize(held.dequantize(), held.quantizer, shapes=shapes, key=key)
    assert_same_bytes(turned, expected)


@pytest.mark.feature("A28")
@some
@pytest.mark.parametrize("name", ["first", "both", "empty"])
def test_files_and_states(name, text, tmp_path):
    """State dicts go to a group of the same members and to plain values, and from them."""

    def module(weight):
        holder = nn.Module()
        holder.weight = nn.Parameter(weight)
        return holder

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
    target.load_state_dict({"weight": torch.full_like(plain.weight, 1.5)})
    assert torch.equal(target.weight.dequantize(), torch.full_like(plain.weight, 1.5))
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


@pytest.mark.feature("A28")
@pytest.mark.parametrize("text", [text for text in SOME if not text.endswith(("_block", "_row"))])
def test_memory_is_used_again_for_other_shapes(text):
    """What stands behind the members stays as it is, and so do addresses. Left out are formats whose blocks are taller
    than members, or whose scales go by rows."""
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


@pytest.mark.feature("A28")
def test_no_product_takes_members_of_unlike_widths():
    """On the loop and by a kernel, of codes and of exact operands; nor weights of unlike shapes."""
    w, x, uneven = (group(name=name) for name in ("both", "uniform", "first"))
    for equal in (False, True):
        group_gemm = GroupGemm(equal_splits=equal)
        how = gemm_plan(w.quantizer.rowwise, w.quantizer.rowwise, (9, 0), group=group_gemm)
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
