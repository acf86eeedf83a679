"""TransformerEngine's LayerNormMLP, MultiheadAttention and TransformerLayer, called as they are called there."""

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from hqsweep import compat
from hqsweep.compat import CustomRecipe, DType, MXFP8Quantizer, autocast
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import (
    LayerNormMLP,
    MLPOptions,
    MultiheadAttention,
    TransformerLayer,
    TransformerOptions,
    quantization,
    quantized_model_init,
)
from hqsweep.nn.core.options import AttentionOptions
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.recipe import Recipe

D, F, H, S, B = 64, 96, 4, 32, 2
NORM = {"normalization": "LayerNorm"}
NO_DROPOUT = {"attention_dropout": 0.0}
RECIPE = CustomRecipe(qfactory=lambda role: MXFP8Quantizer(DType.kFloat8E4M3))


def run(module, x, **options):
    """y and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    with autocast(recipe=RECIPE):
        y = module(x, **options)
    y.backward(draw("normal", x.shape[0] * x.shape[1], D, 7).view(x.shape).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for _, p in sorted(module.named_parameters()))]


def seeded(build):
    torch.manual_seed(0)
    module = build()
    for name, parameter in sorted(module.named_parameters()):
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.2)
    return module


def tokens():
    return draw("normal", S * B, D, 3).view(S, B, D)


PAIRS = {
    "gelu": (
        lambda: compat.LayerNormMLP(D, F, name="m"),
        lambda: LayerNormMLP(
            D, F, name="m", recipe="mxfp8", bias=True, options=MLPOptions(activation="gelu", **NORM)
        ),
    ),
    "swiglu": (
        lambda: compat.LayerNormMLP(D, F, 1e-5, name="m", activation="swiglu", normalization="RMSNorm", bias=False),
        lambda: LayerNormMLP(D, F, name="m", recipe="mxfp8"),
    ),
    "attention": (
        lambda: compat.MultiheadAttention(D, H, input_layernorm=True, name="m", qkv_format="bshd", **NO_DROPOUT),
        lambda: MultiheadAttention(
            D, H, name="m", recipe="mxfp8", bias=True, options=AttentionOptions(**NORM)
        ),
    ),
    "no mask": (
        lambda: compat.MultiheadAttention(
            D, H, input_layernorm=True, name="m", qkv_format="bshd", attn_mask_type="no_mask", **NO_DROPOUT
        ),
        lambda: MultiheadAttention(
            D, H, name="m", recipe="mxfp8", bias=True, options=AttentionOptions(is_causal=False, **NORM)
        ),
    ),
    "layer": (
        lambda: compat.TransformerLayer(
            D, F, H, name="m", attn_input_format="bshd", hidden_dropout=0, ub_bulk_wgrad=True, **NO_DROPOUT
        ),
        lambda: TransformerLayer(
            D, F, H, name="m", recipe="mxfp8", options=TransformerOptions(bias=True, activation="gelu", **NORM)
        ),
    ),
}  # fmt: skip


@pytest.mark.feature("F119")
@pytest.mark.parametrize("case", PAIRS)
def test_they_are_ours_under_their_names(case):
    theirs, ours = (seeded(build) for build in PAIRS[case])
    x = tokens()
    expected = run(ours, x)
    assert all(map(torch.equal, run(theirs, x, is_first_microbatch=True), expected))
    assert not torch.equal(theirs(x), expected[0])  # high precision outside of autocast


def test_the_first_axis_may_be_that_of_tokens():
    """Each sequence is what it is by itself, with its tokens along the other axis."""
    build = PAIRS["layer"][0]
    batch_first = seeded(build)
    tokens_first = seeded(lambda: compat.TransformerLayer(D, F, H, name="m", hidden_dropout=0, **NO_DROPOUT))
    x = tokens()
    for sequence in range(B):
        own = x[:, sequence : sequence + 1]
        expected = run(batch_first, own.transpose(0, 1).contiguous())
        actual = run(tokens_first, own.contiguous())
        assert torch.equal(actual[0], expected[0].transpose(0, 1))
        assert torch.equal(actual[1], expected[1].transpose(0, 1))


def test_attention_without_a_norm():
    plain = seeded(lambda: compat.MultiheadAttention(D, H, name="m", **NO_DROPOUT))
    normed = seeded(lambda: compat.MultiheadAttention(D, H, input_layernorm=True, name="m", **NO_DROPOUT))
    x = tokens()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(dict(normed.named_parameters())[name])
    assert "qkv.norm.weight" not in dict(plain.named_parameters())
    with autocast(recipe=RECIPE):
        h = normed.qkv.norm.added(x, None, torch.bfloat16)[1]
        assert torch.equal(plain(h), normed(x))
        assert torch.equal(plain(h, checkpoint_core_attention=True), normed(x))


@pytest.mark.parametrize("draw_weight", [None, nn.init.xavier_normal_])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_part_is_that_of_the_weight_of_one_process(draw_weight, dtype):
    def build(**options):
        torch.manual_seed(0)
        return compat.Linear(D, F, name="l", bias=False, init_method=draw_weight, params_dtype=dtype, **options)

    whole, shared = build(), {"parallel_mode": "column", "tp_size": 2}
    part = build(tp_group=ProcessGroup(1, 2), **shared)
    assert torch.equal(part.weight, whole.weight[F // 2 :])
    part.weight.data.zero_()
    torch.manual_seed(0)
    part.reset_parameters()
    assert torch.equal(part.weight, whole.weight[F // 2 :])
    with pytest.raises(UserError, match="l: tp_size=2, and no tp_group says which ranks these are; give tp_group, or"):
        build(**shared)(tokens())


def test_weights_are_held_by_the_recipe_of_quantized_model_init():
    tokens = lambda: draw("normal", S * B, D, 3).view(S, B, D).float()  # noqa: E731
    with quantized_model_init(recipe=RECIPE):
        held = seeded(PAIRS["layer"][0])
    expected = run(seeded(PAIRS["layer"][0]), tokens())
    assert all(isinstance(p, HybridQuantizedTensor) for n, p in held.named_parameters() if p.dim() == 2)
    assert all(map(torch.equal, run(held, tokens()), expected))
    with pytest.raises(UserError, match="the weight is held in mxfp8, but the recipe asks for fp32"):
        held(tokens())


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_held_weights_in_another_dtype_are_drawn_with_their_histories(kind):
    """Megatron-Core gives init_method and params_dtype, and draws weights after they have got their dtype."""
    recipe, outputs, more = Recipe.from_config({"linear": "fp8_delayed"}), [], {}
    if kind == "GroupedLinear":
        more = {"m_splits": [S, S]}
    for held in (False, True):
        torch.manual_seed(0)
        options = {"bias": False, "init_method": nn.init.xavier_normal_, "params_dtype": torch.bfloat16, "name": "l"}
        with quantized_model_init(recipe=recipe, enabled=held):
            module = getattr(compat, kind)(*([2] if more else []), D, F, **options)
        assert all(isinstance(p, HybridQuantizedTensor) == held for p in module.parameters())
        with autocast(recipe=recipe), quantization(step=1):
            outputs.append(module(tokens().flatten(0, 1), **more))
    assert torch.equal(*outputs)


def test_weights_are_drawn_by_their_functions():
    with torch.no_grad():
        layer = compat.TransformerLayer(
            D, F, H, hidden_dropout=0, init_method=lambda w: w.fill_(0.5), params_dtype=torch.bfloat16,
            output_layer_init_method=lambda w: w.fill_(0.25), fuse_wgrad_accumulation=True, **NO_DROPOUT
        )  # fmt: skip
    values = {name: p.unique().tolist() for name, p in layer.named_parameters() if p.dim() == 2}
    assert values == {
        "attn.qkv.weight": [0.5], "attn.proj.weight": [0.25], "mlp.fc1.weight": [0.5], "mlp.fc2.weight": [0.25]
    }  # fmt: skip
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    weights = [p for p in layer.parameters() if p.dim() == 2]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    layer(tokens()).sum().backward()
    assert all(weight.grad is None and weight.main_grad.any() for weight in weights)


REFUSED = {
    "hidden_dropout=0.1, attention_dropout=0.1 have no counterpart here": lambda: compat.TransformerLayer(
        D, F, H
    ),
    "MultiheadAttention: attention_dropout=0.1 has no counterpart here": lambda: compat.MultiheadAttention(D, H),
    "TransformerLayer: ub_tp_comm_overlap=True has no": lambda: compat.TransformerLayer(
        D, F, H, hidden_dropout=0, ub_tp_comm_overlap=True, **NO_DROPOUT
    ),
    "LayerNormMLP: return_layernorm_output=True has no": lambda: compat.LayerNormMLP(
        D, F, return_layernorm_output=True
    ),
    "LayerNormMLP: activation is 'relu'; it takes 'gelu' or 'swiglu'": lambda: compat.LayerNormMLP(
        D, F, activation="relu"
    ),
    "Linear: tp_size is '2'; it takes the number of ranks, 1 or more": lambda: compat.Linear(D, F, tp_size="2"),
    "GroupedLinear: tp_size is 0; it takes the number": lambda: compat.GroupedLinear(2, D, F, tp_size=0),
    "LayerNormMLP: tp_size is -1; it takes the number": lambda: compat.LayerNormMLP(D, F, tp_size=-1),
    "LayerNormMLP: tp_size=2 without set_parallel_mode; give": lambda: compat.LayerNormMLP(D, F, tp_size=2),
    "LayerNormLinear: out_features=66 does not divide by tp_size=4": lambda: compat.LayerNormMLP(
        D, 66, tp_size=4, set_parallel_mode=True
    ),
    "MultiheadAttention: num_attention_heads=4 does not divide by tp_size=8": lambda: compat.MultiheadAttention(
        D, H, tp_size=8, set_parallel_mode=True, **NO_DROPOUT
    ),
    "MultiheadAttention: sequence_parallel splits tokens along the first axis": lambda: compat.MultiheadAttention(
        D, H, tp_size=2, set_parallel_mode=True, sequence_parallel=True, qkv_format="bshd", **NO_DROPOUT
    ),
    "MultiheadAttention: num_gqa_groups=2 has no": lambda: compat.MultiheadAttention(
        D, H, num_gqa_groups=2, **NO_DROPOUT
    ),
    "MultiheadAttention: kv_channels=32 has no": lambda: compat.MultiheadAttention(D, H, kv_channels=32, **NO_DROPOUT),
    "MultiheadAttention: q, k and v lie one below the other": lambda: compat.MultiheadAttention(
        D, H, fuse_qkv_params=True, **NO_DROPOUT
    ),
    "attn_mask_type is 'padding'; it takes 'causal' or 'no_mask'": lambda: compat.MultiheadAttention(
        D, H, attn_mask_type="padding", **NO_DROPOUT
    ),
    "TransformerLayer: layer_type is 'decoder'": lambda: compat.TransformerLayer(
        D, F, H, layer_type="decoder", hidden_dropout=0, **NO_DROPOUT
    ),
    "MultiheadAttention: attention_mask=a Tensor .1., rotary_pos_emb=1 have": lambda: compat.MultiheadAttention(
        D, H, **NO_DROPOUT
    )(tokens(), torch.ones(1), rotary_pos_emb=1),
}  # fmt: skip


@pytest.mark.feature("F119")
@pytest.mark.parametrize("sentence", REFUSED)
def test_what_would_change_a_number_and_is_not_here_is_refused(sentence):
    with pytest.raises(UserError, match=sentence):
        REFUSED[sentence]()


@pytest.mark.parametrize("held", [False, True])
def test_an_mlp_is_drawn_again_as_it_was_built(held):
    with quantized_model_init(enabled=held, recipe="mxfp8"):
        torch.manual_seed(0)
        module = compat.LayerNormMLP(D, F)
    first = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.full(parameter.shape, 3.0))
    torch.manual_seed(0)
    module.reset_parameters()
    for name, parameter in module.named_parameters():
        values = [p.dequantize() if isinstance(p, HybridQuantizedTensor) else p for p in (parameter, first[name])]
        assert torch.equal(*values), name
