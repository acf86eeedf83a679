"""Weights of experts as parameters: one each or one for all, quantized or not; checkpoints go either way."""

import pytest
import torch
from cases import BASES, BY_STEP
from support.nn.experts import (
    EXPERTS,
    ROWS,
    SECTIONS,
    SPLITS,
    K,
    N,
    assert_same_gradients,
    gradients,
    grouped,
    held,
    ids,
    singles,
    train,
)
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.nn import Probe, quantization, quantized_model_init, set_recipe
from hqsweep.nn.saved_memory import SavedBytes, saved_input_bytes
from hqsweep.optim import FusedAdam
from hqsweep.quant import GroupedTensor, HybridQuantizedTensor
from hqsweep.quant.serialize import load_safetensors, save_safetensors
from hqsweep.recipe import parse_recipe

SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}
HELD = [*BASES, *BY_STEP[1:], "fp8_current|mxfp8", SECTIONS[1]]


def output(module, step=1):
    with quantization(seed=1, step=step):
        return module(draw("normal", ROWS, K), SPLITS)


def bytes_of(state):
    """By name, buffer by buffer."""
    flat = {n: t.buffers if isinstance(t, HybridQuantizedTensor) else {"": t} for n, t in state.items()}
    return {f"{name}.{part}": buffer for name, held in flat.items() for part, buffer in held.items()}


@pytest.mark.feature("F80")
def test_a_single_parameter_is_one_parameter():
    module = grouped(bias=True, **SINGLE)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {"weight": (EXPERTS, N, K), "bias": (EXPERTS, N)}
    assert isinstance(module.weight, nn.Parameter)
    many = {name: tuple(p.shape) for name, p in grouped(bias=True).named_parameters()}
    assert many == {f"weight{e}": (N, K) for e in range(EXPERTS)} | {f"bias{e}": (N,) for e in range(EXPERTS)}
    for own, other in zip(module.expert_weights(), grouped().expert_weights(), strict=True):
        assert torch.equal(own, other) and own.data_ptr() >= module.weight.data_ptr()


@pytest.mark.feature("F91", "T16")
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("quantizers", HELD, ids=ids)
def test_held_weights_have_the_bits_of_those_they_were_made_from(quantizers, single):
    options = {"single_grouped_weight": single, "bias": True}
    module = held(quantizers, **options)
    with quantized_model_init(), quantization(seed=1, step=0):
        linears = singles(grouped(quantizers, **options))  # as many single linears that hold theirs
    kinds = {type(weight) for weight in module.weights}
    assert all(issubclass(kind, GroupedTensor if single else HybridQuantizedTensor) for kind in kinds)
    for linear, weight in zip(linears, grouped(quantizers).expert_weights(), strict=True):
        with torch.no_grad(), quantization(seed=1, step=0):
            linear.weight.quantize_(weight.detach(), key=linear.weight.metadata.key and _key(linear))
    assert_same_gradients(*train(module, linears))


def _key(linear):
    return RngKey(seed=1, slot=f"experts/grouped_linear/weight/{linear.expert}", step=0)


@pytest.mark.feature("F91", "T16")
@pytest.mark.parametrize("quantizers", BY_STEP)
def test_one_parameter_trains_as_many(quantizers):
    """Two models, two steps of an optimizer with masters: the same codes."""
    models = [held(quantizers, preserve=True, single_grouped_weight=single) for single in (False, True)]
    for model in models:
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        for step in (1, 2):
            optimizer.zero_grad()
            output(model, step).backward(draw("normal", ROWS, N, step))
            optimizer.step()
    many, single = (model.expert_weights() for model in models)
    for a, b in zip(many, single, strict=True):
        assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)
    assert torch.equal(output(models[0], 3), output(models[1], 3))
    assert isinstance(models[1].weight, GroupedTensor)


