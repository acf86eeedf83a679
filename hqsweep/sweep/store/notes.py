"""What people write beside their results: a note and tags of a sweep, and of its runs, in notes.json of the sweep.

    {"note", "tags", "runs": {name of a run: {"note", "tags"}}}

No number depends on it, and no seal covers it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hqsweep.errors import Damaged, UserError, nearest
from hqsweep.sweep.store.documents import Document, Mapped, Text, check_document
from hqsweep.sweep.store.files import read_json, write_json
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

FILE = "notes.json"
REMEDY = "delete it, or correct it by hand"
TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
LONGEST_TAG, LONGEST_NOTE = 40, 2000


class Entry(Document):
    """The note and the tags of a run, as JSON."""

    note: Text = ""
    tags: Annotated[list[Text], Field(default_factory=list)]


class Entries(Entry):
    """notes.json"""

    runs: Annotated[Mapped, Field(default_factory=dict)]


@dataclass(frozen=True, kw_only=True)
class Note:
    """The note and the tags of a sweep or a run; "" and () where it has none."""

    note: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Target:
    """A sweep's folder, and the name of one of its runs, "" for the sweep itself."""

    folder: Path
    run: str = ""

    @property
    def name(self) -> str:
        """SWEEP, or SWEEP/RUN."""
        return "/".join(part for part in (self.folder.name, self.run) if part)


def read(folder: Path) -> dict[str, Note]:
    """Name of a run ("" for the sweep in `folder`) -> its Note. Raises Damaged for a file of another form."""
    path = folder / FILE
    document = read_json(path, {})
    check_document(path, document, Entries, remedy=REMEDY)
    entries = {"": document, **document.get("runs", {})}
    for entry in entries.values():
        check_document(path, entry, Entry, remedy=REMEDY)
    return {
        name: Note(note=entry.get("note", ""), tags=tuple(entry.get("tags", ()))) for name, entry in entries.items()
    }


def targets(store: RunStore, word: str) -> list[Target]:
    """The targets that a word means: a sweep, by name or folder, or else runs as RunStore.resolve() finds them."""
    if folder := store.sweep_path(word):
        return [Target(folder=folder)]
    return [Target(folder=run.sweep_path, run=run.name) for run in store.resolve([word])]


def note(asked: Sequence[Target], text: str) -> None:
    """Write the note of each target; "" deletes it. Raises UserError for a long one."""
    if len(text) > LONGEST_NOTE:
        raise UserError(f"note: {len(text)} characters; at most {LONGEST_NOTE} are kept")
    _change(asked, lambda old: replace(old, note=text))


def tag(asked: Sequence[Target], changes: Sequence[str]) -> None:
    """Add and remove tags, "+good" and "-bad". Raises UserError for other words, and for removing a tag that no target
    has."""
    for word in changes:
        if not re.fullmatch(rf"[+-]{TAG}", word) or len(word) > LONGEST_TAG:
            raise UserError(
                f"tag: '{word}'; write +NAME to add a tag and -NAME to take it away, of letters, digits and . _ -, at"
                f" most {LONGEST_TAG - 1}"
            )
    added, gone = ([word[1:] for word in changes if word[0] == sign] for sign in "+-")
    known = {word for target in asked for word in read(target.folder).get(target.run, Note()).tags}
    unknown = next((word for word in gone if word not in known), None)
    if unknown is not None:
        said = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise UserError(f"tag: '{unknown}' is no tag of what was named{nearest(unknown, known)}; {said}")

    def changed(old: Note) -> Note:
        tags = [word for word in (*old.tags, *added) if word not in gone]
        return replace(old, tags=tuple(dict.fromkeys(tags)))

    _change(asked, changed)


def forget(folder: Path, runs: Iterable[str]) -> None:
    """Drop the notes of runs that are deleted. The caller holds the sweep's lock."""
    gone = set(runs)
    notes = read(folder)
    if gone & set(notes):
        _write(folder, {name: own for name, own in notes.items() if name not in gone})


def of_run(run: RunDir) -> Note:
    """The Note of a run; an empty one where the file is damaged, which `hqsweep ls` names."""
    try:
        return read(run.sweep_path).get(run.name, Note())
    except Damaged:
        return Note()


def _change(asked: Sequence[Target], change: Callable[[Note], Note]) -> None:
    """Replace the Note of each target, a sweep at a time, under its lock."""
    for folder in dict.fromkeys(target.folder for target in asked):
        with RunStore(folder.parent).lock(folder.name):
            notes = read(folder)
            for target in asked:
                if target.folder == folder:
                    notes[target.run] = change(notes.get(target.run, Note()))
            _write(folder, notes)


def _write(folder: Path, notes: Mapping[str, Note]) -> None:
    entries = {name: {"note": own.note, "tags": list(own.tags)} for name, own in notes.items() if own != Note()}
    own = entries.pop("", {"note": "", "tags": []})
    write_json(folder / FILE, own | {"runs": entries})


def line(said: Note) -> str:
    """The line of a Note, such as: [good, draft] lower rate from step 100; "" where it is empty."""
    return " ".join(part for part in (f"[{', '.join(said.tags)}]" if said.tags else "", said.note) if part)
