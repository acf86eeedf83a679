"""The machine of a run: facts that a number may depend on beside the config, and its use while the run works.

Facts are versions, commit, machine, instruction set and kernel build.

Use covers processors and memory, and use, memory, power and energy of the GPUs. A thread of the worker adds a row to
system.jsonl every track.system_s seconds, with the columns of SYSTEM (config/jobs.py). psutil measures the worker and
its ranks; NVML the GPUs that the run has. What cannot be measured is null. No row enters a checkpoint, so bits of a run
do not depend on them. At the end the manifest gets a summary:

    joules_per_token    energy of the GPUs between the first and the last row, over the tokens that were trained between
"""

import importlib.util
import os
import platform
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hqsweep.config.jobs import SYSTEM
from hqsweep.errors import Damaged
from hqsweep.sweep.store.files import drop_torn_tail, encode_rows
from hqsweep.sweep.store.names import ranks_of
from hqsweep.sweep.store.run_dir import RunDir

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


Row = dict[str, Any]
LONGEST_S = 5.0
"""The seconds that the end of a run waits for a measurement."""


@contextmanager
def sampled(run: RunDir) -> Iterator[None]:
    """Measure while the block goes on, if the run's config asks for it; a fault of the measurement stops it alone."""
    config = run.config()
    every_s = (config.get("track") or {}).get("system_s") or 0
    if not every_s:
        yield
        return
    sampler = _Sampler(run, config)
    stop = threading.Event()
    thread = threading.Thread(target=sampler.go_on, args=(stop, float(every_s)), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LONGEST_S)
        sampler.is_over = True
        if sampler.written and (summary := summary_of(sampler.rows, _tokens_per_step(config))):
            with suppress(OSError, Damaged):
                run.update_manifest(system=summary)


def _tokens_per_step(config: Mapping[str, Any]) -> int:
    train = config.get("train") or {}
    return int(train.get("batch") or 0) * int(train.get("context") or 0)


class _Sampler:
    """Rows of one attempt of a run."""

    def __init__(self, run: RunDir, config: Mapping[str, Any]) -> None:
        self._run, self._processes = run, _Processes.of_this()
        on_gpu = (config.get("train") or {}).get("device") != "cpu"
        self._gpus = _Gpus.visible(ranks_of(config)) if on_gpu else None
        self.rows: list[Row] = []
        self.written = 0
        self.is_over = False
        """Whether the run has ended, so that its files must not change."""

    def go_on(self, stop: threading.Event, every_s: float) -> None:
        """Take a row at once, every `every_s` seconds, and at the end. A run on CPUs that ends
        before that leaves nothing."""
        path = self._run.jsonl("system")
        drop_torn_tail(path)
        try:
            while True:
                stopped = stop.wait(every_s if self.rows else 0.0)
                self.rows.append(self._row())
                is_long = len(self.rows) > (2 if stopped and self._gpus is None else 1)
                if is_long and not self.is_over:
                    with path.open("ab") as file:
                        file.write(encode_rows(self.rows[self.written :]))
                    self.written = len(self.rows)
                if stopped:
                    return
        except Exception as error:
            print(f"warning: the machine is not measured any more ({type(error).__name__}: {error})", flush=True)

    def _row(self) -> Row:
        progress = None
        with suppress(Damaged):
            progress = self._run.written_status()["progress"]
        row = dict.fromkeys(SYSTEM) | {"seconds": time.time(), "step": (progress or {}).get("step", 0)}
        row |= self._processes.row() if self._processes else {}
        return row | (self._gpus.row() if self._gpus else {})


class _Processes:
    """This process and all below it, by psutil."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._before = time.monotonic(), self._seconds()

    @classmethod
    def of_this(cls) -> "_Processes | None":
        """None without psutil."""
        try:
            import psutil
        except ImportError:
            return None
        return cls(psutil.Process())

    def row(self) -> Row:
        now, (before, used_before) = (time.monotonic(), self._seconds()), self._before
        self._before = now
        used = 100 * max(now[1] - used_before, 0.0) / max(now[0] - before, 1e-9)
        return {"cpu_pct": used, "memory_bytes": float(sum(self._each(lambda each: each.memory_info().rss)))}

    def _seconds(self) -> float:
        """Processor seconds of all, children that have ended included."""
        return sum(self._each(lambda each: sum(each.cpu_times()[:4])))

    def _each(self, measure: Any) -> list[float]:
        """The measure of each process that is still there."""
        import psutil

        values = []
        for each in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):
                values.append(measure(each))
        return values


class _Gpus:
    """Some GPUs, by NVML."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._first_j: float | None = None

    @classmethod
    def visible(cls, ranks: int) -> "_Gpus | None":
        """The GPUs that CUDA_VISIBLE_DEVICES names, else the first `ranks`; None without NVML or without any."""
        try:
            import pynvml as nvml

            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            words = [str(index) for index in range(count)] if named is None else named.split(",")
            handles = [_handle(nvml, word.strip()) for word in words[:ranks] if word.strip()]
        except Exception:  # NVML's errors are a class for each code, and there may be no library
            return None
        return cls(nvml, handles) if handles else None

    def row(self) -> Row:
        nvml = self._nvml
        energy = self._sum(nvml.nvmlDeviceGetTotalEnergyConsumption, 1e-3)
        if self._first_j is None:
            self._first_j = energy
        used = self._sum(lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return {
            "gpu_pct": None if used is None else used / len(self._handles),
            "gpu_memory_bytes": self._sum(lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "gpu_watts": self._sum(nvml.nvmlDeviceGetPowerUsage, 1e-3),
            "gpu_joules": None if energy is None else energy - self._first_j,
        }

    def _sum(self, measure: Any, unit: float = 1.0) -> float | None:
        """The sum over the GPUs; None where one cannot say it."""
        try:
            return unit * sum(measure(handle) for handle in self._handles)
        except self._nvml.NVMLError:
            return None


def _handle(nvml: Any, word: str) -> Any:
    if word.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(word))
    return nvml.nvmlDeviceGetHandleByUUID(word.encode())


def summary_of(rows: Sequence[Row], tokens_per_step: int) -> dict[str, float]:
    """Means and maxima over the rows of an attempt; {} for one row alone. Values that were never measured are left
    out."""
    if len(rows) < 2:
        return {}
    columns = {name: [row[name] for row in rows[1:] if row[name] is not None] for name in SYSTEM}
    means = {f"{name}_mean": sum(columns[name]) / len(columns[name]) for name in
             ("cpu_pct", "gpu_pct", "gpu_watts") if columns[name]}  # fmt: skip
    most = {f"{name}_max": max(columns[name]) for name in ("memory_bytes", "gpu_memory_bytes") if columns[name]}
    first, last = rows[0], rows[-1]
    tokens = tokens_per_step * (last["step"] - first["step"])
    if first["gpu_joules"] is None or last["gpu_joules"] is None:
        return means | most
    joules = last["gpu_joules"] - first["gpu_joules"]
    return means | most | {"gpu_joules": joules} | ({"joules_per_token": joules / tokens} if tokens > 0 else {})
