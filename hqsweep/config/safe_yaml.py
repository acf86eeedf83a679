"""YAML of others, read within bounds: its size, its depth, its nodes with every alias written out, no key twice.

A YAML of 400 bytes can stand for more nodes than memory has ("billion laughs"), and of a key that is given twice a
reader sees one value and the loader takes the other. The text is checked event by event, before a loader builds
anything.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hqsweep.config.references import MAX_NODES, check_references
from hqsweep.errors import UserError, visible

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of yaml.safe_load in C, which is ten times as fast."""


def load_yaml(path: Path) -> Any:
    """The document of a file, by the safe loader. Raises as check_file and parse_yaml do."""
    return _named(path, parse_yaml)


def check_file(path: Path) -> None:
    """Check the YAML of a file; UserError, which names the file, where it is no file, or its YAML is beyond the bounds
    of parse_yaml to the parser of PyYAML, which is OmegaConf's (libyaml takes other texts). OSError where it cannot be
    read."""
    _named(path, partial(_checked, loader=yaml.SafeLoader))


def parse_yaml(data: bytes) -> Any:
    """The document, by the safe loader.

    Raises:
        UserError: "line 3: ..." for what is not UTF-8 or no YAML, larger than MAX_BYTES, deeper than MAX_DEPTH, has
            more than MAX_NODES nodes, gives a key twice, or holds `${...}` that is no reference to a key.
    """
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
    """Raise what goes wrong as a UserError of one line. PyYAML raises anything: AttributeError by !!timestamp 1."""
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
