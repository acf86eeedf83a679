"""Private names of torch stand in hqsweep.torch_private, and nowhere else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hqsweep
from hqsweep import torch_private

pytestmark = pytest.mark.slow

PACKAGE = Path(hqsweep.__file__).parent
HOME = PACKAGE / "torch_private.py"
ALLOWED = {
    "memo.py": {"_dynamo_marked_constant"},  # it is imported without torch
    "recipe/roles.py": {"_orig_mod", "_fsdp_wrapped_module"},  # so are inspections of checkpoints
    "track/rows.py": {"_schema"},  # its own
    "nn/core/module.py": {"_current_level"},  # a number that torch replaces; a function is one more call of a Linear
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def from_torch(tree: ast.AST) -> dict[str, str]:
    """Name in a file -> what it is in torch."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name.split(".")[0]): a.name for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "torch":
            names |= {(alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.ops"):
            names |= {target.id: "torch.ops" for target in node.targets if isinstance(target, ast.Name)}
    return names


def attributes(tree: ast.AST) -> set[str]:
    """The private attributes of objects, and the private names in strings."""
    nodes = list(ast.walk(tree))
    named = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in named | texts if name.isidentifier() and is_private(name)}


OF_OBJECTS = attributes(ast.parse(HOME.read_text())) - {"_replace"}  # of any NamedTuple


def private_names(text: str) -> set[str]:
    """The private names of torch that a file imports, reaches from torch, or asks an object of torch for."""
    tree = ast.parse(text)
    names = from_torch(tree)
    found = {full for full in names.values() if is_private(full)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in names:
                found.add(node.attr)
    asked = attributes(tree)
    return found | {name for name in asked if name in OF_OBJECTS or name.startswith(("_dynamo", "_fsdp", "_orig_mod"))}


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch.nn.modules.conv import _ConvNd",
        "import torch\ntorch._foreach_add_([], 1)",
        "import torch\nATEN = torch.ops.aten\nATEN._unsafe_view(1, 2)",
        "from torch.autograd import Variable\nVariable._execution_engine.queue_callback(print)",
        "import torch\ndef phase(group): return group._training_state.name",
        "import torch\ndef whole(parameter): return getattr(parameter, '_unsharded_param', None)",
    ],
)
def test_a_private_name_is_found(text):
    assert private_names(text)


def test_no_other_file_names_what_is_private_in_torch():
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != HOME]
    found = {path.relative_to(PACKAGE).as_posix(): private_names(path.read_text()) for path in files}
    assert {file: names for file, names in found.items() if names} == ALLOWED


def test_each_name_is_used():
    texts = [path.read_text() for path in PACKAGE.rglob("*.py") if path != HOME]
    imported = {
        alias.name
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == "hqsweep.torch_private"
        for alias in node.names
    }
    tree = ast.parse(HOME.read_text())
    offered = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} | set(torch_private.__all__)
    bound = [target for node in tree.body if isinstance(node, ast.Assign) for target in ast.walk(node)]
    offered |= {t.id for t in bound if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store) and t.id[0] != "_"}
    assert offered <= imported


@pytest.mark.slow
def test_importing_it_waits_for_no_compiler_and_no_ranks():
    code = (
        "import hqsweep.torch_private, sys;"
        "sys.exit(any(m in sys.modules for m in ('torch._dynamo', 'torch.distributed.tensor', 'sympy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
