"""`hqsweep doctor`: a page of this machine's parts, and of the product of each pair of formats here (gemm/pairs.py).

A probe of a part that fails is a row, never an error.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from hqsweep import formats
from hqsweep.errors import UserError, nearest
from hqsweep.formats import parse
from hqsweep.formats.spec import FINGERPRINT
from hqsweep.gemm.pairs import FORMATS, Product, capability_here, products, reasons, sm_name
from hqsweep.ops.attention import CUDNN_FRONTEND, frontend_version
from hqsweep.ops.fingerprint import fingerprint
from hqsweep.ops.library import extension
from hqsweep.report.pages.text import TextTable, to_rich
from hqsweep.track.machine import cpu_isa

Answer = tuple[bool, str]
"""Whether it is there, and its version or the reason."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One row: `present` is None for a probe that itself failed."""

    what: str
    present: bool | None
    detail: str


def parts() -> list[Part]:
    """Every part, in the order of PROBES."""
    return [_part(what, probe) for what, probe in PROBES.items()]


def _part(what: str, probe: Callable[[], Answer]) -> Part:
    try:
        present, detail = probe()
    except Exception as error:  # any error of a broken driver or package is the answer
        return Part(what=what, present=None, detail=" ".join(f"{type(error).__name__}: {error}".split()))
    return Part(what=what, present=present, detail=detail)


def _python() -> Answer:
    return True, f"{platform.python_version()}, hqsweep {version('hqsweep')}, {platform.platform()}"


def _cpu() -> Answer:
    return True, f"{os.cpu_count()} CPUs, {cpu_isa()}"


def _threads() -> Answer:
    limit = os.environ.get("OMP_NUM_THREADS")
    return True, f"torch uses {torch.get_num_threads()}" + (f" (OMP_NUM_THREADS={limit})" if limit else "")


def _cpu_kernels() -> Answer:
    if extension() is None:
        return False, "hqsweep._C was not built, so the torch reference runs: the same bytes, slower; make build"
    build = extension().build_info()
    return True, f"{build['compiler']}, built for {build['isas']}, using {build['isa']}"


def _digest() -> Answer:
    """The promise of every build: one fixed computation through all formats has one hash."""
    digest = fingerprint()
    if digest == FINGERPRINT:
        return True, f"{digest[:16]}, as every exact build"
    return False, f"{digest[:16]} where exact builds have {FINGERPRINT[:16]}: this build or machine rounds otherwise"


def _cuda_kernels() -> Answer:
    build = extension() and extension().build_info()
    if not build or not build["cuda"]:
        return (
            False,
            "built without (no nvcc then, or HQ_CUDA=OFF); a GPU would run the torch reference: same bytes, slower",
        )
    return True, f"{build['cuda_compiler']}, for {build['cuda_archs']}"


def _nvcc() -> Answer:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [Path(home, "bin", "nvcc") for home in (*homes, "/usr/local/cuda")]
    path = shutil.which("nvcc") or next((str(place) for place in places if place.is_file()), None)
    if path is None:
        return False, "not on PATH, in CUDA_HOME or /usr/local/cuda; only a build with CUDA needs it"
    return True, f"{path}, {_last_line(path, '--version')}"


def _torch() -> Answer:
    return True, f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build for CPUs")


def _gpus() -> Answer:
    if torch.version.cuda is None:
        return False, "torch is a build for CPUs"
    if not torch.cuda.is_available():
        return False, "torch sees no device; " + (
            "nvidia-smi is there, so the driver and this torch may not fit"
            if shutil.which("nvidia-smi")
            else "no driver"
        )
    return True, "; ".join(_gpu(index) for index in range(torch.cuda.device_count()))


def _gpu(index: int) -> str:
    device = torch.cuda.get_device_properties(index)
    return f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB"


