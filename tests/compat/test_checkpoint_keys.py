"""TransformerEngine's state_dicts load into modules of its names, and can be made of them."""

import io
import warnings

import pytest
import torch
from torch import Tensor, nn

import hqsweep.nn
from hqsweep import compat
from hqsweep.compat import quantized_model_init, transformer_engine_state_dict
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw

D, F, H = 64, 96, 4
EMPTY = torch.empty(0, dtype=torch.uint8)
NO_DROPOUT = {"attention_dropout": 0.0}
FUSED = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
NORM = {"layer_norm_weight": (D,), "layer_norm_bias": (D,)}
MLP = {**NORM, "fc1_weight": (F, D), "fc1_bias": (F,), "fc2_weight": (D, F), "fc2_bias": (D,)}
SPLIT = {f"{part}_{name}": shape for part in ("query", "key", "value")
         for name, shape in (("weight", (D, D)), ("bias", (D,)))}  # fmt: skip
PROJ = {"proj.weight": (D, D), "proj.bias": (D,), "proj._extra_state": None, "core_attention._extra_state": None}


def below(prefix: str, keys: dict) -> dict:
    return {f"{prefix}{key}": shape for key, shape in keys.items()}


def attention(first: str, keys: dict) -> dict:
    return {**below(first, keys), f"{first}_extra_state": None, **PROJ}


LAYER = {**below("self_attention.", attention("layernorm_qkv.", {**NORM, **SPLIT})), **below("layernorm_mlp.", MLP),
         "layernorm_mlp._extra_state": None}  # fmt: skip
CASES = {
    "Linear": (lambda: compat.Linear(D, F), {"weight": (F, D), "bias": (F,), "_extra_state": None}),
    "without a bias": (lambda: compat.Linear(D, F, bias=False), {"weight": (F, D), "_extra_state": None}),
    "LayerNormLinear": (
        lambda: compat.LayerNormLinear(D, F), {**NORM, "weight": (F, D), "bias": (F,), "_extra_state": None}
    ),
    "RMSNorm": (
        lambda: compat.LayerNormLinear(D, F, normalization="RMSNorm", bias=False),
        {"layer_norm_weight": (D,), "weight": (F, D), "_extra_state": None},
    ),
    "GroupedLinear": (
        lambda: compat.GroupedLinear(2, D, F),
        {"weight0": (F, D), "weight1": (F, D), "bias0": (F,), "bias1": (F,), "_extra_state": None},
    ),
    "LayerNormMLP": (lambda: compat.LayerNormMLP(D, F), {**MLP, "_extra_state": None}),
    "SwiGLU": (
        lambda: compat.LayerNormMLP(D, F, activation="swiglu", normalization="RMSNorm", bias=False),
        {"layer_norm_weight": (D,), "fc1_weight": (2 * F, D), "fc2_weight": (D, F), "_extra_state": None},
    ),
    "attention": (lambda: compat.MultiheadAttention(D, H, **NO_DROPOUT), attention("qkv.", SPLIT)),
    "attention with a norm": (
        lambda: compat.MultiheadAttention(D, H, input_layernorm=True, **NO_DROPOUT),
        attention("layernorm_qkv.", {**NORM, **SPLIT}),
    ),
    "fused": (
        lambda: compat.MultiheadAttention(D, H, input_layernorm=True, **FUSED, **NO_DROPOUT),
        attention("layernorm_qkv.", {**NORM, "weight": (3 * D, D), "bias": (3 * D,)}),
    ),
    "fused without a norm": (
        lambda: compat.MultiheadAttention(D, H, **FUSED, **NO_DROPOUT),
        attention("qkv.", {"weight": (3 * D, D), "bias": (3 * D,)}),
    ),
    "TransformerLayer": (lambda: compat.TransformerLayer(D, F, H, hidden_dropout=0.0, **NO_DROPOUT), LAYER),
}  # fmt: skip
"""Case -> how the module is built, and the keys of its state_dict in TransformerEngine with their shapes."""
OWN = {"layernorm_qkv.": "qkv.", "self_attention.": "attn.", "layernorm_mlp.": "mlp.", "fc1_": "fc1.", "fc2_": "fc2."}
"""Parts of TransformerEngine's keys -> those of this package, where the rest stays as it is."""


