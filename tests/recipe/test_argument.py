"""recipe= of every module: what it takes, what it means, and what is refused when the module is built."""

from dataclasses import replace

import pytest
import torch
from cases import PACKAGED, crossed
from torch import nn

import hqsweep
from hqsweep.errors import UserError
from hqsweep.nn import (
    DotProductAttention,
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    LayerNormMoE,
    Linear,
    MoELayer,
    MoELayerOptions,
    MoEOptions,
    MultiheadAttention,
    TransformerLayer,
    autocast,
    set_recipe,
)
from hqsweep.nn.core.module import quantized_modules
from hqsweep.nn.norm_embedding import Norm
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import CustomRecipe, DpaQuantizers, LinearQuantizers, Recipe

MODULES = {
    "Linear": lambda recipe: Linear(64, 96, name="m", recipe=recipe),
    "Linear named head": lambda recipe: Linear(64, 96, name="head", recipe=recipe),
    "GroupedLinear": lambda recipe: GroupedLinear(2, 64, 96, name="m", recipe=recipe),
    "LayerNormLinear": lambda recipe: LayerNormLinear(64, 96, name="m", recipe=recipe),
    "LayerNormMLP": lambda recipe: LayerNormMLP(64, 96, name="m", recipe=recipe),
    "MultiheadAttention": lambda recipe: MultiheadAttention(64, 2, name="m", recipe=recipe),
    "TransformerLayer": lambda recipe: TransformerLayer(64, 96, 2, name="m", recipe=recipe),
    "LayerNormMoE": lambda recipe: LayerNormMoE(
        64, 96, name="m", recipe=recipe, options=MoEOptions(experts=2, top_k=1, shared_expert=True)
    ),
    "MoELayer": lambda recipe: MoELayer(
        64, 96, 2, name="m", recipe=recipe, options=MoELayerOptions(experts=2, top_k=1, rope_base=1e4)
    ),
}
LINEAR = {"input": "nvfp4|mxfp8@rowwise_dequantized", "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"}
DPA_SLOTS = ("qkv", "s", "do", "dp")
RHT = {"input": "nvfp4+rht", "weight": "nvfp4", "grad_output": "nvfp4"}
STRICT = {"linear": {"input": "nvfp4|mxfp8", "weight": "mxfp8", "grad_output": "mxfp8"}, "gemm": "strict"}
NO_PAIR = "wgrad: grad_output columnwise nvfp4 cannot meet input columnwise nvfp4[+]rht: the random Hadamard transform"
NOT_STRICT = "fprop: input rowwise nvfp4 cannot meet weight rowwise mxfp8 under gemm=strict: their scaling modes differ"


def formats(module):
    """(module type, slot) -> texts of the quantizers that the modules have there."""
    texts = {}
    for each in quantized_modules(module):
        for slot in each.quantizers.tensors():
            texts.setdefault((each.module_type, slot), set()).add(str(getattr(each.quantizers, slot)))
    return texts


@pytest.mark.parametrize("name", MODULES)
def test_every_module_takes_a_recipe_a_section_a_mapping_a_quantizer_or_text(name):
    build = MODULES[name]
    recipe = Recipe.from_config({"linear": LINEAR, "head": LINEAR})
    for same in (LinearQuantizers.parse(LINEAR, "t"), LINEAR, {"linear": LINEAR, "head": LINEAR}):
        assert formats(build(same)) == formats(build(recipe))
    text = "nvfp4|mxfp8@rowwise_dequantized"
    expected = formats(build(Recipe.from_config({"linear": text, "head": text})))
    assert {text} in expected.values()
    assert formats(build(text)) == formats(build(HybridQuantizer.parse(text))) == expected
    assert formats(build(CustomRecipe(qfactory=lambda role: text))) == expected


SECTIONED = ("fp32", "nvfp4_fc2_mxfp8", "nvfp4_linear_fp8_dpa", "nvfp4_row_scaled_fwd_mxfp8_bwd")
"""Packaged recipes that treat some modules in ways of their own."""


@pytest.mark.parametrize(("recipe", "name"), crossed(PACKAGED, MODULES, whole=SECTIONED))
def test_a_packaged_name_is_the_packaged_recipe(name, recipe):
    assert formats(MODULES[name](recipe)) == formats(MODULES[name](hqsweep.recipe(recipe)))


def test_a_packaged_name_says_what_single_modules_do_too():
    assert formats(DotProductAttention(name="m", recipe="mxfp8")) == {("dpa", s): {"bf16"} for s in DPA_SLOTS}
    own = formats(DotProductAttention(name="m", recipe="nvfp4_linear_fp8_dpa"))
    assert own["dpa", "qkv"] == {"fp8_current"} and own["dpa", "do"] == {"fp8_current+e5m2"}
    assert formats(Linear(64, 96, name="head", recipe="nvfp4"))["linear", "weight"] == {"bf16"}
    assert formats(Norm(64, name="m", recipe="bf16")) == {("norm", "weight"): {"fp32"}}


def test_a_format_is_for_every_tensor_of_a_single_module():
    attention = formats(DotProductAttention(name="m", recipe="format:mxfp8"))
    assert attention == {("dpa", slot): {"mxfp8"} for slot in DPA_SLOTS}
    section = DpaQuantizers.parse("mxfp8", "t")
    assert DotProductAttention(name="m", recipe=section).quantizers is section
    assert formats(Norm(64, name="m", recipe="format:bf16")) == {("norm", "weight"): {"bf16"}}


