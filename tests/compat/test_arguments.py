"""Arguments come in TransformerEngine's order with its defaults; what they do not take gets a sentence."""

import inspect

import numpy as np
import pytest
import torch
from support.compat.te_signatures import SIGNATURES
from torch.distributed import ProcessGroup

from hqsweep import compat
from hqsweep.compat import DType, Format, autocast
from hqsweep.compat import signatures as arguments
from hqsweep.compat.arguments import TAKEN
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw


def theirs() -> dict[str, inspect.Signature]:
    """Name -> its signature in TransformerEngine, with defaults as values."""
    found = {}
    for line in SIGNATURES.replace("\n    ", " ").splitlines():
        name, arguments = line.split("(", 1)
        scope = {"DType": DType, "Format": Format}
        exec(f"def stub({arguments}: pass", scope)
        found[name] = inspect.signature(scope["stub"])
    return found


THEIRS = theirs()
MODULES = {
    "Linear": ((64, 96), arguments.LINEAR, arguments.OF_LINEAR_CALL),
    "LayerNormLinear": ((64, 96), arguments.LAYERNORM_LINEAR, arguments.OF_LINEAR_CALL),
    "LayerNormMLP": ((64, 96), arguments.LAYERNORM_MLP, arguments.OF_MLP_CALL),
    "GroupedLinear": ((2, 64, 96), arguments.GROUPED_LINEAR, arguments.OF_GROUPED_CALL),
    "MultiheadAttention": ((64, 4), arguments.MULTIHEAD_ATTENTION, arguments.OF_ATTENTION_CALL),
    "DotProductAttention": ((4, 16), arguments.DOT_PRODUCT_ATTENTION, arguments.OF_DOT_PRODUCT_CALL),
    "TransformerLayer": ((64, 96, 4), arguments.TRANSFORMER_LAYER, arguments.OF_LAYER_CALL),
}
"""Module -> its sizes, and the signatures of its constructor and its call."""
HEADS = ("query_layer", "key_layer", "value_layer")
DROPOUT = ("hidden_dropout", "attention_dropout")
FUNCTIONS = sorted(set(THEIRS) - {n for n in THEIRS if n.split(".")[0] in MODULES})
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def defaults(name: str) -> dict[str, object]:
    """The arguments of a signature that have a default, in their order."""
    parameters = THEIRS[name].parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def built(kind: str, **arguments: object) -> torch.nn.Module:
    torch.manual_seed(0)
    off = {n: 0.0 for n in DROPOUT if n in MODULES[kind][1].defaults}
    return getattr(compat, kind)(*MODULES[kind][0], **off | arguments)


def called(name: str) -> tuple[object, ...]:
    """The tensors of a call, by position."""
    x = draw("normal", 32, 64)
    if name == "DotProductAttention":
        return (x.view(16, 2, 4, 16),) * 3
    return (x, [16, 16]) if name == "GroupedLinear" else (x.view(16, 2, 64),)


def defaults_of_call(name: str) -> list[object]:
    """The defaults of the arguments of a call after its tensors."""
    return [value for argument, value in defaults(f"{name}.forward").items() if argument not in HEADS]


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_their_calls_have_the_positions_and_defaults_of_theirs(name):
    _, constructor, call = MODULES[name]
    assert list(constructor.defaults.items()) == list(defaults(name).items())
    assert list(call.defaults.items()) == list(defaults(f"{name}.forward").items())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_quantizers_and_contexts_take_the_positions_and_defaults_of_theirs(name):
    ours = inspect.signature(getattr(compat, name)).parameters
    positional = [p for p in THEIRS[name].parameters.values() if p.kind is POSITIONAL]
    own = [p for p in ours.values() if p.kind is POSITIONAL]
    assert [p.name for p in own] == [p.name for p in positional]
    for parameter in THEIRS[name].parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            assert ours[parameter.name].default == parameter.default, parameter.name


@pytest.mark.parametrize("name", MODULES)
def test_defaults_that_are_spelled_out_change_nothing(name):
    spelled = [0.0 if n in DROPOUT else value for n, value in defaults(name).items()]
    torch.manual_seed(0)
    module, plain = getattr(compat, name)(*MODULES[name][0], *spelled), built(name)
    with autocast(True, False, "mxfp8", None, False):
        y = module(*called(name), *defaults_of_call(name))
        assert torch.equal(y, plain(*called(name)))


