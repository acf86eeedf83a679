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
    plain = seeded(PAIRS["layer"][0])
    with torch.no_grad():
        for parameter, own in zip(plain.parameters(), held.parameters(), strict=True):
            parameter.copy_(own.dequantize() if isinstance(own, HybridQuantizedTensor) else own)
    torch.testing.assert_close(held(tokens()), plain(tokens()))  # outside of autocast, as it is held


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
    "TransformerLayer: ub_tp_comm_overlap=True has no": lambda: compat.TransformerLayer(
        D, F, H, ub_tp_comm_overlap=True
    ),
    "TransformerLayer: hidden_dropout is 2; it takes a number from 0 to 1": lambda: compat.TransformerLayer(
        D, F, H, hidden_dropout=2
    ),
    "LayerNormMLP: activation is 'tanh'; it takes 'gelu', .* or 'clamped_swiglu'": lambda: compat.LayerNormMLP(
        D, F, activation="tanh"
    ),
    "LayerNormMLP: activation_params=True has no counterpart": lambda: compat.LayerNormMLP(
        D, F, activation_params={"limit": 7.0}
    ),
    "LayerNormMLP: activation_params.'slope'.=True has no": lambda: compat.LayerNormMLP(
        D, F, activation="clamped_swiglu", activation_params={"slope": 7.0}
    ),
    "Linear: tp_size is '2'; it takes the number of ranks, 1 or more": lambda: compat.Linear(D, F, tp_size="2"),
    "GroupedLinear: tp_size is 0; it takes the number": lambda: compat.GroupedLinear(2, D, F, tp_size=0),
    "LayerNormMLP: tp_size is -1; it takes the number": lambda: compat.LayerNormMLP(D, F, tp_size=-1),
    "LayerNormMLP: tp_size=2 without set_parallel_mode; give": lambda: compat.LayerNormMLP(D, F, tp_size=2),
    "LayerNormLinear: out_features=66 does not divide by tp_size=4": lambda: compat.LayerNormMLP(
        D, 66, tp_size=4, set_parallel_mode=True
    ),
    "Linear: return_bias=True has no counterpart here with tp_size=2": lambda: compat.Linear(
        D, F, tp_size=2, parallel_mode="column", return_bias=True
    ),
    "Linear: delay_wgrad_compute=True has no counterpart here with tp_size=2": lambda: compat.Linear(
        D, F, tp_size=2, parallel_mode="column", delay_wgrad_compute=True
    ),
    "Linear: parameters_split has {'a': 5, 'b': 6} of 96 rows": lambda: compat.Linear(
        D, F, parameters_split={"a": 5, "b": 6}
    ),
    "Linear: parts of .90, 6. rows have no counterpart here with tp_size=2": lambda: compat.Linear(
        D, F, parameters_split={"a": 90, "b": 6}, tp_size=2, parallel_mode="column"
    ),
    "MultiheadAttention: num_attention_heads=4 does not divide by tp_size=8": lambda: compat.MultiheadAttention(
        D, H, tp_size=8, set_parallel_mode=True
    ),
    "MultiheadAttention: num_attention_heads=4 does not divide by num_gqa_groups=3": lambda: compat.MultiheadAttention(
        D, H, num_gqa_groups=3
    ),
    "MultiheadAttention: sequence_parallel splits tokens along the first axis": lambda: compat.MultiheadAttention(
        D, H, tp_size=2, set_parallel_mode=True, sequence_parallel=True, qkv_format="bshd"
    ),
    "MultiheadAttention: attention_type='cross' takes encoder_output": lambda: compat.MultiheadAttention(
        D, H, attention_type="cross"
    )(tokens()),
    "attn_mask_type='padding' takes attention_mask .B, 1, 1, T.": lambda: compat.MultiheadAttention(
        D, H, attn_mask_type="padding"
    )(tokens()),
    "attention_mask hides 1 queries and 1 keys, where there are 32 and 32": lambda: compat.MultiheadAttention(
        D, H, attn_mask_type="padding"
    )(tokens(), torch.ones(2, 1, 1, 1)),
    "rotary_pos_emb is 1; it takes a tensor": lambda: compat.MultiheadAttention(D, H)(tokens(), rotary_pos_emb=1),
    "rotary_pos_emb .3, 1, 1, 16. is too small for 32 positions": lambda: compat.MultiheadAttention(D, H)(
        tokens(), rotary_pos_emb=compat.RotaryPositionEmbedding(16)(3)
    ),
    "MultiheadAttention: inference_params=a object has no counterpart": lambda: compat.MultiheadAttention(D, H)(
        tokens(), inference_params=object()
    ),
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


