"""HybridQuantizedTensor: what it holds, what it decodes to, what writing does, and how it refuses."""

import copy

import pytest
import torch
from cases import FEW, SOME, STATELESS
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer
from hqsweep.quant.tensor_protocol import dispatch

KEY = RngKey(seed=3, slot="layer/linear/weight", step=5)


def quantized(text, rows=128, cols=96, dtype=torch.bfloat16, **options):
    x = draw("normal", rows, cols, dtype=dtype)
    return x, HybridQuantizedTensor.quantize(x, HybridQuantizer.parse(text), key=KEY, **options)


def assert_same_bytes(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.feature("F29", "F30")
@pytest.mark.parametrize("text", STATELESS)
def test_it_holds_what_the_quantizer_makes(text):
    x, w = quantized(text)
    operands = HybridQuantizer.parse(text).quantize(x, key=KEY)
    for direction in ("rowwise", "columnwise"):
        assert_same_bytes(getattr(w, direction).buffers, getattr(operands, direction).buffers)
    assert torch.equal(w.dequantize(), operands.rowwise.dequantize())
    assert (w.shape, w.dtype, w.device, w.is_contiguous()) == (x.shape, x.dtype, x.device, True)


@pytest.mark.parametrize("text", STATELESS)
def test_its_memory_is_its_own(text):
    x, w = quantized(text)
    before = {name: buffer.clone() for name, buffer in w.buffers.items()}
    x.zero_()
    w.dequantize().zero_()
    assert_same_bytes(w.buffers, before)
    assert all(buffer.is_contiguous() for buffer in w.buffers.values())


@pytest.mark.feature("F52", "F53", "F54", "F55", "F51")
def test_one_matrix_serves_both_directions_of_an_identity():
    x, w = quantized("bf16")
    assert list(w.buffers) == ["rowwise_q"] and torch.equal(w.columnwise.buffers["q"], x.t())
    with torch.no_grad():
        w.mul_(2)
    assert torch.equal(w.columnwise.dequantize(), 2 * x.t())
    assert list(quantized("bf16", directions=["columnwise"])[1].buffers) == ["columnwise_q"]


@pytest.mark.feature("F27", "F31", "F37", "F36", "F39", "F42", "T26")
@pytest.mark.parametrize("text", SOME)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_one_direction_alone_has_the_bytes_it_has_in_both(text, direction):
    x, both = quantized(text)
    _, alone = quantized(text, directions=[direction])
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}[direction]
    assert getattr(alone, other) is None and f"{other}=None" in repr(alone)
    assert_same_bytes(getattr(alone, direction).buffers, getattr(both, direction).buffers)
    decoded = getattr(both, direction).dequantize()
    assert torch.equal(alone.dequantize(), decoded if direction == "rowwise" else decoded.t())
    before = alone.clone()
    assert alone.quantize_(2 * x, key=KEY) is alone and getattr(alone, other) is None
    assert not torch.equal(alone, before) and torch.equal(alone, 2 * before)  # every scale doubles


def test_source_dtype_rounds_before_quantizing():
    x, w = quantized("mxfp8", dtype=torch.float32, source_dtype=torch.bfloat16)
    assert w.dtype == w.dequantize().dtype == torch.float32
    assert_same_bytes(w.buffers, HybridQuantizedTensor.quantize(x.bfloat16(), w.quantizer).buffers)
    w.quantize_(3 * x)
    assert_same_bytes(w.buffers, HybridQuantizedTensor.quantize((3 * x).bfloat16(), w.quantizer).buffers)


@pytest.mark.feature("F39", "F42")
@pytest.mark.parametrize("text", STATELESS)
def test_quantize_in_place_keeps_the_memory_and_takes_the_values(text):
    x, w = quantized(text)
    pointers = {name: buffer.data_ptr() for name, buffer in w.buffers.items()}
    version = w._version
    assert w.quantize_(x * x - 1, key=KEY) is w and w._version > version
    assert_same_bytes(w.buffers, HybridQuantizedTensor.quantize(x * x - 1, w.quantizer, key=KEY).buffers)
    assert {name: buffer.data_ptr() for name, buffer in w.buffers.items()} == pointers


