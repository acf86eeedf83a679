"""TransformerEngine's factories by name are the packaged recipes of these names."""

import pytest

from hqsweep import compat
from hqsweep.compat import CustomRecipe
from hqsweep.recipe import QuantizerRole, parse_recipe
from hqsweep.recipe.roles import module_roles
from hqsweep.sweep.grid.compose import load_recipe

NAMES = sorted(name.removesuffix("_factory") for name in compat.__all__ if name.endswith("_factory"))
for name in ("quantizer", "nvfp4_ref_rht_2d"):
    NAMES.remove(name)
ROLES = [
    *module_roles("linear", "layers.0.attn.qkv"),
    *module_roles("grouped_linear", "layers.0.mlp.experts"),
    *module_roles("dpa", "layers.0.attn.dpa"),
]


def test_there_are_thirteen():
    assert len(NAMES) == 13


@pytest.mark.parametrize("name", NAMES)
def test_a_factory_is_the_packaged_recipe(name):
    factory, dpa = getattr(compat, f"{name}_factory"), name == "nvfp4_linear_fp8_dpa"
    assert CustomRecipe(factory, fp8_dpa=dpa).resolve(ROLES) == parse_recipe(load_recipe(name)).resolve(ROLES)
    factory(None)  # a boundary


def test_boundaries_of_attention_in_fp8_have_its_formats():
    made = compat.nvfp4_linear_fp8_dpa_factory
    texts = [str(made(QuantizerRole(name=f"attn.{end}"))) for end in ("dpa_output", "dpa_grad_input")]
    assert texts == ["fp8_current", "fp8_current+e5m2"]


def test_the_reference_of_nvfp4_rounds_nothing_stochastically():
    texts = {role.tensor_type: str(compat.nvfp4_ref_rht_2d_factory(role)) for role in module_roles("linear", "fc")}
    assert texts == {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht"}
    assert str(compat.nvfp4_ref_rht_2d_factory(None)) == "nvfp4+rht"