def checkpoint(keys: dict, prefix: str = "") -> dict[str, Tensor]:
    """A state_dict of these keys, with values of their own."""
    state = {}
    for number, (key, shape) in enumerate(keys.items()):
        rows = shape and draw("normal", shape[0], shape[-1] if len(shape) > 1 else 1, number).float() / 8
        state[f"{prefix}{key}"] = EMPTY if shape is None else rows.view(shape)
    return state


def value(module: nn.Module, state: dict[str, Tensor], key: str) -> tuple[Tensor, Tensor]:
    """The parameter that a key of a checkpoint is for, or its rows, and the values that the checkpoint has."""
    name = key.replace("layer_norm_", "fc1.norm." if "fc1_weight" in key or has_fc1(state, key) else "norm.")
    for theirs, own in OWN.items():
        name = name.replace(theirs, own)
    part = next((i for i, q in enumerate(("query_", "key_", "value_")) if q in name), None)
    if part is None:
        return module.get_parameter(name), state[key]
    name = name.replace(("query_", "key_", "value_")[part], "")
    return module.get_parameter(name)[part * D : (part + 1) * D], state[key]


def has_fc1(state: dict[str, Tensor], key: str) -> bool:
    return f"{key.rpartition('.')[0]}.fc1_weight".lstrip(".") in state


def called(module: nn.Module) -> Tensor:
    x = draw("normal", 32, D, 9).float()
    return module(x, [12, 20]) if isinstance(module, compat.GroupedLinear) else module(x.view(16, 2, D))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a model"])
def test_a_checkpoint_of_theirs_loads_strictly_and_every_value_is_where_it_belongs(case, inside):
    build, keys = CASES[case]
    module, file = build(), io.BytesIO()
    model = nn.ModuleDict({"body": nn.ModuleList([nn.Identity(), module])}) if inside else module
    prefix = "body.1." if inside else ""
    torch.save(checkpoint(keys, prefix), file)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = torch.load(file)
        before = dict(given)
        result = model.load_state_dict(given, strict=True)
    assert not result.missing_keys and not result.unexpected_keys and list(given) == list(before)
    state = checkpoint(keys)
    loaded = [value(module, state, key) for key, shape in keys.items() if shape is not None]
    assert all(torch.equal(own, theirs) for own, theirs in loaded)
    assert sum(own.numel() for own, _ in loaded) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_for_them_has_their_keys_and_loads_into_a_fresh_module(case):
    build, keys = CASES[case]
    module, fresh = build(), build()
    module.load_state_dict(checkpoint(keys))
    state = transformer_engine_state_dict(module)
    shapes = {key: None if key.endswith("_extra_state") else tuple(t.shape) for key, t in state.items()}
    assert shapes == {key: shape for key, shape in keys.items() if "core_attention" not in key}
    assert not torch.equal(called(fresh), called(module))
    fresh.load_state_dict(state)
    assert torch.equal(called(fresh), called(module))


@pytest.mark.parametrize("case", CASES)
def test_own_keys_still_load(case):
    module, fresh = CASES[case][0](), CASES[case][0]()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(called(fresh), called(module))


@pytest.mark.parametrize("case", CASES)
def test_what_is_missing_and_what_is_too_much_is_named(case):
    build, keys = CASES[case]
    weights = [key for key, shape in keys.items() if shape is not None]
    for gone in weights[:1] + weights[-1:]:
        state, module = checkpoint(keys), build()
        del state[gone]
        with pytest.raises(RuntimeError, match="Missing key"):
            build().load_state_dict(state)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        assert module.load_state_dict(state, strict=False).missing_keys
        same = [torch.equal(p, before[name]) for name, p in module.named_parameters()]
        assert same.count(True) <= 1
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        build().load_state_dict(checkpoint(keys) | {"other": torch.zeros(1)})
    assert build().load_state_dict(checkpoint(keys) | {"other": torch.zeros(1)}, strict=False).unexpected_keys == [
        "other"
    ]


