"""A factory that was written for TransformerEngine, as a recipe of hqsweep: the way back from export.

The file runs with hqsweep.compat's names in place of TransformerEngine's. Its factory is then asked for every slot.
"""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import hqsweep.compat
from hqsweep.compat.recipes import CustomRecipe
from hqsweep.errors import UserError, nearest
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.roles import TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sectioned import HEAD, Recipe

THEIRS = "transformer_engine"
NAMES = ("layers.0.self_attention.qkv", "layers.1.layernorm_mlp.fc1", "layers.11.layernorm_mlp.fc2", "")
"""Names of modules for which a factory is asked; it must not tell them apart."""


def from_transformer_engine(path: Path, name: str) -> dict[str, Any]:
    """The config of a recipe with the quantizers of a factory, or of a recipe, at `name` in a file of Python.

    The file's code runs. Attention is asked for where the recipe has fp8_dpa=True. The head is asked for by its name,
    "head", and has the other linears' quantizers unless the factory knows that name.

    Raises:
        UserError: the file fails, or has no such name; the factory fails, tells modules apart by their names, or
            returns a quantizer with a quantize() of its own.
    """
    found = _at(path, name)
    recipe = found if hasattr(found, "resolve") else CustomRecipe(found)
    where = f"{path}:{name}"
    config: dict[str, Any] = {}
    for module_type in ("linear", "grouped_linear", *(["dpa"] if getattr(recipe, "fp8_dpa", False) else [])):
        config[module_type] = _section(recipe, module_type, NAMES, where)
    config["head"] = _section(recipe, "linear", (HEAD,), where)
    Recipe.from_config(config, where)  # whose faults are raised now
    return config


def _section(recipe: Any, module_type: str, names: Sequence[str], where: str) -> dict[str, str]:
    section = {}
    for tensor in TENSOR_TYPES[module_type]:
        answers = {own: recipe.quantizer(QuantizerRole(module_type, tensor, own)) for own in names}
        texts = {own: str(answer) for own, answer in answers.items()}
        if any(type(answer) is not HybridQuantizer for answer in answers.values()):
            raise UserError(f"{where}: {module_type}.{tensor} quantizes by a method of its own, which no recipe has")
        if len(set(texts.values())) > 1:
            listed = ", ".join(f"{text} for {own!r}" for own, text in texts.items())
            raise UserError(
                f"{where}: the factory tells modules apart by their names: {module_type}.{tensor} is {listed}; keep it"
                " in Python, as recipe._target_=module.factory"
            )
        section[tensor] = texts[names[0]]
    return section


def _at(path: Path, name: str) -> Any:
    """The object of this name, after the file has run."""
    try:
        with _their_imports():
            names = runpy.run_path(str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file of Python, as FILE.py:factory") from None
    except Exception as error:
        raise UserError(f"{path} raised {type(error).__name__}: {error}") from None
    if name not in names:
        known = [own for own, value in names.items() if callable(value) and not own.startswith("_")]
        raise UserError(f"{path}: there is no {name!r}{nearest(name, known)}")
    found = names[name]
    if not (callable(found) or hasattr(found, "resolve")):
        raise UserError(f"{path}:{name} is a {type(found).__name__}; it must be a factory or a recipe")
    return found


class _Names(ModuleType):
    """A module of TransformerEngine, with hqsweep.compat's names."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not hasattr(hqsweep.compat, name):
            raise AttributeError(f"hqsweep.compat has no {name}{nearest(name, hqsweep.compat.__all__)}")
        return getattr(hqsweep.compat, name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        first, *_, last = name.split(".")[0], name.split(".")[-1]
        return ModuleSpec(name, self, is_package=True) if first == THEIRS and not last[0].isupper() else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _their_imports() -> Iterator[None]:
    """Imports of transformer_engine inside give hqsweep.compat's names."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == THEIRS}
    for name in before:
        del sys.modules[name]
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == THEIRS]:
            del sys.modules[name]
        sys.modules.update(before)
