"""Linear with a weight that is held quantized: initialisation, equal bits, what it refuses, and main_grad."""

import copy

import pytest
import torch
from cases import BASE_LINEARS, BASES, LINEARS
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, Probe, quantization, quantized_model_init
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer, Operand
from hqsweep.recipe import LinearQuantizers

RECIPES = LINEARS | {
    "nvfp4 weights with sr": {"input": "nvfp4", "weight": "nvfp4+sr", "grad_output": "nvfp4"},
    "row scaled": "nvfp4+row_scaled|mxfp8@rowwise_dequantized",
    "high precision forward": {"input": "bf16|mxfp8", "weight": "bf16|mxfp8", "grad_output": "mxfp8"},
    "high precision backward": {"input": "mxfp8|bf16", "weight": "mxfp8|bf16", "grad_output": "bf16"},
    "three formats": {"input": "fp8_current|nvfp4", "weight": "fp8_current|mxfp8", "grad_output": "mxfp8|nvfp4"},
}


def build(recipe, *, held, bias=False, seed=7, step=3, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    quantizers = LinearQuantizers.parse(recipe, "test")
    with quantization(seed=seed, step=step), quantized_model_init(enabled=held, **options):
        return Linear(64, 96, name="layer", recipe=quantizers, bias=bias, dtype=dtype)


def run(module, *, call=None, step=3, seed=7, backward=True):
    x = draw("heavy", 32, 64).clamp(-100, 100).to(module.dtype).requires_grad_()
    with quantization(seed=seed, step=step):
        y = (call or module)(x)
        if backward:
            y.backward(draw("normal", 32, 96, 1).to(y.dtype))
    biases = {} if module.bias is None else {"db": module.bias.grad}
    return {"y": y.detach(), "dx": x.grad, "dw": module.weight.grad, **biases}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] is None and b[name] is None) or torch.equal(a[name], b[name]), name


@pytest.mark.feature("F52", "F53", "F54", "F55", "F95", "F151")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_held_weight_gives_the_bits_of_the_one_it_was_made_from(recipe, bias):
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    plain, held = (build(recipe, held=h, bias=bias, dtype=dtype) for h in (False, True))
    assert isinstance(held.weight, HybridQuantizedTensor) and isinstance(held.weight, nn.Parameter)
    assert type(plain.weight) is nn.Parameter and (held.bias is None or type(held.bias) is nn.Parameter)
    assert_equal(run(plain), run(held))


def test_a_weight_set_by_hand_is_taken_as_it_is():
    plain = build("nvfp4|mxfp8", held=False)
    held = copy.deepcopy(plain)
    held.weight = nn.Parameter(HybridQuantizedTensor.quantize(plain.weight.bfloat16(), plain.quantizers.weight))
    a, b = run(plain), run(held)
    assert torch.equal(a["y"], b["y"]) and torch.equal(a["dx"], b["dx"])
    assert b["dw"].dtype == torch.bfloat16 and torch.equal(a["dw"].bfloat16(), b["dw"])


def test_held_weights_are_not_quantized_again(monkeypatch):
    module, seen = build("nvfp4|mxfp8", held=True), []
    original = HybridQuantizer.quantize

    def spy(self, x, **options):
        seen.append(tuple(x.shape))
        return original(self, x, **options)

    monkeypatch.setattr(HybridQuantizer, "quantize", spy)
    run(module)
    assert seen == [(32, 64), (32, 96)]  # the input and its gradient


@pytest.mark.feature("F56", "F59")
def test_gemms_receive_the_held_operands(monkeypatch):
    module, seen = build("nvfp4|mxfp8", held=True), []
    original = Operand.operand
    monkeypatch.setattr(Operand, "operand", lambda self: seen.append(self.buffers["q"].data_ptr()) or original(self))
    run(module)
    weight = module.weight
    assert seen[0] == weight.rowwise_q.data_ptr() and seen[1] == weight.columnwise_q.data_ptr()


@pytest.mark.parametrize("recipe", BASE_LINEARS.values(), ids=BASE_LINEARS)
def test_recompute_and_offload_give_the_same_bits(recipe):
    module = build(recipe, held=True)
    expected = run(module)

    def offloaded(x):
        with save_on_cpu():
            return module(x)

    calls = [lambda x, r=r: checkpoint(module, x, use_reentrant=r) for r in (True, False)]
    for call in (*calls, offloaded):
        module.weight.grad = None
        assert_equal(run(module, call=call), expected)