def test_leading_axes_are_folded():
    x = draw("normal", 64, 96).view(2, 32, 96)
    w = HybridQuantizedTensor.quantize(x, HybridQuantizer.parse("nvfp4|mxfp8"))
    flat = HybridQuantizedTensor.quantize(x.view(64, 96), w.quantizer)
    assert w.shape == (2, 32, 96)
    assert_same_bytes(w.buffers, flat.buffers)
    assert torch.equal(w.dequantize(), flat.dequantize().view(2, 32, 96))


@pytest.mark.feature("F82")
@pytest.mark.parametrize("text", FEW)  # what draws random bits takes a key each time
def test_in_place_operations_compute_on_values_and_return_self(text):
    _, w = quantized(text, dtype=torch.float32)
    value = w.dequantize()
    with torch.no_grad():
        for name, arguments in (("mul_", (1.5,)), ("add_", (1.0,)), ("fill_", (2.0,)), ("zero_", ())):
            expected = HybridQuantizedTensor.quantize(getattr(value.clone(), name)(*arguments), w.quantizer)
            done = w.clone()
            assert getattr(done, name)(*arguments) is done
            assert_same_bytes(done.buffers, expected.buffers)
        for operator in (torch.ops.aten.mul_.Scalar, torch.ops.aten.fill_.Scalar):  # torch's methods return self anyway
            assert dispatch(HybridQuantizedTensor, operator, (done, 2.0), {}) is done
        torch.manual_seed(0)
        drawn = nn.init.normal_(torch.empty(128, 96))
        torch.manual_seed(0)
        assert nn.init.normal_(w) is w
        assert_same_bytes(w.buffers, HybridQuantizedTensor.quantize(drawn, w.quantizer).buffers)
        [done] = torch._foreach_mul([w], 2.0)
        assert type(done) is torch.Tensor
        torch._foreach_mul_([w], 2.0)
        torch.testing.assert_close(
            w.dequantize(), done, rtol=2.0**-22, atol=0
        )  # fp32 scales of rows are no powers of two


def test_operations_read_values_and_gradients_reach_the_parameter():
    x, w = quantized("nvfp4|mxfp8", dtype=torch.float32)
    parameter, value = nn.Parameter(w), w.dequantize().requires_grad_()
    tokens = draw("normal", 8, 96, 1, torch.float32)
    for weight in (parameter, value):
        torch.nn.functional.linear(tokens, weight).square().sum().backward()
    assert type(parameter.grad) is torch.Tensor and torch.equal(parameter.grad, value.grad)
    parameter.grad = None
    (3 * parameter.dequantize(torch.bfloat16)).sum().backward()
    assert torch.equal(parameter.grad, torch.full((128, 96), 3.0))
    assert torch.equal(x.copy_(w), w.dequantize())  # plain.copy_(quantized)


@pytest.mark.feature("F96")
def test_a_preserved_initial_value_follows_writes_until_it_is_cleared():
    x, w = quantized("nvfp4|mxfp8", dtype=torch.float32, preserve_high_precision_init_val=True)
    assert torch.equal(w.get_high_precision_init_val(), x)
    parameter = nn.Parameter(w)
    with torch.no_grad():
        parameter.mul_(0.3).add_(1.0)  # on the value that is kept, not on the rounded one
    expected = (x * 0.3).add_(1.0)
    assert torch.equal(parameter.get_high_precision_init_val(), expected)
    again = HybridQuantizedTensor.quantize(expected, w.quantizer)
    assert_same_bytes({n: b for n, b in parameter.buffers.items() if "init" not in n}, again.buffers)
    parameter.quantize_(x)
    assert torch.equal(parameter.get_high_precision_init_val(), x)
    other = HybridQuantizedTensor.quantize(-x, w.quantizer)
    with torch.no_grad():
        parameter.copy_(other)
    assert torch.equal(parameter.get_high_precision_init_val(), other.dequantize())
    parameter.clear_high_precision_init_val()
    assert parameter.get_high_precision_init_val() is None


