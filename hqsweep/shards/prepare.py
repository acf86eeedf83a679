"""Text becomes shards: `hqsweep data prepare`.

Each piece of the source becomes a shard of its own, which is written beside its place and moved there; a record in
OUT/.prepare then says so. After a kill the same call does the pieces that have no record. As pieces and their shards
depend on the source and the tokenizer alone, the bytes are the same for any number of workers and of kills. The
manifest comes last, and OUT/.prepare is deleted.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.host import Busy, locked, usable_cpus, write_whole
from hqsweep.shards import manifest as manifests
from hqsweep.shards import sources
from hqsweep.shards.encode import Piece, Setup, encode_all
from hqsweep.shards.manifest import SPLITS, WIDE, Manifest, Section, Separator, Shard, Source, TokenizerFacts
from hqsweep.shards.stream import Part, Stream, unigram_entropy
from hqsweep.shards.tokenizer import open_tokenizer, separator, tokenizer_file, vocab_size

WORK = ".prepare"
OTHER = "give another --out, or delete that folder"


class Options(Section):
    """How shards are made from the source.

    column: key of JSON lines, or column of Parquet. format: None: by the names of files. val_fraction: share of
    documents that are held out. separator: token after each document, None for the tokenizer's own. allow_unknown:
    share of tokens that may be unknown, for text that the tokenizer does not cover.
    """

    column: str = "text"
    format: sources.Format | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    separator: str | None = None
    allow_unknown: Annotated[float, Field(ge=0, lt=1)] = 0.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """The progress of a call of prepare: bytes of the source, tokens so far, and pieces that an earlier call had
    done."""

    bytes: int
    total: int
    tokens: int
    kept: int


Progress = Callable[[Done], None]


def prepare(
    source: str | Path,
    tokenizer: str | Path,
    out: str | Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Manifest:
    """Make shards in the folder `out` of all text of a file or folder: text, JSON lines or Parquet, also .gz and .zst.

    tokenizer: a tokenizer.json of Hugging Face, its folder, or a .gguf file. workers: processes, by default one for
    each processor. progress: called after each piece. options: those of Options. Pieces that are done already are not
    done again.

    Raises:
        UserError: what is wrong with the source, the tokenizer, the folder or an option, in one sentence.
    """
    try:
        asked = Options.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r}") from None
    if workers is not None and workers < 1:
        raise UserError(f"workers: {workers} is less than 1")
    job = _job(Path(source), Path(tokenizer), Path(out), asked)
    if (finished := _finished(job)) is not None:
        return finished
    with _begun(job):
        records = _records(job, workers or usable_cpus(), progress or (lambda done: None))
        manifest = _manifest(job, records)
        write_whole(job.out / manifests.NAME, manifest.model_dump_json(indent=1).encode() + b"\n", synced=True)
    shutil.rmtree(job.work, ignore_errors=True)
    return manifest


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A call of prepare, read and checked. facts: the entries of the manifest that are known before anything is
    tokenized."""

    out: Path
    files: list[sources.File]
    tokenizer: Path
    facts: dict[str, Any]
    piece_bytes: int
    options: Options

    @property
    def work(self) -> Path:
        return self.out / WORK

    @property
    def plan(self) -> dict[str, Any]:
        """The entries that must not change from one call to the next."""
        times = {file.name: file.path.stat().st_mtime_ns for file in self.files}
        return self.facts | {"times": hashlib.sha256(json.dumps(times).encode()).hexdigest()}


def _job(source: Path, tokenizer: Path, out: Path, options: Options) -> _Job:
    opened = open_tokenizer(tokenizer)
    file = tokenizer_file(tokenizer)
    token = separator(opened, tokenizer, options.separator)
    vocab = vocab_size(opened)
    files = sources.find(source, options.format, without=out)
    listing = [[file.name, file.format, file.codec, file.size] for file in files]
    plan = {
        "dtype": "int32" if vocab >= WIDE else "uint16",
        "vocab_size": vocab,
        "separator": {"token": token, "id": opened.token_to_id(token)},
        "tokenizer": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "library": _library()},
        "listing": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
        "column": options.column,
        "val_fraction": options.val_fraction,
        "allow_unknown": options.allow_unknown,
    }
    size = sources.piece_bytes(files)
    return _Job(out=out, files=files, tokenizer=file, facts=plan, piece_bytes=size, options=options)