@pytest.mark.feature("F43", "F45", "F125")
def test_backward_saves_codes_of_the_weight_and_nothing_else_of_it():
    module, saved = build("nvfp4|mxfp8", held=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(draw("normal", 32, 64).requires_grad_())
    assert [(str(t.dtype), tuple(t.shape)) for t in saved] == [
        ("torch.uint8", (64, 96)), ("torch.uint8", (64, 3)),  # w columnwise: codes, scales
        ("torch.uint8", (64, 32)), ("torch.uint8", (64, 1)),  # x columnwise
    ]  # fmt: skip


def test_a_weight_written_between_forward_and_backward_is_caught():
    module = build("mxfp8", held=True)
    y = module(draw("normal", 32, 64).requires_grad_())
    module.weight.quantize_(torch.ones(96, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.feature("F95", "F151", "T29")
def test_quantized_model_init_nests_and_works_under_no_grad():
    with torch.no_grad():
        module = build("nvfp4|mxfp8", held=True)
    assert module.weight.requires_grad and module.weight.columnwise is not None
    with quantized_model_init():
        assert type(build("mxfp8", held=False).weight) is nn.Parameter
        inner = Linear(64, 96, name="l", recipe="mxfp8")
    assert isinstance(inner.weight, HybridQuantizedTensor) and inner.weight.get_high_precision_init_val() is None
    outside = Linear(64, 96, name="l", recipe="mxfp8")
    assert type(outside.weight) is nn.Parameter


@pytest.mark.feature("F96")
def test_the_initial_value_is_preserved_in_full_precision():
    plain = build("nvfp4|mxfp8", held=False)
    held = build("nvfp4|mxfp8", held=True, preserve_high_precision_init_val=True)
    value = held.weight.get_high_precision_init_val()
    assert value.dtype == torch.float32 and torch.equal(value, plain.weight)
    assert not torch.equal(value, held.weight.dequantize())


@pytest.mark.feature("F95", "F151")
@pytest.mark.parametrize("recipe", BASE_LINEARS.values(), ids=BASE_LINEARS)
def test_a_model_on_the_meta_device_is_made_real_later(recipe):
    with torch.device("meta"):
        module = build(recipe, held=True, bias=True, preserve_high_precision_init_val=True)
    assert module.weight.is_meta and module.weight.rowwise_q.is_meta
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    expected = build(recipe, held=True, bias=True, preserve_high_precision_init_val=True)
    assert module.weight.buffers.keys() == expected.weight.buffers.keys()
    for name, buffer in expected.weight.buffers.items():
        assert torch.equal(module.weight.buffers[name], buffer), name
    assert_equal(run(module), run(expected))


def test_bits_of_stochastic_weights_are_keyed_by_seed_module_and_step():
    weight = build(RECIPES["nvfp4 weights with sr"], held=True, seed=7, step=3).weight
    assert weight.metadata.key == RngKey(seed=7, slot="layer/linear/weight", step=3)


@pytest.mark.feature("F31", "F37", "F56", "F59")
def test_inference_runs_on_rowwise_operands_alone():
    module = build("nvfp4|mxfp8", held=True)
    expected = run(module, backward=False)["y"]
    only = HybridQuantizedTensor.quantize(module.weight.dequantize(), module.weight.quantizer, directions=["rowwise"])
    only.write_(module.weight)
    module.weight = nn.Parameter(only)
    with torch.no_grad():
        assert torch.equal(run(module, backward=False)["y"], expected)
    with pytest.raises(UserError, match="layer: the columnwise operand of the weight is not held; quantize it with"):
        run(module)


@pytest.mark.feature("F70")
@pytest.mark.parametrize("held", [False, True])
def test_training_after_inference_is_training(held):
    fresh, used = (build("nvfp4|mxfp8", held=held) for _ in range(2))
    with torch.no_grad():
        first = run(used, backward=False)["y"]
    for _ in range(2):
        expected, seen = run(fresh), run(used)
        assert torch.equal(first, seen["y"])
        assert_equal(expected, seen)
    assert isinstance(used.weight, HybridQuantizedTensor) == held


def test_inference_makes_no_columnwise_operand(monkeypatch):
    module, asked = build("nvfp4|mxfp8", held=False), []
    original = HybridQuantizer.quantize

    def spy(self, x, **options):
        asked.append(options["columnwise"])
        return original(self, x, **options)

    monkeypatch.setattr(HybridQuantizer, "quantize", spy)
    with torch.no_grad():
        run(module, backward=False)
    assert asked == [None, None]


@pytest.mark.feature("F71")
def test_a_recipe_other_than_the_weights_is_refused():
    module = build("mxfp8", held=True)
    module.quantizers = LinearQuantizers.parse("nvfp4|mxfp8", "test")
    with pytest.raises(UserError, match=r"layer: the weight is held in mxfp8, but the recipe asks for nvfp4\|mxfp8"):
        run(module)


def test_the_probe_compares_a_held_weight_with_its_original():
    plain, held = (build("nvfp4|mxfp8", held=h) for h in (False, True))
    rows = []
    for module, originals in ((plain, None), (held, {"layer": plain.weight}), (held, None)):
        probe = Probe(step=3, originals=originals)
        x = draw("normal", 32, 64).requires_grad_()
        with quantization(step=3, probe=probe):
            module(x).backward(draw("normal", 32, 96, 1))
        rows.append(probe.rows)
    assert rows[0] == rows[1]
    assert {r["tensor"] for r in rows[2]} == {"input", "grad_output", "fprop", "dgrad", "wgrad"}


def test_fused_accumulation_adds_wgrad_in_fp32():
    module, plain = build("mxfp8", held=True), build("mxfp8", held=False)
    module.weight = nn.Parameter(module.weight.detach().to(torch.bfloat16))
    module.fuse_wgrad_accumulation = True
    module.weight.main_grad = torch.zeros(96, 64)
    for _ in range(3):
        assert run(module)["dw"] is None
    dw = run(plain)["dw"]
    assert torch.equal(module.weight.main_grad, dw + dw + dw)
    assert not torch.equal(dw, dw.bfloat16().float())  # bf16 would show


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", BASES)
def test_gpu_gradients_are_added_to_main_grad_by_the_gemm(recipe):
    """Without a product of their own in memory, and rounded at most once less than dw and the sum are."""
    width, options = 512, {"name": "layer", "bias": False, "dtype": torch.bfloat16}
    quantizers = LinearQuantizers.parse(recipe, "test")
    layers = [Linear(width, width, recipe=quantizers, **options).cuda() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].fuse_wgrad_accumulation = True
    start = torch.randn(width, width, device="cuda")
    layers[1].weight.main_grad = start.clone()
    x, dy = draw("normal", 256, width).cuda(), draw("normal", 256, width, 1).cuda()
    for layer in layers:
        layer(x).backward(dy)
    assert layers[1].weight.grad is None
    expected = start + layers[0].weight.grad
    torch.testing.assert_close(layers[1].weight.main_grad, expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(
    ("main_grad", "got"),
    [(None, "none"), (torch.zeros(96, 64).half(), "torch.float16"), (torch.zeros(64, 96), r"torch.float32 \(64, 96\)")],
)
def test_fused_accumulation_needs_an_fp32_main_grad(main_grad, got):
    module = build("mxfp8", held=True)
    module.fuse_wgrad_accumulation, module.weight.main_grad = True, main_grad
    with pytest.raises(UserError, match=rf"layer: .* a float32 tensor \(96, 64\); got {got}"):
        run(module)
    with torch.no_grad():
        run(module, backward=False)  # there is nothing to accumulate


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp32"])
def test_gpu_held_weights_give_the_bits_of_plain_ones(name):
    results = []
    for held in (False, True):
        module = build(RECIPES[name], held=held).cuda()
        x = draw("normal", 32, 64).cuda().requires_grad_()
        with quantization(seed=7, step=3):
            y = module(x)
        y.backward(draw("normal", 32, 96, 1).cuda())
        results.append({"y": y.detach(), "dx": x.grad, "dw": module.weight.grad})
    assert_equal(*results)
