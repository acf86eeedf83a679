"""Attention of Hugging Face's models by recipe.dpa: the plain one's numbers, and the bytes of DotProductAttention."""

import pickle

import pytest
import torch
from cases import DELAYED, LOW_BASES, attended, bare
from support.models.tiny import equal, furthest, step, tiny, tokens

import hqsweep
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.models.attention import AttentionPart, Scores
from hqsweep.models.convert import gemm_modules_of
from hqsweep.nn import DotProductAttention, quantization, set_recipe
from hqsweep.nn.core.module import quantized_modules
from hqsweep.recipe import Recipe

IDENTITY = {"linear": "fp32", "dpa": "fp32"}
ROUNDED_ONCE = {"qkv": "fp32", "s": "fp32", "do": "fp32", "dp": "fp32|bf16"}
"""All but dk is in float32, and it is no identity."""
KINDS = ("llama", "gpt2", "qwen3_moe", "deepseek_v3", "gpt_oss")
OPTIONS = {"gpt2": {"scale_attn_by_inverse_layer_idx": True}, "deepseek_v3": {"v_head_dim": 40}}
"""Groups of heads, a scale of each layer, norms of queries, values wider than keys, sinks and sliding windows."""
LEFT_PADDED = torch.ones(2, 32, dtype=torch.long)
LEFT_PADDED[0, :7] = 0
INPUTS = {
    "whole": {},
    "left-padded": {"attention_mask": LEFT_PADDED},
    "packed": {"position_ids": torch.cat([torch.arange(12), torch.arange(20)]).expand(2, -1)},
}


@pytest.mark.feature("H42")
@pytest.mark.parametrize("kind", KINDS)
def test_model(kind):
    """In identities it is the original to the bit. By our products it is the original's numbers in float32, whatever is
    masked, and revert leaves nothing behind."""
    model = tiny(kind, **OPTIONS.get(kind, {}))
    implementation = model.config._attn_implementation
    plain = {name: step(model, **inputs) for name, inputs in INPUTS.items()}
    conversion = hqsweep.convert(model, IDENTITY, attention=True)
    assert [each.kind for each in conversion.modules].count("attention") == 2
    assert all(equal(step(model, **inputs), plain[name]) for name, inputs in INPUTS.items())
    set_recipe(model, Recipe.from_config({"linear": "fp32", "dpa": ROUNDED_ONCE}))
    conversion.reset()
    for name, inputs in INPUTS.items():
        ours = step(model, **inputs)
        attended = inputs.get("attention_mask", torch.ones(2, 32)).bool()
        assert torch.allclose(ours[0][attended], plain[name][0][attended], rtol=0, atol=1e-5), name
        assert 1e-5 < furthest(plain[name], ours) < 0.02 and ours[0].isfinite().all(), name
    assert conversion.unused() == []
    set_recipe(model, Recipe.from_config({"linear": "fp32", "dpa": "mxfp8"}))
    assert 1e-5 < (step(model)[0] - plain["whole"][0]).abs().max() < 0.1
    hqsweep.revert(model)
    assert model.config._attn_implementation == implementation and equal(step(model), plain["whole"])


@pytest.mark.feature("H42")
@pytest.mark.parametrize(
    "recipe", [*attended(LOW_BASES, 32), DELAYED, {**ROUNDED_ONCE, "do": "nvfp4+sr|bf16"}], ids=str
)
def test_bytes_are_those_of_our_attention(recipe):
    """Heads share keys and values in groups, and nothing is masked but what lies ahead."""
    q, k, v, do = (draw("normal", 2 * heads * 32, 16).float().view(2, heads, 32, 16) for heads in (4, 2, 2, 4))
    modules = [
        kind(name="attn", recipe=bare(recipe), dtype=torch.float32) for kind in (DotProductAttention, AttentionPart)
    ]
    results = []
    for module in modules:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with quantization(seed=3, step=5):
            if type(module) is AttentionPart:
                scores = Scores(mask=None, is_causal=True, scale=0.25, sinks=None)
                o = module.product(*inputs, scores, torch.float32)
            else:
                a, b, c = inputs
                o = module(a, b.repeat_interleave(2, 1), c.repeat_interleave(2, 1), is_causal=True)
            o.backward(do)
        results.append((o, *(x.grad for x in inputs)))
    assert all(map(torch.equal, *results))


def test_recipe_says_whether_attention_is_taken():
    kinds = [
        {each.kind for each in hqsweep.convert(tiny("llama"), {"linear": "mxfp8"} | more).modules}
        for more in (
            {},
            {"dpa": "mxfp8"},
            {"overrides": [{"name": "model.layers.1.*", "dpa": "mxfp8"}]},
            {"schedule": [{"at": 0.5, "dpa": "mxfp8"}]},
        )
    ]
    assert kinds == [{"linear"}, *[{"linear", "attention"}] * 3]
    model = tiny("llama")
    filtered = hqsweep.convert(model, {"linear": "bf16", "dpa": "mxfp8"}, lambda module, name: "layers.1" in name)
    assert [each.name for each in filtered.modules if each.kind == "attention"] == ["model.layers.1.self_attn"]
    roles = [part.slot_roles() for part in quantized_modules(model) if part.module_type == "dpa"]
    assert str(roles[0]["qkv"]) == "model.layers.1.self_attn/dpa/qkv"


@pytest.mark.feature("H42")
@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("gpt2", {"attn_pdrop": 0.1}, r"attention of transformer\.h\.0\.attn drops out 0\.1 of its softmax"),
        ("llama", {"attn_implementation": "flex_attention"}, "computed by flex_attention, where .* sdpa or eager"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "its scores in float32"),
        ("gpt2", {"add_cross_attention": True}, "attends to another sequence"),
    ],
)
def test_what_attention_is_refused(kind, options, why):
    """By its name, and nothing is converted."""
    model = tiny(kind, **options)
    with pytest.raises(UserError, match=why):
        hqsweep.convert(model, {"linear": "bf16", "dpa": "mxfp8"})
    with pytest.raises(UserError, match=why):
        gemm_modules_of(model, Recipe.from_config({"linear": "bf16", "dpa": "mxfp8"}))
    assert not quantized_modules(model) and not model.config._attn_implementation.startswith("hqsweep")


def test_what_a_call_asks_beyond():
    model = tiny("llama").eval()
    hqsweep.convert(model, {"linear": "bf16", "dpa": "mxfp8"})
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn dpa: .* 30 positions.*multiple of 32"):
        model(tokens(length=30), use_cache=False)
    with pytest.raises(UserError, match=r"1 queries and 33 keys.*use_cache=False"):
        cache = model(tokens(), use_cache=True).past_key_values
        model(tokens(length=1), past_key_values=cache)
    attention = model.model.layers[0].self_attn
    attention.train().attention_dropout = 0.5
    with pytest.raises(UserError, match=r"it drops out 0\.5"):
        model(tokens(), use_cache=False)


def test_another_process_reads_a_pickle(monkeypatch):
    """In which transformers does not know the names yet."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    model = tiny("llama").eval()
    hqsweep.convert(model, {"linear": "bf16", "dpa": "mxfp8"})
    logits, text = model(tokens(), use_cache=False).logits, pickle.dumps(model)
    for interface in (AttentionInterface, AttentionMaskInterface):
        known = {k: v for k, v in interface._global_mapping.items() if not k.startswith("hqsweep")}
        monkeypatch.setattr(interface, "_global_mapping", known)
    with pytest.raises(KeyError):
        model(tokens(), use_cache=False)
    assert torch.equal(pickle.loads(text)(tokens(), use_cache=False).logits, logits)
