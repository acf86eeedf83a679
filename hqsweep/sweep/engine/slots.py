"""CPU threads and GPUs of this machine, shared out to workers as environment variables."""

import os
import shutil
import subprocess
from collections.abc import Sequence


def slots(workers: int | None, runs_per_gpu: int | None, gpus_per_run: int | None = None) -> list[dict[str, str]]:
    """One environment per run at a time: the GPUs it sees where there are several, {} where nothing is to be shared
    out.

    workers       runs at a time; None is runs_per_gpu times the GPUs, or 1 where either is missing
    runs_per_gpu  the most runs on one GPU; None is any number. GPUs are dealt out in turn, so that they fill evenly.
    gpus_per_run  of a run of several ranks, which no other run sees; workers None is as many as there are GPUs for.
                  None is for runs of one process.
    """
    if gpus_per_run is not None:
        return _groups(visible_gpus(), workers, gpus_per_run)
    gpus = visible_gpus() if runs_per_gpu or (workers or 1) > 1 else []
    room = len(gpus) * runs_per_gpu if runs_per_gpu and gpus else None
    count = min(filter(None, (workers, room)), default=1)
    return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if len(gpus) > 1 else {} for i in range(count)]


def _groups(gpus: Sequence[str], workers: int | None, size: int) -> list[dict[str, str]]:
    """Neighbouring GPUs for each run; where there are too few for one, all that is there."""
    room = len(gpus) // size
    if room == 0:
        return [{}] * (workers or 1)
    parts = [gpus[i * size : (i + 1) * size] for i in range(min(workers or room, room))]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def visible_gpus() -> Sequence[str]:
    """Names of the GPUs this process sees, without starting CUDA: CUDA_VISIBLE_DEVICES, else nvidia-smi."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines()
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in listed))]


def thread_limits(threads: int) -> dict[str, str]:
    """Environment that holds torch, numpy and BLAS to so many threads."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
