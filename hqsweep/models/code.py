"""The code of a user's functions and modules, as a text that is equal where the code is.

A run's config names a function alone, and the code behind a name may change: a resumed run would go on with another
model.
"""

import ast
import hashlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from hqsweep.errors import UserError

LEFT_OUT = ("torch", "hqsweep", "builtins")
"""The packages whose versions the manifest has anyway."""
INSTALLED = {"site-packages", "dist-packages"}
"""The folders of installed packages."""
DIGITS = 12


def code_of(model: nn.Module, *functions: Callable[..., Any]) -> str:
    """Return "my_package.blocks 3f2a91c0d4e7, timm 1.0.9": the modules of the functions, which build the model or
    compute its loss, and of the model's classes, sorted.

    An installed package has its version, any other file a hash of its code without comments. Functions elsewhere that
    they call are not seen.
    """
    names = {
        *(function.__module__ for function in functions),
        *(cls.__module__ for part in model.modules() for cls in type(part).__mro__),
    }
    return code_of_modules(names)


def code_of_modules(names: set[str]) -> str:
    """The text of code_of() for modules by name."""
    names = {name for name in names if name.partition(".")[0] not in LEFT_OUT}
    return ", ".join(sorted({said for name in names for said in _said(name)}))


def check_code(target: str, before: str | None, now: str) -> None:
    """Raise UserError if a run would continue from a state that other code made. before: None without such a state."""
    if before is None or before == now:
        return
    known = before.split(", ")
    other = ", ".join(entry.partition(" ")[0] for entry in now.split(", ") if entry not in known) or "a module of it"
    raise UserError(
        f"model._target_: {target} is other code than this state was trained with ({other} differs); put that back, or"
        " begin again (hqsweep rm)"
    )


def _said(name: str) -> Iterator[str]:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return
    path = Path(file).resolve()
    if not INSTALLED.isdisjoint(path.parts):
        package = name.partition(".")[0]
        for distribution in importlib.metadata.packages_distributions().get(package, [package]):
            yield f"{distribution} {_version(distribution)}"
    else:
        yield f"{name} {_digest(path)}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of no version"


def _digest(path: Path) -> str:
    source = path.read_bytes()
    with suppress(SyntaxError, ValueError):  # of a compiled module
        source = ast.dump(ast.parse(source)).encode()
    return hashlib.sha256(source).hexdigest()[:DIGITS]