@pytest.mark.feature("F92")
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("quantizers", BY_STEP)
def test_checkpoints_load_both_ways(quantizers, quantized, tmp_path):
    """From one parameter to many and back, in memory and through a file: the same bytes and outputs."""
    make = held if quantized else grouped
    many, single = make(quantizers, bias=True), make(quantizers, bias=True, **SINGLE)
    for module in (many, single):
        torch.manual_seed(7)
        with quantization(seed=1, step=0):
            module.reset_parameters()
        for bias in module.biases:
            nn.init.normal_(bias)
    for source, options in ((many, SINGLE), (single, {})):
        target = make(quantizers, bias=True, **options)
        target.load_state_dict(source.state_dict())
        assert torch.equal(output(target), output(source))
        save_safetensors(source.state_dict(), tmp_path / "file.safetensors")
        again = make(quantizers, bias=True, **options)
        again.load_state_dict(load_safetensors(tmp_path / "file.safetensors"))
        back = make(quantizers, bias=True, **({} if options else SINGLE))
        back.load_state_dict(again.state_dict())
        ours, theirs = bytes_of(back.state_dict()), bytes_of(source.state_dict())
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.feature("F92")
def test_a_high_precision_checkpoint_loads_into_held_weights():
    source, expected = grouped("mxfp8"), held("mxfp8")
    target = held("mxfp8", single_grouped_weight=True)
    nn.init.zeros_(target.weight)
    target.load_state_dict(source.state_dict())
    assert torch.equal(output(target), output(expected))
    plain = grouped("mxfp8", single_grouped_weight=True)
    plain.load_state_dict(expected.state_dict())
    assert torch.equal(plain.weight[2], expected.weight2.dequantize())
    with pytest.raises(RuntimeError, match="weight3"):
        grouped().load_state_dict({f"weight{e}": torch.zeros(N, K) for e in range(3)})
    for options, state in (({}, {"weight": torch.zeros(3, N, K)}), (SINGLE, {"weight0": torch.zeros(N, K)})):
        with pytest.raises(RuntimeError, match=r'Missing key.*"weight'):
            grouped(**options).load_state_dict(state)


def test_another_recipe_than_the_weights_is_refused():
    module = held("mxfp8", single_grouped_weight=True)
    set_recipe(module, parse_recipe({"linear": "nvfp4"}))
    with pytest.raises(UserError, match="experts: the weight is held in mxfp8, but the recipe asks for nvfp4"):
        output(module)


@pytest.mark.feature("F90")
@pytest.mark.parametrize("single", [False, True])
def test_tensor_parallel_attributes(single):
    module = grouped(bias=True, single_grouped_weight=single, single_grouped_bias=single)
    for mode, cut, bias_is_cut in (("column", 0, True), ("row", 1, False), (None, None, False)):
        module.set_tensor_parallel_attributes(mode)
        for weight in module.weights:
            attributes = (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride)
            assert attributes == (cut is not None, -1 if cut is None else cut + single, 1)
        for bias in module.biases:
            assert (bias.tensor_model_parallel, bias.partition_dim) == (bias_is_cut, int(single) if bias_is_cut else -1)
    with pytest.raises(UserError, match="parallel_mode is 'columns'"):
        module.set_tensor_parallel_attributes("columns")


@pytest.mark.parametrize("single", [False, True])
def test_what_is_saved_is_the_columnwise_operand(single):
    """MXFP8: one byte an element, and a scale for 32 tokens of an expert; x itself where that is read."""
    for quantizers, options in (("mxfp8", {}), ("nvfp4", {}), ("bf16", {}), ("mxfp8", {"save_original_input": True})):
        module = grouped(quantizers, single_grouped_weight=single, **options)
        counter, x = SavedBytes(module), draw("normal", ROWS, K)
        with counter.counting():
            module(x, SPLITS)
        empty = 4 * SPLITS.count(0) if quantizers == "nvfp4" else 0  # a global amax
        assert counter.nbytes == empty + sum(saved_input_bytes(module, m) * m * K for m in SPLITS if m)
    assert saved_input_bytes(grouped("mxfp8"), 64) == 1 + 1 / 32


ENTRIES = {  # quantizers -> (bytes an element, tokens of a scale, elements of K that share it, bytes of it, and those
    # of each expert besides), counted from the definition of each format
    "bf16": (2, None, 1, 0, 0),
    "fp8_current": (1, None, 1, 0, 4),
    "fp8_block": (1, 128, 1, 4, 0),
    "fp8_block+2d": (1, 128, 128, 4, 0),
    "mxfp8": (1, 32, 1, 1, 0),
    "mxfp4": (1 / 2, 32, 1, 1, 0),
    "nvfp4": (1 / 2, 16, 1, 1, 4),
    "nvfp4|mxfp8": (1, 32, 1, 1, 0),
    "nvfp4|mxfp8@rowwise_dequantized": (1, 32, 1, 1, 0),
    "nvfp4+row_scaled|mxfp8@rowwise_dequantized": (1, 32, 1, 1, 0),
    "mxfp8|nvfp4": (1 / 2, 16, 1, 1, 4),
}


