"""replace_raw_data keeps values and moves memory; post_all_gather_processing makes columnwise operands of codes."""

import copy
import pickle

import pytest
import torch
from cases import FEW, QUANTIZERS, STATELESS
from support.optim.adam_cases import OPTIONS
from torch import nn

from hqsweep.checkpoints.sharded_save import save_sharded
from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantized_model_init
from hqsweep.optim import FusedAdam
from hqsweep.quant import (
    GroupedTensor,
    HybridQuantizedTensor,
    HybridQuantizer,
    RawSizes,
    post_all_gather_processing,
    quantize_master_weights,
    raw_data_sizes,
    replace_raw_data,
)
from hqsweep.quant.delayed import DelayedState, SlotStates

KEY, LATER = RngKey(seed=3, slot="w", step=5), RngKey(seed=3, slot="w", step=6)
POISON = 0xA5
FOLLOW = (
    "bf16", "fp32", "bf16|mxfp8", "bf16|nvfp4+rht+sr", "fp8_current", "fp8_current+e5m2+pow2", "fp8_block+2d",
    "mxfp8+2d", "mxfp4+2d", "nvfp4+2d", "nvfp4+tensor", "nvfp4|mxfp8@rowwise_dequantized", "mxfp8@rowwise_dequantized",
    "nvfp4+row_scaled|fp8_current@rowwise_dequantized", "mxfp8|nvfp4+rht+sr@rowwise_dequantized",
    "nvfp4+2d+sr|bf16@rowwise_dequantized",
)  # fmt: skip
DO_NOT = (
    "mxfp8", "nvfp4|mxfp8", "nvfp4", "fp8_block", "fp8_current|fp8_current+e5m2", "mxfp8|mxfp8+2d", "mxfp8|bf16",
    "nvfp4+2d+4over6", "nvfp4+2d+sr", "fp8_current|fp8_block+2d", "fp16|mxfp8",
)  # fmt: skip


def values(seed=0, dtype=torch.bfloat16):
    return draw("normal", 256, 96, seed, dtype=dtype)


def weight_of(text, x=None, key=KEY, **options):
    quantizer = HybridQuantizer.parse(text)
    states = {d: DelayedState(4) for d in ("rowwise", "columnwise") if getattr(quantizer, d).delayed}
    states = SlotStates(states=states, step=0, record=True) if states else None
    x = values() if x is None else x
    return HybridQuantizedTensor.quantize(x, quantizer, key=key, states=states, **options)


def raw_bytes(buffer):
    return buffer.contiguous().view(-1).view(torch.uint8)


def assert_same_bytes(a, b):
    assert a.keys() == b.keys()
    wrong = [name for name in a if not torch.equal(raw_bytes(a[name]), raw_bytes(b[name]))]
    assert not wrong


def in_one_buffer(weight):
    """All bytes of a weight, each buffer from a multiple of 16 on, and where these begin."""
    parts, starts, size = [], {}, 0
    for name, buffer in weight.buffers.items():
        own = raw_bytes(buffer)
        starts[name] = size
        parts += [own, own.new_zeros(-len(own) % 16)]
        size += len(own) + -len(own) % 16
    return torch.cat(parts), starts


@pytest.mark.feature("F129")
@pytest.mark.parametrize("text", QUANTIZERS)
def test_all_bytes_move_and_are_the_weight(text):
    w, before = weight_of(text), weight_of(text)
    flat, starts = in_one_buffer(before)
    new = torch.zeros(len(flat), dtype=torch.uint8)
    replace_raw_data(w, new)
    assert torch.equal(new, flat)
    assert {name: buffer.data_ptr() - new.data_ptr() for name, buffer in w.buffers.items()} == starts
    assert_same_bytes(w.buffers, before.buffers)
    for direction in ("rowwise", "columnwise"):
        assert_same_bytes(getattr(w, direction).buffers, getattr(before, direction).buffers)
    if w.states is None:  # what others write there is the weight's, and so are later writes of its own
        after = weight_of(text, values(1), LATER)
        w.quantize_(values(1), key=LATER)
        assert torch.equal(new, in_one_buffer(after)[0])
        new.copy_(flat)
        assert torch.equal(w.dequantize(), before.dequantize())