def test_positions_reach_what_they_are():
    """A position that is off by one would give these another meaning, or a refusal."""
    attention = compat.MultiheadAttention(64, 4, 16, 0.0, 1e-3, torch.nn.init.zeros_, torch.nn.init.ones_, 1, "no_mask")
    assert attention.qkv.weight.unique().tolist() == [0] and attention.proj.weight.unique().tolist() == [1]
    assert attention.attn_mask_type == "no_mask"
    layer = compat.TransformerLayer(64, 96, 4, 4, 1e-3, 0.0, 0.0, torch.nn.init.zeros_, torch.nn.init.ones_)
    assert layer.mlp.fc1.weight.unique().tolist() == [0] and layer.mlp.fc2.weight.unique().tolist() == [1]
    mlp = compat.LayerNormMLP(64, 96, 1e-3, False, False, None, None, 1, None, False, "RMSNorm", "swiglu")
    assert mlp.fc1.norm.epsilon == 1e-3 and mlp.fc1.weight.shape == (192, 64) and mlp.fc1.bias is None
    linear = compat.Linear(64, 96, False, False, None, 1, None, None, None, False, False, torch.float16, None)
    assert linear.bias is None and linear.weight.dtype is torch.float16
    normed = compat.LayerNormLinear(64, 96, 1e-3, False, False, None, 1, None, None, True, "RMSNorm")
    assert normed.norm.epsilon == 1e-3 and normed.bias is not None
    part = compat.Linear(64, 96, False, False, ProcessGroup(0, 2), 2, parallel_mode="column")
    assert part.weight.shape == (48, 64)
    texts = [
        str(quantizer)
        for quantizer in (
            compat.NVFP4Quantizer(DType.kFloat4E2M1, True, True, False, None, True, True, False, True),
            compat.NVFP4Quantizer(DType.kFloat4E2M1, True, True, False, None, False, False, True),
            compat.NVFP4Quantizer(
                DType.kFloat4E2M1, True, True, False, None, False, False, False, False, False, True, 256, "MSE"
            ),
            compat.Float8CurrentScalingQuantizer(DType.kFloat8E5M2, torch.device("cpu")),
        )
    ]
    assert texts == ["nvfp4+rht+sr", "nvfp4+2d", "nvfp4+4over6+mse", "fp8_current+e5m2"]


WRONG = (torch.ones(2), np.ones(2), "neither", 3.5, -1, [1], object())
TEXTS, NUMBERS = ("name", "ub_name"), ("eps", "layernorm_epsilon", "qk_norm_eps", "softmax_scale")
TENSORS = {name for name, (check, _) in TAKEN.items() if check(torch.ones(2))}


def accepts(argument: str, value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return argument in TENSORS
    return (argument in TEXTS and isinstance(value, str)) or (argument in NUMBERS and isinstance(value, float))


@pytest.mark.parametrize("name", MODULES)
def test_what_an_argument_does_not_take_gets_a_sentence_that_names_it(name):
    """Of the constructor and of the call; truth, order and length of the value are never asked for."""
    module = built(name)
    for of_call, signature in enumerate(MODULES[name][1:]):
        for argument in signature.defaults:
            for value in WRONG:
                if argument in signature.hints or accepts(argument, value):
                    continue
                with pytest.raises(UserError, match=rf"^\S+: .*\b{argument}\b.* (it takes|has no counterpart here)"):
                    call = () if argument in HEADS else called(name)
                    module(*call, **{argument: value}) if of_call else built(name, **{argument: value})


E4M3 = DType.kFloat8E4M3
OPTIONS = {
    "IdentityQuantizer": ((), ("dtype",)),
    "Float8CurrentScalingQuantizer": (
        (E4M3, "cpu"), ("use_existing_amax", "with_amax_reduction", "force_pow_2_scales", "amax_epsilon")
    ),
    "Float8BlockQuantizer": ((E4M3,), ("amax_epsilon", "force_pow_2_scales", "block_scaling_dim")),
    "MXFP8Quantizer": ((E4M3,), ("with_2d_quantization",)),
    "NVFP4Quantizer": (
        (),
        ("fp4_dtype", "with_amax_reduction", "with_rht", "with_post_rht_amax", "with_2d_quantization",
         "stochastic_rounding", "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_4over6_err_mode",
         "with_random_sign_mask"),
    ),
    "DelayedScalingRequest": (
        (),
        ("fp8_format", "margin", "amax_history_len", "amax_compute_algo", "scaling_factor_compute_algo", "reduce_amax"),
    ),
}  # fmt: skip
"""Quantizer -> its required arguments, and the options that say something."""


@pytest.mark.parametrize("name", OPTIONS)
def test_what_an_option_of_a_quantizer_does_not_take_gets_a_sentence_that_names_it(name):
    required, options = OPTIONS[name]
    for option in options:
        for value in WRONG:
            if option == "amax_epsilon" and isinstance(value, float):
                continue
            with pytest.raises(UserError, match=rf"{name}: .*\b{option}\b"):
                quantizer = getattr(compat, name)(*required, **{option: value})
                quantizer.quantizer(compat.QuantizerRole())  # a request is read when a slot asks for its format


def test_an_argument_that_is_not_theirs_or_comes_twice_is_refused():
    with pytest.raises(UserError, match=r"Linear: TransformerEngine has no argument 'init_methd'.*'init_method'"):
        compat.Linear(64, 96, init_methd=None)
    with pytest.raises(UserError, match="Linear: sequence_parallel is given twice, by position and by name"):
        compat.Linear(64, 96, False, sequence_parallel=False)
    with pytest.raises(UserError, match="LayerNormMLP: 1 positional arguments too many"):
        compat.LayerNormMLP(64, 96)(*called("LayerNormMLP"), None, None)


@pytest.mark.parametrize("name", sorted({*MODULES, "LayerNorm", "RMSNorm"} - {"DotProductAttention"}))
def test_device_meta_builds_without_memory_and_reset_parameters_gives_it(name):
    sizes = MODULES[name][0] if name in MODULES else (64,)
    with compat.quantized_model_init(recipe="mxfp8"):
        module = getattr(compat, name)(*sizes, device="meta", params_dtype=torch.bfloat16)
    assert all(parameter.is_meta for parameter in module.parameters())
    torch.manual_seed(0)
    module.reset_parameters()
    assert not any(parameter.is_meta for parameter in module.parameters())
    for parameter in module.parameters():
        value = parameter.to(torch.float64)
        assert value.isfinite().all() and value.abs().max() < 2
