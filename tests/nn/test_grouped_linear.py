"""GroupedLinear: every expert is the Linear that it would be by itself, to the byte."""

import pytest
import torch
from cases import BASES, BY_STEP
from support.nn.experts import (
    EXPERTS,
    FORMATS,
    ROWS,
    SECTIONS,
    SPLITS,
    K,
    N,
    assert_same_gradients,
    grouped,
    ids,
    singles,
    train,
)

import hqsweep.quant.hybrid
from hqsweep.formats.inputs import draw
from hqsweep.nn import quantization
from hqsweep.nn.core.context import recomputed


@pytest.mark.feature("F67", "F141", "T18", "A15")
@pytest.mark.parametrize("quantizers", FORMATS + SECTIONS, ids=ids)
def test_experts_are_linears(quantizers):
    module = grouped(quantizers, bias=True)
    assert_same_gradients(*train(module, singles(module)))


@pytest.mark.feature("F75")
@pytest.mark.parametrize("index", range(len(FORMATS)), ids=FORMATS)
def test_other_columnwise_formats_from_either_source(index):
    """One format in one direction of all three tensors, others in the other: each meets each other one in a row."""
    for distance, source in ((1, "original"), (4, "rowwise_dequantized"), (7, "original"), (0, "rowwise_dequantized")):
        column = FORMATS[(index + distance) % len(FORMATS)]
        module = grouped(f"{FORMATS[index]}|{column}@{source}")
        assert_same_gradients(*train(module, singles(module), splits=(16, 0, 0, 32), steps=1))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("quantizers", [*BASES, *SECTIONS], ids=ids)
def test_options_of_linear(quantizers, single):
    options = {"single_grouped_weight": single, "single_grouped_bias": single, "bias": True}
    module = grouped(quantizers, save_original_input=True, fuse_wgrad_accumulation=True, **options)
    linears = singles(module, save_original_input=True)
    for m in (module, *linears):
        for name, p in m.named_parameters():
            if "weight" in name:
                p.main_grad = torch.zeros(p.shape)
    assert_same_gradients(*train(module, linears))
    assert all(w.grad is None for w in module.weights)
    assert [bool(w.any()) for p in module.weights for w in p.main_grad.view(-1, N, K)] == [m > 0 for m in SPLITS]


@pytest.mark.parametrize("quantizers", [*BY_STEP, SECTIONS[0], SECTIONS[2]], ids=ids)
def test_recomputation_microbatches_and_cached_weights(quantizers):
    module, plain = grouped(quantizers, single_grouped_weight=True), grouped(quantizers)
    linears = singles(plain)
    ours, theirs = train(plain, linears, call=lambda m, *args: recomputed(m, *args))
    assert_same_gradients(ours, theirs)

    def context(step):
        return quantization(seed=1, step=1, microbatch=step, cache_weights=True)

    ours, theirs = train(module, singles(module), steps=3, context=context)
    assert_same_gradients(ours, theirs)


def test_a_weight_is_quantized_once_for_all_microbatches(monkeypatch):
    place, sizes = hqsweep.quant.hybrid, []
    module, real = grouped(), place.quantize_plain

    def spy(x, splits, pair):
        sizes.append(splits.sizes)
        return real(x, splits, pair)

    monkeypatch.setattr(place, "quantize_plain", spy)
    for microbatch in range(3):
        with quantization(step=1, microbatch=microbatch, cache_weights=True):
            module(draw("normal", ROWS, K).requires_grad_(), SPLITS).float().sum().backward()
    assert sizes.count((N,) * EXPERTS) == 1  # both directions; x and dy are the rest
    assert len(sizes) == 1 + 3 * 2


def test_high_precision_is_torch():
    module = grouped("fp32", dtype=torch.float32, bias=True)
    x = draw("heavy", ROWS, K).clamp(-50, 50).double().requires_grad_()
    y = module(x.detach().float(), torch.tensor(SPLITS, dtype=torch.int32))
    rows = zip(x.split(SPLITS), module.expert_weights(), module.biases, strict=True)
    expected = torch.cat([torch.nn.functional.linear(part, w.double(), b.double()) for part, w, b in rows])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
