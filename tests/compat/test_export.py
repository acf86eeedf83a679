"""Exported modules run against compat.py and give what the recipe gives, for every slot of a model."""

import re

import pytest
import torch
from cases import FEW_PACKAGED
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.compat.export import to_transformer_engine
from hqsweep.config.recipe_files import read_recipe, recipe_file
from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.recipe import CustomRecipe, QuantizerRole, parse_recipe
from hqsweep.recipe.listing import slots
from hqsweep.recipe.roles import module_roles
from hqsweep.sweep.grid.compose import known_recipes, load_recipe

pytestmark = pytest.mark.slow

THERE = {"bf16", "fp16", "fp32", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"}
"""Names of formats that TransformerEngine has at d0067d0."""


def _is_there(name):
    """Whether a packaged recipe takes only formats that TransformerEngine has."""
    recipe = read_recipe(recipe_file(name))  # without Hydra, which would take seconds of each collection
    quantizers = [slot.quantizer for slot in slots(parse_recipe(recipe))]
    formats = {format for q in quantizers for format in (q.rowwise, q.columnwise)}
    return {format.name for format in formats} <= THERE and not any(format.rht_drawn for format in formats)


EXPORTED = [name for name in known_recipes() if _is_there(name)]
LAYERS = 12
KEY = RngKey(seed=1, slot="slot", step=3)
ROLES = [
    role
    for module_type, name in [
        *((t, f"layers.{i}.{n}") for i in range(LAYERS)
          for t, n in (("linear", "attn.qkv"), ("grouped_linear", "mlp.experts"), ("dpa", "attn.dpa"))),
        ("linear", "head"), ("linear", "adapter"),
    ]
    for role in module_roles(module_type, name)
]  # fmt: skip


def run(text):
    """The names of an exported module, its imports of TransformerEngine replaced and nothing else."""
    text, count = re.subn(r"^from transformer_engine[\w.]* import", "from hqsweep.compat import", text, flags=re.M)
    assert count >= 2
    names = {}
    exec(compile(text, "exported.py", "exec"), names)
    return names


@pytest.mark.parametrize("name", sorted({*EXPORTED} & {*FEW_PACKAGED}))
def test_an_exported_recipe_is_the_recipe(name):
    recipe = parse_recipe(load_recipe(name))
    exported = run(to_transformer_engine(recipe, name, LAYERS))["recipe"]
    assert isinstance(exported, CustomRecipe)
    assert exported.resolve(ROLES) == recipe.resolve(ROLES)


@pytest.mark.parametrize(
    "sections",
    [
        {"linear": "nvfp4+rht+nosign", "head": "fp32"},
        {"linear": "mxfp8+2d", "head": "nvfp4+4over6+mse+max448"},
        {"linear": "fp8_current+e5m2+pow2+eps0.25", "grouped_linear": "fp8_block+2d+fp32_scale", "head": "fp16"},
        {"linear": "mxfp8", "dpa": {"qkv": "fp8_current", "do": "fp8_current+e5m2"}},
        {"linear": "mxfp8", "overrides": [{"layers": "last(0.15)", "linear": "bf16", "dpa": "mxfp8"}]},
        {"linear": "mxfp8", "overrides": [{"name": "*.qkv", "linear": "nvfp4"}, {"layers": [0, -1], "linear": "bf16"}]},
        {"linear": "mxfp8", "overrides": [{"name": "*", "linear": "nvfp4|mxfp8@rowwise_dequantized"}]},
        {"linear": "mxfp8", "overrides": [{"layers": 3, "grouped_linear": "bf16|mxfp8"}]},
        {"linear": "mxfp8", "overrides": [{"name": "head", "linear": "nvfp4"}]},
        {"linear": {"input": "fp8_delayed+most_recent+history4", "weight": "mxfp8", "grad_output": "fp8_delayed"}},
        {"linear": "fp8_delayed+local_amax"},
        {"linear": "mxfp8", "overrides": [{"layers": "first(2)", "name": "*.qk?", "linear": "bf16"}]},
    ],
    ids=str,
)  # fmt: skip
def test_options_overrides_and_attention_are_exported(sections):
    recipe = parse_recipe(sections)
    assert run(to_transformer_engine(recipe, "mine", LAYERS))["recipe"].resolve(ROLES) == recipe.resolve(ROLES)


@pytest.mark.parametrize(
    "linear",
    ["nvfp4_4over6", "nvfp4+4over6+mse+max448", "mxfp8+2d", "nvfp4+2d", "nvfp4+4over6+2d", "nvfp4+rht+nosign"],
)
def test_operands_of_an_exported_recipe_have_its_bytes(linear, tmp_path):
    """Of 4over6 and of tiles, in both directions of every slot, by the command and by TransformerEngine's names."""
    recipe = {"linear": linear}
    if linear in EXPORTED:
        recipe, source = load_recipe(linear), linear
    else:
        source = tmp_path / "mine.yaml"
        source.write_text(f"linear: {linear}\n")
    printed = CliRunner().invoke(app, ["recipe", "export", str(source), "--to", "transformer-engine"])
    assert printed.exit_code == 0
    exported, ours, x = run(printed.stdout)["recipe"], parse_recipe(recipe), draw("heavy", 64, 96, 3)
    for role in module_roles("linear", "layers.0.attn.qkv"):
        operands = [recipe.quantizer(role).quantize(x, key=KEY) for recipe in (exported, ours)]
        for direction in ("rowwise", "columnwise"):
            theirs, own = (getattr(operand, direction).buffers for operand in operands)
            assert set(theirs) == set(own) and all(torch.equal(theirs[name], own[name]) for name in own)
    plain = parse_recipe({"linear": "nvfp4" if "nvfp4" in linear else "mxfp8"}).quantizer(role).quantize(x, key=KEY)
    assert any(
        not torch.equal(b, getattr(plain, d).buffers[n])
        for d in ("rowwise", "columnwise")
        for n, b in getattr(operands[0], d).buffers.items()
    )  # the option is there


@pytest.mark.parametrize(
    "name", ['"""\nPLANTED = 1\n"""', "'''\nPLANTED = 1", "a\\", '\\"""\nPLANTED = 1', "é\u202e\x00"]
)
def test_a_name_is_text_in_the_module_and_runs_no_code(name):
    text = to_transformer_engine(parse_recipe({"linear": "mxfp8"}), name)
    module = run(text)
    assert "PLANTED" not in module and module["__doc__"].startswith("Recipe '") and "\0" not in text
    assert name in module["__doc__"] and module["recipe"].resolve(ROLES)


def test_a_schedule_is_exported_as_one_factory_for_each_stage():
    changes = [{"at": 0.5, "dgrad": "bf16"}, {"at": 900, "fprop": "bf16"}]
    recipe = parse_recipe({"linear": "mxfp8", "schedule": changes})
    module = run(to_transformer_engine(recipe, "mine"))
    stages = [(0, recipe), *((change.at, change.recipe) for change in recipe.schedule)]
    assert [at for at, _ in module["SCHEDULE"]] == [at for at, _ in stages] == [0, 0.5, 900]
    for (_, exported), (_, ours) in zip(module["SCHEDULE"], stages, strict=True):
        assert exported.resolve(ROLES) == ours.resolve(ROLES)


def test_slots_that_no_module_of_ours_has_get_a_quantizer():
    qfactory = run(to_transformer_engine(parse_recipe({"linear": "mxfp8", "dpa": "fp8_current"}), "mine"))["qfactory"]
    assert str(qfactory(None)) == "bf16"
    assert str(qfactory(QuantizerRole(name="layers.0.dpa_output"))) == "fp8_current"
    assert str(qfactory(QuantizerRole(name="layers.0.elsewhere"))) == "bf16"


@pytest.mark.parametrize("name", sorted({*FEW_PACKAGED} - {*EXPORTED}))
def test_formats_that_transformer_engine_has_not_are_named_with_their_slots(name):
    with pytest.raises(UserError, match=r"recipe.linear.input: TransformerEngine has no .*; recipe.linear.weight: "):
        to_transformer_engine(parse_recipe(load_recipe(name)), name)


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        ({"input": "fp8_delayed|mxfp8"}, r"input: .* only in both directions of a tensor, not fp8_delayed\|mxfp8"),
        ({"weight": "fp8_delayed@rowwise_dequantized"}, "weight: .* only in both directions of a tensor"),
        ({"input": "fp8_delayed+e5m2"}, r"input: TransformerEngine takes fp8_delayed\+e5m2 for gradients only"),
        ({"input": "fp8_delayed+skip_nonfinite"}, r"TransformerEngine keeps inf in its histories, and has no \+skip"),
        (
            {"input": "fp8_delayed", "weight": "fp8_delayed+history4"},
            r"weight: .* one fp8_delayed for all forward",
        ),
    ],
    ids=str,
)
def test_delayed_scaling_is_exported_as_far_as_it_goes_there(linear, message):
    recipe = parse_recipe({"linear": dict.fromkeys(("input", "weight", "grad_output"), "mxfp8") | linear})
    with pytest.raises(UserError, match=message):
        to_transformer_engine(recipe, "mine")


def test_what_cannot_be_said_there_is_refused():
    counted = parse_recipe({"linear": "mxfp8", "overrides": [{"layers": "last(2)", "linear": "bf16"}]})
    with pytest.raises(UserError, match=r"recipe.overrides\[0\].layers: 'last\(2\)' counts the layers.*--layers N"):
        to_transformer_engine(counted, "mine")
    factory = CustomRecipe(qfactory=module_roles)
    with pytest.raises(UserError, match=r"a Python factory already, hqsweep.recipe.roles.module_roles"):
        to_transformer_engine(factory, "mine")
