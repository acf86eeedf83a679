"""This machine: one row for each part that hqsweep can use. A probe that fails is a row, never an error."""

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from hqsweep.formats.spec import FINGERPRINT
from hqsweep.ops.fingerprint import fingerprint
from hqsweep.ops.library import extension
from hqsweep.ops.model.attention import CUDNN_FRONTEND, frontend_version
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
    from hqsweep.track.destination import logged_in

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
