"""The tokens of a run and where they come from: files on disk, installed packages, or a Markov chain.

Text is used as bytes, one byte one token, so that the same files give the same data on every machine. Files are taken
in the order of a hash of their relative path. This mixes topics, so any prefix (`max_bytes`) is a fair sample. A file
goes to val whenever val has less than its share of the files before it. So no file is in both splits, the shares hold
at every prefix, and a quick run's val files are among the full run's. Memory holds each byte once.

The Markov chain is a source whose loss floor is known exactly. The next token depends on the last `order` tokens,
through one row of probabilities per context, drawn from a symmetric Dirichlet distribution. No model can have a lower
expected loss than the chain's entropy rate. Order 2 or more needs attention and MLP to reach it. The embedding and the
head alone solve an order-1 chain, and recipes leave these in high precision.
"""

import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hqsweep.config.safe import loads
from hqsweep.config.train import DataConfig
from hqsweep.errors import UserError
from hqsweep.shards.reader import is_llm_c

SNIFF_BYTES = 8192  # a NUL byte this early says that a file is not text (the rule of git and grep)
NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}  # not part of the standard library
SITE_FOLDERS = ("site-packages", "dist-packages")
SCAN_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Two 1-D arrays of tokens (uint8 or uint16, possibly memory-mapped), their vocabulary, and where they came from.

    `split` says in words how train and val were cut; `facts` are further JSON values for the manifest.
    """

    train: np.ndarray
    val: np.ndarray
    vocab_size: int
    split: str
    facts: dict


def stdlib(val_fraction: float, max_bytes: int | None) -> Corpus:
    """The running Python's standard library, its *.py sources as bytes (31 MB if its tests are installed), by file."""
    root = Path(sysconfig.get_path("stdlib"))
    # config-* and _sysconfigdata* are written when Python is built and hold the paths of that machine.
    names = _walk(
        root,
        keep_folder=lambda name: name not in NOT_SOURCES and not name.startswith("config-"),
        keep_file=lambda name: name.endswith(".py") and not name.startswith("_sysconfigdata"),
    )
    files = {name: root / name for name in names}
    return _split_by_file(files, val_fraction, max_bytes, {"python": platform.python_version()})


def site(val_fraction: float, max_bytes: int | None) -> Corpus:
    """The installed packages of the running Python, their *.py sources as bytes (200 MB with torch), by file.

    A file counts if a package lists it among its own (RECORD), wherever on sys.path the package is installed. The
    standard library is another source. hqsweep is left out, so that its changes change no data. Equal versions of all
    packages give equal data. facts: `packages`, their number, and `packages_hash`, the SHA-256 of their NAME==VERSION,
    one a line, sorted.

    Raises:
        UserError: no package has sources.
    """
    files: dict[str, Path] = {}
    versions: dict[str, str] = {}
    for package in distributions(path=[folder for folder in sys.path if Path(folder).name in SITE_FOLDERS]):
        name = re.sub(r"[-_.]+", "-", package.name).lower()
        if name == "hqsweep" or name in versions:  # Python imports the first one on sys.path
            continue
        names = [file for file in package.files or () if file.suffix == ".py" and ".." not in file.parts]
        paths = {file.as_posix(): Path(package.locate_file(file)) for file in names}
        paths = {file: path for file, path in paths.items() if path.is_file() and path.stat().st_size}
        if paths:
            versions[name] = package.version
            files |= paths
    if not files:
        raise UserError("data.source: site found no package with *.py files; install some, or use data=stdlib")
    listing = "\n".join(sorted(f"{name}=={version}" for name, version in versions.items()))
    fields = {"packages": len(versions), "packages_hash": hashlib.sha256(listing.encode()).hexdigest()}
    return _split_by_file(files, val_fraction, max_bytes, fields)


def text(path: str | None, val_fraction: float, max_bytes: int | None) -> Corpus:
    """A text file (val is its end) or a folder's text files (split by file), as bytes.

    In a folder, all regular files count whose first 8 KiB hold no NUL byte, except hidden files and files in hidden
    folders.

    Raises:
        UserError: no path, a path that does not exist, or a folder without text.
    """
    root = _existing(path, "text", "a text file, or a folder of text files")
    if root.is_file():
        return _split_by_position(_map(root, np.uint8, max_bytes), 256, val_fraction, {"files": 1})

    def visible(name: str) -> bool:
        return not name.startswith(".")

    names = [name for name in _walk(root, visible, visible) if _is_text(root / name)]
    if not names:
        raise UserError(f"data.path: no text file in the folder {root}; point it to a text file or a folder of them")
    if len(names) == 1:
        return _split_by_position(_map(root / names[0], np.uint8, max_bytes), 256, val_fraction, {"files": 1})
    return _split_by_file({name: root / name for name in names}, val_fraction, max_bytes, {})


