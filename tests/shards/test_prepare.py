"""Text becomes shards: the tokens that the library gives, of every kind of file, and the same bytes after kills."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.shards.texts import END, byte_level, documents, of_letters, write
from tokenizers import Tokenizer

from hqsweep.errors import UserError
from hqsweep.shards import prepare as preparing
from hqsweep.shards import sources
from hqsweep.shards.prepare import prepare
from hqsweep.shards.reader import Shards

pytestmark = pytest.mark.slow

TEXTS = documents(400)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 4 KiB: many for little text."""
    monkeypatch.setattr(sources, "piece_bytes", lambda files: 4096)


def expected(tokenizer: Path, texts: list[str]) -> set[tuple[int, ...]]:
    """What the library makes of each text, with the separator."""
    library = Tokenizer.from_file(str(tokenizer))
    return {(*encoding.ids, library.token_to_id(END)) for encoding in library.encode_batch(texts)}


def documents_of(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """Documents of both splits, by the lengths in the .idx."""
    manifest, read = Shards(folder).manifest, {}
    for split in ("train", "val"):
        read[split] = []
        for shard in getattr(manifest, split):
            index = (folder / f"{shard.name}.idx").read_bytes()[34:]
            lengths = np.frombuffer(index, "<i4", shard.documents)
            tokens = np.fromfile(folder / f"{shard.name}.bin", manifest.numpy_dtype)
            read[split] += [tuple(part.tolist()) for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    return read


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


NAMES = [f"texts.{kind}{codec}" for kind in ("jsonl", "parquet") for codec in ("", ".gz", ".zst")]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_gives_the_tokens_of_the_library(
    name: str, tmp_path: Path, tokenizer: Path, small_pieces: None
) -> None:
    source = write(tmp_path / name, [*TEXTS, "", END])
    manifest = prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)
    splits = documents_of(tmp_path / "out")
    assert sorted(splits["train"] + splits["val"]) == sorted(expected(tokenizer, TEXTS) | special(tokenizer))
    assert 40 < len(splits["val"]) < 120 and len(manifest.train) > 5 and manifest.source.empty == 1
    assert manifest.tokens("train") == sum(map(len, splits["train"]))
    assert not (tmp_path / "out/.prepare").exists()


def special(tokenizer: Path) -> set[tuple[int, ...]]:
    """A text that is the name of the separator stays text."""
    library = Tokenizer.from_file(str(tokenizer))
    library.encode_special_tokens = True
    ids = library.encode(END).ids
    assert len(ids) > 1
    return {(*ids, library.token_to_id(END))}


def test_files_of_text_are_documents(tmp_path: Path, tokenizer: Path) -> None:
    for i, text in enumerate(TEXTS[:100]):
        write(tmp_path / f"in/{i % 7}/{i}.txt{('', '.gz', '.zst')[i % 3]}", [text])
    (tmp_path / "in/image.png").write_bytes(b"\0\1")
    (tmp_path / "in/.hidden").write_text("hidden")
    calls = [prepare(tmp_path / "in", tokenizer, tmp_path / "in/out", val_fraction=0.3, workers=1) for _ in range(2)]
    assert calls[0] == calls[1]  # the shards are no part of the source
    splits = documents_of(tmp_path / "in/out")
    assert sorted(splits["train"] + splits["val"]) == sorted(expected(tokenizer, TEXTS[:100]))


@pytest.mark.parametrize("codec", ["", ".zst"])
def test_a_long_text_is_cut_at_ends_of_lines(tmp_path: Path, tokenizer: Path, codec: str, small_pieces: None) -> None:
    lines = [line for text in TEXTS for line in text.splitlines(keepends=True)]
    source = write(tmp_path / f"in.txt{codec}", lines)
    prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)
    library = Tokenizer.from_file(str(tokenizer))
    splits = documents_of(tmp_path / "out")
    stretches = [library.decode(list(part[:-1])) for part in splits["train"] + splits["val"]]
    assert sorted("".join(stretches).splitlines(keepends=True)) == sorted(lines) and len(stretches) > 5
    prepare(source, tokenizer, tmp_path / "lines", format="lines", val_fraction=0.2, workers=1)
    splits = documents_of(tmp_path / "lines")
    texts = [line.rstrip("\n") for line in lines]
    assert sorted(splits["train"] + splits["val"]) == sorted(
        document for document in map(tuple, ((*e.ids, 0) for e in library.encode_batch(texts)))
    )