@pytest.mark.feature("F129")
@pytest.mark.parametrize("text", FEW)
def test_codes_alone_move_as_those_of_transformer_engine_do(text):
    p, twin = (nn.Parameter(weight_of(text, preserve_high_precision_init_val=True, source_dtype=torch.bfloat16,
                                      x=values(dtype=torch.float32))) for _ in range(2))  # fmt: skip
    old = {name: buffer.data_ptr() for name, buffer in p.buffers.items()}
    codes = twin.rowwise.buffers["q"]
    new = torch.zeros(raw_bytes(codes).shape, dtype=torch.uint8).view(256, -1)
    replace_raw_data(p, new)
    assert p.buffers["rowwise_q"].data_ptr() == new.data_ptr() != old.pop("rowwise_q")
    assert {name: p.buffers[name].data_ptr() for name in old} == old
    assert torch.equal(p.dequantize(), twin.dequantize())
    optimizers = [FusedAdam([each], **OPTIONS) for each in (p, twin)]
    for step in (1, 2):
        for each, optimizer in zip((p, twin), optimizers, strict=True):
            each.grad = values(step, torch.float32)
            optimizer.step()
        assert torch.equal(new.view(-1), raw_bytes(codes))
    assert not torch.equal(raw_bytes(codes), raw_bytes(weight_of(text).rowwise.buffers["q"]))


def poisoned(text, **options):
    w = weight_of(text, **options)
    for name, buffer in w.buffers.items():
        if name.startswith("columnwise"):
            buffer.view(torch.uint8).fill_(POISON)
    return w


@pytest.mark.feature("F130")
@pytest.mark.parametrize("text", sorted({*STATELESS, *FOLLOW, *DO_NOT}))
def test_columnwise_operands_are_made_of_codes_or_refused(text):
    expected, w = weight_of(text), poisoned(text)
    before = copy.deepcopy(w.buffers)
    try:
        post_all_gather_processing([w])
    except UserError as error:
        assert "does not follow from its rowwise codes; have replace_raw_data move all its" in str(error)
        assert text not in FOLLOW and "@" not in text
        assert_same_bytes(w.buffers, before)
        replace_raw_data(w, torch.empty(raw_data_sizes(w).all, dtype=torch.uint8))
        post_all_gather_processing([w])  # which were gathered, then
        assert_same_bytes(w.buffers, before)
        return
    assert text not in DO_NOT
    for _ in range(2):
        assert_same_bytes(w.buffers, expected.buffers)
        post_all_gather_processing([w])


@pytest.mark.feature("F130")
def test_nothing_is_written_where_one_weight_is_refused():
    weights = [poisoned("mxfp8+2d"), poisoned("nvfp4|mxfp8")]
    before = copy.deepcopy(weights[0].buffers)
    with pytest.raises(UserError, match=r"columnwise operand of weight 1, held in nvfp4\|mxfp8, does not follow"):
        post_all_gather_processing(weights)
    assert_same_bytes(weights[0].buffers, before)


