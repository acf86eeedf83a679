"""Weights that are quantized once for as long as they stay what they are."""

import pickle

import pytest
import torch
from experts import EXPERTS, ROWS, SPLITS, K, N, grouped

from hqsweep.formats import RngKey, RngKeys
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization, set_recipe
from hqsweep.nn.grouped_call import GroupedCall
from hqsweep.ops.grouped_layout import Splits
from hqsweep.quant import HybridQuantizer
from hqsweep.quant.grouped_operand import quantize_group
from hqsweep.recipe import Recipe

BOTH = ["rowwise", "columnwise"]
SR = {"input": "nvfp4", "weight": "nvfp4+sr", "grad_output": "nvfp4"}


@pytest.fixture
def made(monkeypatch):
    """Quantizer and directions of every quantization of a weight."""
    seen, real = [], HybridQuantizer.quantize

    def spy(self, x, **options):
        if options["key"].slot.endswith("weight"):
            seen.append([d for d in ("rowwise", "columnwise") if options[d]])
        return real(self, x, **options)

    monkeypatch.setattr(HybridQuantizer, "quantize", spy)
    return seen


def linear(quantizers="mxfp8"):
    torch.manual_seed(0)
    return Linear(64, 96, name="layer", recipe=quantizers)


def train(module, index):
    x = draw("normal", 32, 64, index).requires_grad_()
    y = module(x)
    y.backward(draw("normal", 32, 96, index))
    return y.detach(), x.grad