@pytest.mark.parametrize("name", MODULES)
def test_what_is_no_recipe_of_the_module_is_refused(name):
    with pytest.raises(
        UserError, match=r"(m|head): recipe is None; a (linear|grouped_linear) takes a Recipe or Custom"
    ):
        MODULES[name](None)
    with pytest.raises(UserError, match=r"(m|head): recipe is a DpaQuantizers; a .* takes .* LinearQuantizers, the n"):
        MODULES[name](DpaQuantizers.parse("mxfp8", "t"))
    with pytest.raises(UserError, match=r"(m|head): 'mxfp9' is no recipe and no format \(did you mean 'mxfp8'"):
        MODULES[name]("mxfp9")


def test_boundary_quantizers_of_a_section_are_of_single_modules():
    section = LinearQuantizers.parse("mxfp8", "t")
    section = replace(section, output=section.input)
    assert Linear(64, 96, name="m", recipe=section).quantizers.output == section.input
    with pytest.raises(UserError, match=r"m: recipe has quantizers for output or grad_input"):
        LayerNormMLP(64, 96, name="m", recipe=section)


@pytest.mark.feature("F61", "T1", "T31")
@pytest.mark.parametrize("name", MODULES)
def test_a_transform_of_one_operand_of_wgrad_is_refused(name):
    with pytest.raises(UserError, match=rf"(m\S*|head) {NO_PAIR}"):
        MODULES[name](RHT)
    with pytest.raises(UserError, match=rf"(m\S*|head) {NO_PAIR}"):
        MODULES[name](Recipe.from_config({"linear": RHT, "head": RHT}))
    MODULES[name](RHT | {"grad_output": "nvfp4+rht"})


@pytest.mark.feature("F61", "T1", "T31")
@pytest.mark.parametrize("name", MODULES)
def test_pairs_that_no_hardware_takes_are_refused_under_strict(name):
    strict = {**STRICT, "head": STRICT["linear"]}
    with pytest.raises(UserError, match=rf"(m\S*|head) {NOT_STRICT}"):
        MODULES[name](strict)
    MODULES[name](strict | {"gemm": "exact"})


def test_attention_is_refused_as_linears_are():
    with pytest.raises(UserError, match=r"m pv: s rowwise nvfp4 cannot meet qkv columnwise nvfp4[+]rht: the random"):
        DotProductAttention(name="m", recipe="nvfp4+rht")
    with pytest.raises(UserError, match=r"m ds: do rowwise bf16 cannot meet qkv rowwise mxfp8 under gemm=strict"):
        dpa = {"qkv": "mxfp8", "s": "mxfp8", "do": "bf16", "dp": "mxfp8"}
        DotProductAttention(name="m", recipe={"linear": "bf16", "dpa": dpa, "gemm": "strict"})


@pytest.mark.feature("F61", "T1", "T31")
@pytest.mark.parametrize(
    ("config", "message"), [({"linear": RHT}, NO_PAIR), (STRICT, NOT_STRICT)], ids=["rht", "strict"]
)
def test_set_recipe_and_autocast_refuse_them_too_and_change_nothing(config, message):
    model = nn.Sequential(MODULES["Linear"]("mxfp8"), nn.ReLU(), Linear(96, 64, name="n", recipe="mxfp8"))
    before, recipe = formats(model), Recipe.from_config(config)
    with pytest.raises(UserError, match=rf"m {message}.*\(and in 1 more\)"):
        set_recipe(model, recipe)
    assert formats(model) == before and model[0].gemm == "exact"
    for _ in range(2):
        with autocast(recipe=recipe), pytest.raises(UserError, match=f"m {message}"):
            model(torch.randn(32, 64))
    assert model(torch.randn(32, 64)).shape == (32, 64)


@pytest.mark.parametrize(
    "given", ["format:nvfp4", "nvfp4|nvfp4", {"linear": "nvfp4", "head": "nvfp4"}, LinearQuantizers.parse("nvfp4", "m")]
)
def test_set_recipe_and_autocast_take_what_modules_take(given):
    x, whole = torch.randn(32, 64), Recipe.from_config({"linear": "nvfp4", "head": "nvfp4"})
    model = nn.Sequential(MODULES["Linear"]("mxfp8"), nn.ReLU(), Linear(96, 64, name="n", recipe="mxfp8"))
    own = formats(model)
    with autocast(recipe=whole):
        y = model(x)
    with autocast(recipe=given):
        assert torch.equal(model(x), y)
    assert formats(model) == own and set_recipe(model, given) == 6 and torch.equal(model(x), y)


def test_what_is_no_recipe_is_refused_by_set_recipe_and_autocast():
    model = nn.Sequential(MODULES["Linear"]("mxfp8"))
    with pytest.raises(UserError, match=r"set_recipe: 'nvfp5' is no recipe and no format \(did you mean 'nvfp4'"):
        set_recipe(model, "nvfp5")
    with pytest.raises(UserError, match=r"set_recipe: recipe is None; a linear takes a Recipe or CustomRecipe"):
        set_recipe(model, None)
    with pytest.raises(UserError, match=r"autocast: 'nvfp5' is no recipe"), autocast(recipe="nvfp5"):
        pass
