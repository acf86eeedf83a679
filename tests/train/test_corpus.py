"""data=site: which files of which packages it takes; and that files are read into memory once."""

import hashlib
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hqsweep.config.train import DataConfig
from hqsweep.errors import UserError
from hqsweep.train import data
from hqsweep.train.data import load

MIB = 1 << 20


def install(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    """A package as pip leaves it: its files, and their list in RECORD."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return folder


def site(**keys: object) -> data.Dataset:
    return load(DataConfig(source="site", **keys))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only site-packages on sys.path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages"), str(tmp_path)])
    return tmp_path / "site-packages"


def contents(dataset: data.Dataset) -> set[int]:
    return set(dataset.train.tolist()) | set(dataset.val.tolist())


class TestSite:
    def test_takes_the_sources_that_packages_list(self, folder):
        install(folder, "one", {"one/a.py": b"a" * 9, "one/b.so": b"b", "one/empty.py": b"", "../bin/c.py": b"c"})
        install(folder, "Two_Words", {"two/d.py": b"d" * 9, "two/gone.py": b"h"}, version="2.1")
        install(folder, "hqsweep", {"_editable.py": b"e"})
        install(folder.parent, "outside", {"outside.py": b"f"})
        (folder / "listed_by_nobody.py").write_bytes(b"g")
        (folder / "two/gone.py").unlink()
        dataset = site()
        assert contents(dataset) == {*b"ad"}
        assert dataset.facts["files"] == dataset.facts["packages"] == 2
        assert dataset.facts["packages_hash"] == hashlib.sha256(b"one==1.0\ntwo-words==2.1").hexdigest()

    def test_of_two_versions_the_imported_one_counts(self, folder, monkeypatch):
        later = install(folder.parent / "dist-packages", "one", {"one/a.py": b"bb", "one/c.py": b"cc"}, version="2.0")
        install(folder, "one", {"one/a.py": b"aa", "one/d.py": b"dd"})
        monkeypatch.setattr(sys, "path", [str(folder), str(later)])
        assert contents(site()) == {*b"ad"}

    def test_depends_on_contents_and_not_on_the_folder(self, folder, tmp_path, monkeypatch):
        files = {f"one/{i}.py": bytes([i]) * (20 + i) for i in range(40)}
        install(folder, "one", files)
        here = site()
        there = install(tmp_path / "elsewhere" / "site-packages", "one", dict(reversed(files.items())))
        monkeypatch.setattr(sys, "path", [str(there)])
        assert site().hash == here.hash and site().facts == here.facts
        (there / "one/3.py").write_bytes(b"!" * 23)
        assert site().hash != here.hash

    def test_without_packages_says_so(self, folder):
        with pytest.raises(UserError, match=r"data.source: site found no package with \*.py files; .* data=stdlib"):
            site()

    @pytest.mark.slow
    def test_of_this_machine_is_english_and_code(self):
        dataset = site(max_bytes=2 * MIB)
        assert dataset.facts["bytes"] == 2 * MIB and dataset.facts["packages"] > 10
        assert b"def __init__(self" in dataset.train.tobytes()
        assert site(max_bytes=2 * MIB).hash == dataset.hash


def test_files_are_held_in_memory_once(tmp_path):
    for i in range(24):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * MIB)
    tracemalloc.start()
    try:
        dataset = load(DataConfig(source="text", path=str(tmp_path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert dataset.facts["bytes"] == 24 * MIB
    assert peak < 1.5 * 24 * MIB, "the files, and a few MiB to count bytes in"


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path, monkeypatch):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * 100)
    read = data.corpus._read
    monkeypatch.setattr(data.corpus, "_read", lambda parts: read([(path, length + 1) for path, length in parts]))
    with pytest.raises(UserError, match=r"\d.txt became shorter while it was read"):
        load(DataConfig(source="text", path=str(tmp_path)))


class TestRepeats:
    def dataset(self) -> data.Dataset:
        tokens = np.zeros(1000, np.uint8)
        return data.Dataset(train=tokens, val=tokens, vocab_size=256, hash="", facts={})

    def test_epochs_are_tokens_seen_over_tokens_there(self):
        assert self.dataset().epochs(2500) == 2.5

    def test_a_run_that_reads_its_data_once_is_not_warned(self):
        assert self.dataset().warnings(1000) == []
        (line,) = self.dataset().warnings(1234)
        assert line.startswith("training reads its 1,000 tokens 1.23 times; ") and "data=site" in line


def test_runs_of_one_process_read_their_data_once():
    first = data.loaded(DataConfig(source="markov", markov={"length": 100}))
    assert data.loaded(DataConfig(source="markov", markov={"length": 100})) is first
    assert data.loaded(DataConfig(source="markov", markov={"length": 101})) is not first