def assert_trained_alike(cached, plain, batches=3, **context):
    for index in range(batches):
        with quantization(cache_weights=True, **context):
            a = train(cached, index)
        with quantization(**context):
            b = train(plain, index)
        assert all(map(torch.equal, a, b))
    assert torch.equal(cached.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("quantizers", ["mxfp8", "nvfp4|mxfp8@rowwise_dequantized", SR, "bf16"], ids=str)
def test_microbatches_share_operands_and_have_the_same_bits(made, quantizers):
    cached, plain = linear(quantizers), linear(quantizers)
    assert_trained_alike(cached, plain, seed=1, step=2)
    assert made.count(BOTH) == 1  # and without, each direction of each batch by itself
    assert made.count(["rowwise"]) == made.count(["columnwise"]) == 3 and len(made) == 7


def test_a_written_weight_is_quantized_again(made):
    module = linear()
    with quantization(cache_weights=True):
        before, _ = train(module, 0)
        with torch.no_grad():
            module.weight.mul_(2.0)
        after, _ = train(module, 0)
    assert made == [BOTH, BOTH] and torch.equal(after, 2 * before)


FORMATS = [
    "mxfp8", "nvfp4|mxfp8@rowwise_dequantized", "mxfp8|nvfp4@rowwise_dequantized", "nvfp4+sr", "nvfp4+sr|mxfp8",
    "fp8_block+2d", "fp8_block+fp32_scale", "fp8_current", "mxfp6_e2m3|bf16", "bf16",
]  # fmt: skip


@pytest.mark.parametrize("text", FORMATS)
def test_both_directions_at_once_have_the_bytes_of_each_alone(text):
    """And each is an operand of the product's kind."""
    module = linear({"input": "bf16", "weight": text, "grad_output": "bf16"})
    with quantization(seed=3, step=2, cache_weights=True):
        train(module, 0)
    key, weight = RngKey(seed=3, slot="layer/linear/weight", step=2), module.weight.detach().bfloat16()
    for direction in BOTH:
        wanted = dict.fromkeys(BOTH) | {direction: "exact"}
        alone = getattr(HybridQuantizer.parse(text).quantize(weight, **wanted, key=key), direction)
        ours = module.workspace._made[direction][1]
        assert torch.equal(ours.matrix, alone.matrix) and ours.divisor == alone.divisor
        assert (ours.factor is None) == (alone.factor is None)
        assert ours.factor is None or torch.equal(ours.factor, alone.factor)


@pytest.mark.parametrize("splits", [SPLITS, (ROWS // EXPERTS,) * EXPERTS], ids=["ragged", "equal"])
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("text", FORMATS)
def test_groups_are_made_at_once_as_the_products_take_them(text, single, kernels, splits, monkeypatch):
    """One call a step; columns lie by rows where one kernel computes dgrad, with the bytes of a call for columns."""
    monkeypatch.setattr("hqsweep.gemm.grouped.has_kernel", lambda device, majors: kernels)
    calls, real = [], GroupedCall._quantize

    def spy(self, tensor, x, splits, **options):
        if tensor == "weight":
            calls.append([d for d in BOTH if options[d]])
        return real(self, tensor, x, splits, **options)

    monkeypatch.setattr(GroupedCall, "_quantize", spy)
    row, _, column = text.partition("@")[0].partition("|")
    meets = {"input": row, "grad_output": column or row}  # torch._grouped_mm of a CPU takes two of one dtype
    meets = {tensor: "bf16|mxfp8" if it == "bf16" else "mxfp8" for tensor, it in meets.items()}
    section = meets | {"weight": text}
    cached, plain = (grouped(section, single_grouped_weight=single) for _ in range(2))
    for module, cache, expected in ((cached, True, [BOTH]), (plain, False, [["rowwise"], ["columnwise"]] * 2)):
        calls.clear()
        for microbatch in range(2):
            x, dy = draw("normal", ROWS, K, microbatch).requires_grad_(), draw("normal", ROWS, N, microbatch)
            with quantization(seed=3, step=2, microbatch=microbatch, cache_weights=cache):
                module(x, splits).backward(dy)
        assert calls == expected
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(cached.weights, plain.weights, strict=True))
    slots = tuple(f"experts/grouped_linear/weight/{e}" for e in range(EXPERTS))
    facts = {"keys": RngKeys(seed=3, slots=slots, step=2), "by_rows": kernels and "fp32_scale" not in text}
    weight = torch.cat([w.detach().view(-1, K) for w in cached.weights]).bfloat16()
    for direction in BOTH:
        wanted = dict.fromkeys(BOTH) | {direction: "exact"}
        made = quantize_group(weight, Splits.uniform(EXPERTS, N), HybridQuantizer.parse(text), **wanted, **facts)
        ours, alone = cached.workspace._made[direction][1], getattr(made, direction)
        assert torch.equal(ours.matrix, alone.matrix) and ours.by_rows == alone.by_rows
        assert (ours.factor is None) == (alone.factor is None)
        assert ours.factor is None or torch.equal(ours.factor, alone.factor)


def test_columns_are_made_anew_where_a_product_takes_another_form(monkeypatch):
    """By a GPU whose only kernel is that for equal experts, so that bits never depend on the call before."""
    monkeypatch.setattr("hqsweep.gemm.grouped.has_kernel", lambda device, majors: majors is None)
    module, forms = grouped("mxfp8"), []
    with quantization(cache_weights=True):
        for splits in (SPLITS, (ROWS // EXPERTS,) * EXPERTS):
            module(draw("normal", ROWS, K).requires_grad_(), splits).backward(draw("normal", ROWS, N))
            forms.append(module.workspace._made["columnwise"][1].by_rows)
    assert forms == [False, True]


def test_nothing_is_made_ahead_that_backward_will_not_ask_for(made):
    """Of a first layer, without autograd, and where the scale depends on the steps before."""
    with quantization(cache_weights=True):
        linear()(draw("normal", 32, 64)).sum().backward()
        with torch.no_grad():
            linear()(draw("normal", 32, 64).requires_grad_())
        assert made == [["rowwise"], ["rowwise"]]
        made.clear()
        train(linear("fp8_delayed"), 0)
    assert made == [["rowwise"], ["columnwise"]]


def test_another_recipe_is_quantized_again(made):
    module = linear()
    with quantization(cache_weights=True):
        train(module, 0)
        set_recipe(module, Recipe.from_config({"linear": "nvfp4"}))
        y, _ = train(module, 0)
    assert torch.equal(y, train(linear("nvfp4"), 0)[0])


def test_random_bits_are_those_of_the_step(made):
    module = linear(SR)
    outputs = []
    for step in (1, 2, 2):
        with quantization(step=step, cache_weights=True):
            outputs.append(module(draw("normal", 32, 64)))
    assert not torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[1], outputs[2])
    assert made.count(["rowwise"]) == 2


def test_inference_then_training_and_no_operand_outlives_its_context(made):
    module = linear()
    with quantization(cache_weights=True):
        with torch.no_grad():
            module(draw("normal", 32, 64))
        train(module, 0)
    assert made == [["rowwise"], ["columnwise"]]
    module(draw("normal", 32, 64))
    assert not module.workspace._made


def test_a_module_pickles_without_its_workspace():
    module = linear()
    with quantization(cache_weights=True):
        train(module, 0)
    assert not pickle.loads(pickle.dumps(module)).workspace._made
