"""csrc/README.md is true: every kernel is in its table, and every file and function that it names is there."""

import re
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
README = (CSRC / "README.md").read_text()
SOURCES = {str(path.relative_to(CSRC)): path.read_text() for path in CSRC.glob("**/*.[ch]*")}


def test_every_kernel_is_in_the_table():
    kernels = {
        name
        for text in SOURCES.values()
        for name in re.findall(r"__global__ void (?:__launch_bounds__\([^;{]*?\)\s+)?(\w+)\(", text)
    }
    table = re.findall(r"^\| `(\w+)", README, re.MULTILINE)
    assert kernels and kernels <= set(table), kernels - set(table)


def test_every_source_is_built_or_included():
    built = (CSRC.parent / "CMakeLists.txt").read_text()
    included = {name for text in SOURCES.values() for name in re.findall(r'#include "([^"]+)"', text)}
    assert included <= SOURCES.keys()
    assert {name for name in SOURCES if name not in included and f"csrc/{name}" not in built} == set()


def test_every_name_that_it_gives_is_there():
    names = set(re.findall(r"`([\w./]+)`", README))
    files = {name for name in names if "." in name}
    folders = (CSRC, CSRC / "cpu", CSRC / "cuda", CSRC.parent)
    assert files and not [name for name in files if not any((folder / name).exists() for folder in folders)]
    words = {word for text in SOURCES.values() for word in re.findall(r"\w+", text)}
    functions = {name for name in names if "_" in name and "/" not in name and "." not in name}
    assert functions and functions <= words, functions - words
