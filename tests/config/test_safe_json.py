"""JSON of others: garbage of every depth is a ValueError, and every reader of such files goes through loads."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import hqsweep
from hqsweep.config.data import _stated_vocab
from hqsweep.config.safe_json import MAX_DEPTH, loads
from hqsweep.errors import UserError

OWN = {
    "cli/output.py", "config/safe_json.py", "shards/tokenizer.py", "shards/documents.py",
    "report/compare/compare.py", "report/compare/identical.py", "report/compare/notes.py", "report/pages/gemm_plans.py",
    "sweep/engine/process.py", "sweep/engine/ranks.py", "sweep/store/files.py", "sweep/store/seen_data.py",
}  # fmt: skip
"""What reads JSON of this process, of its workers or of a library; and the readers of rows, of which there are many."""


def nested(depth, kind="list"):
    return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("kind", ["list", "mapping"])
def test_depth_is_bounded_wherever_the_caller_stands(kind):
    assert loads(nested(MAX_DEPTH, kind)) == json.loads(nested(MAX_DEPTH, kind))
    for depth in (MAX_DEPTH + 1, sys.getrecursionlimit() // 2, 100_000):
        with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} deep"):
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
