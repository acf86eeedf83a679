"""Datasets: what is read, how it is split and hashed, and that a batch depends on its arguments alone."""

import json
import math
import platform
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.shards.written import write_llm_c, write_megatron, write_ours

from hqsweep.config.train import DataConfig
from hqsweep.errors import UserError
from hqsweep.train import data
from hqsweep.train.data import Dataset, load, unigram_entropy

MIB = 1 << 20


def config(source: str, path: Path | None = None, val_fraction: float = 0.1, max_bytes: int | None = None, **chain):
    markov = {"vocab": 16, "order": 2, "concentration": 0.4, "seed": 0, "length": 20_000} | chain
    return SimpleNamespace(
        source=source,
        path=None if path is None else str(path),
        val_fraction=val_fraction,
        max_bytes=max_bytes,
        markov=SimpleNamespace(**markov),
    )


def counting(length: int) -> Dataset:
    """A dataset in which every token is its own position."""
    tokens = np.arange(length, dtype=np.uint16)
    return Dataset(train=tokens, val=tokens, vocab_size=length, hash="", facts={})


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def write_tokens(path: Path, tokens) -> Path:
    np.asarray(tokens, dtype="<u2").tofile(path)
    return path


class TestBatch:
    def test_targets_are_the_next_tokens(self):
        inputs, targets = counting(500).batch("train", seed=3, step=7, batch=4, context=16)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (4, 16)
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(16))

    def test_depends_on_its_arguments_alone(self):
        dataset = counting(60_000)
        first = dataset.batch("train", 3, 7, 8, 16)
        dataset.batch("train", 4, 8, 2, 32)
        dataset.batch("val", 3, 0, 8, 16)
        assert all(map(torch.equal, first, counting(60_000).batch("train", 3, 7, 8, 16)))
        for seed, step in ((4, 7), (3, 8), (7, 3)):
            assert not torch.equal(first[0], dataset.batch("train", seed, step, 8, 16)[0])

    def test_stream_is_pinned(self):
        # a change here would make new runs incomparable with stored ones
        inputs, _ = counting(60_000).batch("train", seed=1, step=2, batch=4, context=8)
        assert inputs[:, 0].tolist() == [28251, 53099, 24496, 21704]

    def test_reaches_both_ends_and_no_further(self):
        starts = torch.cat([counting(20).batch("train", 0, step, 64, 10)[0][:, 0] for step in range(20)])
        assert set(starts.tolist()) == set(range(10))

    def test_val_windows_are_fixed_disjoint_and_cover_the_split(self):
        dataset = counting(1001)
        for seed in (0, 9):
            starts = torch.cat([dataset.batch("val", seed, step, 5, 100)[0][:, 0] for step in range(2)])
            assert sorted(starts.tolist()) == list(range(0, 1000, 100))
        assert torch.equal(dataset.batch("val", 0, 0, 5, 100)[0], dataset.batch("val", 1, 2, 5, 100)[0])

    def test_few_val_windows_are_spread_evenly(self):
        inputs, _ = counting(10_001).batch("val", 0, 0, 16, 10)
        gaps = torch.diff(inputs[:, 0].sort().values)
        assert gaps.max() <= 3 * gaps.min()
        assert gaps.max() < 2 * 10_000 / 16

    @pytest.mark.parametrize("split", ["train", "val"])
    def test_context_that_just_fits_and_one_that_does_not(self, split):
        inputs, targets = counting(33).batch(split, 0, 0, 2, 32)
        assert inputs[:, 0].tolist() == [0, 0] and targets[:, -1].tolist() == [32, 32]
        with pytest.raises(UserError, match=rf"the {split} split has 33 tokens, too short for train.context=33"):
            counting(33).batch(split, 0, 0, 2, 33)