def _library() -> str:
    from importlib.metadata import version

    return f"tokenizers {version('tokenizers')}"


def _finished(job: _Job) -> Manifest | None:
    """Return the manifest of an earlier call with the same work, or None. UserError if that call did other work."""
    if not (job.out / manifests.NAME).is_file():
        return None
    manifest = manifests.read_manifest(job.out)
    said = {
        "dtype": manifest.dtype, "vocab_size": manifest.vocab_size, "separator": manifest.separator.model_dump(),
        "tokenizer": manifest.tokenizer.model_dump(), "listing": manifest.source.listing,
        "column": manifest.source.column, "val_fraction": manifest.val_fraction,
        "allow_unknown": manifest.source.allow_unknown,
    }  # fmt: skip
    _refuse_other(job, said, job.facts, "holds shards of")
    if times := manifest.source.times:  # which shards of before lack
        _refuse_other(job, {"times": times}, {"times": job.plan["times"]}, "holds shards of")
    shutil.rmtree(job.work, ignore_errors=True)
    return manifest


def _refuse_other(job: _Job, said: dict[str, Any], asked: dict[str, Any], holds: str) -> None:
    words = {
        "listing": "other files", "times": "files that have changed since", "tokenizer": "another tokenizer",
        "vocab_size": "another vocabulary", "separator": "another separator", "dtype": "another vocabulary",
    }  # fmt: skip
    for key in sorted(asked, key=lambda key: key not in ("tokenizer", "listing")):
        if said.get(key) != asked[key]:
            what = words.get(key) or f"{key} {said.get(key)}, not {asked[key]}"
            raise UserError(f"{job.out} {holds} {what}; {OTHER}")


@contextmanager
def _begun(job: _Job) -> Iterator[None]:
    """Yield the folders of a job, new or resumed, and hold a lock on them."""
    if job.out.is_dir() and not job.work.is_dir() and any(job.out.iterdir()):
        raise UserError(f"{job.out} is not empty, and holds no shards; give a new folder as --out")
    job.work.mkdir(parents=True, exist_ok=True)
    try:
        with locked(job.work / "lock"):
            _make_folders(job)
            yield
    except Busy:
        raise UserError(f"{job.out} is being prepared by another process; wait until it ends") from None


def _make_folders(job: _Job) -> None:
    """Write the plan of a new job; UserError where the plan of an earlier call is another one."""
    plan = job.work / "plan.json"
    if plan.is_file() and any(job.work.glob("[0-9]*.json")):
        _refuse_other(job, _plan_in(plan), job.plan, "was begun with")
        return
    for split in SPLITS:  # nothing is done that other options would contradict
        shutil.rmtree(job.out / split, ignore_errors=True)
        (job.out / split).mkdir()
    write_whole(job.out / "tokenizer.json", job.tokenizer.read_bytes(), synced=True)
    write_whole(plan, json.dumps(job.plan).encode(), synced=True)


def _records(job: _Job, workers: int, progress: Progress) -> list[dict[str, Any]]:
    """The records of all pieces, in their order, when all are done."""
    setup = Setup(
        out=job.out, work=job.work, tokenizer=job.out / "tokenizer.json", separator=job.facts["separator"]["id"],
        dtype=job.facts["dtype"], column=job.options.column, val_fraction=job.options.val_fraction,
        allow_unknown=job.options.allow_unknown,
    )  # fmt: skip
    records: dict[int, dict[str, Any]] = {}
    total = sum(file.size for file in job.files)
    resumed = seen = 0

    def to_do() -> Iterator[Piece]:
        nonlocal resumed, seen
        cut = sources.pieces(job.files, job.piece_bytes, job.options.column, job.work / "unpacked")
        for number, piece in enumerate(cut):
            if (record := _record(job, number)) is None:
                yield number, piece
            else:
                records[number] = record
                resumed, seen = resumed + 1, seen + _weight(piece)
                progress(_far(seen, total, records, resumed))

    for (number, piece), record in encode_all(setup, to_do(), workers):
        _on_disk(job, record)
        write_whole(_record_file(job, number), json.dumps(record).encode(), synced=True)
        records[number] = record
        seen += _weight(piece)
        progress(_far(seen, total, records, resumed))
    if _plan_in(job.work / "plan.json") != job.plan:
        raise UserError(f"files of the source changed while they were read; delete {job.out}, and start again")
    return [records[number] for number in range(len(records))]


