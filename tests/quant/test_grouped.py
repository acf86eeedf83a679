"""GroupedTensor: every expert as a tensor of its own, in shared memory."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from cases import SOME, STATELESS
from support.quant.group_tensors import KEY, E, K, N, alone, assert_same_bytes, grouped, key_of, values
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.optim import FusedAdam
from hqsweep.quant import GroupedTensor, HybridQuantizedTensor, HybridQuantizer
from hqsweep.quant.serialize import load_safetensors, save_safetensors


@pytest.mark.feature("F81", "F86", "F89")
@pytest.mark.parametrize("text", STATELESS)
def test_members_are_the_tensors_of_the_experts(text):
    x, w = values(), grouped(text)
    assert (w.shape, w.dtype, w.experts, w.is_contiguous()) == (x.shape, x.dtype, E, True)
    for own, single in zip(w.members, alone(x, text), strict=True):
        assert_same_bytes(own, single)
        assert type(own) is HybridQuantizedTensor and own.metadata == single.metadata
    assert torch.equal(w.dequantize(), torch.stack([single.dequantize() for single in alone(x, text)]))


@pytest.mark.feature("F87", "F88", "A28")
@pytest.mark.parametrize("text", STATELESS)
def test_members_are_views_of_the_packed_buffers(text):
    w = grouped(text)
    for name, flat in w.buffers.items():
        each = flat.nbytes // E
        assert [m.buffers[name].data_ptr() - flat.data_ptr() for m in w.members] == [0, each, 2 * each]
    before = {name: flat.data_ptr() for name, flat in w.buffers.items()}
    w[1].quantize_(values(1)[1], key=key_of(1))
    fresh = grouped(text, torch.stack([values()[0], values(1)[1], values()[2]]))
    assert_same_bytes(w, fresh)
    w.quantize_(values(2), key=KEY)
    assert_same_bytes(w, grouped(text, values(2)))
    assert before == {name: flat.data_ptr() for name, flat in w.buffers.items()}


@pytest.mark.feature("F93")
@pytest.mark.parametrize("directions", [("rowwise",), ("columnwise",)])
@pytest.mark.parametrize("text", SOME)
def test_one_direction_alone(text, directions):
    w = grouped(text, directions=directions)
    for own, single in zip(w.members, alone(values(), text, directions=directions), strict=True):
        assert_same_bytes(own, single)
        assert torch.equal(own.dequantize(), single.dequantize())
    assert torch.equal(w.dequantize(), torch.stack([own.dequantize() for own in w.members]))


@pytest.mark.feature("F81", "F86", "F89")
@pytest.mark.parametrize("text", SOME)
def test_in_place_operations_and_init_functions_return_self(text):
    w = nn.Parameter(grouped(text))
    assert isinstance(w, nn.Parameter) and isinstance(w, GroupedTensor)
    with torch.no_grad():
        for written, expected in (
            (lambda: w.fill_(0.75), torch.full((E, N, K), 0.75)),
            (lambda: w.mul_(2), torch.full((E, N, K), 1.5)),
            (lambda: w.copy_(torch.zeros(E, N, K)), torch.zeros(E, N, K)),
            (lambda: nn.init.constant_(w, 0.375), torch.full((E, N, K), 0.375)),
            (lambda: w.zero_(), torch.zeros(E, N, K)),
        ):
            assert written() is w and torch.equal(w.dequantize().float(), expected)
    assert nn.init.normal_(w) is w and w.dequantize().std() > 0.9


def test_a_key_goes_on_for_every_expert():
    """quantize_ without a key takes the next step; parts of a group draw the bits of their own experts."""
    w, next_key = grouped("nvfp4+sr"), replace(KEY, step=6)
    w.quantize_(values())
    expected = [HybridQuantizer.parse("nvfp4+sr").quantize(x, key=key_of(e, next_key)) for e, x in enumerate(values())]
    for own, single in zip(w.members, expected, strict=True):
        assert torch.equal(own.rowwise.buffers["q"], single.rowwise.buffers["q"])
    part = grouped("nvfp4+sr")
    part[1:].quantize_(values(1)[1:], key=KEY)
    assert_same_bytes(part[2], grouped("nvfp4+sr", values(1))[2])
    assert_same_bytes(part[0], grouped("nvfp4+sr")[0])


@pytest.mark.feature("F93")
@pytest.mark.parametrize("text", SOME)
def test_it_is_cut_between_experts_and_copied_whole(text):
    w = grouped(text)
    whole = w.dequantize()
    for part, expected in zip(w.split([1, 2]), whole.split([1, 2]), strict=True):
        assert isinstance(part, GroupedTensor) and torch.equal(part.dequantize(), expected)
    assert [type(p) for p in w.unbind(0)] == [HybridQuantizedTensor] * E and torch.equal(w[2].dequantize(), whole[2])
    for same in (w.clone(), w.detach(), w.view(E, N, K), copy.deepcopy(w), w.to(torch.float32).to(torch.bfloat16)):
        assert isinstance(same, GroupedTensor)
        assert_same_bytes(same, w)
    with pytest.raises(UserError, match="cut along the first axis"):
        w[:, :16]
    with pytest.raises(UserError, match=r"\[experts, rows, columns\], not of shape \(4, 8\)"):
        GroupedTensor.empty((4, 8), w.quantizer)
    zeros = w.new_zeros((2, N, K))
    assert isinstance(zeros, GroupedTensor) and not zeros.dequantize().any()
    assert not isinstance(w.new_zeros((N, K)), GroupedTensor)
    assert torch.empty_like(w).buffers.keys() == w.buffers.keys()


@pytest.mark.feature("H8")
@pytest.mark.parametrize("dim", [1, 2, -1])
@pytest.mark.parametrize("text", SOME)
def test_shards_of_every_expert_are_copies(text, dim):
    """Of any number of rows or columns; what is written into one would not reach the whole."""
    w = grouped(text)
    for part, expected in zip(w.split(12, dim), w.dequantize().split(12, dim), strict=True):
        assert isinstance(part, GroupedTensor) and torch.equal(part.dequantize(), expected)
        assert part.metadata.key == w.metadata.key and part.states is w.states
        with pytest.raises(UserError, match="cannot be written alone"):
            part.quantize_(expected, key=KEY)


@pytest.mark.parametrize("dim", [3, -4])
def test_it_is_not_split_along_an_axis_that_it_has_not(dim):
    for w in (grouped("mxfp8"), grouped("mxfp8").dequantize()):
        with pytest.raises(IndexError, match=rf"\[-3, 2\], but got {dim}\)"):
            w.split(1, dim)
    with pytest.raises(UserError, match=rf"select along axis {dim} of a grouped tensor"):
        grouped("mxfp8").select(dim, 0)


@pytest.mark.parametrize("text", SOME)
def test_files(text, tmp_path):
    w = nn.Parameter(grouped(text))
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    save_safetensors({"weight": w.detach()}, tmp_path / "w.safetensors")
    for same in (loaded, load_safetensors(tmp_path / "w.safetensors")["weight"]):
        assert isinstance(same, GroupedTensor) and same.metadata == w.metadata
        assert_same_bytes(same, w)
    assert isinstance(loaded, nn.Parameter)


@pytest.mark.feature("F74", "F77", "F84")
@pytest.mark.parametrize("text", SOME)
def test_one_is_made_of_members(text):
    members = alone(values(), text)
    assert_same_bytes(GroupedTensor.of(members), grouped(text))
    assert GroupedTensor.of(members).metadata == grouped(text).metadata
    with pytest.raises(UserError, match="expert 2"):
        GroupedTensor.of([*members[:2], HybridQuantizedTensor.quantize(values()[2], HybridQuantizer.parse("fp16"))])
    with pytest.raises(UserError, match=r"expert 1 is \(16, 48\)"):
        GroupedTensor.of([members[0], HybridQuantizedTensor.quantize(values()[1][:16], members[0].quantizer, key=KEY)])


def test_the_optimizer_keeps_masters_of_all_experts():
    x = values().float()
    w = nn.Parameter(grouped("mxfp8", x, preserve_high_precision_init_val=True))
    plain, gradient = nn.Parameter(x.clone()), draw("normal", E * N, K, 3).float().view(E, N, K)
    ours, theirs = FusedAdam([w], lr=0.1), torch.optim.AdamW([plain], lr=0.1)
    for _ in range(2):
        w.grad, plain.grad = gradient.to(w.dtype), gradient.clone()
        ours.step()
        theirs.step()
    assert torch.equal(ours.master_param(w), plain.detach())
    assert_same_bytes(w, grouped("mxfp8", plain.detach()))
    assert w.high_precision_init_val is None


@pytest.mark.feature("F93")
def test_preserved_values_are_those_of_the_experts():
    """In members, in parts, and in a group that is made of tensors that have some."""
    w, x = grouped(preserve_high_precision_init_val=True), values()
    together = GroupedTensor.of(alone(x, "mxfp8", preserve_high_precision_init_val=True))
    for whole in (w, together):
        assert torch.equal(whole.high_precision_init_val, x)
        assert all(map(torch.equal, [member.high_precision_init_val for member in whole.members], x))
        assert torch.equal(whole[1:].high_precision_init_val, x[1:])
    assert GroupedTensor.of(alone(x, "mxfp8")).high_precision_init_val is None


@pytest.mark.feature("F93")
def test_experts_that_do_not_follow_each_other_are_no_part():
    w = grouped()
    for part in (lambda: w[::2], lambda: w[2:2], lambda: w[3:]):
        with pytest.raises(UserError, match="of 3 experts; it takes step 1 and one expert or more"):
            part()
    assert torch.equal(w[-2:-1].dequantize(), w.dequantize()[1:2])