class TestStdlib:
    def test_is_repeatable_and_limited(self):
        one, two = load(config("stdlib", max_bytes=MIB)), load(config("stdlib", max_bytes=MIB))
        assert one.hash == two.hash
        assert len(one.train) + len(one.val) == one.facts["bytes"] == MIB
        assert one.vocab_size == 256 and one.train.dtype == np.uint8
        assert one.facts["python"] == platform.python_version()
        assert json.loads(json.dumps(one.facts)) == one.facts

    def test_is_python_source_of_english_statistics(self):
        dataset = load(config("stdlib", max_bytes=4 * MIB))
        assert b"def __init__(self" in dataset.train.tobytes()
        assert dataset.facts["unigram_entropy_nats"] == unigram_entropy(dataset.val)
        assert 2.5 < dataset.facts["unigram_entropy_nats"] < 3.6  # of any Python 3.11 and later

    def test_quick_val_is_the_beginning_of_the_full_val(self):
        quick, full = load(config("stdlib", max_bytes=MIB)), load(config("stdlib", max_bytes=4 * MIB))
        cut = len(quick.val) - 1000  # the last file of the quick run may have been cut short
        assert cut > 1000
        np.testing.assert_array_equal(quick.val[:cut], full.val[:cut])

    def test_val_share(self):
        dataset = load(config("stdlib", val_fraction=0.05, max_bytes=8 * MIB))
        assert 0.02 < len(dataset.val) / dataset.facts["bytes"] < 0.1  # whole files, of any Python's library

    def test_installed_packages_are_left_out(self, tmp_path, monkeypatch):
        write_folder(
            tmp_path,
            {
                "a.py": b"aaaa",
                "json/b.py": b"bbbb",
                "c.txt": b"cccc",
                "site-packages/d.py": b"dddd",
                "config-3.11/e.py": b"eeee",
                "_sysconfigdata_linux.py": b"ffff",
            },
        )
        monkeypatch.setattr(data.corpus.sysconfig, "get_path", lambda name: str(tmp_path))
        dataset = load(config("stdlib"))
        assert sorted((dataset.train.tobytes(), dataset.val.tobytes())) == [b"aaaa", b"bbbb"]


class TestText:
    def test_folder_is_split_by_file(self, tmp_path):
        files = {f"part{i}/{i}.txt": bytes([i]) * (50 + i) for i in range(1, 60)}
        dataset = load(config("text", write_folder(tmp_path, files), val_fraction=0.2))
        train, val = set(dataset.train.tolist()), set(dataset.val.tolist())
        assert not train & val
        assert train | val == set(range(1, 60))
        assert len(dataset.val) / dataset.facts["bytes"] == pytest.approx(0.2, abs=0.03)
        assert dataset.facts["files"] == 59
        assert dataset.facts["split"] == f"by file: {len(train)} train, {len(val)} val"

    def test_folder_of_two_has_one_on_each_side(self, tmp_path):
        dataset = load(config("text", write_folder(tmp_path, {"a": b"aaa", "b": b"bbb"}), val_fraction=0.01))
        assert {len(set(dataset.train)), len(set(dataset.val))} == {1}

    def test_binary_hidden_and_empty_files_are_not_text(self, tmp_path):
        files = {"a.txt": b"x" * 20, "b.bin": b"\0bin", ".hidden": b"secret", ".git/c": b"secret", "empty": b""}
        dataset = load(config("text", write_folder(tmp_path, files)))
        assert dataset.train.tobytes() + dataset.val.tobytes() == b"x" * 20
        assert dataset.facts["files"] == 1

    def test_file_is_split_by_position(self, tmp_path):
        content = bytes(range(100))
        (tmp_path / "a.txt").write_bytes(content)
        dataset = load(config("text", tmp_path / "a.txt", val_fraction=0.25))
        assert (dataset.train.tobytes(), dataset.val.tobytes()) == (content[:75], content[75:])
        limited = load(config("text", tmp_path / "a.txt", val_fraction=0.25, max_bytes=40))
        assert (limited.train.tobytes(), limited.val.tobytes()) == (content[:30], content[30:40])

    @pytest.mark.parametrize(
        ("files", "path", "message"),
        [
            ({}, "nowhere", r"data.path: .*nowhere does not exist; data.source=text reads a text file, or a folder"),
            ({}, "x" * 300, "data.path: .*x{300}"),
            ({"a.bin": b"\0"}, ".", r"data.path: no text file in the folder"),
            ({"a.txt": b""}, "a.txt", r"data.path: .*a.txt is empty"),
            ({"a.txt": b"abc"}, "a.txt", r"the val split of data.source=text has 0 tokens, at least 2 are needed"),
        ],
    )
    def test_wrong_input(self, tmp_path, files, path, message):
        with pytest.raises(UserError, match=message):
            load(config("text", write_folder(tmp_path, files) / path))

    def test_path_is_needed(self):
        with pytest.raises(UserError, match=r"data.path: not given; data.source=text reads .*; set data.path=PATH"):
            load(config("text"))


