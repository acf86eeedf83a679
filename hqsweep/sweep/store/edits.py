"""Changes that people make to stored runs: notes, tags, and deletion with its limits.

Notes and tags that people give a sweep and its runs stand in notes.json of the sweep. No number depends on it, and no
seal covers it.

    {"note", "tags", "runs": {name of a run: {"note", "tags"}}}

Nothing is deleted that runs or waits in a queue, and no trunk without its forks. A run leaves the sweep's list first,
so that a kill in between leaves a folder that is no run of the sweep, never a hole in a sweep that is whole. Of a link
only the link is deleted, never its target, be it a run's, a sweep's or a file's.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hqsweep.errors import Damaged, UserError, nearest
from hqsweep.host import Busy
from hqsweep.sweep.store.documents import Document, Mapped, Text, check_document
from hqsweep.sweep.store.files import read_json, write_json
from hqsweep.sweep.store.run_dir import RunDir, remove
from hqsweep.sweep.store.store import INDEX, RunStore, sweep_file

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


OURS = (sweep_file.FILE, FILE, INDEX, ".lock", "slurm")
"""The files beside the runs of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """The runs of one sweep that are to be deleted; whole: whether they are all of its runs."""

    folder: Path
    runs: tuple[RunDir, ...]
    whole: bool

    @property
    def link(self) -> Path | None:
        """Where the sweep's folder leads to if it is a link, which alone is deleted then; None for a folder."""
        return self.folder.resolve() if self.folder.is_symlink() else None


def removals(store: RunStore, words: Sequence[str]) -> list[Removal]:
    """Return the removals for these words, a sweep at a time.

    UserError for a run that is at work or waits for Slurm, for a trunk whose forks stay, for a run whose checkpoint is
    another sweep's fork.trunk, for a folder of no sweep, and for some of the runs behind a link.
    """
    runs = store.resolve(words)
    removed = []
    for folder in dict.fromkeys(run.sweep_path for run in runs):
        if not (folder / sweep_file.FILE).is_file():
            raise UserError(f"rm: {folder} is no sweep's folder, so what is in it is not deleted here")
        asked = tuple(run for run in runs if run.sweep_path == folder)
        listed = _listed(folder)
        whole = {run.name for run in listed} <= {run.name for run in asked}
        for run in asked:
            _check_at_rest(run)
        _check_trunks(asked, [run for run in listed if run not in asked])
        removed.append(Removal(folder=folder, runs=asked, whole=whole))
        if removed[-1].link and not whole:
            raise UserError(
                f"rm: {folder} is a link, and what is behind it is not deleted through it; name {asked[0].name} by its"
                f" own path, {asked[0].path.resolve()}"
            )
    _check_other_sweeps(store, removed)
    return removed


def _listed(folder: Path) -> list[RunDir]:
    return RunStore(folder.parent).runs(folder.name)


def _check_at_rest(run: RunDir) -> None:
    if not run.path.is_dir() or run.path.is_symlink():
        return
    status, job = run.seen(), None
    if run.is_locked() or status["state"] == "running":
        raise _at_work(run)
    with suppress(Damaged):
        job = run.job()
    if job is not None and status["state"] == "pending":
        raise UserError(f"rm: {run.name} waits for Slurm as job {job}; `hqsweep cancel {run.name}` takes it back")


def _at_work(run: RunDir) -> UserError:
    return UserError(f"rm: {run.name} is at work; `hqsweep cancel {run.name}` stops it")


def _check_trunks(gone: Sequence[RunDir], left: Sequence[RunDir]) -> None:
    names = {run.name for run in gone}
    forks = [(run, trunk.name) for run in left if (trunk := _trunk(run)) and trunk.name in names]
    if forks:
        fork, name = forks[0]
        raise UserError(f"rm: {name} is the trunk of {fork.name}, which would stay; delete its forks too, or the sweep")


def _trunk(run: RunDir) -> RunDir | None:
    try:
        return run.trunk()
    except Damaged:
        return None


def _check_other_sweeps(store: RunStore, removed: Sequence[Removal]) -> None:
    removed = [removal for removal in removed if not removal.link]
    gone = {run.path.resolve(): run for removal in removed for run in removal.runs if not run.path.is_symlink()}
    whole = {removal.folder.resolve() for removal in removed if removal.whole}
    for sweep in store.sweeps():
        run = None if (store.root / sweep).resolve() in whole else gone.get(_outside_trunk(store, sweep))
        if run is not None and not all(fork.has_finished() for fork in store.runs(sweep)):
            raise UserError(f"rm: forks of '{sweep}' that are not done start from {run.name}; delete that sweep first")


def _outside_trunk(store: RunStore, sweep: str) -> Path | None:
    """The folder of the run whose checkpoint a sweep has as its fork.trunk, by its file or by the folder."""
    try:
        trunk = (store.facts(sweep)["study"].get("fork") or {}).get("trunk")
    except Damaged:
        return None
    path = Path(trunk).resolve() if trunk else None
    return path.parent.parent if path and path.suffix == ".pt" else path


def delete(removal: Removal) -> None:
    """Delete the runs, and, of a whole sweep, the files beside them; of a link the link. UserError where a run has
    begun to work meanwhile."""
    if removal.link:
        removal.folder.unlink()
        return
    store, sweep = RunStore(removal.folder.parent), removal.folder.name
    with store.lock(sweep), ExitStack() as held:
        for run in removal.runs:
            if run.path.is_dir() and not run.path.is_symlink():
                try:
                    held.enter_context(run.lock())
                except Busy:
                    raise _at_work(run) from None
        names = {run.name for run in removal.runs}
        if removal.whole:
            (removal.folder / sweep_file.FILE).unlink(missing_ok=True)
        else:
            _take_off(store, sweep, names)
        for run in removal.runs:
            remove(run.path)
        if removal.whole:
            for name in OURS:
                remove(removal.folder / name)
    if removal.whole:
        with suppress(OSError):  # something of somebody else's is there
            removal.folder.rmdir()


def _take_off(store: RunStore, sweep: str, names: set[str]) -> None:
    """Write the sweep's list without these runs, and its notes without theirs."""
    folder, document = store.root / sweep, store.facts(sweep)
    left = [name for name in document["runs"] if name not in names]
    arms = {_arm(RunDir(folder / name)) for name in left}
    sweep_file.write(folder, document | {"runs": left, "arms": [arm for arm in document["arms"] if arm in arms]})
    with suppress(Damaged):
        forget(folder, names)


def _arm(run: RunDir) -> str | None:
    try:
        return run.manifest()["arm"]
    except Damaged:
        return None
