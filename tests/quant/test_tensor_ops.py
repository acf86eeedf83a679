"""Operations under which a HybridQuantizedTensor stays one: views, parts, copies, moves."""

import pytest
import torch
from cases import STATELESS, crossed
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer

pytestmark = pytest.mark.feature("F106", "F156")

KEY = RngKey(seed=3, slot="w", step=5)


def has_whole_scale(text):
    """Whether some direction has one entry for all rows."""
    quantizer = HybridQuantizer.parse(text)
    return any(format.amax_name and not format.row_scaled for format in (quantizer.rowwise, quantizer.columnwise))


def quantized(text, rows=256, cols=256, **options):
    x = draw("normal", rows, cols)
    return x, HybridQuantizedTensor.quantize(x, HybridQuantizer.parse(text), key=KEY, **options)


def pointers(w):
    return {name: buffer.untyped_storage().data_ptr() for name, buffer in w.buffers.items()}


def assert_same_bytes(a, b):
    assert a.buffers.keys() == b.buffers.keys()
    for name in a.buffers:
        assert torch.equal(a.buffers[name], b.buffers[name]), name


@pytest.mark.feature("F43", "F45", "F125", "F107")
@pytest.mark.parametrize(("text", "directions"), crossed(STATELESS, [("rowwise", "columnwise"), ("rowwise",)]))
def test_views_of_the_whole_share_its_memory(text, directions):
    _, w = quantized(text, directions=directions)
    for view in (w.detach(), w.view(-1), w.view(2, 128, 256), w[:], w.as_strided((256, 256), (256, 1)), w.view_as(w)):
        assert type(view) is HybridQuantizedTensor and view.metadata.directions == directions
        assert pointers(view) == pointers(w)
        assert torch.equal(view.dequantize().flatten(), w.dequantize().flatten())
    with torch.no_grad():
        w.view(-1).fill_(1.5)  # 6 / 4: a constant that every format holds
    assert torch.equal(w.dequantize(), torch.full_like(w.dequantize(), 1.5))
    assert (
        w.metadata.key
        == w.detach().metadata.key
        == (RngKey(seed=3, slot="w", step=6) if w.quantizer.stochastic else None)
    )


@pytest.mark.parametrize(("text", "dim"), crossed(STATELESS, [0, 1]))
def test_parts_are_views_with_the_values_of_the_part(text, dim):
    _, w = quantized(text)
    values, cut = w.dequantize(), 128
    parts = [*w.split(cut, dim), *w.chunk(2, dim), *w.split_with_sizes([cut, 256 - cut], dim), w.narrow(dim, cut, cut)]
    wanted = [*values.split(cut, dim) * 3, values.narrow(dim, cut, cut)]
    for part, value in zip(parts, wanted, strict=True):
        assert type(part) is HybridQuantizedTensor and pointers(part) == pointers(w)
        assert part.shape == value.shape and torch.equal(part.dequantize(), value)
    columns = w.columnwise.dequantize().t().narrow(dim, cut, cut)
    assert torch.equal(parts[1].columnwise.dequantize().t(), columns)


def test_slices_of_a_stack_along_its_first_axis():
    _, w = quantized("mxfp8")
    stack = w.view(4, 64, 256)
    part = stack[1:3]
    assert part.shape == (2, 64, 256) and part.metadata.matrix == (128, 256)
    assert torch.equal(part.dequantize(), w.dequantize().view(4, 64, 256)[1:3])
    with pytest.raises(UserError, match=r"slice along axis 1 of a quantized tensor of shape \(4, 64, 256\)"):
        stack[:, :32]


def test_a_part_of_blocks_is_written_through():
    x, w = quantized("mxfp8", preserve_high_precision_init_val=True)
    with torch.no_grad():
        w[64:128].mul_(3)
        w[:, 32:64].copy_(torch.ones(256, 32))
    expected = x.clone()
    expected[64:128] *= 3
    expected[:, 32:64] = 1
    assert torch.equal(w.get_high_precision_init_val(), expected)
    w.clear_high_precision_init_val()
    assert_same_bytes(w, HybridQuantizedTensor.quantize(expected, w.quantizer))