def _mps() -> Answer:
    """CUDA finds the daemon by its pipes, so runs that share a GPU need no setting for it."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if (pipes / "control").exists():
        return True, f"its pipes are in {pipes}: kernels of several runs on one GPU overlap"
    return False, f"no daemon in {pipes}: several runs on one GPU take turns (nvidia-cuda-mps-control -d starts one)"


def _cudnn_frontend() -> Answer:
    found = frontend_version()
    if found is None:
        return False, f"not installed; pip install {CUDNN_FRONTEND} for a faster backward of attention on Hopper GPUs"
    return True, f"{found}, for attention's backward on Hopper GPUs"


def _wandb() -> Answer:
    if importlib.util.find_spec("wandb") is None:
        return False, "not installed, so track=none; pip install wandb"
    from hqsweep.track.tracker import logged_in

    there = logged_in(os.environ)
    return True, f"{version('wandb')}, " + ("logged in: online" if there else "not logged in: offline (wandb login)")


def _submitit() -> Answer:
    if importlib.util.find_spec("submitit") is None:
        return False, "not installed; pip install submitit to send runs to Slurm"
    return True, version("submitit")


def _slurm() -> Answer:
    missing = [name for name in ("sbatch", "scontrol") if shutil.which(name) is None]
    if missing:
        return False, f"{' and '.join(missing)} not on PATH: this is no login node of a Slurm cluster"
    try:
        return True, _last_line("sbatch", "--version")
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or "").strip().rpartition("\n")[2]
        return False, f"sbatch is on PATH, but this is no node of a Slurm cluster: {reason or error}"


def _chromium() -> Answer:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return (True, path) if path else (False, "not on PATH; only the tests that open the report need it")


def _last_line(*command: str) -> str:
    """The last line that a program prints; it has ten seconds."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    lines = done.stdout.strip().splitlines()
    return lines[-1].strip() if lines else "no version given"


PROBES: dict[str, Callable[[], Answer]] = {
    "python": _python,
    "cpu": _cpu,
    "threads": _threads,
    "cpu kernels": _cpu_kernels,
    "kernel digest": _digest,
    "cuda kernels": _cuda_kernels,
    "nvcc": _nvcc,
    "torch": _torch,
    "gpu": _gpus,
    "cudnn frontend": _cudnn_frontend,
    "mps": _mps,
    "wandb": _wandb,
    "submitit": _submitit,
    "slurm": _slurm,
    "chromium": _chromium,
}


MARKS = {"native": "N", "strict": "S", "exact": "x", "none": "-"}
"""The best mode of a pair -> its mark in the table."""


FOUND = {True: "yes", False: "no", None: "broken"}
STYLES = {True: "", False: "dim", None: "red"}
LEGEND = (
    "N native: on the tensor cores of this machine (gemm=native); high precision has one plan in every mode.  S strict:"
    " exact here, and some tensor cores take the pair.  x exact only: no hardware GEMM takes the pair.  - none."
)


CARDS = {
    "A100": (8, 0), "A40": (8, 6), "RTX3090": (8, 6), "L4": (8, 9), "L40S": (8, 9), "RTX4090": (8, 9), "H100": (9, 0),
    "H200": (9, 0), "GH200": (9, 0), "B200": (10, 0), "GB200": (10, 0), "B300": (10, 3), "GB300": (10, 3),
    "RTX5090": (12, 0), "CPU": None,
}  # fmt: skip
"""Card -> compute capability, from NVIDIA's table (developer.nvidia.com/cuda-gpus)."""
FIRST = ("cpu", "cpu kernels", "torch", "gpu", "cuda kernels")
"""The parts that a short page shows with details."""
WIDTH = 80
"""Characters of a line of the short page, but for long names of formats."""


def doctor(card: str | None = None, *, every: bool = False) -> tuple[RenderableType, dict[str, Any]]:
    """(page, document): the machine's parts, every pair of formats, and why a pair has no product in a mode.

    card: answer for a GPU of CARDS in the place of this machine's. every: the page has all of the document; without it
    at most 12 lines. Raises UserError for an unknown card.
    """
    name = None if card is None else _card(card)
    capability = capability_here() if name is None else CARDS[name]
    machine, pairs = parts(), products(capability)
    why = reasons(pairs)
    document = {
        "card": name,
        "machine": {part.what: {"found": part.present, "detail": part.detail} for part in machine},
        "products": [{"mode": pair.mode, **asdict(pair)} for pair in pairs],
        "reasons": why,
    }
    if not every:
        return Group(*(Text(line) for line in _short(machine, pairs, name, capability))), document
    heads = [Text(_as_line(name, capability))] if name else [_machine(machine)]
    return Group(*heads, _matrix(pairs), Text(LEGEND), Text(), _native(pairs), _why(why)), document


