"""CustomRecipe: what a factory may return, what it is asked, pickling, and the way from a path to it."""

import pickle
import sys

import pytest

from hqsweep.errors import UserError
from hqsweep.quant import HybridQuantizer, IdentityQuantizer
from hqsweep.recipe import CustomRecipe, QuantizerRole, Recipe, parse_recipe
from hqsweep.recipe.factories import find_factory
from hqsweep.recipe.pairs import MODULE_GEMMS
from hqsweep.recipe.roles import TENSOR_TYPES, module_roles

FC = QuantizerRole("linear", "input", "fc")


def factory(role):
    return "mxfp8"


class Request:
    def quantizer(self, role):
        return HybridQuantizer.parse("mxfp8" if role.tensor_type == "input" else "mxfp8+e5m2")


@pytest.mark.parametrize("answer", [HybridQuantizer.parse("nvfp4|mxfp8"), "nvfp4|mxfp8"], ids=["value", "text"])
def test_a_quantizer_or_its_text(answer):
    assert CustomRecipe(qfactory=lambda role: answer).quantizer(FC) == HybridQuantizer.parse("nvfp4|mxfp8")


def test_a_request_is_asked_for_the_quantizer_of_the_role():
    custom = CustomRecipe(qfactory=lambda role: Request())
    assert [str(q) for q in custom.resolve(module_roles("linear", "fc")).values()] == [
        "mxfp8",
        "mxfp8+e5m2",
        "mxfp8+e5m2",
    ]


def test_attention_is_asked_for_with_fp8_dpa_only_and_norms_never():
    dpa, norm = module_roles("dpa", "attn"), QuantizerRole("norm", "weight", "norm")
    plain, attention = CustomRecipe(qfactory=factory), CustomRecipe(qfactory=factory, fp8_dpa=True)
    assert set(map(str, plain.resolve(dpa).values())) == {"bf16"}
    assert set(map(str, attention.resolve(dpa).values())) == {"mxfp8"}
    assert attention.quantizer(norm) == IdentityQuantizer("fp32")
    assert plain.resolve([None, FC, FC]) == {FC: HybridQuantizer.parse("mxfp8")}


@pytest.mark.feature("F11")
def test_a_factory_is_asked_for_the_tensors_that_products_read_and_no_others():
    asked = []
    custom = CustomRecipe(qfactory=lambda role: asked.append(role) or "mxfp8", fp8_dpa=True)
    roles = [role for module_type in TENSOR_TYPES for role in module_roles(module_type, "m")]
    custom.resolve(roles)
    read = {(kind, tensor) for kind, gemms in MODULE_GEMMS.items() for pair in gemms.values() for tensor, _ in pair}
    assert {(role.module_type, role.tensor_type) for role in asked} == read
    assert len(asked) == len(read) and not read & {("embedding", "weight"), ("norm", "weight")}


def test_it_gives_what_the_sections_give():
    roles = [*module_roles("linear", "a"), *module_roles("grouped_linear", "b"), *module_roles("dpa", "c")]
    sections = Recipe.from_config({"linear": "mxfp8", "dpa": "mxfp8"})
    assert CustomRecipe(qfactory=factory, fp8_dpa=True).resolve(roles) == sections.resolve(roles)


@pytest.mark.feature("F19")
def test_custom_recipes_are_values():
    a, b = CustomRecipe(qfactory=factory), CustomRecipe(qfactory=factory)
    assert a == b and hash(a) == hash(b) and pickle.loads(pickle.dumps(a)) == a
    assert a != CustomRecipe(qfactory=factory, fp8_dpa=True) != CustomRecipe(qfactory=lambda role: "mxfp8")


@pytest.mark.feature("F19")
def test_a_lambda_is_refused_where_it_would_have_to_be_found_again():
    custom = CustomRecipe(qfactory=lambda role: "mxfp8")
    with pytest.raises(UserError, match="cannot be pickled; define it at the top of a module"):
        pickle.dumps(custom)
    with pytest.raises(UserError, match=r"lambda.* cannot be found by its name"):
        custom.to_config()


@pytest.mark.feature("F12")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda role: None,
            r"\(fc/linear/input\) returned None; it must return .*'bf16' leaves the slot in high",
        ),
        (lambda role: "mxfp9", "fc/linear/input.*: format 'mxfp9': unknown name"),
        (lambda role: 1 / 0, "fc/linear/input.* raised ZeroDivisionError"),
    ],
)
def test_wrong_factories_are_named_with_the_role(answer, message):
    with pytest.raises(UserError, match=message):
        CustomRecipe(qfactory=answer).quantizer(FC)


@pytest.mark.feature("F12")
def test_unknown_roles_are_our_own_error():
    with pytest.raises(ValueError, match="no slot"):
        CustomRecipe(qfactory=factory).quantizer(QuantizerRole("linear", "qkv", "x"))


@pytest.fixture
def module(tmp_path, monkeypatch):
    code = "import os\ndef mine(role):\n    return 'nvfp4|mxfp8'\nother = mine\n"
    (tmp_path / "my_factories.py").write_text(code)
    (tmp_path / "my_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_factories"
    for name in ("my_factories", "my_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("key", ["qfactory", "_target_"])
def test_a_factory_is_found_by_its_name_and_its_config_reads_back(key, module):
    recipe = parse_recipe({"name": "mine", key: f"{module}.mine", "gemm": "strict"}, find_factory)
    assert str(recipe.quantizer(FC)) == "nvfp4|mxfp8"
    assert recipe.to_config() == {"qfactory": "my_factories.mine", "fp8_dpa": False, "gemm": "strict"}
    assert parse_recipe(recipe.to_config(), find_factory) == recipe


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_factories.mime", "my_factories has no function 'mime' .did you mean 'mine'"),
        ("my_factorys.mine", "w: 'my_factorys.mine' cannot be imported"),
        ("mine", "w: 'mine' is no package.module.function"),
        ("my_factories.mine()", "w: 'my_factories.mine()' is no package.module.function"),
        ("my_factories.other", "w: 'my_factories.other' is my_factories.mine; give that"),
        ("my_factories.os.path.join", "w: 'my_factories.os.path.join' cannot be imported"),
        ("my_broken.mine", "w: importing 'my_broken' raised ZeroDivisionError"),
    ],
)
def test_wrong_paths(path, message, module):
    with pytest.raises(UserError, match=message.replace("()", r"\(\)")):
        find_factory(path, "w")


def test_sections_beside_a_factory_are_refused():
    with pytest.raises(UserError, match="recipe: unknown key 'linear' beside qfactory"):
        parse_recipe({"qfactory": "json.dumps", "linear": "mxfp8"})
    with pytest.raises(UserError, match=r"recipe.fp8_dpa: got 'yes'; it must be true or false"):
        parse_recipe({"qfactory": "json.dumps", "fp8_dpa": "yes"})