@pytest.mark.parametrize("text", [text for text in STATELESS if has_whole_scale(text)])
def test_a_part_that_shares_a_scale_is_not_written(text):
    _, w = quantized(text)
    before = w.clone()
    for write in (lambda p: p.mul_(2), lambda p: p.copy_(torch.ones(128, 256)), lambda p: p.copy_(w[:128])):
        with (
            torch.no_grad(),
            pytest.raises(UserError, match="shares its scale with the rest and cannot be written alone"),
        ):
            write(w[128:])
    assert_same_bytes(w, before)
    with torch.no_grad():
        w[128:].clone().mul_(2)  # a copy has a scale of its own


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda w: w[3:7], "slice 3:7 of 256 cuts a block of mxfp8: give multiples of 32, or slice dequantize"),
        (lambda w: w[:, :24], "slice 0:24 of 256 cuts a block of nvfp4: give multiples of 16, or slice dequantize"),
        (lambda w: w.split_with_sizes([100, 156]), "slice 0:100 of 256 cuts a block of mxfp8"),
        (lambda w: w[::2], "with step 2; it takes step 1"),
        (lambda w: w[0], r"one row or column of a tensor in nvfp4\|mxfp8 cannot be held by itself"),
        (lambda w: w.unbind(), "one row or column"),
        (lambda w: w.as_strided((16, 16), (256, 1)), r"takes all of its 65536 elements in order, not size \[16, 16\]"),
        (lambda w: w.view(-1)[:16], r"slice along axis 0 of a quantized tensor of shape \(65536,\)"),
    ],
)
def test_parts_that_cannot_be_held_are_refused(part, message):
    """Their values would be a copy, and what is written to it lost."""
    with pytest.raises(UserError, match=message):
        part(quantized("nvfp4|mxfp8")[1])


@pytest.mark.parametrize("text", STATELESS)
def test_rows_that_are_split_inside_blocks_have_the_values_of_the_whole(text):
    _, w = quantized(text)
    parts = w.split(100)
    assert [tuple(part.shape) for part in parts] == [(100, 256), (100, 256), (56, 256)]
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), w.dequantize())
    assert all(pointers(part) == pointers(w) for part in parts)
    first, last = parts[0].metadata.cover("columnwise")[:2]
    columns = parts[0].columnwise.dequantize().t()[-first : 100 - first]
    assert first == 0 and last >= 100 and torch.equal(columns, w.columnwise.dequantize().t()[:100])


@pytest.mark.parametrize("text", STATELESS)
def test_copies_are_apart_and_have_the_same_bytes(text):
    _, w = quantized(text)
    for twin in (w.clone(), w.to("cpu", copy=True), w.to(torch.float32), w[:].clone(), w[128:].clone()):
        assert type(twin) is HybridQuantizedTensor and not twin.metadata.shares_scale
        assert not set(pointers(twin).values()) & set(pointers(w).values())
        assert torch.equal(twin.dequantize(w.dtype), w.dequantize()[-len(twin) :])
    assert w.to(w.device) is w


@pytest.mark.feature("F36")
def test_a_change_of_dtype_is_one_of_name():
    _, w = quantized("nvfp4|mxfp8")
    wide = w.to(torch.float32)
    assert_same_bytes(wide, w)
    assert wide.dtype == wide.dequantize().dtype == torch.float32
    assert torch.equal(wide.dequantize(), w.rowwise.dequantize(torch.float32))
    assert torch.equal(wide.to(torch.bfloat16).dequantize(), w.dequantize())
    whole = HybridQuantizedTensor.quantize(torch.full((32, 32), 3.0), HybridQuantizer.parse("bf16")).to(torch.int32)
    assert type(whole) is torch.Tensor and torch.equal(whole, torch.full((32, 32), 3, dtype=torch.int32))


@pytest.mark.parametrize("text", STATELESS)
def test_copy_of_an_equal_quantizer_takes_the_bytes(text):
    _, w = quantized(text)
    target = w.new_zeros(256, 256)
    with torch.no_grad():
        assert target.copy_(w) is target
    assert_same_bytes(target, w)
    assert target.metadata.key == w.metadata.key and pointers(target) != pointers(w)