def test_a_document_stays_in_its_split_when_others_are_added(tmp_path: Path, tokenizer: Path) -> None:
    for name, texts in (("few", TEXTS[:200]), ("all", TEXTS[::-1])):
        prepare(write(tmp_path / f"{name}.jsonl", texts), tokenizer, tmp_path / name, val_fraction=0.2, workers=1)
    assert set(documents_of(tmp_path / "few")["val"]) < set(documents_of(tmp_path / "all")["val"])
    assert not set(documents_of(tmp_path / "few")["train"]) & set(documents_of(tmp_path / "all")["val"])


def test_a_large_vocabulary_has_wide_tokens(tmp_path: Path, tokenizer: Path) -> None:
    library = Tokenizer.from_file(str(tokenizer))
    library.add_tokens([f"word{i}" for i in range(70_000)])
    library.save(str(tmp_path / "wide.json"))
    source = write(tmp_path / "a.jsonl", [f"word{69_000 + i}" for i in range(300)])
    manifest = prepare(source, tmp_path / "wide.json", tmp_path / "out", val_fraction=0.2, workers=1)
    assert manifest.dtype == "int32" and manifest.vocab_size == library.get_vocab_size()
    assert max(max(document) for document in documents_of(tmp_path / "out")["train"]) > 69_000


def test_the_same_bytes_for_any_number_of_workers_and_another_call_does_nothing(
    tmp_path: Path, tokenizer: Path, small_pieces: None
) -> None:
    source = write(tmp_path / "in/a.jsonl.zst", TEXTS).parent
    write(source / "b.jsonl", TEXTS[::-1])
    summaries = [prepare(source, tokenizer, tmp_path / f"out{n}", val_fraction=0.2, workers=n) for n in (1, 3)]
    assert summaries[0] == summaries[1] and contents(tmp_path / "out1") == contents(tmp_path / "out3")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out1").rglob("*")}
    assert prepare(source, tokenizer, tmp_path / "out1", val_fraction=0.2) == summaries[0]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out1").rglob("*")}


KILLED = """
import sys
from hqsweep.shards import sources
from hqsweep.shards.prepare import prepare
sources.piece_bytes = lambda files: 4096
def progress(done):
    print(done.kept, flush=True)
prepare(*sys.argv[1:], val_fraction=0.2, workers=2, progress=progress)
"""


def test_killed_prepare_goes_on_to_the_same_bytes(tmp_path: Path, tokenizer: Path, small_pieces: None) -> None:
    source = write(tmp_path / "in/a.jsonl", TEXTS * 3).parent
    write(source / "b.jsonl.gz", TEXTS * 3)
    command = [sys.executable, "-c", KILLED, source, tokenizer, tmp_path / "out"]
    for kill in range(3):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = [process.stdout.readline() for _ in range(8 * (kill + 1))]
        assert all(lines), "it came to its end before it was killed"
        process.kill()
        process.wait()
        with pytest.raises(UserError, match="is not finished"):
            Shards(tmp_path / "out")
    assert int(lines[-1]) >= 8
    time.sleep(0.3)  # for workers to find that their parent is gone
    done = []
    prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=2, progress=done.append)
    assert done[-1].kept >= 24 and done[-1].bytes == done[-1].total
    prepare(source, tokenizer, tmp_path / "whole", val_fraction=0.2, workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_shard_that_was_lost_before_the_end_is_made_again(
    tmp_path: Path, tokenizer: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)
    (tmp_path / "out/train/00001.bin").write_bytes(b"short")
    (tmp_path / "out/val/00002.idx").unlink()
    (tmp_path / "out/.prepare/00003.json").write_text("{")
    prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)
    Shards(tmp_path / "out").verify()


def test_a_killed_worker_ends_the_call_and_loses_nothing(
    tmp_path: Path, tokenizer: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)

    def kill(done: preparing.Done) -> None:
        listing = subprocess.run(
            ["pgrep", "-P", str(os.getpid()), "-f", "shards.worker"], capture_output=True, text=True
        )
        for each in listing.stdout.split():
            os.kill(int(each), signal.SIGKILL)

    with pytest.raises(UserError, match=r"a worker was killed by signal 9, .* fewer --workers; what is done is kept"):
        prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1, progress=kill)
    assert (tmp_path / "out/.prepare/00000.json").is_file()


