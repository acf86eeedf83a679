"""Random damages to the files of a sweep: what a full disk, a careless hand or another program may leave behind.

A Damage holds plain values only, so its repr and the seed are the reproducer of a failure.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GARBAGE = [
    b"", b"[]", b"{}", b"null", b"3", b'"text"', b"\x00" * 64, bytes(range(256)), b"{", b"[" * 100, b"a: [", b"- a\n",
    b'{"state": 3}\n', b'{"state": "finished", "seconds": "long", "progress": []}\n',
    b'{"arm": ["bf16"], "seed": {}}\n',
    b'{"name": "other", "runs": [], "arms": []}\n', b"\xef\xbb\xbf{}", b"\n\n\n", b"NaN\n", b"<html></html>\n",
    b'{"step": 1, "metric": "val_loss", "value": 0.5}\n', b'{"step": "1", "metric": 2, "value": null}\n',
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Damage:
    """kind: a key of KINDS. path: of a file, or a run's folder, below the sweep's; other: that of a second one."""

    seed: int
    kind: str
    path: str
    other: str = ""


def draw(seed: int, sweep: Path) -> Damage:
    """The damage of a seed to a sweep. Seeds go round the kinds. Files are drawn by their names first, so that the few
    of a sweep are hit too."""
    rng = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    runs = sorted(path.name for path in sweep.iterdir() if path.is_dir())
    if kind in FOLDERS:
        chosen = rng.sample(runs, 2)
        return Damage(seed=seed, kind=kind, path=chosen[0], other=chosen[1])
    files = sorted(str(path.relative_to(sweep)) for path in sweep.rglob("*") if path.is_file())
    name = rng.choice(sorted({Path(file).name for file in files}))
    path = rng.choice([file for file in files if Path(file).name == name])
    twins = [file for file in files if Path(file).suffix == Path(path).suffix and file != path]
    return Damage(seed=seed, kind=kind, path=path, other=rng.choice(twins) if twins else "")


def inflict(damage: Damage, sweep: Path) -> None:
    """Do the damage to the sweep's folder."""
    KINDS[damage.kind](random.Random(f"{damage.seed} inflicted"), sweep / damage.path, sweep / damage.other)


def _cut(rng: random.Random, path: Path, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) or 1)])


def _cut_lines(rng: random.Random, path: Path, other: Path) -> None:
    """Whole lines are gone from the end, so that the rest can be read."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: rng.randrange(len(lines) or 1)]))


def _flip(rng: random.Random, path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _swap_lines(rng: random.Random, path: Path, other: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) > 1:
        a, b = rng.sample(range(len(lines)), 2)
        lines[a], lines[b] = lines[b], lines[a]
    path.write_bytes(b"".join(lines))


def _swap_files(rng: random.Random, path: Path, other: Path) -> None:
    if other.is_file():
        here, there = path.read_bytes(), other.read_bytes()
        path.write_bytes(there)
        other.write_bytes(here)


def _double(rng: random.Random, path: Path, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data + data)


def _double_line(rng: random.Random, path: Path, other: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines:
        at = rng.randrange(len(lines))
        lines.insert(rng.randrange(at, len(lines)) + 1, lines[at])
    path.write_bytes(b"".join(lines))


def _append(rng: random.Random, path: Path, other: Path) -> None:
    """A line that was not written, of numbers that would look good where the file has rows."""
    line = b'{"step": 12, "metric": "val_loss", "value": 0.25}\n' if path.suffix == ".jsonl" else rng.choice(GARBAGE)
    path.write_bytes(path.read_bytes() + line)


def _delete(rng: random.Random, path: Path, other: Path) -> None:
    path.unlink()


def _foreign(rng: random.Random, path: Path, other: Path) -> None:
    path.write_bytes(rng.choice(GARBAGE))


def _copy(rng: random.Random, path: Path, other: Path) -> None:
    """The content of another file of this sweep, of the same type where there is one."""
    if other.is_file():
        path.write_bytes(other.read_bytes())


def _edit(rng: random.Random, path: Path, other: Path) -> None:
    """Another digit, where the file has some: a change by hand that leaves everything well-formed."""
    data = bytearray(path.read_bytes())
    digits = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if digits:
        at = rng.choice(digits)
        data[at] = rng.choice([byte for byte in b"0123456789" if byte != data[at]])
    path.write_bytes(data)


def _edit_json(rng: random.Random, path: Path, other: Path) -> None:
    """Another value under one key, of a JSON document or of one of its lines."""
    try:
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        at = rng.randrange(len(lines))
        document = json.loads(lines[at])
        key = rng.choice(sorted(document))
    except (ValueError, IndexError, TypeError, KeyError):
        return _edit(rng, path, other)
    document[key] = rng.choice([None, -1, 0.5, "finished", "failed", "bf16", [], {}, True, document[key]])
    lines[at] = json.dumps(document)
    path.write_text("\n".join(lines) + "\n")
    return None


def _link(rng: random.Random, path: Path, other: Path) -> None:
    """A link to another file in its place."""
    if other.is_file():
        path.unlink()
        path.symlink_to(other)


def _folder(rng: random.Random, path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def _unreadable(rng: random.Random, path: Path, other: Path) -> None:
    """A link that leads nowhere: it is there, and cannot be read."""
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def _delete_run(rng: random.Random, path: Path, other: Path) -> None:
    shutil.rmtree(path)


def _empty_run(rng: random.Random, path: Path, other: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _swap_runs(rng: random.Random, path: Path, other: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _copy_run(rng: random.Random, path: Path, other: Path) -> None:
    """A run's folder holds another run."""
    shutil.rmtree(path)
    shutil.copytree(other, path)


def _double_run(rng: random.Random, path: Path, other: Path) -> None:
    """A run that the sweep does not know."""
    shutil.copytree(path, path.with_name(f"{path.name}-copy"))


KINDS: dict[str, Callable[[random.Random, Path, Path], None]] = {
    "cut": _cut, "cut lines": _cut_lines, "flip": _flip, "swap lines": _swap_lines, "swap files": _swap_files,
    "double": _double, "double line": _double_line, "append": _append, "delete": _delete, "foreign": _foreign,
    "copy": _copy, "edit": _edit, "edit json": _edit_json, "link": _link, "folder": _folder, "dead link": _unreadable,
    "delete run": _delete_run, "empty run": _empty_run, "swap runs": _swap_runs, "copy run": _copy_run,
    "double run": _double_run,
}  # fmt: skip
FOLDERS = ("delete run", "empty run", "swap runs", "copy run", "double run")
"""Kinds that are done to the folders of runs."""
