"""The floor plan: a module imports only from the layers above it (the order of the list), no files import each other in
a circle, chains of imports are short, and importing the package starts nothing.

Every import counts, also one inside a function or under TYPE_CHECKING. `from package import name` counts as an import
of the module that defines the name, so that a package's __init__ hides nothing.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hqsweep

PACKAGE = Path(hqsweep.__file__).parent
LAYERS = [
    ("errors", "memo", "torch_private", "config.jobs", "config.jobs"),
    ("host", "verdicts", "formats.spec", "config.safe"), ("config.recipe_files",), ("formats",),
    ("ops",), ("parallel.wire",), ("quant + parallel.shards",), ("recipe",),
    ("config", "gemm"), ("nn",), ("optim",), ("models",), ("parallel", "shards"),
    ("checkpoints",), ("compat",),
    ("train",), ("jobs",),
    ("sweep",), ("track",), ("report",), ("queries",), ("foreign_logs",), ("study",), ("api",),
    ("worker",), ("cli",), ("__main__",),
]  # fmt: skip
"""Packages, and packages or files that stand elsewhere than the package around them. Those joined by + import each
other: held tensors know their shards, and what fully_shard gathers."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for entry in names for name in entry.split(" + ")}
TOGETHER = [set(entry.split(" + ")) for names in LAYERS for entry in names if " + " in entry]
LONGEST_CHAIN = 18
ROOT_FILES = 7
FOLDER_FILES = 16


def name_of(path: Path) -> str:
    """Dotted name below hqsweep; "" for hqsweep itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(name: str) -> ast.Module:
    """The syntax tree of a file of FILES. To parse all takes 3 s."""
    return ast.parse(FILES[name].read_text())


def is_package(name: str) -> bool:
    return FILES[name].name == "__init__.py"


@cache
def imported(file: str) -> list[tuple[str, str, ast.AST]]:
    """(module below hqsweep, name imported from it or "", node) of every import of our own."""
    modules = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            modules += [(alias.name, "", node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            modules += [(node.module, alias.name, node) for alias in node.names]
    ours = [each for each in modules if each[0].split(".")[0] == "hqsweep"]
    return [(module.removeprefix("hqsweep").removeprefix("."), name, node) for module, name, node in ours]


@cache
def defines(module: str, name: str) -> str:
    """The module that an import of `name` from `module` leads to."""
    inside = f"{module}.{name}".strip(".")
    if inside in FILES:
        return inside
    if name and is_package(module):
        for source, re_exported, _ in imported(module):
            if re_exported == name:
                return defines(source, name)
    return module


def late(tree: ast.AST) -> set[int]:
    """Ids of the nodes that do not run when the module is imported: in functions, or under TYPE_CHECKING."""
    blocks = (
        block
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test))
    )
    return {id(node) for block in blocks for node in ast.walk(block)}


@cache
def edges(name: str, *, only_top: bool = False) -> set[str]:
    """The modules that a module imports."""
    if is_package(name):
        return set()
    skipped = late(tree_of(name)) if only_top else set()
    targets = {
        defines(module, what) for module, what, node in imported(name) if id(node) not in skipped and what != "_C"
    }
    return targets - {name, "", "_C"}


def layer(name: str) -> str:
    """The entry of LAYERS that a module belongs to: its own, or that of the innermost package around it."""
    while name not in RANK and "." in name:
        name = name.rpartition(".")[0]
    return name


def may_import(own: str, to: str) -> bool:
    return own == to or RANK[to] < RANK[own] or any({own, to} <= both for both in TOGETHER)


def test_imports_only_from_above():
    names = [name for name in FILES if name and not name.startswith("conf.")]
    homeless = {layer(name) for name in names} - set(RANK)
    assert not homeless, f"in no layer: {homeless}"
    faults = [
        f"hqsweep.{name} imports {to}"
        for name in names
        for to in sorted({defines(module, what) for module, what, _ in imported(name)} - {"", "_C"})
        if not may_import(layer(name), layer(to))
    ]
    assert not faults, "what is imported does not stand above:\n" + "\n".join(faults)


def test_nn_knows_protocols_and_no_ranks():
    """nn.core.wire says what modules ask of ranks; hqsweep.parallel has the classes, and sets them on modules."""
    found = {(name, to) for name in FILES if name.startswith("nn.") for to in edges(name) if to.startswith("parallel")}
    assert not found


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen, ahead = set(), [start]
    while ahead:
        for to in graph[ahead.pop()] - seen:
            seen.add(to)
            ahead.append(to)
    return seen


def test_no_two_files_import_each_other():
    graph = {name: edges(name) for name in FILES}
    circles = {name for name in graph if name in reachable(name, graph)}
    assert not circles, f"circles of imports: {sorted(circles)}"


def test_nothing_is_imported_for_types_alone():
    guarded = [name for name in FILES if "TYPE_CHECKING" in ast.dump(tree_of(name))]
    assert not guarded, f"the order of layers makes TYPE_CHECKING needless: {guarded}"


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    @cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max((chain(to) for to in graph[name]), key=len, default=()))

    return list(max(map(chain, graph), key=len))


def test_chains_of_imports_are_short():
    chain = longest_chain({name: edges(name, only_top=True) for name in FILES})
    assert len(chain) <= LONGEST_CHAIN, f"{len(chain)} files: {' > '.join(chain)}"


def test_few_files_stand_in_a_folder():
    files = {folder: len([*folder.glob("*.py")]) for folder in (PACKAGE, *{path.parent for path in FILES.values()})}
    assert files[PACKAGE] <= ROOT_FILES
    assert not {str(folder.relative_to(PACKAGE)): count for folder, count in files.items() if count > FOLDER_FILES}


def test_import_starts_nothing():
    code = (
        "import sys, hqsweep; print([m for m in ('torch', 'pandas', 'hydra', 'wandb', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.slow
def test_importing_the_command_line_leaves_the_compiler_alone():
    """torch._dynamo takes as long to import as torch itself."""
    code = "import hqsweep.config.job, hqsweep.sweep.engine.launch, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_run_in_one_process_waits_for_no_module_of_ranks():
    """torch's FSDP and DTensor import sympy and take half a second."""
    modules = "hqsweep.worker, hqsweep.jobs.convergence, hqsweep.jobs.parity.job, hqsweep.sweep.engine.launch"
    modules += ", hqsweep.parallel.data"
    code = f"import {modules}, sys; sys.exit(any(m in sys.modules for m in ('torch.distributed.tensor', 'sympy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MANY_ARGUMENTS = {
    "ops.quantize.operators", "ops.quantize.amax.find_amax_", "ops.quantize.dequantize.decode",
    "ops.quantize.dequantize._decode_fake", "ops.elementwise", "ops.norm", "ops.library", "compat",
    "cli.run", "cli.compare", "cli.judge", "cli.runs", "cli.files", "cli.probe", "cli.recipe",
}  # fmt: skip
"""Modules and functions whose signatures are not ours to choose: operators, TransformerEngine's names, and options of
commands."""
NINE_AT_MOST = {
    "optim.adam.__init__", "sweep.engine.local.run_local", "quant.hybrid.quantize", "quant.grouped.quantize",
    "quant.group.quantize_group", "quant.tensor.empty",
    "nn.core.context.quantization", "api.sweep.run", "track.own_loop.track",
}  # fmt: skip
"""Functions with one or two arguments too many: torch.optim's signature, the keys of engine=local, groups, what a step
says to modules, the options of `hqsweep run`, and what makes a run."""
FORMAT_FIELDS = {"sr", "rht", "rht_signed", "row_scaled", "tile", "two_d", "pow2", "stochastic", "delayed",
                 "exact_dtype", "divisor", "amax_name", "element_name"}  # fmt: skip