def wrong(folder: Path, case: str, tokenizer: Path) -> tuple[Path, Path, dict]:
    """(source, tokenizer, options) of a call that is refused."""
    source = write(folder / "in/a.jsonl", TEXTS[:50])
    match case:
        case "nowhere":
            return folder / "nowhere", tokenizer, {}
        case "empty":
            (folder / "e.txt").touch()
            return folder / "e.txt", tokenizer, {}
        case "empty_folder":
            (folder / "e").mkdir()
            return folder / "e", tokenizer, {}
        case "binary":
            (folder / "e").write_bytes(b"\0" * 50)
            return folder / "e", tokenizer, {}
        case "no_key":
            return source, tokenizer, {"column": "txet"}
        case "no_column":
            return write(folder / "a.parquet", TEXTS[:50], "content"), tokenizer, {}
        case "numbers":
            return write(folder / "a.parquet", TEXTS[:50]), tokenizer, {"column": "id"}
        case "number":
            return source, tokenizer, {"column": "id"}
        case "cut":
            source.write_bytes(source.read_bytes()[:-20])
        case "no_json":
            source.write_text('{"text": "a"}\nplain text\n')
        case "list":
            source.write_text('{"text": "a"}\n["b"]\n')
        case "half_parquet" | "half_gz" | "half_zst":
            path = write(folder / f"a.{case[5:]}" if case == "half_parquet" else folder / f"a.jsonl.{case[5:]}", TEXTS)
            path.write_bytes(path.read_bytes()[:-200])
            return path, tokenizer, {}
        case "no_tokenizer":
            return source, folder / "nowhere.json", {}
        case "garbage_tokenizer":
            (folder / "t.json").write_text('{"model": 3}')
            return source, folder / "t.json", {}
        case "separator":
            return source, tokenizer, {"separator": "<|endofetxt|>"}
        case "uncovered":
            return source, of_letters(folder / "t.json", unknown="<unk>"), {"allow_unknown": 0.001}
        case "dropped":
            return source, of_letters(folder / "t.json", unknown=None), {}
        case "no_val":
            return source, tokenizer, {"val_fraction": 1e-9}
        case "fraction":
            return source, tokenizer, {"val_fraction": 1.5}
        case "workers":
            return source, tokenizer, {"workers": 0}
        case "full":
            write(folder / "out/other.txt", ["text"])
    return source, tokenizer, {}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nowhere", r"nowhere does not exist; give a file, or a folder of files"),
        ("empty", r"e\.txt is empty"),
        ("empty_folder", r"e holds no file of text, JSON lines or Parquet"),
        ("binary", r"e is no text: a NUL byte is in its first 8192 bytes"),
        ("no_key", r"a\.jsonl, byte 0: no 'txet' \(did you mean 'text'\?\); it has id, text; --column names one"),
        ("no_column", r"a\.parquet: no column 'text'.*; it has id, content; --column names one"),
        ("numbers", r"a\.parquet: column 'id' is int64, not text; --column names another"),
        ("number", r"a\.jsonl, byte 0: 'id' is int, not text; --column names another"),
        ("cut", r"a\.jsonl, byte [\d,]+: the last line is cut short"),
        ("no_json", r"a\.jsonl, byte 14: this line is no JSON \(.*; JSON lines have one object a line"),
        ("list", r"a\.jsonl, byte 14: a line is list, not an object"),
        ("half_parquet", r"a\.parquet: is no whole Parquet file"),
        ("half_gz", r"a\.jsonl\.gz: is no whole gzip file \(Truncated compressed stream\); copy it again"),
        ("half_zst", r"a\.jsonl\.zst: is no whole zstd file \(Truncated compressed stream\); copy it again"),
        ("no_tokenizer", r"--tokenizer: .*nowhere\.json does not exist; give a tokenizer\.json"),
        ("garbage_tokenizer", r"t\.json is no tokenizer\.json of Hugging Face"),
        ("separator", r"no token '<\|endofetxt\|>' \(did you mean '<\|endoftext\|>'\?\); its special tokens are"),
        ("uncovered", r"a\.jsonl: the tokenizer has no token for '.*' \(U\+00EF.*\), so it does not cover this text"),
        ("dropped", r"a\.jsonl: the tokenizer has no token for '.*' \(U\+[0-9A-F]+\), so it does not cover this text"),
        ("no_val", r"of 50 documents none was drawn for val with --val-fraction 1e-09"),
        ("fraction", r"val_fraction: Input should be less than 1, not 1\.5"),
        ("workers", r"workers: 0 is less than 1"),
        ("full", r"out is not empty, and holds no shards; give a new folder as --out"),
    ],
)
def test_what_is_wrong_is_one_sentence(case: str, message: str, tmp_path: Path, tokenizer: Path) -> None:
    source, tokenizer, options = wrong(tmp_path, case, tokenizer)
    with pytest.raises(UserError, match=message) as error:
        prepare(source, tokenizer, tmp_path / "out", **({"val_fraction": 0.2, "workers": 1} | options))
    assert "\n" not in str(error.value)


