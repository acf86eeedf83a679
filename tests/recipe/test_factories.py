"""Names of Python factories: read without an import, imported only where that is allowed, and never from the working
directory."""

import re
import sys
from pathlib import Path

import pytest

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.nn import Linear
from hqsweep.recipe import CustomRecipe, find_factory, parse_recipe
from hqsweep.recipe.argument import recipe_config
from hqsweep.recipe.factories import Importer, factory_name
from hqsweep.recipe.listing import described, diff, slots
from hqsweep.recipe.roles import module_roles

CONFIG = {"name": "mine", "qfactory": "planted_factory.make", "fp8_dpa": True}
SCHEDULED = {"name": "late", "linear": "mxfp8", "schedule": [{"at": 0.5, "qfactory": "planted_factory.make"}]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A working directory, not on sys.path, with the module that CONFIG names; its import writes a file."""
    code = "open('planted', 'w').close()\ndef make(role):\n    return 'mxfp8'\n"
    (tmp_path / "planted_factory.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    sys.modules.pop("planted_factory", None)


def importer(**fields) -> tuple[Importer, list[str]]:
    said: list[str] = []
    return Importer(said.append, **fields), said


@pytest.mark.parametrize("config", [CONFIG, SCHEDULED])
def test_a_name_is_read_described_and_compared_without_an_import(config: dict):
    recipe = parse_recipe(config, factory_name)
    assert recipe_config(parse_recipe(recipe_config(recipe), factory_name)) == recipe_config(recipe)
    assert "planted_factory.make" in described(recipe).values()
    assert diff(recipe, recipe) == [] and diff(recipe, parse_recipe({"linear": "mxfp8"}))
    job = {"job": "convergence", "sweep": "s", "recipe": config, "data": {"source": "markov"}}
    typed = parse(job)
    assert typed.recipe.has_names and parse(typed.model_dump(mode="json")) == typed
    assert not Path("planted").exists() and "planted_factory" not in sys.modules


def test_a_name_has_no_quantizers():
    recipe = parse_recipe(CONFIG, factory_name)
    assert isinstance(recipe, CustomRecipe) and list(slots(recipe)) == [] and recipe.path == "planted_factory.make"
    with pytest.raises(UserError, match=r"planted_factory.make is a Python factory, which is not imported here"):
        recipe.resolve(module_roles("linear", "fc"))


def test_a_call_in_python_imports_what_it_is_told_to_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """`hqsweep run` alone imports by itself; a config is data to parse_recipe and to the recipe of a module."""
    monkeypatch.syspath_prepend(folder)
    refused = r"planted_factory.make is a Python factory, which is not imported.* parse_recipe\(config, find=find"
    with pytest.raises(UserError, match=refused):
        parse_recipe(CONFIG).resolve(module_roles("linear", "fc"))
    with pytest.raises(UserError, match=refused):
        Linear(32, 32, name="fc", recipe=CONFIG)
    assert not Path("planted").exists() and "planted_factory" not in sys.modules
    assert str(Linear(32, 32, name="fc", recipe=parse_recipe(CONFIG, find=find_factory)).quantizers.input) == "mxfp8"
    assert Path("planted").exists()


def test_an_importer_says_what_it_imports_once_and_what_a_worker_needs(folder: Path):
    find, said = importer(folders=[str(folder)])
    before = list(sys.path)
    for _ in range(2):
        assert str(parse_recipe(CONFIG, find).resolve(module_roles("linear", "fc")).popitem()[1]) == "mxfp8"
    assert (
        said == ["importing planted_factory for recipe.qfactory=planted_factory.make"]
        and sys.path == before
        and Path("planted").exists()
    )
    assert find.arguments == ["--import=planted_factory.make", f"--import-from={folder}"]


def test_the_working_directory_is_not_searched():
    find, _ = importer()
    with pytest.raises(UserError, match=r"recipe.qfactory: 'planted_factory.make' cannot be imported .*installed pack"):
        parse_recipe(CONFIG, find)
    with pytest.raises(UserError, match="cannot be imported"):
        parse_recipe(CONFIG, find_factory)
    assert not Path("planted").exists()


def test_a_module_of_the_working_directory_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    find, said = importer()
    monkeypatch.chdir(folder)
    for _ in range(2):
        with pytest.raises(UserError, match=r"has planted_factory.py, is searched with --config-dir . alone"):
            parse_recipe(CONFIG, find)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import nosuchmodule", "importing 'at_fault' raised ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("from sys import nothing", "importing 'at_fault' raised ImportError: cannot import name 'nothing'"),
        ("raise SystemExit(2)", r"importing 'at_fault' ended the program (SystemExit: 2), as a script does"),
    ],
)
def test_what_a_module_does_when_it_is_imported_is_said(source, sentence, tmp_path):
    (tmp_path / "at_fault.py").write_text(source)
    find, _ = importer(folders=[str(tmp_path)])
    with pytest.raises(UserError, match=re.escape(f"model._target_: {sentence}")):
        find("at_fault.build", "model._target_")


@pytest.mark.parametrize("config", [CONFIG, SCHEDULED])
def test_what_is_not_allowed_is_refused_and_not_imported(config: dict, folder: Path):
    find, said = importer(folders=[str(folder)], allowed=["planted_factory.other"], refusal="which nobody wants")
    with pytest.raises(UserError, match=r"'planted_factory.make' is a Python factory, which nobody wants"):
        parse_recipe(config, find)
    assert not Path("planted").exists() and said == find.arguments == []


@pytest.mark.parametrize("name", ["make", "a..b", "a.b()", "a.b\n", "a.b c", ".a.b", "os.system('x').y", "", "a.é"])
def test_what_is_no_name_is_refused(name: str):
    for find in (factory_name, importer()[0]):
        with pytest.raises(UserError, match=r"recipe.qfactory: .* is no package.module.function"):
            parse_recipe(CONFIG | {"qfactory": name}, find)
