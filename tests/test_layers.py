"""A module imports only from the layers above it (the order of the list), and importing the package starts nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hqsweep

PACKAGE = Path(hqsweep.__file__).parent
LAYERS = [
    ("errors", "memo"), ("formats",), ("ops",), ("quant",), ("recipe",), ("config", "gemm"), ("nn",), ("optim",),
    ("compat",), ("train",), ("jobs",), ("sweep",), ("track",), ("report",), ("worker", "doctor"), ("cli",),
    ("__main__",),
]  # fmt: skip
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports(path: Path):
    """(line, first part below hqsweep) of every import that runs, TYPE_CHECKING blocks left out."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "hqsweep" else [f"hqsweep.{a.name}" for a in node.names]
        for name in names:
            if name.startswith("hqsweep."):
                yield node.lineno, name.split(".")[1]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_from_above(path):
    parts = path.relative_to(PACKAGE).parts
    own = parts[0].removesuffix(".py")
    if own in ("__init__", "conf"):
        return
    assert own in RANK, f"{own} stands in no layer"
    wrong = [(line, name) for line, name in imports(path) if name != "_C" and RANK[name] > RANK[own]]
    assert not wrong, f"{path.relative_to(PACKAGE)} imports from below: {wrong}"


def test_import_starts_nothing():
    code = (
        "import sys, hqsweep; print([m for m in ('torch', 'pandas', 'hydra', 'wandb', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_importing_the_command_line_leaves_the_compiler_alone():
    """torch._dynamo takes as long to import as torch itself."""
    code = "import hqsweep.config.job, hqsweep.sweep.launch, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