def test_a_share_of_unknown_tokens_may_be_allowed_and_is_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS[:50])
    letters = of_letters(tmp_path / "t.json", unknown="<unk>")
    manifest = prepare(source, letters, tmp_path / "out", val_fraction=0.2, allow_unknown=0.2, workers=1)
    unknown = Tokenizer.from_file(str(letters)).token_to_id("<unk>")
    splits = documents_of(tmp_path / "out")
    assert manifest.source.unknown == sum(document.count(unknown) for split in splits.values() for document in split)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tokenizer", r"out holds shards of another tokenizer; give another --out, or delete that folder"),
        ("source", r"out holds shards of other files"),
        ("option", r"out holds shards of val_fraction 0\.2, not 0\.3"),
    ],
)
def test_shards_of_another_job_are_left_alone(tmp_path: Path, tokenizer: Path, change: str, message: str) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS[:100])
    prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)
    before = contents(tmp_path / "out")
    if change == "tokenizer":
        tokenizer = byte_level(tmp_path / "other.json", vocab=300)
    elif change == "source":
        write(source, TEXTS[:101])
    with pytest.raises(UserError, match=message):
        prepare(source, tokenizer, tmp_path / "out", val_fraction=0.3 if change == "option" else 0.2, workers=1)
    assert contents(tmp_path / "out") == before


def test_a_call_that_failed_before_its_first_shard_binds_no_other(tmp_path: Path, tokenizer: Path) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UserError, match=r"--column names one"):
        prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1, column="txet")
    prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)
    prepare(source, tokenizer, tmp_path / "other", val_fraction=0.2, workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, tokenizer: Path, small_pieces: None) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)

    def touch(done: preparing.Done) -> None:
        os.utime(source)

    with pytest.raises(UserError, match=r"files of the source changed while they were read"):
        prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1, progress=touch)
    with pytest.raises(UserError, match=r"out was begun with files that have changed since"):
        prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)


def test_a_source_that_changes_after_its_end_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    """Though its files have their names and sizes, as those of before had."""
    source = write(tmp_path / "a.jsonl", TEXTS)
    manifest = prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)
    assert prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1) == manifest
    os.utime(source)
    with pytest.raises(UserError, match=r"out holds shards of files that have changed since"):
        prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)


def test_two_calls_at_once_do_not_mix(tmp_path: Path, tokenizer: Path, small_pieces: None) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    said = []

    def again(done: preparing.Done) -> None:
        with pytest.raises(UserError, match=r"out is being prepared by another process") as error:
            prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1)
        said.append(str(error.value))

    prepare(source, tokenizer, tmp_path / "out", val_fraction=0.2, workers=1, progress=again)
    assert said


def test_bytes_that_are_no_utf8_are_replaced_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(20):
        (tmp_path / f"in/{i}.txt").write_bytes(f"caf{i} é".encode("latin-1" if i < 3 else "utf-8"))
    manifest = prepare(tmp_path / "in", tokenizer, tmp_path / "out", val_fraction=0.3, workers=1)
    assert manifest.source.replaced == 3


def test_half_of_a_pair_in_json_does_not_stop_it(tmp_path: Path, tokenizer: Path) -> None:
    rows = [json.dumps({"text": text}) for text in TEXTS[:50]]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, r'{"text": "\ud83d"}', '{"text": null}']))
    manifest = prepare(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", val_fraction=0.3, workers=1)
    assert manifest.source.empty == 1 and manifest.documents("train") + manifest.documents("val") == 51


def test_a_record_is_written_after_its_shards_are_on_the_disk(tokenizer, tmp_path, monkeypatch):
    """The workers do not wait for the disk; whoever writes the record does, of each file, before it."""
    order, fsync, write = [], os.fsync, preparing.write_whole

    def noted(number):
        order.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(
        preparing, "write_whole", lambda path, data, **how: order.append(path.name) or write(path, data, **how)
    )
    source = tmp_path / "source.txt"
    source.write_text("\n".join(f"line {i}" for i in range(2000)))
    prepare(source, tokenizer, tmp_path / "out", format="lines", val_fraction=0.5, workers=1)
    shards = order[: order.index("00000.json")]
    assert [shards.count(f"00000.{end}") for end in ("bin", "idx")] == [2, 2]  # of both splits