class TestTokens:
    def test_folder(self, tmp_path):
        write_tokens(tmp_path / "train.bin", [1, 2, 500])
        write_tokens(tmp_path / "val.bin", [3, 64])
        (tmp_path / "meta.pkl").write_bytes(b"not a pickle, and never opened")
        dataset = load(config("tokens", tmp_path))
        assert isinstance(dataset.train, np.memmap)
        assert (dataset.train.tolist(), dataset.val.tolist()) == ([1, 2, 500], [3, 64])
        assert dataset.vocab_size == 512
        assert dataset.facts["bytes"] == 10
        inputs, targets = dataset.batch("train", 0, 0, 1, 2)
        assert (inputs.tolist(), targets.tolist()) == ([[1, 2]], [[2, 500]])

    @pytest.mark.parametrize(("largest", "vocab"), [(62, 64), (63, 64), (64, 128), (50256, 50304), (65535, 65536)])
    def test_vocabulary_is_rounded_up_to_64(self, tmp_path, largest, vocab):
        assert load(config("tokens", write_tokens(tmp_path / "a.bin", [0, largest] * 20))).vocab_size == vocab

    def test_meta_json_names_the_vocabulary(self, tmp_path):
        (tmp_path / "meta.json").write_text('{"vocab_size": 65}')
        path = write_tokens(tmp_path / "a.bin", range(60))
        assert load(config("tokens", path)).vocab_size == 65
        write_tokens(path, range(70))
        with pytest.raises(UserError, match=r"meta.json: vocab_size is 65, but the data holds token 69"):
            load(config("tokens", path))
        (tmp_path / "meta.json").write_text("{}")
        with pytest.raises(UserError, match=r'meta.json: no "vocab_size" number in it'):
            load(config("tokens", path))

    def test_limit(self, tmp_path):
        path = write_tokens(tmp_path / "a.bin", range(100))
        dataset = load(config("tokens", path, max_bytes=80))
        assert (len(dataset.train), len(dataset.val), dataset.val[-1]) == (36, 4, 39)
        write_tokens(tmp_path / "train.bin", range(100))
        write_tokens(tmp_path / "val.bin", range(100))
        dataset = load(config("tokens", tmp_path, max_bytes=80))
        assert (len(dataset.train), len(dataset.val)) == (36, 4)

    @pytest.mark.parametrize(
        ("files", "path", "message"),
        [
            ({"a.bin": b"123"}, "a.bin", r"a.bin has 3 bytes, an odd number; tokens are uint16"),
            ({"train.bin": b"12"}, ".", r"has no val.bin; data.source=tokens reads both"),
            ({"other": b"12"}, ".", r"has no train.bin and no val.bin"),
            ({"train.bin": b"1234", "val.bin": b""}, ".", r"val.bin is empty"),
        ],
    )
    def test_wrong_input(self, tmp_path, files, path, message):
        with pytest.raises(UserError, match=message):
            load(config("tokens", write_folder(tmp_path, files) / path))


