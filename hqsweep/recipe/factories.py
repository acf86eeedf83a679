"""Python factories of recipes, as names that only some readers import.

A config that names a module may come from anyone, so readers treat the name as text. Code is imported only by `hqsweep
run` (see Importer), and by Python calls that pass find_factory.
"""

import importlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hqsweep.errors import UserError, nearest

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


class FindFactory(Protocol):
    """A function that returns the factory at "package.module.function". where: the key that names it, which starts
    errors."""

    def __call__(self, path: str, where: str) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class FactoryName:
    """A factory that was not imported and cannot be called."""

    is_name = True

    path: str

    def __call__(self, role: Any) -> Any:
        raise UserError(
            f"{self.path} is a Python factory, which is not imported here, so nobody can say what it gives; in Python,"
            " parse_recipe(config, find=find_factory) imports it, and CustomRecipe takes the function itself"
        )

    def __str__(self) -> str:
        return f"a Python factory, {self.path}"


def factory_name(path: str, where: str) -> FactoryName:
    """Return the factory as a name. UserError for text that does not name a function in a module."""
    if not _PATH.fullmatch(path):
        raise UserError(f"{where}: {path!r} is no package.module.function")
    return FactoryName(path)


def find_factory(path: str, where: str) -> Callable[..., Any]:
    """Import a module as usual, and return its function at "package.module.function".

    Raises:
        UserError: the module does not exist, importing it failed, or it has no such function.
    """
    factory_name(path, where)
    return _find(path, where)


def _find(path: str, where: str, places: str = "") -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        missing = getattr(error, "name", None) or module_name
        if missing != module_name and not module_name.startswith(f"{missing}."):  # it exists, but imports a missing one
            raise UserError(f"{where}: importing '{module_name}' raised {type(error).__name__}: {error}") from error
        raise UserError(
            f"{where}: '{path}' cannot be imported ({error}); it takes package.module.function{places}"
        ) from None
    except SystemExit as error:
        raise UserError(
            f"{where}: importing '{module_name}' ended the program (SystemExit: {error}), as a script does that reads"
            " its command line; keep that under if __name__ == '__main__'"
        ) from None
    except Exception as error:
        raise UserError(f"{where}: importing '{module_name}' raised {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [other for other in vars(module) if callable(getattr(module, other)) and not other.startswith("_")]
        raise UserError(f"{where}: {module_name} has no function '{name}'{nearest(name, known)}")
    home = f"{getattr(factory, '__module__', None)}.{getattr(factory, '__qualname__', name)}"
    if home != path:
        raise UserError(f"{where}: '{path}' is {home}; give that, so that the factory has one name")
    return factory


@dataclass
class Importer:
    """A FindFactory for commands that may import code. It announces each import, and also searches `folders`.

    It never searches the working directory, whose contents are not trusted.
    """

    say: Callable[[str], None]
    """Receives a line before each import."""
    folders: Sequence[str] = ()
    allowed: Collection[str] | None = None
    """Paths of factories that may be imported; None for all."""
    refusal: str = ""
    """The end of the error for all other paths."""
    others_by_name: bool = False
    """Whether other paths stay names, instead of an error."""
    imported: list[str] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    def __call__(self, path: str, where: str) -> Callable[..., Any]:
        """Return find_factory() for an allowed path; UserError for all others."""
        factory_name(path, where)
        if self.allowed is not None and path not in self.allowed:
            if self.others_by_name:
                return FactoryName(path)
            raise UserError(f"{where}: '{path}' is a Python factory, {self.refusal}")
        if path not in self._said:
            self._said.add(path)
            self.say(f"importing {path.rpartition('.')[0]} for {where}={path}")
        with _searched(self.folders):
            factory = _find(
                path, where, f", from {' or '.join(['the installed packages', *self.folders])}{_here(path)}"
            )
        if path not in self.imported:
            self.imported.append(path)
        return factory

    @property
    def arguments(self) -> list[str]:
        """Arguments that let a worker (python -m hqsweep.worker) import the same factories, and no others."""
        folders = [f"--import-from={folder}" for folder in self.folders] if self.imported else []
        return [*(f"--import={path}" for path in self.imported), *folders]


def _here(path: str) -> str:
    """Return the end of an error about a module in the working directory, or ""."""
    top = path.partition(".")[0]
    name = next((name for name in (f"{top}.py", top) if Path(name).exists()), None)
    return "" if name is None else f"; the working directory, which has {name}, is searched with --config-dir . alone"


@contextmanager
def _searched(folders: Sequence[str]) -> Iterator[None]:
    """Search these folders for modules too, after all other places."""
    before = list(sys.path)
    sys.path += [folder for folder in folders if folder not in before]
    try:
        yield
    finally:
        sys.path[:] = before
