"""Facts that a number may depend on beside the config: versions, commit, machine, instruction set, kernel build."""

import importlib.util
import os
import platform
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("hqsweep", "torch", "numpy", "nvidia-cudnn-frontend", "wandb")
ISA_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "bf16", "sve", "sve2",
)  # fmt: skip
"""Instruction sets that kernels of ours or of torch choose by, x86 then Arm, as Linux names them."""


MOST_DIFF = 20_000


def facts(with_diff: bool = False) -> dict[str, Any]:
    """The manifest's part that no job knows. `started` in seconds since 1970; `threads` per worker; a package that is
    not installed has no version; commit and dirty describe the current directory's repository, None outside one.
    with_diff: also git_diff(), if it is dirty."""
    git = git_state()
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        **git,
        **({"diff": git_diff()} if with_diff and git["dirty"] else {}),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "isa": cpu_isa(),
        "threads": int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
        "started": time.time(),
        "kernel_build": kernel_build(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state() -> dict[str, Any]:
    """{"commit": hex or None, "dirty": whether tracked files differ from it, or None}."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def git_diff() -> str:
    """What `git diff HEAD` says of tracked text files, at most MOST_DIFF characters of it; a last line says how many
    more there are."""
    text = _git("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv") or ""
    more = len(text) - MOST_DIFF
    return text if more <= 0 else f"{text[:MOST_DIFF]}\n... {more} more characters"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def cpu_isa(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The ISA_FLAGS that the first CPU has, as in "avx2 fma"; the machine's name where Linux does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine()
    flags = next((line.split(":")[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return " ".join(flag for flag in ISA_FLAGS if flag in flags) or platform.machine()


def kernel_build() -> Any:
    """build_info() of the compiled extension, None where there is none."""
    if importlib.util.find_spec("hqsweep._C") is None:
        return None
    return importlib.import_module("hqsweep._C").build_info()