@pytest.mark.feature("F130")
@pytest.mark.parametrize("text", ["nvfp4+sr|mxfp8@rowwise_dequantized", "fp8_block+2d", "nvfp4+2d", "bf16"])
@pytest.mark.parametrize("shapes", [None, [(32, 64), (48, 96), (16, 32)]], ids=["equal", "any"])
def test_members_of_a_group_are_made_one_by_one(text, shapes):
    x = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x if shapes is None else torch.cat([x.view(-1), x.view(-1)])[: sum(m * k for m, k in shapes)]
    make = lambda: GroupedTensor.quantize(x, HybridQuantizer.parse(text), shapes=shapes, key=KEY)  # noqa: E731
    group, expected = make(), make()
    new = torch.zeros(raw_data_sizes(group).codes, dtype=torch.uint8)
    replace_raw_data(group, new)
    assert torch.equal(new, raw_bytes(expected.buffers["rowwise_q"]))
    for name, buffer in group.buffers.items():
        if name.startswith("columnwise"):
            buffer.view(torch.uint8).fill_(POISON)
    post_all_gather_processing([group])
    assert_same_bytes(group.buffers, expected.buffers)
    assert all(
        torch.equal(a.dequantize(), b.dequantize()) for a, b in zip(group.members, expected.members, strict=True)
    )


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_one_direction_alone_has_nothing_to_be_made(direction):
    w, expected = (weight_of("nvfp4|mxfp8", directions=[direction]) for _ in range(2))
    replace_raw_data(w, torch.empty(raw_data_sizes(w).codes, dtype=torch.uint8))
    post_all_gather_processing([w])
    assert_same_bytes(w.buffers, expected.buffers)


def test_delayed_rows_are_decoded_under_the_scale_that_they_have():
    text = "fp8_delayed|nvfp4@rowwise_dequantized"
    w, expected = weight_of(text), weight_of(text)
    for each in (w, expected):
        each.states.use()
        each.quantize_(values(1) * 5)
    for buffer in w.columnwise.buffers.values():
        buffer.view(torch.uint8).fill_(POISON)
    post_all_gather_processing([w])
    assert_same_bytes(w.buffers, expected.buffers)
    for own, other in zip(w.states.states.values(), expected.states.states.values(), strict=True):
        assert torch.equal(own.history, other.history) and torch.equal(own.amax, other.amax)
    with pytest.raises(UserError, match="does not follow"):
        post_all_gather_processing([weight_of("fp8_delayed")])


def test_a_weight_of_this_ranks_rows_is_read_by_nothing_before_the_processing(tmp_path):
    with quantized_model_init(preserve_high_precision_init_val=True):
        linear = Linear(96, 256, name="l", recipe="mxfp8+2d|mxfp8@rowwise_dequantized")
    x, master = draw("normal", 32, 96), values(4, torch.float32)
    quantize_master_weights([linear.weight], [master.flatten()], [0], manual_post_all_gather_processing=True)
    other = weight_of("mxfp8+2d|mxfp8@rowwise_dequantized")
    for read in (
        lambda: linear(x),
        lambda: linear.weight.dequantize(),
        lambda: copy.deepcopy(linear),
        lambda: linear.weight.to(torch.float32, copy=True),
        lambda: other.copy_(linear.weight),
        lambda: pickle.dumps(linear.state_dict()),
        lambda: save_sharded(linear, None, tmp_path / "saved"),
    ):
        with pytest.raises(UserError, match="has the rows of this rank's masters alone: gather its raw data, and call"):
            read()
    assert linear.weight.high_precision_init_val is None
    post_all_gather_processing([linear.weight])
    linear(x).sum().backward()
    expected = HybridQuantizedTensor.quantize(master.bfloat16(), linear.weight.quantizer)
    assert_same_bytes(linear.weight.buffers, expected.buffers)


def test_sizes_by_hand():
    assert raw_data_sizes(weight_of("bf16")) == RawSizes(2 * 256 * 96, 2 * 256 * 96)
    # codes of two to a byte, a scale for 16, one float32; codes of a byte, a scale for 32 rows
    assert raw_data_sizes(weight_of("nvfp4|mxfp8")) == RawSizes(256 * 48, 256 * 48 + 256 * 6 + 16 + 96 * 256 + 96 * 8)


