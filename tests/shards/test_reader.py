"""Folders of shards: ours, Megatron's and llm.c's, and what is wrong with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.shards.written import write_llm_c, write_manifest, write_megatron, write_ours

from hqsweep.errors import Damaged, UserError
from hqsweep.shards import reader
from hqsweep.shards.manifest import encode_index
from hqsweep.shards.reader import Shards

PARTS = {"train": [range(100), range(100, 180)], "val": [range(180, 200)]}


def test_ours(tmp_path: Path) -> None:
    shards = Shards(write_ours(tmp_path, PARTS))
    assert (len(shards.train), len(shards.val), shards.vocab_size, shards.layout) == (180, 20, 300, "hqsweep")
    assert shards.documents == {"train": 2, "val": 1} and shards.unigram_entropy() == 1.5
    shards.verify()
    windows = shards.windows(1, np.arange(6), 16)
    assert np.array_equal(shards.window(1, 2, 1, batch=2, context=16), windows[5])
    assert np.array_equal(np.diff(windows), np.ones((6, 16)))


def test_a_changed_byte_is_found_by_reading_all(tmp_path: Path) -> None:
    write_ours(tmp_path, PARTS)
    path = tmp_path / "train/00001.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(Damaged, match=r"train/00001\.bin: is not what was written"):
        Shards(tmp_path).verify()


def test_a_start_finds_other_sizes_another_tokenizer_and_what_is_newer_than_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(write_ours(tmp_path, PARTS))
    monkeypatch.setattr(reader, "CHECKED_BYTES", 1)  # one shard
    shards.check()
    path = tmp_path / "train/00001.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\7")
    last = (tmp_path / "manifest.json").stat().st_mtime_ns
    os.utime(path, ns=(last + 1, last + 1))
    with pytest.raises(Damaged, match=r"train/00001\.bin: is not what was written"):
        shards.check()
    path.write_bytes(whole + b"\0\0")
    with pytest.raises(Damaged, match=r"train/00001\.bin: has 162 bytes, and 160 were written"):
        shards.check()
    path.write_bytes(whole)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Damaged, match=r"tokenizer\.json: is not what was written"):
        shards.check()


def test_the_middle_of_large_shards_of_others_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SAMPLES", 4)
    monkeypatch.setattr(reader, "END_TOKENS", 100)
    monkeypatch.setattr(reader, "SAMPLE_TOKENS", 10)
    tokens = np.arange(1000)
    before = Shards(write_llm_c(tmp_path / "a.bin", tokens), val_fraction=0.1).hash
    for changed, same in ((95, False), (335, False), (300, True)):
        write_llm_c(tmp_path / "a.bin", np.where(tokens == changed, 7, tokens))
        assert (Shards(tmp_path / "a.bin", val_fraction=0.1).hash == before) is same


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dtype", "float32", r"manifest\.json: is no manifest of shards \(dtype: "),
        ("hash", "0", r"manifest\.json: is not what was written"),
        ("unigram_entropy_nats", 9.5, r"manifest\.json: is not what was written"),
        ("vocab_size", 7, r"manifest\.json: is not what was written"),
        ("train", [], r"manifest\.json: is not what was written"),
    ],
)
def test_a_manifest_that_is_not_what_was_written(tmp_path: Path, key: str, value: object, message: str) -> None:
    write_ours(tmp_path, PARTS)
    document = json.loads((tmp_path / "manifest.json").read_text()) | {key: value}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(Damaged, match=message):
        Shards(tmp_path)


def test_a_manifest_leads_to_no_file_outside_its_folder(tmp_path: Path) -> None:
    write_ours(tmp_path / "a", PARTS)
    shard = json.loads((tmp_path / "a/manifest.json").read_text())["train"][0] | {"name": "../a/train/00000"}
    (tmp_path / "b").mkdir()
    write_manifest(tmp_path / "b", {"train": [shard], "val": [shard]})
    with pytest.raises(Damaged, match=r"names '\.\./a/train/00000', which is not in its folder"):
        Shards(tmp_path / "b")


@pytest.mark.parametrize("wide", [False, True])
def test_llm_c(tmp_path: Path, wide: bool) -> None:
    write_llm_c(tmp_path / "fineweb_train_000001.bin", [1, 2, 3], wide=wide)
    write_llm_c(tmp_path / "fineweb_train_000002.bin", [4, 5], wide=wide)
    write_llm_c(tmp_path / "fineweb_val_000000.bin", [6, 70], wide=wide)
    shards = Shards(tmp_path)
    assert (shards.train.read(0, 5).tolist(), shards.val.read(0, 2).tolist()) == ([1, 2, 3, 4, 5], [6, 70])
    assert (shards.vocab_size, shards.layout, shards.split) == (71, "llm.c", "by file: 2 train, 1 val")
    assert Shards(tmp_path / "fineweb_train_000001.bin", val_fraction=0.3).val.read(0, 1).tolist() == [3]


@pytest.mark.parametrize("wide", [False, True])
def test_megatron(tmp_path: Path, wide: bool) -> None:
    path = write_megatron(tmp_path / "text_document.bin", [[1, 2, 3], [4], [5, 6, 7, 8, 9, 0]], wide=wide)
    for place in (tmp_path, path, path.with_suffix(".idx")):
        shards = Shards(place, val_fraction=0.2)
        assert shards.train.read(0, 8).tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and shards.val.read(0, 2).tolist() == [9, 0]
        assert (shards.layout, shards.split) == ("megatron", "by position: val starts at token 8 of 10")


def test_our_index_is_that_of_megatron(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4], [5, 6]])
    assert encode_index(np.dtype("<u2"), np.array([3, 1, 2])) == path.with_suffix(".idx").read_bytes()


def test_a_vocabulary_that_is_stated(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"vocab_size": 77}')
    assert Shards(write_llm_c(tmp_path / "a.bin", range(50))).vocab_size == 77
    (tmp_path / "meta.json").write_text("[]")
    with pytest.raises(UserError, match=r'meta\.json: no "vocab_size" number in it'):
        Shards(tmp_path)


def broken(folder: Path, name: str) -> None:
    match name:
        case "nothing":
            pass
        case "unfinished":
            (folder / ".prepare").mkdir()
        case "headless":
            np.arange(99, dtype="<u2").tofile(folder / "a.bin")
        case "mixed":
            write_llm_c(folder / "a.bin", [1, 2])
            write_llm_c(folder / "b.bin", [1, 2], wide=True)
        case "half":
            path = write_llm_c(folder / "a.bin", range(50))
            path.write_bytes(path.read_bytes()[:-20])
        case "half_index":
            path = write_megatron(folder / "a.bin", [[1], [2], [3]]).with_suffix(".idx")
            path.write_bytes(path.read_bytes()[:40])
        case "more":
            path = write_megatron(folder / "a.bin", [[1], [2], [3]])
            path.write_bytes(path.read_bytes() * 2)
        case "no_index":
            write_megatron(folder / "a.bin", [[1], [2], [3]]).with_suffix(".idx").write_bytes(b"garbage")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"data\.path: .* has no shards \(manifest\.json, or \*\.bin\); hqsweep data prepare makes them"),
        ("unfinished", r"is not finished; run its `hqsweep data prepare` again, which goes on"),
        ("headless", r"a\.bin has neither an \.idx beside it .* read by data=tokens"),
        ("mixed", r"holds shards of several kinds \(llm\.c uint16 and llm\.c uint32\)"),
        ("half", r"a\.bin: has 1,104 bytes, and its header says 50 tokens"),
        ("more", r"a\.bin: has 12 bytes, and its \.idx says 3 tokens"),
        ("half_index", r"a\.idx: is cut short"),
        ("no_index", r"a\.idx: is no index of Megatron's"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, name: str, message: str) -> None:
    broken(tmp_path, name)
    with pytest.raises(UserError, match=message):
        Shards(tmp_path)


def test_a_negative_token_is_one_sentence(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3]] * 9, wide=True)
    tokens = np.fromfile(path, "<i4")
    tokens[-1] = -1
    tokens.tofile(path)
    with pytest.raises(UserError, match=r"the shards hold token -1; tokens are 0 or more"):
        Shards(tmp_path).unigram_entropy()


READ = """
import resource, sys, numpy as np
from hqsweep.shards.reader import Shards
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shards = Shards(sys.argv[1])
for step in range(200):
    assert not shards.windows(0, np.arange(step * 32, (step + 1) * 32), 4096).any()
print(len(shards.train), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_100_gb_take_no_more_memory_than_1_gb(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    taken = {}
    for gigabytes in (1, 100):
        with (tmp_path / "train/00000.bin").open("wb") as file:
            os.truncate(file.fileno(), gigabytes * 10**9)
        shard = {
            "name": "train/00000", "tokens": gigabytes * 10**9 // 2, "documents": 1, "sha256": "", "index_sha256": ""
        }  # fmt: skip
        write_manifest(tmp_path, {"train": [shard], "val": []})
        out = subprocess.run([sys.executable, "-c", READ, tmp_path], capture_output=True, text=True, check=True).stdout
        tokens, taken[gigabytes] = map(int, out.split())
        assert tokens == gigabytes * 5 * 10**8
    assert taken[100] < 20_000 and taken[100] < taken[1] + 5_000  # KiB
