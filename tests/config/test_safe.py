"""JSON and YAML of others: within bounds, or a sentence."""

import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

import hqsweep
from hqsweep.config.safe import JSON_DEPTH, MAX_BYTES, MAX_DEPTH, MAX_NODES, check_expansion, load_yaml, loads
from hqsweep.config.train import _stated_vocab
from hqsweep.errors import UserError

OWN = {
    "cli/output.py", "config/job.py", "config/keys.py", "config/safe.py", "shards/tokenizer.py", "shards/encode.py",
    "report/compare/compare.py", "report/compare/identical.py", "report/compare/notes.py", "report/pages/gemm_plans.py",
    "sweep/engine/process.py", "sweep/engine/ranks.py", "sweep/store/files.py", "sweep/store/seen_data.py",
}  # fmt: skip
"""What reads JSON of this process, of its workers or of a library; and the readers of rows, of which there are many."""


def nested(depth, kind="list"):
    return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("kind", ["list", "mapping"])
def test_depth_is_bounded_wherever_the_caller_stands(kind):
    assert loads(nested(JSON_DEPTH, kind)) == json.loads(nested(JSON_DEPTH, kind))
    for depth in (JSON_DEPTH + 1, sys.getrecursionlimit() // 2, 100_000):
        with pytest.raises(ValueError, match=f"nested more than {JSON_DEPTH} deep"):
            loads(nested(depth, kind))
    with pytest.raises(ValueError):
        loads("[" * 100_000)


def test_wide_documents_are_as_json_has_them():
    text = json.dumps({"rows": [{"a": [1, None, "x"]}] * 1000, "deep": [[[]]]})
    assert loads(text) == loads(text.encode()) == json.loads(text)


def test_every_reader_of_files_of_others_is_one_of_these():
    package = Path(hqsweep.__file__).parent
    files = {str(path.relative_to(package)) for path in package.rglob("*.py") if "json.load" in path.read_text()}
    assert files == OWN


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size":' * 900 + "1" + "}" * 900, '{"vocab_size": [[1]]}'])
def test_facts_beside_tokens_are_refused_in_a_sentence(tmp_path, text):
    from hqsweep.train.corpus import _vocab

    (tmp_path / "meta.json").write_text(text)
    assert _stated_vocab(tmp_path) is None
    with pytest.raises(UserError, match=re.escape('meta.json: no "vocab_size" number in it')):
        _vocab(tmp_path / "meta.json", [np.array([1])])


BOMB = "a0: &a0 [" + ", ".join("x" * 10) + "]\n"
BOMB += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
LAUGHS = {"a0": "lol"} | {f"a{i}": f"${{a{i - 1}}}" * 10 for i in range(1, 30)}
LISTS = {"a0": ["lol"] * 10} | {f"a{i}": [f"${{a{i - 1}}}"] * 10 for i in range(1, 9)}


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 5: it has more than 20000 nodes with its aliases written out"),
        ("a: [" + "1," * MAX_NODES + "]", "line 1: it has more than 20000 nodes"),
        ("a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH, "line 1: it is nested more than 64 deep"),
        ("a: &a [*a]", r"line 1: alias '\*a' stands for nothing that is complete before it"),
        ("a: &a 1\nb: &a [*a]", r"line 2: alias '\*a' stands for nothing"),
        ("a: 1\nb: {c: 1, 'c': 2}", "line 2: key 'c' is given twice"),
        ("#" * (MAX_BYTES + 1), "is larger than 1024 KiB"),
        (b"a: \xff\xfe", "is not UTF-8 .byte 3."),
        ("a: [1", "line 2: .*correct the YAML"),
        ("a: !!timestamp 1", "correct the YAML"),
        ("a: !!python/object/apply:os.system [touch planted]", "line 1: could not determine a constructor"),
        ("--- 1\n--- 2", "line 2: .*correct the YAML"),
        ("a: ${oc.env:HOME}", "line 1: '.*HOME}' is no reference to a key"),
        ('a: "\\x24{oc.env:HOME}"', "line 1: '.*HOME}' is no reference"),
        ("${oc.env:HOME}: 1", "line 1: '.*HOME}' is no reference"),
        ("a: ${b}\nb: ${${c}:HOME}", "line 2: '.*HOME}' is no reference"),
        ("a: x ${b.${c}}", r"line 1: '\$\{b.\$\{c}}' is no reference"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_its_line(text: str | bytes, message: str, tmp_path: Path):
    began = time.monotonic()
    with pytest.raises(UserError, match=message) as raised:
        load_yaml(written(tmp_path, text))
    assert time.monotonic() - began < 2 and str(tmp_path / "a.yaml") in str(raised.value)
    assert "\n" not in str(raised.value) and os.listdir(tmp_path) == ["a.yaml"]


def test_what_is_within_bounds_is_read_as_by_pyyaml(tmp_path: Path):
    text = "a: &a {b: 1, c: [1, 2.5, null, yes]}\nd: {<<: *a, b: 2}\ne: [*a, *a]\nf: ${a.c[0]} ${.g}\n"
    assert load_yaml(written(tmp_path, text)) == yaml.safe_load(text)
    assert load_yaml(written(tmp_path, "")) is None


def test_a_document_is_the_callers_own(tmp_path):
    path = written(tmp_path, "a: [1, {b: 2}]\n")
    load_yaml(path)["a"][1]["b"] = 3
    assert load_yaml(path) == {"a": [1, {"b": 2}]}


def test_a_pipe_or_a_folder_is_no_file(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(UserError, match="is no file"):
            load_yaml(path)


@pytest.mark.parametrize("config", [LAUGHS, LISTS, {"a": [{"b": "${a}"}], "c": "${a}"}, {"a": "${b.c}", "b": "${a}"}])
def test_references_are_counted_before_they_are_followed(config: dict[str, object]):
    with pytest.raises(UserError, match=r"it has more than 20000 nodes|leads back to itself"):
        check_expansion(config, "the config")


def test_references_to_what_is_there_and_what_is_not_are_allowed():
    config = {"a": {"b": [1, {"c": 2}], "d": "${.b[1].c}"}, "e": "${a.b} ${nope} ${a.nope.x}", "f": "${..a}${e.x}"}
    check_expansion(config, "the config")
    with pytest.raises(UserError, match=r"a.b.0: '\$\{now:%Y\}' is no reference"):
        check_expansion({"a": {"b": ["${now:%Y}"]}}, "the config")