def stream(module, x, encoded=None):
    """The layer's output [S, B, D] from its own modules, by TransformerEngine's formulas."""
    options = module.options
    mlp = lambda y: module.mlp(y)[0] if isinstance(module.mlp(y), tuple) else module.mlp(y)  # noqa: E731
    if options.get("parallel_attention_mlp"):
        return x + module.attn(x) + mlp(x)
    if options.get("output_layernorm"):
        y = x + module.attn(x)
        return nn.functional.layer_norm(y + mlp(y), (D,), module.layernorm.weight, module.layernorm.bias)
    if options.get("apply_residual_connection_post_layernorm"):
        y, normed = module.attn(x)
        x = y + normed
        y, normed = module.mlp(x)
        return y + normed
    x = x + module.attn(x)
    if encoded is not None:
        x = x + module.inter_attention(x, encoder_output=encoded)
    return x + mlp(x)


@pytest.mark.parametrize("options", [
    {}, {"parallel_attention_mlp": True}, {"output_layernorm": True}, {"layer_type": "decoder"},
    {"apply_residual_connection_post_layernorm": True}, {"num_gqa_groups": 2, "qk_norm_type": "RMSNorm"},
    {"softmax_type": "learnable", "window_size": (3, 0)}, {"zero_centered_gamma": True, "activation": "geglu"},
], ids=str)  # fmt: skip
def test_the_stream_is_theirs(options):
    module = seeded(lambda: compat.TransformerLayer(D, F, H, hidden_dropout=0, **options, **NO_DROPOUT))
    module.options = options
    x, encoded = tokens().float(), draw("normal", 12 * B, D, 5).view(12, B, D).float()
    encoded = encoded if "layer_type" in options else None
    y = module(x) if encoded is None else module(x, encoder_output=encoded)
    torch.testing.assert_close(y, stream(module, x, encoded), rtol=1e-4, atol=1e-4)
    state = compat.transformer_engine_state_dict(module)
    assert {key.split(".")[0] for key in state} <= {
        "self_attention", "inter_attention", "layernorm_mlp", "layernorm"
    }  # fmt: skip
    fresh = compat.TransformerLayer(D, F, H, hidden_dropout=0, **options, **NO_DROPOUT)
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x) if encoded is None else fresh(x, encoder_output=encoded), y)


def test_dropout_acts_on_each_branch_in_training():
    module = seeded(lambda: compat.TransformerLayer(D, F, H, hidden_dropout=0.5, **NO_DROPOUT))
    x = tokens().float()
    torch.manual_seed(3)
    y = module(x)
    torch.manual_seed(3)
    expected = x + nn.functional.dropout(module.attn(x), 0.5)
    expected = expected + nn.functional.dropout(module.mlp(expected), 0.5)
    torch.testing.assert_close(y, expected)
    assert torch.equal(module.eval()(x), module(x))


def test_whole_branches_may_be_dropped_by_the_first_axis():
    module = seeded(lambda: compat.TransformerLayer(D, F, H, hidden_dropout=0, drop_path_rate=0.5, **NO_DROPOUT))
    module.mlp = nn.Identity()
    module.attn.attended = lambda x, call: torch.ones_like(x)
    torch.manual_seed(0)
    y = module(torch.zeros(S, B, D))
    assert all(row.unique().numel() == 1 for row in y) and set(y.unique().tolist()) <= {0.0, 2.0, 4.0, 6.0}
    assert y.unique().numel() > 1


def test_attention_dropout_is_of_the_layers_attention():
    module = seeded(lambda: compat.TransformerLayer(D, F, H, hidden_dropout=0, attention_dropout=0.5))
    x = tokens().float()
    assert not torch.equal(module(x), module(x))
    assert torch.equal(module.eval()(x), module(x))


def test_roles_have_the_names_of_transformer_engine():
    asked = []

    def factory(role):
        asked.append(role and role.name)
        return compat.MXFP8Quantizer(compat.DType.kFloat8E4M3)

    decoder = compat.TransformerLayer(64, 128, 4, name="d", layer_type="decoder", hidden_dropout=0.0)
    plain = compat.MultiheadAttention(64, 4, name="a", attention_dropout=0.0)
    with compat.autocast(recipe=compat.CustomRecipe(factory)):
        x = torch.randn(32, 1, 64)
        decoder(x, encoder_output=x)
        plain(x)
    of_layer = ("self_attention.layernorm_linear_qkv", "self_attention.proj", "inter_attention.layernorm_linear_q")
    of_layer += ("inter_attention.linear_kv", "inter_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
    assert set(asked) - {None} == {f"d.{name}" for name in of_layer} | {"a.linear_qkv", "a.proj"}
    assert plain.dpa.name == "a.core_attention" and decoder.attn.dpa.name == "d.self_attention.core_attention"


def test_a_factory_is_asked_with_none_for_each_boundary():
    asked = []

    def factory(role):
        asked.append(role and role.tensor_type)
        return compat.MXFP8Quantizer(compat.DType.kFloat8E4M3)

    module = compat.Linear(64, 64)
    with compat.autocast(recipe=compat.CustomRecipe(factory)):
        for _ in range(2):
            module(torch.randn(32, 64))
    assert asked == ["input", "weight", "grad_output", None, None]