def test_random_bits_follow_the_key_and_each_write_draws_new_ones():
    x, w = quantized("nvfp4+sr")
    first = {name: buffer.clone() for name, buffer in w.buffers.items()}
    w.quantize_(x)
    second = HybridQuantizedTensor.quantize(x, w.quantizer, key=RngKey(seed=3, slot=KEY.slot, step=6))
    assert w.metadata.key == second.metadata.key
    assert_same_bytes(w.buffers, second.buffers)
    assert not torch.equal(first["rowwise_q"], second.rowwise_q)
    w.quantize_(x, key=KEY)
    assert_same_bytes(w.buffers, first)
    assert quantized("mxfp8")[1].metadata.key is None  # draws nothing


def test_deepcopy_of_a_module_is_whole_and_apart():
    _, w = quantized("nvfp4|mxfp8", preserve_high_precision_init_val=True)
    module = nn.Linear(96, 128)
    module.weight = nn.Parameter(w)
    module.weight.main_grad = torch.ones(128, 96)
    twin = copy.deepcopy(module).weight
    assert (
        isinstance(twin, nn.Parameter) and twin.requires_grad and torch.equal(twin.main_grad, module.weight.main_grad)
    )
    assert_same_bytes(twin.buffers, module.weight.buffers)
    with torch.no_grad():
        twin.zero_()
    assert not twin.any() and module.weight.any()


@pytest.mark.feature("F35")
def test_repr_names_the_formats_and_what_is_missing():
    _, w = quantized("nvfp4|mxfp8@rowwise_dequantized", directions=["rowwise"])
    assert repr(w) == (
        "HybridQuantizedTensor([128, 96], nvfp4|mxfp8@rowwise_dequantized, dtype=torch.bfloat16, device=cpu,"
        " columnwise=None)"
    )
    assert repr(nn.Parameter(w)).startswith("Parameter of Hybrid") and "requires_grad=True" in repr(nn.Parameter(w))


@pytest.mark.feature("F36")
def test_a_columnwise_transform_has_no_values_without_the_rowwise_operand():
    _, w = quantized("nvfp4|nvfp4+rht", directions=["columnwise"])
    with pytest.raises(UserError, match=r"columnwise nvfp4\+rht holds transformed values; keep rowwise too"):
        w.dequantize()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w.quantize_(torch.zeros(64, 96)), r"quantize_: got \(64, 96\) for a tensor of shape \(128, 96\)"),
        (lambda w: w.empty((96,), w.quantizer), r"two axes or more, not the shape \(96,\)"),
        (lambda w: w.empty((96, 100), w.quantizer), "nvfp4: the contracted axis has 100 elements; it takes a multiple"),
        (lambda w: w.quantize(torch.zeros(96, 96).int(), w.quantizer), "input is torch.int32; it takes float32"),
        (lambda w: w.empty((96, 96), w.quantizer, directions=[]), r"directions are \(\); allowed: rowwise, columnwise"),
        (lambda w: w.empty((96, 96), w.quantizer, directions=["row"]), r"directions are \('row',\); allowed"),
        (
            lambda w: w.quantize(torch.zeros(96, 96), HybridQuantizer.parse("nvfp4+sr")),
            r"nvfp4\+sr rounds stochastically; give key=RngKey",
        ),
    ],
)
def test_wrong_calls_say_what_is_allowed(call, message):
    _, w = quantized("nvfp4|mxfp8")
    with pytest.raises(UserError, match=message):
        call(w)


@pytest.mark.gpu
@pytest.mark.parametrize("text", STATELESS)
def test_gpu_has_the_bytes_of_the_cpu(text):
    x, w = quantized(text)
    operands = HybridQuantizedTensor.quantize(x.cuda(), w.quantizer, key=KEY)
    assert_same_bytes({name: buffer.cpu() for name, buffer in operands.buffers.items()}, w.buffers)
    assert_same_bytes(w.cuda().cpu().buffers, w.buffers)
    assert torch.equal(operands.dequantize().cpu(), w.dequantize())
