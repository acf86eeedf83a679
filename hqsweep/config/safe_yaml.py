"""YAML of others, read within bounds: its size, its depth, its nodes with every alias written out, no key twice.

A YAML of 400 bytes can stand for more nodes than memory has ("billion laughs"), and a key that is given twice shows a
reader another value than the one that is taken. The text is checked event by event, before a loader builds anything.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hqsweep.config.references import MAX_NODES, check_references
from hqsweep.errors import UserError

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""As yaml.safe_load, ten times as fast."""


def load_yaml(path: Path) -> Any:
    """The document of a file, by the safe loader.

    Raises:
        UserError: what read_yaml raises for, and text that is no YAML. OSError where it cannot be read.
    """
    text = read_yaml(path)
    try:
        return yaml.load(text, Loader=LOADER)
    except Exception as error:  # PyYAML raises anything: AttributeError by !!timestamp 1
        raise UserError(f"{path}{_line(error)}: {_problem(error)}; correct the YAML") from None


def read_yaml(path: Path) -> str:
    """The text of a file whose YAML is within the bounds.

    Raises:
        UserError: it is larger than MAX_BYTES, no file, not UTF-8 or no YAML, deeper than MAX_DEPTH, has more than
            MAX_NODES nodes, gives a key twice, or holds `${...}` that is no reference to a key. OSError where it cannot
            be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe without a writer would hold us up
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path}: it is no file; give one")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError(f"{path}: it is larger than {MAX_BYTES >> 10} KiB, which no config is; shorten it")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: it is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    check_yaml(text, str(path))
    return text


def check_yaml(text: str, where: str) -> None:
    """UserError, which begins with `where` and the line, for YAML beyond the bounds of read_yaml."""
    watch = _Watch(where)
    try:
        for event in yaml.parse(text, Loader=LOADER):
            watch.see(event)
    except (yaml.YAMLError, UnicodeError) as error:
        raise UserError(f"{where}{_line(error)}: {_problem(error)}; correct the YAML") from None


@dataclass
class _Open:
    """A mapping or list that is being read."""

    keys: set[str] | None
    """Those so far; None for a list."""
    anchor: str | None
    nodes: int = 1
    children: int = 0


@dataclass
class _Watch:
    """What was read so far."""

    where: str
    open: list[_Open] = field(default_factory=list)
    anchors: dict[str, int] = field(default_factory=dict)
    """Anchor -> its nodes, aliases written out."""

    def see(self, event: yaml.Event) -> None:
        match event:
            case yaml.AliasEvent():
                if event.anchor not in self.anchors:
                    self._refuse(event, f"alias '*{event.anchor}' stands for nothing that is complete before it")
                self._add(event, None, self.anchors[event.anchor])
            case yaml.ScalarEvent():
                check_references(event.value, f"{self.where} line {event.start_mark.line + 1}")
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
        """Count a child of the innermost open mapping or list; `text` is that of a scalar."""
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
                self._refuse(event, f"key '{text}' is given twice")
            parent.keys.add(text)

    def _refuse(self, event: yaml.Event, fault: str) -> None:
        raise UserError(f"{self.where} line {event.start_mark.line + 1}: {fault}; correct the YAML")


def _line(error: BaseException) -> str:
    mark = getattr(error, "problem_mark", None)
    return f" line {mark.line + 1}" if mark else ""


def _problem(error: BaseException) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())