def _card(card: str) -> str:
    """The key of CARDS that a word means."""
    known = {name.lower(): name for name in CARDS}
    word = (
        card.lower().replace(" ", "").replace("-", "").replace("_", "").removeprefix("nvidia").removeprefix("geforce")
    )
    if word not in known:
        raise UserError(f"--as: no card '{card}'{nearest(card.upper(), CARDS)}; there are {', '.join(CARDS)}")
    return known[word]


def _as_line(name: str, capability: tuple[int, int] | None) -> str:
    return f"as on {name}{'' if capability is None else f' ({sm_name(capability)})'}, which need not be here"


def _short(
    machine: list[Part], pairs: list[Product], name: str | None, capability: tuple[int, int] | None
) -> list[str]:
    """At most 12 lines."""
    alike = {p.a: p for p in pairs if p.a == p.b}
    native = [text for text in formats.NAMES if text in alike and alike[text].mode == "native"]
    high = [text for text in native if parse(text).high_precision]
    here = capability and sm_name(capability)
    untried = [text for text in native if text not in high and here in alike[text].untried]
    lines = [_as_line(name, capability)] if name else _parts_lines(machine)
    lines += [f"{'native':<13}{', '.join(native)}"]
    lines += [f"{'':<13}from documents, not yet run there: {', '.join(untried)}"] if untried else []
    none = Counter(pair.mode for pair in pairs)["none"]
    return [
        *lines,
        f"{'exact':<13}{len(pairs) - none} of {len(pairs)} pairs of formats, on any device, the same bytes",
        f"{'no product':<13}{none} pairs, which have a Hadamard transform on one side alone",
        "--all: every part with its reason, and every pair; --as B200: another card",
    ]


def _parts_lines(machine: list[Part]) -> list[str]:
    named = {part.what: part for part in machine}
    lines = [
        f"{what:<13}{'' if (part := named[what]).present else f'{FOUND[part.present]}: '}{part.detail}"
        for what in FIRST
    ]
    others = [part for part in machine if part.what not in FIRST]
    for said, found in (("also here", True), ("not here", False), ("broken", None)):
        names = [part.what for part in others if part.present is found]
        lines += [f"{said:<13}{', '.join(names)}"] if names else []
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]


def _machine(machine: list[Part]) -> RenderableType:
    rows = tuple((part.what, FOUND[part.present], part.detail) for part in machine)
    table = TextTable(header=("part", "there", "what, or why not"), rows=rows)
    return to_rich(table, "this machine", [STYLES[part.present] for part in machine])


def _matrix(pairs: list[Product]) -> RenderableType:
    """Rows and columns are FORMATS, columns by the numbers of the rows."""
    mark = {(p.a, p.b): MARKS[p.mode] for p in pairs}
    rows = [
        (f"{number} {a}", *(mark.get((a, b)) or mark[b, a] for b in FORMATS)) for number, a in enumerate(FORMATS, 1)
    ]
    header = ("operand", *(str(number) for number in range(1, len(FORMATS) + 1)))
    return to_rich(TextTable(header=header, rows=tuple(rows)), "products of two operands")


def _native(pairs: list[Product]) -> RenderableType:
    """Which tensor cores take which low-precision pairs."""
    on = dict.fromkeys(sm for pair in pairs for sm in pair.native_on)
    high = {p.a for p in pairs if p.a == p.b and p.native_on and not p.native_fault and len(p.native_on) == len(on)}
    rows = []
    for sm in on:
        taken = [p for p in pairs if sm in p.native_on and p.a not in high]
        notes = "from documents, not yet run there" if any(sm in p.untried for p in taken) else ""
        rows.append((sm, notes, ", ".join(f"{p.a} x {p.b}" if p.a != p.b else p.a for p in taken)))
    return to_rich(TextTable(header=("on", "note", "pairs (one name: with itself)"), rows=tuple(rows)), "gemm=native")


def _why(why: list[dict[str, Any]]) -> RenderableType:
    rows = tuple((row["mode"], str(row["pairs"]), row["reason"], row["example"]) for row in why)
    table = TextTable(header=("no", "pairs", "because", "for example"), rows=rows, numeric=frozenset({1}))
    return to_rich(table, "why not")