def tokens(path: str | None, val_fraction: float, max_bytes: int | None) -> Corpus:
    """nanoGPT's token shards, little-endian uint16 without a header, memory-mapped.

    `path` is a folder that holds train.bin and val.bin, or one .bin file whose end becomes val. The vocabulary is
    "vocab_size" of meta.json next to them, else the largest token + 1 rounded up to a multiple of 64. A meta.pkl is
    never opened, because unpickling runs code.

    Raises:
        UserError: a missing path or file, an odd number of bytes, or a token that meta.json's vocabulary excludes.
    """
    root = _existing(path, "tokens", "a .bin file of uint16 tokens, or a folder that holds train.bin and val.bin")
    if root.is_file():
        data = _map(root, np.dtype("<u2"), max_bytes)
        return _split_by_position(data, _vocab(root.parent / "meta.json", [data]), val_fraction, {"files": 1})
    missing = [name for name in ("train.bin", "val.bin") if not (root / name).is_file()]
    if missing:
        raise UserError(f"data.path: {root} has no {' and no '.join(missing)}; data.source=tokens reads both")
    share = {"train.bin": 1 - val_fraction, "val.bin": val_fraction}
    train, val = (_map(root / name, np.dtype("<u2"), max_bytes and int(max_bytes * share[name])) for name in share)
    vocab = _vocab(root / "meta.json", [train, val])
    return Corpus(train=train, val=val, vocab_size=vocab, split="train.bin and val.bin as they are", facts={"files": 2})


def _existing(path: str | None, source: str, wanted: str) -> Path:
    if path is None:
        raise UserError(f"data.path: not given; data.source={source} reads {wanted}; set data.path=PATH")
    if not Path(path).exists():
        raise UserError(f"data.path: {path} does not exist; data.source={source} reads {wanted}")
    return Path(path)


def _walk(root: Path, keep_folder: Callable[[str], bool], keep_file: Callable[[str], bool]) -> list[str]:
    """The relative POSIX paths of the non-empty regular files below root, sorted."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if keep_folder(name)]
        paths = (Path(folder, name) for name in files if keep_file(name))
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file() and path.stat().st_size]
    return sorted(names)


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(SNIFF_BYTES)


def _split_by_file(files: Mapping[str, Path], val_fraction: float, max_bytes: int | None, fields: dict) -> Corpus:
    """Cut files, in the order of their names' hashes, into train and val. Each file has the bytes that it has now."""
    parts: dict[str, list[tuple[Path, int]]] = {"train": [], "val": []}
    size = {"train": 0, "val": 0}
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        total = size["train"] + size["val"]
        if max_bytes is not None and total >= max_bytes:
            break
        side = "val" if size["val"] < val_fraction * total else "train"
        length = min(files[name].stat().st_size, sys.maxsize if max_bytes is None else max_bytes - total)
        parts[side].append((files[name], length))
        size[side] += length
    fields = {"files": len(parts["train"]) + len(parts["val"])} | fields
    split = f"by file: {len(parts['train'])} train, {len(parts['val'])} val"
    return Corpus(train=_read(parts["train"]), val=_read(parts["val"]), vocab_size=256, split=split, facts=fields)


def _read(parts: list[tuple[Path, int]]) -> np.ndarray:
    """The first bytes of each file, one file after another. sizes: the number of bytes of each."""
    data = np.empty(sum(length for _, length in parts), np.uint8)
    at = 0
    for path, length in parts:
        with path.open("rb") as file:
            if file.readinto(memoryview(data)[at : at + length]) < length:
                raise UserError(f"data: {path} became shorter while it was read; start again when it stays as it is")
        at += length
    data.flags.writeable = False
    return data


def _split_by_position(data: np.ndarray, vocab_size: int, val_fraction: float, fields: dict) -> Corpus:
    cut = len(data) - round(len(data) * val_fraction)
    split = f"by position: val starts at token {cut} of {len(data)}"
    return Corpus(train=data[:cut], val=data[cut:], vocab_size=vocab_size, split=split, facts=fields)