class TestShards:
    def test_an_epoch_reads_every_window_once_whatever_the_batch(self, tmp_path):
        dataset = load(
            config("shards", write_ours(tmp_path, {"train": [range(100), range(100, 266)], "val": [range(9)]}))
        )
        starts = [torch.cat([dataset.batch("train", 3, step, batch, 10)[0][:, 0] for step in range(25 // batch)])
                  for batch in (1, 5, 25)]  # fmt: skip
        assert torch.equal(starts[0], starts[1]) and torch.equal(starts[0], starts[2])
        assert set(torch.diff(starts[0].sort().values).tolist()) == {10}
        inputs, targets = dataset.batch("train", 3, 7, 4, 10)
        assert torch.equal(targets, inputs + 1) and inputs.dtype == torch.int64 and inputs.shape == (4, 10)

    def test_what_is_said_of_them(self, tmp_path):
        dataset = load(config("shards", write_ours(tmp_path, {"train": [range(100)], "val": [range(9)]})))
        assert dataset.vocab_size == 300 and dataset.epochs(50) == 0.5
        assert (dataset.facts["documents"], dataset.facts["bytes"]) == ({"train": 1, "val": 1}, 218)
        assert json.loads(json.dumps(dataset.facts)) == dataset.facts
        part = load(config("shards", tmp_path, max_bytes=109))
        assert (len(part.train), len(part.val)) == (50, 4) and part.hash != dataset.hash

    @pytest.mark.parametrize(("write", "layout"), [(write_llm_c, "llm.c"), (write_megatron, "megatron")])
    def test_layouts_of_others(self, tmp_path, write, layout):
        write(tmp_path / "a_train.bin", [range(90)] if layout == "megatron" else range(90))
        write(tmp_path / "a_val.bin", [range(30)] if layout == "megatron" else range(30))
        dataset = load(config("shards", tmp_path))
        assert (dataset.facts["layout"], len(dataset.train), len(dataset.val)) == (layout, 90, 30)
        assert dataset.vocab_size == 90 and dataset.facts["unigram_entropy_nats"] == pytest.approx(math.log(30))

    def test_the_vocabulary_is_known_before_they_are_read(self, tmp_path):
        write_ours(tmp_path, {"train": [range(100)], "val": [range(9)]}, vocab=277)
        assert DataConfig(source="shards", path=str(tmp_path)).vocab_estimate == 277
        data.check_length(DataConfig(source="shards", path=str(tmp_path)), context=8)
        with pytest.raises(UserError, match=r"the val split has 9 tokens, too short for train.context=9"):
            data.check_length(DataConfig(source="shards", path=str(tmp_path)), context=9)

    def test_a_token_beyond_the_vocabulary_is_not_trained_on(self, tmp_path):
        write_ours(tmp_path, {"train": [range(100)], "val": [range(9)]}, vocab=50)
        with pytest.raises(UserError, match=r"the shards hold token \d+, and their vocabulary has 50"):
            load(config("shards", tmp_path)).batch("train", 0, 0, 8, 30)

    def test_headers_are_not_read_as_tokens(self, tmp_path):
        with pytest.raises(UserError, match=r"begins with the header of llm.c's shards; read it with data=shards"):
            load(config("tokens", write_llm_c(tmp_path / "a.bin", range(90))))


class TestMarkov:
    def test_facts_and_floor(self):
        dataset = load(config("markov", length=50_000))
        assert (len(dataset.train), len(dataset.val), dataset.vocab_size) == (50_000, 5000, 16)
        assert 0 < dataset.facts["entropy_rate_nats"] < dataset.facts["unigram_entropy_nats"] < math.log(16)
        assert (dataset.train[:5000] != dataset.val).mean() > 0.5

    def test_seed_names_the_source(self):
        one, same, other = (load(config("markov", seed=seed)) for seed in (0, 0, 1))
        assert one.hash == same.hash != other.hash
        assert one.facts["entropy_rate_nats"] != other.facts["entropy_rate_nats"]


class TestHash:
    def test_changes_with_content_split_and_source(self, tmp_path):
        path = write_tokens(tmp_path / "a.bin", range(100))
        seen = {load(config("tokens", path)).hash, load(config("text", path)).hash}
        seen |= {load(config("tokens", path, val_fraction=0.2)).hash}
        (tmp_path / "meta.json").write_text('{"vocab_size": 2000}')
        seen |= {load(config("tokens", path)).hash}
        write_tokens(path, [*range(99), 7])
        seen |= {load(config("tokens", path)).hash}
        assert len(seen) == 5
        assert all(len(value) == 64 for value in seen)

    def test_large_arrays_are_hashed_by_ends_and_samples_and_say_so(self, tmp_path, monkeypatch):
        path = write_tokens(tmp_path / "a.bin", range(1000))
        assert "hashed" not in load(config("tokens", path)).facts
        for name, value in {"WHOLE_BYTES": 512, "END_BYTES": 100, "SAMPLES": 3, "SAMPLE_BYTES": 10}.items():
            monkeypatch.setattr(data.content, name, value)
        before = load(config("tokens", path))
        assert before.facts["hashed"].startswith("size, first and last 100 bytes")
        hashes = []
        for changed in (0, 450, 500, 899):  # 900 tokens are train: its first, the middle sample, none, and its last
            tokens = np.arange(1000)
            tokens[changed] = 1001
            write_tokens(path, tokens)
            hashes.append(load(config("tokens", path)).hash == before.hash)
        assert hashes == [False, False, True, False]


def test_unigram_entropy():
    assert unigram_entropy(np.tile(np.arange(4, dtype=np.uint8), 25)) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([7, 7, 7], np.uint8)) == 0
    skewed = np.array([1] * 9 + [60_000], np.uint16)
    assert unigram_entropy(skewed) == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))


def test_unknown_source():
    with pytest.raises(UserError, match=r"data.source: 'txt' is not known \(did you mean 'text'\?\); choose stdlib"):
        load(config("txt"))


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_files_that_are_plenty_are_not_read_for_the_check_of_their_length(source, tmp_path, monkeypatch):
    (tmp_path / "data.bin").write_bytes(b"ab" * 50_000)
    files = DataConfig(source=source, path=str(tmp_path / "data.bin"))
    data.check_length(files, 4_000)
    monkeypatch.setattr(data, "loaded", None)
    data.check_length(files, 64)
    data.check_length(DataConfig(), 64)
    with pytest.raises(TypeError):  # it is read where that is close
        data.check_length(files, 4_000)
