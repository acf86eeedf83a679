"""GPT: names, shapes, tied heads, causality."""

import pytest
import torch

from hqsweep.config.job import linear_shapes
from hqsweep.config.model import ModelConfig, ffn_width
from hqsweep.nn import quantization
from hqsweep.nn.rope import rotate
from hqsweep.recipe import Recipe
from hqsweep.train.model import GPT


def build(linear="bf16", vocab=32, **model):
    config = ModelConfig(**{"dim": 32, "layers": 2, "heads": 2} | model)
    torch.manual_seed(0)
    return config, GPT(config, vocab, Recipe.from_config({"linear": linear}), torch.bfloat16)


def randomise_head(model):
    with torch.no_grad():
        model.head.weight.normal_(std=0.2)
    return model


def test_names_and_shapes_are_known_before_building():
    config, model = build()
    assert [(m.name, m.weight.shape[1], m.weight.shape[0]) for m in model.linears()] == linear_shapes(config, 32)
    assert [name for name, _, _ in linear_shapes(config, 32)][4:] == [
        "layers.1.attn.qkv", "layers.1.attn.proj", "layers.1.mlp.fc1", "layers.1.mlp.fc2", "head"
    ]  # fmt: skip


def test_overrides_reach_one_layer():
    config = ModelConfig(dim=32, layers=2, heads=2)
    recipe = Recipe.from_config({"linear": "mxfp8", "overrides": [{"name": "layers.1.*", "linear": "bf16"}]})
    model = GPT(config, 32, recipe, torch.bfloat16)
    assert {m.name: str(m.quantizers.input) for m in model.linears()} == {
        **{name: "mxfp8" for name, _, _ in linear_shapes(config, 32) if name.startswith("layers.0")},
        **{name: "bf16" for name, _, _ in linear_shapes(config, 32) if not name.startswith("layers.0")},
    }


def test_ffn_width_default_is_a_multiple_of_32():
    assert ffn_width(ModelConfig(dim=128)) == 352 and ffn_width(ModelConfig(dim=64)) == 192
    assert ffn_width(ModelConfig(dim=64, ffn=100)) == 100


@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_share_the_embedding(tied):
    _, model = build(tied=tied)
    assert (model.head.weight is model.embedding.weight) == tied
    model(torch.zeros(1, 32, dtype=torch.long)).sum().backward()
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize("linear", ["bf16", "mxfp8", "nvfp4+row_scaled|bf16"])
def test_formats_without_tensor_scales_leak_nothing_from_the_future(linear):
    _, model = build({"input": linear, "weight": "mxfp8", "grad_output": "mxfp8"})
    model = randomise_head(model)
    tokens = torch.arange(32)[None] % 32
    changed = tokens.clone()
    changed[0, 20:] = 3
    a, b = model(tokens), model(changed)
    assert torch.equal(a[0, :20], b[0, :20]) and not torch.equal(a[0, 20:], b[0, 20:])


def test_rotation_keeps_norms_and_depends_on_distance():
    q, k = torch.randn(1, 8, 1, 16), torch.randn(1, 8, 1, 16)
    assert torch.allclose(rotate(q, 1e4).norm(dim=-1), q.norm(dim=-1), rtol=1e-5)
    same_q, same_k = (rotate(x[:, :1].expand(1, 8, 1, 16), 1e4)[0, :, 0] for x in (q, k))
    scores = same_q @ same_k.t()
    assert torch.allclose(scores[3, 1], scores[7, 5], rtol=1e-4) and not torch.allclose(
        scores[3, 1], scores[3, 2], rtol=1e-4
    )


@pytest.mark.parametrize("section", ["embedding", "norm"])
def test_embedding_and_norms_follow_the_recipe(section):
    config = ModelConfig(dim=32, layers=1, heads=2)
    high = GPT(config, 32, Recipe.from_config({"linear": "bf16"}), torch.bfloat16)
    with torch.no_grad():
        randomise_head(high).norm.weight.copy_(torch.linspace(0.5, 1.5, 32))
    low = GPT(config, 32, Recipe.from_config({"linear": "bf16", section: "mxfp4"}), torch.bfloat16)
    low.load_state_dict(high.state_dict())
    tokens = torch.arange(32)[None]
    assert not torch.equal(high(tokens), low(tokens))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("grad_output", "vocab"),
    [("bf16", 256), ("mxfp8", 256), ("fp8_current", 256), ("nvfp4+sr", 256), ("bf16", 97), ("fp8_current", 97)],
)
def test_the_loss_on_kernels_is_that_of_torchs_operators(grad_output, vocab):
    """Loss and gradients, by chunks and of whole logits; without gradients, too."""
    _, model = build({"input": "mxfp8", "weight": "mxfp8", "grad_output": grad_output}, vocab=vocab)
    model = randomise_head(model).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(0, vocab, (4, 64), device="cuda", generator=generator)
    results = {}
    for kernels in (True, False):
        with quantization(step=1, kernels=kernels):
            loss, _ = model.loss(tokens, tokens.roll(-1, 1))
            loss.backward()
            with torch.no_grad():
                evaluated, _ = model.loss(tokens, tokens.roll(-1, 1))
        torch.testing.assert_close(evaluated, loss.detach(), rtol=1e-4, atol=0)
        results[kernels] = loss.detach(), [p.grad for p in model.parameters()]
        model.zero_grad()
    torch.testing.assert_close(results[True][0], results[False][0], rtol=1e-3, atol=0)
    for ours, expected in zip(results[True][1], results[False][1], strict=True):
        assert (ours - expected).norm() <= 0.1 * expected.norm()
