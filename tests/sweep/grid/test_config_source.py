"""A YAML of others in composition: it reads no environment, imports nothing, stays in its folder and within bounds."""

import time
from pathlib import Path

import pytest

from hqsweep.errors import UserError
from hqsweep.sweep.grid.compose import expand, load_recipe

PLANTED = "from pathlib import Path\nPath('planted').touch()\n"
REFERENCES = "a0: lol\n" + "".join(f"a{i}: {f'${{a{i - 1}}}' * 10!r}\n" for i in range(1, 12))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module, a config outside of conf/, and a secret in the environment."""
    monkeypatch.setenv("MY_TOKEN", "planted-secret")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").write_text(PLANTED)
    (tmp_path / "outside.yaml").write_text("linear: planted-secret\n")
    (tmp_path / "conf/recipe").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: ${oc.env:MY_TOKEN}", "conf/a.yaml: line 1: '.*MY_TOKEN}' is no reference to a key"),
        ("defaults: ['recipe: x', {recipe: '${oc.env:MY_TOKEN}'}]", "line 1: '.*MY_TOKEN}' is no reference"),
        ("hydra: {sweeper: {params: {seed: '${oc.env:MY_TOKEN}'}}}", "line 1: '.*MY_TOKEN}' is no reference"),
        ("hydra: {searchpath: ['pkg://my_package']}", "hydra.searchpath is not followed; give .* by --config-dir"),
        ("defaults: [../outside]", "its file is outside of"),
        ("defaults: [convergence, {override recipe: ../../outside}]", "its file is outside of"),
        ("x: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "y: [" + "*a, " * 5000 + "]", "conf/a.yaml: line 2: it has more than"),
        (REFERENCES, "conf=a: the config: it has more than 20000 nodes with its references replaced"),
        (REFERENCES + "hydra: {sweeper: {params: {seed: '${a11}'}}}", "conf=a: the config: it has more than"),
        ("seed: 1\nseed: 2", "line 2: key 'seed' is given twice"),
    ],
)
def test_it_is_refused_before_hydra_follows_it(text: str, message: str, folder: Path):
    began = time.monotonic()
    Path("conf/a.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        expand("a")
    assert time.monotonic() - began < 5 and not Path("planted").exists()
    assert "planted-secret" not in str(raised.value)


def test_a_recipe_file_is_checked_like_a_config(folder: Path):
    Path("mine.yaml").write_text("name: mine\nlinear: ${oc.env:MY_TOKEN}\n")
    Path("conf/recipe/mine.yaml").write_text("name: mine\nlinear: ${oc.env:MY_TOKEN}\n")
    for name in ("mine.yaml", "mine", "conf/recipe/mine.yaml"):
        with pytest.raises(UserError, match=r"mine.yaml: line 2: '.*MY_TOKEN}' is no reference") as raised:
            load_recipe(name)
        assert "planted-secret" not in str(raised.value)


@pytest.mark.parametrize(
    "word",
    ["train.lr=${oc.env:MY_TOKEN}", "+x={a: ['${oc.env:MY_TOKEN}']}", "recipe=${oc.env:MY_TOKEN}",
     "recipe.name='${oc.decode:1}'", "+x.${oc.env:MY_TOKEN}=1"],
)  # fmt: skip
def test_an_override_reads_no_environment(word: str, folder: Path):
    with pytest.raises(UserError, match=r"is no reference to a key|not of the form KEY=VALUE") as raised:
        expand("convergence", [word])
    assert "planted-secret" not in str(raised.value)


def test_references_to_keys_are_followed(folder: Path):
    Path("conf/a.yaml").write_text(
        "defaults: [convergence, _self_]\nbase: 12\nseed: ${base}\ntrain: {steps: '${.batch}', batch: 7}\n"
    )
    config = expand("a", ["train.context=${train.steps}"]).points[0].config
    assert (config["seed"], config["train"]["steps"], config["train"]["context"]) == (12, 7, 7)