def _map(path: Path, dtype: np.dtype | type, max_bytes: int | None) -> np.ndarray:
    width = np.dtype(dtype).itemsize
    size = path.stat().st_size
    if size == 0:  # an empty file cannot be mapped
        raise UserError(f"data.path: {path} is empty; give a file with data in it")
    if width > 1 and is_llm_c(path):
        raise UserError(f"data.path: {path} begins with the header of llm.c's shards; read it with data=shards")
    if size % width:
        raise UserError(f"data.path: {path} has {size} bytes, an odd number; tokens are uint16, two bytes each")
    count = min(size, size if max_bytes is None else max_bytes) // width
    return np.memmap(path, dtype, mode="r")[:count]


def _vocab(meta: Path, arrays: list[np.ndarray]) -> int:
    chunks = (array[at : at + SCAN_TOKENS] for array in arrays for at in range(0, len(array), SCAN_TOKENS))
    largest = max(int(chunk.max()) for chunk in chunks)
    if not meta.is_file():
        return -(-(largest + 1) // 64) * 64
    try:
        vocab = int(loads(meta.read_bytes())["vocab_size"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f'{meta}: no "vocab_size" number in it; write {{"vocab_size": N}} or remove the file') from None
    if vocab <= largest:
        raise UserError(f"{meta}: vocab_size is {vocab}, but the data holds token {largest}; it must be larger")
    return vocab


WHOLE_BYTES = 256 << 20  # arrays up to this size are hashed whole
END_BYTES = 16 << 20  # of a larger array, this much at each end is hashed
SAMPLES, SAMPLE_BYTES = 1024, 16 << 10  # number and size of evenly spread pieces between the ends
SHOWN_DIGITS = 10
"""The number of a hash's digits that a sentence shows."""

Stamp = tuple[tuple[str, int, int, int], ...]
"""(name, size, time of the last change in ns, inode) of each file."""


def content_hash(words: Sequence[Any], arrays: Sequence[np.ndarray]) -> str:
    """SHA-256, in hex, over words and the bytes of arrays.

    Of an array above WHOLE_BYTES it covers the size, both ends, and samples between the ends.
    """
    digest = hashlib.sha256(json.dumps(words).encode())
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.nbytes};".encode())
        data = array.view(np.uint8)
        if array.nbytes > WHOLE_BYTES:
            digest.update(data[:END_BYTES])
            for start in np.linspace(END_BYTES, array.nbytes - END_BYTES - SAMPLE_BYTES, SAMPLES, dtype=np.int64):
                digest.update(data[start : start + SAMPLE_BYTES])
            data = data[-END_BYTES:]
        digest.update(data)
    return digest.hexdigest()


def how_hashed() -> str:
    """A description of how large splits are hashed."""
    return (
        f"size, first and last {END_BYTES} bytes, and {SAMPLES} pieces of {SAMPLE_BYTES} bytes between them, of a split"
        f" above {WHOLE_BYTES} bytes"
    )


def stamp_of(config: DataConfig) -> Stamp:
    """The Stamp of the files that a source with a path reads; () for other sources, and for missing files."""
    if config.path is None:
        return ()
    root = Path(config.path)
    files = root.rglob("*") if root.is_dir() else chain([root], (root.parent / "meta.json", root.with_suffix(".idx")))
    stats = []
    try:
        stats = [(str(path), path.stat()) for path in sorted(files) if path.is_file()]
    except OSError:  # a file went away; its reader reports it
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def check_planned(config: DataConfig, known: str | None, found: str) -> None:
    """Raise UserError if a run's data differ from its plan. Both are hashes; found: the data now.

    known: the hash in the plan, or the hash of earlier reads; None: neither is known.
    """
    if known is not None and known != found:
        raise UserError(
            f"{where(config)} are others than this run was planned for (hash {found[:SHOWN_DIGITS]}, and it was"
            f" {known[:SHOWN_DIGITS]}); put the old data back, or give the sweep's command with another sweep=NAME"
        )


def where(config: DataConfig) -> str:
    """The data of a source, as the beginning of a sentence, with the key to look at."""
    if config.source == "factory":
        return f"data._target_: the data of {config.target}"
    return f"data.path: the data in '{config.path}'" if config.path else f"data.source: the data of {config.source}"


MAX_ENTRIES = 1 << 24  # of the transition table
BURN_IN = 64  # tokens until a chain has forgotten its start


@dataclass(frozen=True, kw_only=True)
class MarkovSource:
    """An order-k chain over V tokens. `rows`: [V**k, V] float64, the next-token probabilities of every context.

    Context number: sum_i token[i] * V**(k-1-i), the oldest token being the most significant digit.
    """

    rows: np.ndarray

    @classmethod
    def draw(cls, *, vocab: int, order: int, concentration: float, seed: int) -> "MarkovSource":
        """Rows from Dirichlet(concentration, ..., concentration); small concentrations make predictable text.

        Raises:
            UserError: the table would exceed 2**24 entries.
        """
        if vocab ** (order + 1) > MAX_ENTRIES:
            raise UserError(
                f"data.markov: vocab {vocab} with order {order} needs {vocab ** (order + 1)} probabilities;"
                f" at most {MAX_ENTRIES} are allowed; lower vocab or order"
            )
        rng = np.random.Generator(np.random.Philox([seed, 0]))
        return cls(rows=rng.dirichlet(np.full(vocab, concentration), size=vocab**order))

    @property
    def vocab(self) -> int:
        return self.rows.shape[1]

    def stationary(self) -> np.ndarray:
        """Probability of every context in the long run, [V**k] float64, to 1e-13 in L1, by power iteration.

        The iterated chain is the lazy one, (P + I) / 2: the same limit, and periodic chains converge too.
        """
        contexts, vocab = self.rows.shape
        step = self.rows.reshape(vocab, contexts // vocab, vocab)
        pi = np.full(contexts, 1 / contexts)
        for _ in range(100_000):
            # the oldest token a leaves the context, the new token c enters: (a, rest) -> (rest, c)
            after = np.einsum("ar,arc->rc", pi.reshape(vocab, -1), step).reshape(-1)
            if np.abs(after - pi).sum() < 1e-13:
                break
            pi = (pi + after) / 2
        return pi

    def entropy_rate(self) -> float:
        """H = -sum_s pi[s] sum_t P[s, t] ln P[s, t], in nats per token; 0 ln 0 = 0."""
        logs = np.log(self.rows, out=np.zeros_like(self.rows), where=self.rows > 0)
        return float(-(self.stationary() @ (self.rows * logs).sum(axis=1)))

    def sample(self, length: int, seed: int) -> np.ndarray:
        """One chain of `length` tokens, uint8 up to 256 tokens, else uint16; the same for the same seed.

        The chain is cut into pieces that run side by side, piece i from the end of piece i-1. The ends are guessed
        first; a piece whose start turns out wrong runs again with the same random numbers. Two chains fed with the
        same numbers soon meet, so a few rounds suffice, and the result is exactly the chain run from end to end.
        """
        total = length + BURN_IN
        pieces = max(1, round(total**0.5))
        steps = -(-total // pieces)
        uniforms = np.random.Generator(np.random.Philox([seed, 1])).random((pieces, steps))
        starts = np.zeros(pieces, np.int64)
        out = np.empty((pieces, steps), np.uint8 if self.vocab <= 256 else np.uint16)
        ends = np.zeros(pieces, np.int64)
        stale = np.arange(pieces)
        thresholds = self._thresholds()
        while stale.size:
            out[stale], ends[stale] = self._run(thresholds, starts[stale], uniforms[stale])
            stale = 1 + np.flatnonzero(starts[1:] != ends[:-1])
            starts[stale] = ends[stale - 1]
        return out.reshape(-1)[BURN_IN:total]

    def _thresholds(self) -> np.ndarray:
        """s + P(token <= t | context s) for every context s and t < V-1: one sorted array, so one search per token."""
        below = np.minimum(self.rows.cumsum(axis=1)[:, :-1], 1)
        return (np.arange(len(below))[:, None] + below).reshape(-1)

    def _run(self, thresholds: np.ndarray, contexts: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chains side by side: contexts [n] and a number in [0, 1) per token [n, steps] -> tokens, last contexts."""
        tokens = np.empty(uniforms.shape[::-1], np.int64)
        for step, u in enumerate(np.ascontiguousarray(uniforms.T)):
            places = np.searchsorted(thresholds, contexts + u, side="right")
            # the minimum: contexts + u can round up to the next context's first threshold
            tokens[step] = np.minimum(places - contexts * (self.vocab - 1), self.vocab - 1)
            contexts = (contexts * self.vocab + tokens[step]) % len(self.rows)
        return tokens.T, contexts
