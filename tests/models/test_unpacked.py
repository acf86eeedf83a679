"""Attention without a mask, in eager steps, CUDA graphs and torch.compile alike, where rows are single sequences."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.models.llamas import CONTEXT, differences, llama, results, tokens
from transformers import masking_utils

import hqsweep
from hqsweep.errors import UserError
from hqsweep.models import hf
from hqsweep.models.hf import EXPORTS, FIND, causal_lm_loss


@pytest.fixture
def masks(monkeypatch):
    """The masks that attention gets."""
    seen, product = [], F.scaled_dot_product_attention

    def spied(*args, attn_mask=None, **options):
        seen.append(attn_mask)
        return product(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    return seen


@pytest.fixture
def captured(monkeypatch):
    """What transformers sees while a CUDA graph is captured, where it cannot look into tensors."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)


def test_a_capture_has_no_mask_as_an_eager_step_has_none(masks, captured):
    model = llama(layers=1)
    results(model)
    assert masks.pop() is not None  # transformers by itself: else this test shows nothing
    with hqsweep.unpacked():
        results(model)
    assert masks == [None]


def test_a_capture_has_no_mask_with_older_transformers(masks, captured, monkeypatch):
    """Before 5.18, which asks whether anything is traced, a mask or none."""
    monkeypatch.delattr(masking_utils, EXPORTS)
    hf._replacements.cache_clear()
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", lambda mask, *_: not masking_utils.is_tracing(mask))
    try:
        with hqsweep.unpacked():
            results(llama(layers=1))
    finally:
        hf._replacements.cache_clear()
    assert masks == [None]


def test_a_step_of_a_run_has_none(masks, captured):
    loss, _ = causal_lm_loss(llama(layers=2), tokens(1), tokens(2))
    loss.backward()
    assert masks == [None, None]


@pytest.mark.slow
def test_a_compiled_model_has_no_mask():
    """In its one graph, with the results of the model by itself."""
    torch.compiler.reset()
    graphs = []

    def keep(module, inputs):
        graphs.append(module)
        return module

    model = llama(layers=1)
    compiled = torch.compile(model, backend=keep, fullgraph=True)
    for step in (1, 2):
        expected = results(model, step)
        with hqsweep.unpacked():
            assert not differences(expected, results(compiled, step))
    (graph,) = graphs
    (product,) = (node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention)
    assert product.kwargs["attn_mask"] is None and product.kwargs["is_causal"]
    torch.compiler.reset()


def test_a_window_keeps_its_mask(masks, captured):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MistralConfig(vocab_size=64, num_hidden_layers=1, sliding_window=CONTEXT // 2, **sizes)
    model = transformers.MistralForCausalLM(config)
    with hqsweep.unpacked():
        model(input_ids=tokens(1))
    (mask,) = masks
    assert int(mask[0, 0].sum(1).max()) == CONTEXT // 2


def test_packed_rows_are_refused():
    positions = torch.arange(CONTEXT).remainder(CONTEXT // 2).expand(2, -1)
    model = llama(layers=1)
    with hqsweep.unpacked(), pytest.raises(UserError, match="position_ids begins anew within a row"):
        model(input_ids=tokens(1), position_ids=positions)
    model(input_ids=tokens(1), position_ids=positions)


def test_transformers_has_what_it_replaces_and_has_it_back():
    before = [getattr(masking_utils, name) for name in (FIND, EXPORTS)]
    with pytest.raises(ZeroDivisionError), hqsweep.unpacked():
        assert [getattr(masking_utils, name) for name in (FIND, EXPORTS)] != before
        1 / 0  # noqa: B018
    assert [getattr(masking_utils, name) for name in (FIND, EXPORTS)] == before


def test_uses_may_end_in_any_order():
    """As those of two threads do."""
    before = [getattr(masking_utils, name) for name in (FIND, EXPORTS)]
    first, second = hqsweep.unpacked(), hqsweep.unpacked()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert getattr(masking_utils, FIND) is not before[0]
    second.__exit__(None, None, None)
    assert [getattr(masking_utils, name) for name in (FIND, EXPORTS)] == before