def test_memory_that_it_has_already_is_taken_again():
    w, expected = weight_of("nvfp4|mxfp8"), weight_of("nvfp4|mxfp8")
    new = torch.zeros(raw_data_sizes(w).all + 16, dtype=torch.uint8)
    for part in (new[:-16], new[16:], new[16:][: raw_data_sizes(w).codes]):
        replace_raw_data(w, part)
        assert_same_bytes(w.buffers, expected.buffers)


def shard():
    return weight_of("mxfp8").split(64)[0]


def freed():
    w = weight_of("mxfp8")
    w.columnwise.buffers["s"].untyped_storage().resize_(0)
    return w


ALL = 2 * (256 * 96 + 8 * 96)


@pytest.mark.feature("F129")
@pytest.mark.parametrize(
    ("make", "new", "message"),
    [
        (None, torch.zeros(256 * 96 - 1, dtype=torch.uint8), rf"got 24575 .* 24576 bytes for its codes, or {ALL} for"),
        (None, torch.zeros(256, 96, dtype=torch.int8), "entries of torch.int8 on cpu .* takes uint8 on cpu"),
        (None, torch.zeros(256 * 96, dtype=torch.uint8, device="meta"), "of torch.uint8 on meta .* takes uint8 on cpu"),
        (
            None,
            torch.zeros(96, 256, dtype=torch.uint8).t(),
            r"new_raw_data \[256, 96\] of strides \(1, 256\) is not cont",
        ),
        (None, torch.zeros(256 * 96 + 4, dtype=torch.uint8)[4:], "begins at a multiple of 16 bytes"),
        (shard, torch.zeros(64 * 96, dtype=torch.uint8), "is one that torch's fully_shard has cut or gathered"),
        (freed, torch.zeros(256 * 96, dtype=torch.uint8), "columnwise_s of the weight held in mxfp8 has no memory"),
        (
            values,
            torch.zeros(256 * 96, dtype=torch.uint8),
            r"got torch.bfloat16 \[256, 96\]; it takes weights that are",
        ),
        (None, [0] * 256, "new_raw_data is list; it takes a tensor of uint8"),
        (lambda: "w", torch.zeros(256 * 96, dtype=torch.uint8), "got str; it takes weights that are held quantized"),
    ],
)
def test_what_is_no_memory_for_a_weight_is_refused(make, new, message):
    with pytest.raises(UserError, match=message):
        replace_raw_data(make() if make else weight_of("mxfp8"), new)


@pytest.mark.parametrize(
    "call",
    [
        lambda w: post_all_gather_processing([w]),
        raw_data_sizes,
        lambda w: quantize_master_weights([w], [w.detach().flatten()], [0]),
    ],
)
def test_plain_weights_are_refused(call):
    with pytest.raises(UserError, match="it takes weights that are held quantized"):
        call(nn.Parameter(values()))


def test_weights_come_one_by_one_in_any_iterable():
    expected, weights = weight_of("mxfp8+2d"), [poisoned("mxfp8+2d"), poisoned("mxfp8+2d")]
    post_all_gather_processing(w for w in weights)
    for w in weights:
        assert_same_bytes(w.buffers, expected.buffers)
    with pytest.raises(UserError, match=r"processing: got torch.bfloat16 \[256, 96\]; it takes a sequence of weights"):
        post_all_gather_processing(weights[0])
    with pytest.raises(UserError, match=r"got 1 weights, 2 masters, 1 offsets and 1 keys; each weight has one of each"):
        quantize_master_weights([expected], [None, None], [0])


def test_shards_and_slices_do_not_follow_from_their_rows():
    whole = weight_of("fp8_current@rowwise_dequantized")
    with pytest.raises(UserError, match="does not follow"):
        post_all_gather_processing([whole[:128]])
    assert parse("nvfp4+2d").two_d  # which follows as a whole, and not as a shard
    with pytest.raises(UserError, match="does not follow"):
        post_all_gather_processing([weight_of("nvfp4+2d").split(64)[1]])