def _plan_in(path: Path) -> dict[str, Any]:
    """Return the plan of an earlier call. UserError for a file that holds no plan."""
    try:
        plan = loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); delete {path.parents[1]}, and start again") from None
    if not isinstance(plan, dict):
        raise UserError(f"{path}: is no plan of shards; delete {path.parents[1]}, and start again")
    return plan


def _on_disk(job: _Job, record: dict[str, Any]) -> None:
    """Wait until the shards of a piece are on the disk, while its worker does the next piece."""
    for shard in filter(None, (record[split] for split in SPLITS)):
        for end in ("bin", "idx"):
            with (job.out / f"{shard['name']}.{end}").open("rb+") as file:
                os.fsync(file.fileno())


def _weight(piece: list[sources.Segment]) -> int:
    return sum(segment.weight for segment in piece)


def _far(seen: int, total: int, records: dict[int, dict[str, Any]], resumed: int) -> Done:
    tokens = sum(record[split]["tokens"] for record in records.values() for split in SPLITS if record[split])
    return Done(bytes=seen, total=total, tokens=tokens, kept=resumed)


def _record_file(job: _Job, number: int) -> Path:
    return job.work / f"{number:05}.json"


def _record(job: _Job, number: int) -> dict[str, Any] | None:
    """Return the record of a piece from an earlier call, if its shards exist in their lengths; else None."""
    try:
        record = loads(_record_file(job, number).read_bytes())
        width = 4 if job.facts["dtype"] == "int32" else 2
        for shard in filter(None, (record[split] for split in SPLITS)):
            if (job.out / f"{shard['name']}.bin").stat().st_size != shard["tokens"] * width:
                return None
            (job.out / f"{shard['name']}.idx").stat()
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record


def _manifest(job: _Job, records: list[dict[str, Any]]) -> Manifest:
    plan = dict(job.facts)
    shards = {split: [Shard(**record[split]) for record in records if record[split]] for split in SPLITS}
    documents = {split: sum(shard.documents for shard in of_split) for split, of_split in shards.items()}
    for split in (split for split in SPLITS if not documents[split]):
        raise UserError(
            f"of {sum(documents.values())} documents none was drawn for {split} with --val-fraction"
            f" {plan['val_fraction']:g}; change it or give more text, and {OTHER}"
        )
    counts = {key: sum(record[key] for record in records) for key in ("text_bytes", "empty", "replaced", "unknown")}
    dtype = plan["dtype"]
    parts = [Part(path=job.out / f"{s.name}.bin", offset=0, tokens=s.tokens) for s in shards["val"]]
    manifest = Manifest(
        dtype=dtype,
        vocab_size=plan["vocab_size"],
        separator=Separator(**plan["separator"]),
        tokenizer=TokenizerFacts(**plan["tokenizer"]),
        source=Source(
            files=len(job.files),
            bytes=sum(file.size for file in job.files),
            piece_bytes=job.piece_bytes,
            times=job.plan["times"],
            **{key: plan[key] for key in ("listing", "column", "allow_unknown")},
            **counts,
        ),
        val_fraction=plan["val_fraction"],
        unigram_entropy_nats=unigram_entropy(Stream(parts, dtype).chunks()),
        train=tuple(shards["train"]),
        val=tuple(shards["val"]),
        hash=manifests.token_hash(dtype, plan["vocab_size"], plan["separator"]["id"], shards),
    )
    return manifests.sealed(manifest)
