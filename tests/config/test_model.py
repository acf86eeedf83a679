"""The section model: a GPT, one of Hugging Face, or one of a Python function."""

import re
import subprocess
import sys

import pytest

from hqsweep.config.job import parse
from hqsweep.config.keys import check_keys
from hqsweep.config.model import FactoryModelConfig, HFModelConfig, ModelConfig
from hqsweep.errors import UserError
from hqsweep.sweep.grid.compose import expand


def config(model: object) -> dict:
    return {"job": "convergence", "sweep": "s", "recipe": {"name": "r", "linear": "mxfp8"}, "model": model}


def points(*words: str) -> list:
    return expand("stdlib", ["recipe=mxfp8", "null_arm=false", "seed=0", *words]).points


def test_the_gpt_has_no_kind_and_the_others_have() -> None:
    model = parse(config({"dim": 64})).model
    assert isinstance(model, ModelConfig) and "kind" not in model.model_dump()
    assert isinstance(parse(config({"kind": "hf", "path": "m"})).model, HFModelConfig)
    built = parse(config({"_target_": "my.build", "width": 64, "deep": {"a": [1, "b"]}, "init_noise": 0.5})).model
    assert isinstance(built, FactoryModelConfig) and built.init_noise == 0.5
    assert built.args == {"width": 64, "deep": {"a": [1, "b"]}} and built.target == "my.build"
    held = parse(config({"_target_": "my.build", "width": 64, "quantized_weights": True})).model
    assert held.quantized_weights and held.args == {"width": 64}


@pytest.mark.parametrize("model", [{"kind": "hf", "path": "m", "head": True}, {"_target_": "my.build", "width": 64}])
def test_a_dump_is_read_again(model: dict) -> None:
    parsed = parse(config(model))
    assert parse(parsed.model_dump(mode="json")) == parsed


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"kind": "hf"}, "model.path: missing; give model.path=VALUE"),
        ({"kind": "hf", "path": "m", "pretraind": False}, "no such key (did you mean 'model.pretrained'?)"),
        ({"kind": "hf", "path": "m", "dim": 64}, "model.dim: no such key here, but with model=gpt; model takes head"),
        ({"path": "m"}, "model.path: no such key here, but with model=hf; model takes dim"),
        ({"kind": "hf", "path": 3}, "model.path: got 3; must be text"),
        ({"kind": "gtp"}, "model.kind: got 'gtp'; must be hf or factory"),
        ({"kind": ["hf"]}, "model.kind: got ['hf']; must be hf or factory"),
        ({"kind": "factory"}, "model.target: missing"),
        ({"_target_": "build"}, "model._target_: 'build' is no package.module.function, such as my_models.build"),
        ({"kind": "hf", "path": "m", "quantized_weights": 2}, "model.quantized_weights: got 2; must be true or false"),
        ("hf", "model: got 'hf'; must be a section with the keys dim, layers"),
    ],
)
def test_what_is_wrong_is_said_by_its_path(model: object, sentence: str) -> None:
    for check in (parse, check_keys):
        with pytest.raises(UserError, match=re.escape(sentence)):
            check(config(model))


def test_the_groups_state_every_leaf_with_its_default() -> None:
    (hf,), (factory,) = points("model=hf", "model.path=m"), points("model=factory", "model._target_=my.build")
    assert hf.config["model"] == HFModelConfig(kind="hf", path="m").model_dump(exclude={"hash"})
    default = FactoryModelConfig(kind="factory", target="my.build").model_dump(exclude={"target", "args"})
    assert factory.config["model"] == default | {"_target_": "my.build"}


def test_keys_of_the_gpt_in_a_packaged_yaml_do_not_become_those_of_another_model() -> None:
    """conf=stdlib says dim, layers and heads."""
    assert "dim" in points()[0].config["model"]
    for words in (["model=hf", "model.path=m"], ["model=factory", "model._target_=a.b"], ["model._target_=a.b"]):
        assert "dim" not in points(*words)[0].config["model"]
    assert points("model._target_=a.b", "model.dim=32")[0].config["model"]["dim"] == 32
    with pytest.raises(UserError, match=re.escape("model.dim: no such key here, but with model=gpt")):
        check_keys(points("model=hf", "model.path=m", "model.dim=32")[0].config)


@pytest.mark.slow
def test_models_and_their_arguments_are_swept() -> None:
    swept = points("model._target_=a.b", "model.width=32,64")
    assert [parse(point.config).model.args for point in swept] == [{"width": 32}, {"width": 64}]
    assert [point.arm for point in swept] == ["mxfp8_width-32", "mxfp8_width-64"]
    assert [point.config["model"]["path"] for point in points("model=hf", "model.path=a,b")] == ["a", "b"]


def test_keys_are_checked_without_torch() -> None:
    code = (
        "import sys; from hqsweep.config.keys import check_keys;"
        "check_keys({'job': 'convergence', 'sweep': 's', 'recipe': {}, 'model': {'_target_': 'a.b', 'x': 1}});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