FORMAT_TYPES = {"MX", "NVFP4", "Fp8Block", "Fp8Current", "Fp8Delayed", "Fp8PerTensor", "Identity"}


def arguments(function: ast.FunctionDef) -> int:
    """How many arguments a function takes, self, cls and ctx not counted."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def test_functions_take_few_arguments():
    many = [
        f"{name}.{node.name}: {arguments(node)}"
        for name in FILES
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.FunctionDef)
        and not any(f"{name}.{node.name}.".startswith(f"{each}.") for each in MANY_ARGUMENTS)
        and arguments(node) > (9 if f"{name}.{node.name}" in NINE_AT_MOST else 7)
    ]
    assert not many, f"more than 7 arguments: {many}; a frozen dataclass says what belongs together"


def asks_a_format(node: ast.AST) -> bool:
    """getattr(x, "a field of formats") or isinstance(x, a class of formats)."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("getattr", "isinstance"):
        return False
    about = node.args[1]
    if node.func.id == "getattr":
        return isinstance(about, ast.Constant) and about.value in FORMAT_FIELDS
    return any(isinstance(part, ast.Name) and part.id in FORMAT_TYPES for part in ast.walk(about))


def test_formats_answer_for_themselves():
    asked = [
        f"{name} line {node.lineno}"
        for name in FILES
        if not name.startswith("formats.")
        for node in ast.walk(tree_of(name))
        if asks_a_format(node)
    ]
    assert not asked, f"a format is asked for its type or for a field that it may not have: {asked}"
