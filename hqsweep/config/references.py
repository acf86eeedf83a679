"""References of a config, `${train.lr}`: to other keys of it, and to nothing else.

OmegaConf's resolvers (`${oc.env:HOME}`, `${oc.decode:...}`) are refused, because a config may be another's: it would
carry what stands in the environment into config.yaml, logs and reports. And references are counted before they are
followed, because ten of them can stand for more nodes than memory has.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hqsweep.errors import UserError, visible

MAX_NODES = 20_000
"""Keys and values of a config with all that its aliases and references stand for."""
_PLAIN = re.compile(r"\$\{\s*(?P<dots>\.*)(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+|\[[\w-]+\])*)\s*\}")


def check_references(text: str, where: str) -> None:
    """UserError, which begins with `where`, for a `${...}` that is no reference to a key."""
    if "${" not in text:
        return
    for start in (match.start() for match in re.finditer(r"\$\{", text)):
        if not _PLAIN.match(text, start):
            raise UserError(
                f"{where}: '{visible(text[start : start + 60])}' is no reference to a key such as ${{train.lr}};"
                " resolvers, as of the environment, are not followed; write the value itself"
            )


def check_expansion(config: Mapping[str, Any], where: str) -> None:
    """check_references for every text of a config in plain containers, references not yet replaced; and UserError where
    it would have more than MAX_NODES nodes with all of them replaced, or a reference leads back to itself."""
    nodes = _Expansion(config).nodes(config, ())
    if nodes > MAX_NODES:
        raise UserError(f"{where}: it has more than {MAX_NODES} nodes with its references replaced; shorten it")


class _Expansion:
    """Counts nodes with references replaced, each node once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.known: dict[tuple[str, ...], int | None] = {}

    def nodes(self, value: Any, path: tuple[str, ...]) -> int:
        """Nodes of the value at `path`; None in `known` marks one whose count is going on."""
        if not isinstance(value, Mapping | list) and not (isinstance(value, str) and "${" in value):
            return 1
        if path in self.known:
            if (known := self.known[path]) is None:
                raise UserError(f"{'.'.join(path)}: its reference leads back to itself; write the value itself")
            return known
        self.known[path] = None
        if isinstance(value, str):
            check_references(value, ".".join(path))
            count = sum(self.nodes(*self._target(match, path)) for match in _PLAIN.finditer(value))
        else:
            count = 1 + sum(self.nodes(child, (*path, name)) for name, child in _children(value))
        self.known[path] = min(count, MAX_NODES + 1)
        return self.known[path]

    def _target(self, match: re.Match[str], path: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
        """The value that a reference leads to and its path: of the nearest one that is there. Where another reference
        stands on the way, that one, which stands for no less."""
        start = path[: max(0, len(path) - len(match["dots"]))] if match["dots"] else ()
        value, target = self._at(start), start
        for part in re.findall(r"[\w-]+", match["key"]):
            inside = dict(_children(value)) if isinstance(value, Mapping | list) else {}
            if part not in inside:
                return (value, target) if isinstance(value, str) else (None, target)
            value, target = inside[part], (*target, part)
        return value, target

    def _at(self, path: tuple[str, ...]) -> Any:
        value: Any = self.config
        for part in path:
            value = dict(_children(value))[part]
        return value


def _children(value: Mapping[Any, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return ((str(name), child) for name, child in items)
