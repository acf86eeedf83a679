"""JSON and YAML of others, read within bounds.

A YAML of 400 bytes can stand for more nodes than memory has ("billion laughs"), and of a key that is given twice a
reader sees one value and the loader takes the other. So a text is checked event by event, before a loader builds
anything: its size, its depth, its nodes with every alias written out, and its keys. In JSON, deep nesting is a
ValueError, like all other garbage: Python's own RecursionError comes late, at a depth that depends on the caller.

References of a config, `${train.lr}`, lead to other keys of it and to nothing else. OmegaConf's resolvers
(`${oc.env:HOME}`, `${oc.decode:...}`) are refused, because a config may be another's: it would carry the environment
into config.yaml, logs and reports. References are counted before they are followed.

The checks are written by hand: a subclass of SafeLoader could check in compose_node alone, which libyaml's loader, ten
times as fast, does not have.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml

from hqsweep.errors import UserError, visible

JSON_DEPTH = 100


def loads(data: str | bytes) -> Any:
    """Return the document in `data`. ValueError for other text than JSON, and for nesting deeper than JSON_DEPTH."""
    try:
        document = json.loads(data)
    except RecursionError:
        raise _too_deep() from None
    opening = ("[", "{") if isinstance(data, str) else (b"[", b"{")
    if sum(map(data.count, opening)) <= JSON_DEPTH:
        return document
    level = [document]
    for _ in range(JSON_DEPTH):
        level = [part for value in level if isinstance(value, dict | list) for part in _parts(value)]
        if not level:
            return document
    raise _too_deep()


def _parts(value: dict | list) -> list[Any]:
    """The mappings and lists in a mapping or a list."""
    values = value.values() if isinstance(value, dict) else value
    return [part for part in values if isinstance(part, dict | list)]


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {JSON_DEPTH} deep")


MAX_NODES = 20_000
"""The most keys and values of a config, after its aliases and references are replaced."""
_PLAIN = re.compile(r"\$\{\s*(?P<dots>\.*)(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+|\[[\w-]+\])*)\s*\}")


def check_references(text: str, where: str) -> None:
    """Raise UserError, which begins with `where`, for a `${...}` other than a reference to a key."""
    if "${" not in text:
        return
    for start in (match.start() for match in re.finditer(r"\$\{", text)):
        if not _PLAIN.match(text, start):
            raise UserError(
                f"{where}: '{visible(text[start : start + 60])}' is no reference to a key such as ${{train.lr}};"
                " resolvers, as of the environment, are not followed; write the value itself"
            )


def check_expansion(config: Mapping[str, Any], where: str) -> None:
    """Check every text of a config in plain containers with check_references, before references are replaced.

    UserError if the replaced config would have more than MAX_NODES nodes, or a reference leads back to itself.
    """
    if "${" not in str(config):  # as is most often so; each file is within MAX_NODES already
        return
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
        """Return the value of a reference and its path: the nearest existing one.

        If another reference is on the way, that one is returned, which has at least as much content.
        """
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


MAX_BYTES = 1 << 20
MAX_DEPTH = 64
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of yaml.safe_load in C, which is ten times as fast."""


def load_yaml(path: Path) -> Any:
    """The document of a file, by the safe loader. Raises as check_file and parse_yaml do."""
    return _named(path, parse_yaml)


def check_file(path: Path) -> None:
    """Check the YAML of a file within the bounds of parse_yaml, by PyYAML's parser, as OmegaConf reads it (libyaml
    takes other texts). Raises UserError with the file's name, also for a folder or a pipe, and OSError."""
    _named(path, partial(_checked, loader=yaml.SafeLoader))


def parse_yaml(data: bytes) -> Any:
    """The document, by the safe loader.

    Raises:
        UserError: "line 3: ..." for text that is not YAML in UTF-8, is larger than MAX_BYTES, deeper than
            MAX_DEPTH, has more than MAX_NODES nodes, gives a key twice, or holds another `${...}` than a reference to a
            key.
    """
    return _copied(_parsed(data))


def _copied(value: Any) -> Any:
    """A copy of a document: deepcopy takes ten times as long, and keeps what an alias shares."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


@lru_cache(maxsize=1024)
def _parsed(data: bytes) -> Any:
    """The document of parse_yaml, once for each text: a command asks several times for the config of each run."""
    text = _checked(data)
    with _explained():
        return yaml.load(text, Loader=LOADER)


def _named(path: Path, read: Callable[[bytes], Any]) -> Any:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe without a writer would hold us up
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path}: is no file; give one")
        data = file.read(MAX_BYTES + 1)
    try:
        return read(data)
    except UserError as error:
        raise UserError(f"{path}: {error}; correct the YAML") from None


@lru_cache(maxsize=1024)
def _checked(data: bytes, loader: type = LOADER) -> str:
    """The text, if it is within bounds."""
    if len(data) > MAX_BYTES:
        raise UserError(f"is larger than {MAX_BYTES >> 10} KiB, which no config is")
    watch = _Watch()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 (byte {error.start})") from None
    with _explained():
        for event in yaml.parse(text, Loader=loader):
            watch.see(event)
    return text


@contextmanager
def _explained() -> Iterator[None]:
    """Raise any error as a UserError of one line. PyYAML raises anything: AttributeError by !!timestamp 1."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "is not YAML"
        raise UserError(f"{where}: {' '.join(str(getattr(error, 'problem', None) or error).split())}") from None


@dataclass
class _Open:
    """A mapping or list that is being read."""

    keys: set[str] | None
    """The keys so far; None for a list."""
    anchor: str | None
    nodes: int = 1
    children: int = 0


@dataclass
class _Watch:
    """The state of reading: mappings and lists that are open, and anchors."""

    open: list[_Open] = field(default_factory=list)
    anchors: dict[str, int] = field(default_factory=dict)
    """Anchor -> the number of its nodes, aliases written out."""

    def see(self, event: yaml.Event) -> None:
        match event:
            case yaml.AliasEvent():
                if event.anchor not in self.anchors:
                    self._refuse(event, f"alias '*{event.anchor}' stands for nothing that is complete before it")
                self._add(event, None, self.anchors[event.anchor])
            case yaml.ScalarEvent():
                check_references(event.value, f"line {event.start_mark.line + 1}")
                self._add(event, event.value, 1)
                if event.anchor:
                    self.anchors[event.anchor] = 1
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                if len(self.open) == MAX_DEPTH:
                    self._refuse(event, f"it is nested more than {MAX_DEPTH} deep")
                self.anchors.pop(event.anchor, None)
                keys = set() if isinstance(event, yaml.MappingStartEvent) else None
                self.open.append(_Open(keys=keys, anchor=event.anchor))
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                ended = self.open.pop()
                if ended.anchor:
                    self.anchors[ended.anchor] = ended.nodes
                self._add(event, None, ended.nodes)

    def _add(self, event: yaml.Event, text: str | None, nodes: int) -> None:
        """Count a child of the innermost open mapping or list; `text` is the text of a scalar."""
        if not self.open:
            return
        parent = self.open[-1]
        is_key = parent.keys is not None and parent.children % 2 == 0
        parent.children += 1
        parent.nodes += nodes
        if parent.nodes > MAX_NODES:
            self._refuse(event, f"it has more than {MAX_NODES} nodes with its aliases written out")
        if is_key and text is not None:
            if text in parent.keys:
                self._refuse(event, f"key '{visible(text)}' is given twice")
            parent.keys.add(text)

    def _refuse(self, event: yaml.Event, fault: str) -> None:
        raise UserError(f"line {event.start_mark.line + 1}: {fault}")