def test_copy_of_anything_else_takes_the_values():
    x, w = quantized("nvfp4|mxfp8")
    for source in (
        quantized("mxfp8")[1],
        quantized("nvfp4|mxfp8", directions=["rowwise"])[1],
        x.float(),
        torch.ones(256),
    ):
        value = source.dequantize() if isinstance(source, HybridQuantizedTensor) else source.expand(256, 256)
        with torch.no_grad():
            w.copy_(source)
        assert_same_bytes(w, HybridQuantizedTensor.quantize(value.bfloat16(), w.quantizer))


@pytest.mark.feature("F32")
@pytest.mark.parametrize("text", STATELESS)
def test_new_zeros_are_zero_in_both_directions_and_draw_nothing(text):
    _, w = quantized(text)
    state = torch.get_rng_state()
    zeros = w.new_zeros(128, 64)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(zeros) is HybridQuantizedTensor and zeros.shape == (128, 64) and zeros.dtype == w.dtype
    for operand in (zeros.rowwise, zeros.columnwise):
        assert not operand.dequantize().any()
    assert zeros.metadata.key == w.metadata.key  # the next write goes on from it
    assert type(w.new_zeros(5)) is type(w.new_zeros(8, 8, dtype=torch.int32)) is torch.Tensor


def test_state_that_an_optimizer_makes_is_plain():
    _, w = quantized("nvfp4|mxfp8")
    for state in (torch.zeros_like(w), torch.ones_like(w), w.new_empty(256, 256), w + 1, w.float() * w):
        assert type(state) is torch.Tensor and state.shape == w.shape


@pytest.mark.feature("F32")
def test_empty_like_is_what_to_empty_needs():
    _, w = quantized("nvfp4|mxfp8", preserve_high_precision_init_val=True)
    meta = torch.empty_like(w, device="meta")
    assert meta.is_meta and all(buffer.is_meta for buffer in meta.buffers.values())
    assert meta.metadata == w.metadata and meta.dequantize().is_meta
    back = torch.empty_like(meta, device="cpu")
    assert type(back) is HybridQuantizedTensor and back.device.type == "cpu"
    assert back.get_high_precision_init_val().shape == w.shape


def test_a_module_moves_and_loads_its_quantized_weight():
    _, w = quantized("nvfp4|mxfp8")
    module = nn.Linear(256, 256)
    module.weight = nn.Parameter(w.clone())
    module.to(torch.float32)
    assert isinstance(module.weight, HybridQuantizedTensor) and module.weight.dtype == torch.float32
    assert isinstance(module.weight, nn.Parameter) and module.weight.requires_grad
    state = module.state_dict()
    with torch.no_grad():
        module.weight.zero_()
    assert not state["weight"].any()  # a view, as torch's
    module.load_state_dict({"weight": w, "bias": state["bias"]})
    assert_same_bytes(module.weight, w)


@pytest.mark.feature("F46")
def test_flatten_and_unflatten_are_inverse():
    _, w = quantized("nvfp4|mxfp8", preserve_high_precision_init_val=True)
    names, metadata = w.__tensor_flatten__()
    again = HybridQuantizedTensor.__tensor_unflatten__(
        {name: getattr(w, name) for name in names}, metadata, w.shape, w.stride()
    )
    assert_same_bytes(again, w)
    assert hash(metadata) == hash(again.metadata) and metadata == again.metadata
    assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(w)


@pytest.mark.gpu
def test_modules_move_between_devices():
    x, w = quantized("nvfp4|mxfp8", preserve_high_precision_init_val=True)
    module = nn.Linear(256, 256)
    module.weight = nn.Parameter(w)
    module.cuda()
    assert module.weight.is_cuda and module.weight.rowwise_q.is_cuda
    assert torch.equal(module.weight.get_high_precision_init_val(), x)
    module.cpu()
    assert_same_bytes(module.weight, w)
