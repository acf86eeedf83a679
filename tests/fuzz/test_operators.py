"""No call of an operator, or of the extension, ends the process or says nothing: random ones, right and wrong.

They run in a process of their own, so that a crash is found, and named by its call. HQSWEEP_FUZZ_OPERATORS=100000 makes
that many calls instead of the usual ones, HQSWEEP_FUZZ_SEED others. `make asan` runs them with sanitizers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fuzz import binding_cases, operator_cases

from hqsweep.ops import library

CALLS = int(os.environ.get("HQSWEEP_FUZZ_OPERATORS", 2400))
FIRST = int(os.environ.get("HQSWEEP_FUZZ_SEED", 0))
HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(library.extension() is None, reason="hqsweep._C was not built")


def case(seed: int) -> object:
    if seed % 3:
        return operator_cases.Call(seed)
    return binding_cases.BindingCall(seed, library.extension())


def test_every_call_returns_or_is_refused_in_a_sentence(tmp_path: Path) -> None:
    at = tmp_path / "at"
    at.touch()
    program = [sys.executable, "-X", "faulthandler", operator_cases.__file__]
    environment = {**os.environ, "HQSWEEP_FUZZ_AT": str(at), "PYTHONPATH": str(HERE.parent)}  # cases.py, support/
    ended = subprocess.run(
        [*program, str(FIRST), str(CALLS), library.extension().__file__],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = int(at.read_text() or -1)
    assert ended.returncode == 0, f"ended with {ended.returncode} at {last}: {case(last)!r}\n{ended.stderr[-3000:]}"
    told = json.loads(ended.stdout.splitlines()[-1])
    assert not told["faults"], "\n".join(told["faults"])
    assert {*operator_cases.registered(), "quantize_cpu", "dequantize_cpu"} <= set(told["names"])
    assert told["right"] > CALLS / 4 and told["refused"] > CALLS / 4


def test_every_operator_of_the_library_is_drawn() -> None:
    drawn = (*operator_cases.BY_HAND, *operator_cases.only_cuda())
    assert set(operator_cases.registered()) == set(drawn)


def test_every_function_of_the_extension_is_drawn() -> None:
    functions = {name for name, value in vars(library.extension()).items() if callable(value)}
    on_a_gpu = {name for name in functions if name.endswith("_cuda")}
    on_a_gpu |= {"cuda_device_count", "product_library_version", "ProductPlan", "Rope"}
    assert functions - on_a_gpu - set(binding_cases.NAMES) == {"build_info"}
