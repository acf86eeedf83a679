"""Targets of the Makefile: each test that needs a GPU is in one part of `make gpu-test`; the suite runs twice."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PARTS = ("kernels", "modules", "training")


def test_each_gpu_test_is_in_one_part() -> None:
    makefile = (TESTS.parent / "Makefile").read_text()
    paths = {}
    for part in PARTS:
        recipe = re.search(rf"^gpu-test-{part}:.*\n\t(.*)", makefile, re.MULTILINE)[1]
        paths[part] = [TESTS.parent / word for word in recipe.split() if word.startswith("tests/")]
    assert all(path.exists() for listed in paths.values() for path in listed)
    needs_gpu = [path for path in TESTS.rglob("test_*.py") if re.search(r"\bmark\.gpu\b", path.read_text())]
    for test in needs_gpu:
        parts = [part for part, listed in paths.items() if any(test.is_relative_to(path) for path in listed)]
        assert len(parts) == 1, f"{test.relative_to(TESTS)} is in {parts}; see gpu-test in the Makefile"
    whole = re.search(r"^gpu-test:(.*?)##", makefile, re.MULTILINE)[1].split()
    assert whole == [*(f"gpu-test-{part}" for part in PARTS), "gpu-parity"]


def test_tests_of_two_gpus_are_where_their_target_looks() -> None:
    makefile = (TESTS.parent / "Makefile").read_text()
    recipe = re.search(r"^gpu-test-2:.*\n\t(.*)", makefile, re.MULTILINE)[1]
    listed = [TESTS.parent / word for word in recipe.split() if word.startswith("tests/")]
    assert all(path.exists() for path in listed)
    marks = re.compile(r"\bmark\.gpu2\b|ranks import .*\b(BACKENDS|backend)\b")
    needs_two = [path for path in TESTS.rglob("test_*.py") if marks.search(path.read_text())]
    outside = [path for path in needs_two if not any(path.is_relative_to(folder) for folder in listed)]
    assert [path for path in outside if path.name != Path(__file__).name] == [], "see gpu-test-2 in the Makefile"


def test_the_suite_runs_again_where_its_durations_are() -> None:
    """pytest takes a word of its own that is a file for tests, and then lacks the options of tests/conftest.py."""
    makefile = (TESTS.parent / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if "--durations-file" in line]
    assert "--durations-file=build/" in line