@pytest.mark.feature("H33")
@pytest.mark.parametrize("quantizers", ENTRIES)
def test_saved_bytes_are_those_counted_by_hand(quantizers):
    """Splits that fit and splits that end in a part of a block; an empty expert keeps its own bytes only."""
    code, tokens, width, scale, own = ENTRIES[quantizers]
    sections = {"input": quantizers, "weight": quantizers.replace("+row_scaled", ""), "grad_output": "bf16"}
    module = grouped(sections, single_grouped_weight=True)
    for splits in ((64, 0, 16, 48), (96, 0, 32, 128)):
        expected = sum(m * K * code + (-(-m // tokens) * -(-K // width) * scale if tokens else 0) + own for m in splits)
        counter, x = SavedBytes(module), draw("normal", sum(splits), K)
        with counter.counting():
            module(x, splits)
        assert counter.nbytes == expected


@pytest.mark.parametrize("make", [grouped, held])
@pytest.mark.parametrize("single", [False, True])
def test_the_probe_sees_every_expert_that_has_tokens(make, single):
    module = make(SECTIONS[0], single_grouped_weight=single)
    probe = Probe(1)
    with quantization(seed=1, step=1, probe=probe):
        module(draw("normal", ROWS, K).requires_grad_(), SPLITS).backward(draw("normal", ROWS, N))
    seen = {(row["layer"], row["tensor"]) for row in probe.rows}
    tensors = ["input", "grad_output", "fprop", "dgrad", "wgrad"] + (["weight"] if make is grouped else [])
    expected = {(f"experts.{e}", t) for e, m in enumerate(SPLITS) if m for t in tensors}
    assert seen - {("experts.1", "weight")} == expected
    linears = singles(grouped(SECTIONS[0]))
    rows = {
        row["tensor"]: row["rel_l2"]
        for row in probe.rows
        if row["layer"] == "experts.3" and row["direction"] != "columnwise"
    }
    other = Probe(1)
    with quantization(seed=1, step=1, probe=other):
        linears[3](draw("normal", ROWS, K)[-SPLITS[3] :])
    single_rows = {row["tensor"]: row["rel_l2"] for row in other.rows if row["direction"] != "columnwise"}
    assert single_rows["input"] == rows["input"]


@pytest.mark.feature("F80")
def test_gradients_of_the_single_parameter_are_stacked():
    many, single = grouped("mxfp8", bias=True), grouped("mxfp8", bias=True, **SINGLE)
    for module in (many, single):
        with torch.no_grad():
            for bias in module.biases:
                bias.zero_()
        output(module).backward(draw("normal", ROWS, N))
    assert single.weight.grad.shape == (EXPERTS, N, K)
    assert_same_gradients(
        gradients(single), [{k: gradients(many)[f"{k}{e}"] for k in ("weight", "bias")} for e in range(EXPERTS)]
    )


@pytest.mark.feature("F87", "F88")
@pytest.mark.parametrize("quantizers", BY_STEP)
def test_writing_one_expert_or_some_is_writing_their_parameters(quantizers):
    """Under their own histories and keys; the others stay as they are."""
    many, single = held(quantizers), held(quantizers, single_grouped_weight=True)
    with torch.no_grad():
        for seed, some in ((2, [1]), (3, [2, 3]), (4, [1, 2, 3])):
            for module in (many, single):
                output(module, step=seed).float().sum()
            values = draw("normal", len(some) * N, K, seed).view(-1, N, K) * 8
            part = single.weight[some[0]] if len(some) == 1 else single.weight[some[0] :]
            part.copy_(values.view(part.shape))
            for expert, value in zip(some, values, strict=True):
                getattr(many, f"weight{expert}").copy_(value)
    for own, expected in zip(single.expert_weights(), many.weights, strict=True):
        assert all(torch.equal(own.buffers[name], expected.buffers[name]) for name in expected.buffers)
    assert torch.equal(output(single, 9), output(many, 9))
