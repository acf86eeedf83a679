"""Packages as data, files that are read into memory once, and the Markov chain with its entropy rate."""

import bisect
import hashlib
import math
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hqsweep.config.train import DataConfig
from hqsweep.errors import UserError
from hqsweep.train import data
from hqsweep.train.corpus import BURN_IN, MarkovSource
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


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def test_entropy_rate_of_two_states_equals_the_closed_form():
    leave0, leave1 = 0.1, 0.4
    source = MarkovSource(rows=np.array([[1 - leave0, leave0], [leave1, 1 - leave1]]))
    expected = (leave1 * binary_entropy(leave0) + leave0 * binary_entropy(leave1)) / (leave0 + leave1)
    assert source.entropy_rate() == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(source.stationary(), [0.8, 0.2], atol=1e-12)


def test_periodic_chain_converges_and_has_no_entropy():
    source = MarkovSource(rows=np.array([[0.0, 1.0], [1.0, 0.0]]))
    np.testing.assert_allclose(source.stationary(), [0.5, 0.5])
    assert source.entropy_rate() == 0


def test_stationary_distribution_is_the_eigenvector_of_the_context_chain():
    source = MarkovSource.draw(vocab=3, order=2, concentration=0.5, seed=4)
    chain = np.zeros((9, 9))  # context (a, b) -> (b, c)
    for context in range(9):
        for token in range(3):
            chain[context, context % 3 * 3 + token] = source.rows[context, token]
    values, vectors = np.linalg.eig(chain.T)
    vector = np.real(vectors[:, np.argmin(abs(values - 1))])
    np.testing.assert_allclose(source.stationary(), vector / vector.sum(), atol=1e-10)


@pytest.mark.parametrize(("vocab", "order", "concentration"), [(16, 2, 0.4), (5, 1, 1.0), (4, 3, 0.2)])
def test_long_sample_has_the_computed_entropy(vocab, order, concentration):
    source = MarkovSource.draw(vocab=vocab, order=order, concentration=concentration, seed=1)
    tokens = source.sample(400_000, seed=9).astype(np.int64)
    contexts = sum(tokens[i : len(tokens) - order + i] * vocab ** (order - 1 - i) for i in range(order))
    nats = -np.log(source.rows[contexts, tokens[order:]])
    means = nats[: len(nats) // 100 * 100].reshape(100, -1).mean(axis=1)  # batch means: neighbours are correlated
    error = means.std(ddof=1) / 10
    assert error < 0.01
    assert means.mean() == pytest.approx(source.entropy_rate(), abs=5 * error)
    # and without knowing the rows: conditional entropy of the counts, with Miller and Madow's correction of its bias
    counts = np.zeros_like(source.rows)
    np.add.at(counts, (contexts, tokens[order:]), 1)
    shares = counts / counts.sum(axis=1, keepdims=True).clip(1)
    plug_in = -(counts * np.log(shares, out=np.zeros_like(shares), where=shares > 0)).sum() / counts.sum()
    bias = ((counts > 0).sum() - (counts.sum(axis=1) > 0).sum()) / (2 * counts.sum())
    assert plug_in + bias == pytest.approx(source.entropy_rate(), abs=5 * error + bias)


@pytest.mark.parametrize("concentration", [0.01, 0.4, 50.0])
def test_sample_equals_the_chain_run_token_by_token(concentration):
    source = MarkovSource.draw(vocab=4, order=2, concentration=concentration, seed=0)
    length = 3000
    sample = source.sample(length, seed=5)
    pieces = round((length + BURN_IN) ** 0.5)
    steps = -(-(length + BURN_IN) // pieces)
    uniforms = np.random.Generator(np.random.Philox([5, 1])).random(pieces * steps)
    cumulative = source.rows.cumsum(axis=1)[:, :-1].tolist()
    older, newer, chain = 0, 0, []
    for u in uniforms[: length + BURN_IN]:
        older, newer = newer, bisect.bisect_right(cumulative[older * 4 + newer], u)
        chain.append(newer)
    np.testing.assert_array_equal(sample, chain[BURN_IN:])


def test_sample_is_reproducible_and_seeded():
    source = MarkovSource.draw(vocab=8, order=2, concentration=0.4, seed=0)
    np.testing.assert_array_equal(source.sample(500, seed=1), source.sample(500, seed=1))
    assert (source.sample(500, seed=1) != source.sample(500, seed=2)).any()
    assert (source.rows != MarkovSource.draw(vocab=8, order=2, concentration=0.4, seed=1).rows).all()


def test_tokens_beyond_a_byte_are_uint16():
    source = MarkovSource.draw(vocab=300, order=1, concentration=1.0, seed=0)
    tokens = source.sample(20_000, seed=0)
    assert tokens.dtype == np.uint16
    assert 256 <= tokens.max() < 300


def test_table_that_would_not_fit_is_refused():
    with pytest.raises(UserError, match=r"data.markov: vocab 256 with order 3 .*; lower vocab or order"):
        MarkovSource.draw(vocab=256, order=3, concentration=1.0, seed=0)