def test_a_model_of_several_round_trips_with_modules_of_its_own():
    """One of them is there twice, under two names."""

    def build():
        shared = CASES["LayerNormMLP"][0]()
        return nn.Sequential(nn.Linear(D, D), CASES["TransformerLayer"][0](), shared, nn.LayerNorm(D), shared)

    torch.manual_seed(0)
    model, fresh = build(), build()
    state = transformer_engine_state_dict(model)
    assert {"0.weight", "1.self_attention.layernorm_qkv.query_weight", "2.fc1_weight", "3.bias", "4.fc1_weight"} < set(
        state
    )
    fresh.load_state_dict(state)
    x = draw("normal", 32, D).float().view(16, 2, D)
    assert torch.equal(fresh(x), model(x))


@pytest.mark.parametrize("case", ["attention", "attention with a norm", "TransformerLayer"])
def test_q_k_and_v_in_one_piece_are_refused_where_their_rows_may_lie_by_heads(case):
    first = "qkv." if case == "attention" else "layernorm_qkv."
    fused = {**NORM, "weight": (3 * D, D), "bias": (3 * D,)}
    if case == "attention":
        fused = {key: shape for key, shape in fused.items() if key not in NORM}
    keys = attention(first, fused)
    if case == "TransformerLayer":
        rest = {key: shape for key, shape in LAYER.items() if "layernorm_qkv." not in key}
        keys = rest | below("self_attention.", keys)
    with pytest.raises(UserError, match=r"has the weight of q, k and v in one piece, .* may lie by heads; build the"):
        CASES[case][0]().load_state_dict(checkpoint(keys))


def test_an_extra_state_that_says_something_is_not_read_which_a_warning_says():
    build, keys = CASES["LayerNormMLP"]
    state = checkpoint(keys) | {"_extra_state": torch.ones(8, dtype=torch.uint8)}
    with pytest.warns(UserWarning, match="LayerNormMLP: _extra_state of the checkpoint is a pickle that does"):
        build().load_state_dict(state)
    module = CASES["attention"][0]()
    old = checkpoint(CASES["attention"][1]) | {"core_attention.fused_attention._extra_state": EMPTY}
    del old["core_attention._extra_state"]
    module.load_state_dict(old)  # as TransformerEngine 1.6 and 1.7 wrote it


@pytest.mark.parametrize("single", [False, True])
def test_experts_load_from_one_tensor_and_from_one_for_each(single):
    one = compat.GroupedLinear(2, D, F, single_grouped_weight=True, single_grouped_bias=True)
    each = compat.GroupedLinear(2, D, F)
    source, target = (one, each) if single else (each, one)
    target.load_state_dict(transformer_engine_state_dict(source))
    assert torch.equal(called(target), called(source))


@pytest.mark.parametrize("case", ["Linear", "GroupedLinear", "LayerNormMLP", "attention", "TransformerLayer"])
def test_held_weights_take_and_give_values(case):
    build, keys = CASES[case]
    with quantized_model_init(recipe="mxfp8"):
        held = build()
    plain = build()
    for module in (held, plain):
        module.load_state_dict(checkpoint(keys))
    with compat.autocast(recipe="mxfp8"):
        assert torch.equal(called(held), called(plain))
    state = transformer_engine_state_dict(held)
    assert {key for key, shape in keys.items() if shape and "core_attention" not in key} <= set(state)
    assert {type(t) for t in state.values()} == {Tensor}


def test_states_that_are_of_no_linear_are_left_out_which_a_warning_says():
    module = hqsweep.nn.Linear(D, F, name="l", recipe="fp8_delayed")
    with pytest.warns(UserWarning, match="states of delayed scaling are left out; they begin anew there"):
        state = transformer_engine_state_dict(module)
    assert set(state) == {"weight"}


def test_a_parameter_is_assigned_by_its_name_there():
    module = compat.LayerNormMLP(64, 96)
    own = {"layer_norm_weight": module.fc1.norm, "fc1_weight": module.fc1, "fc2_bias": module.fc2}
    for name, part in own.items():
        given = nn.Parameter(torch.rand_like(getattr(module, name)))
        setattr(module, name, given)
        assert getattr(module, name) is getattr(part, name.rpartition("_")[2]) is given
    assert len(list(module.parameters())) == 6
    module.note = 1
    assert module.note == 1 and compat.Linear(64, 96).weight is not None
