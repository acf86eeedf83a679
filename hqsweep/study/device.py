"""The device that will train the runs of a plan, and how that is known: a forecast for another one says nothing."""

from dataclasses import dataclass

import torch

from hqsweep.config.engine import gpus_asked
from hqsweep.config.job import ConvergenceConfig
from hqsweep.train.build import pick_device


@dataclass(frozen=True, kw_only=True)
class RunDevice:
    """on_gpu: whether it is a GPU. name: torch's name of the card, "cpu", or "" for a card that is not known. why: how
    that is known."""

    on_gpu: bool
    name: str
    why: str

    def __str__(self) -> str:
        """A text such as: the CPU (train.device=auto, and torch finds no GPU here)."""
        named = self.name if self.on_gpu and self.name else "a GPU" if self.on_gpu else "the CPU"
        return f"{named} ({self.why})"


def device_of(config: ConvergenceConfig) -> RunDevice:
    """The device of a run: on this machine for engine=local, on the partition's for Slurm, by what it is asked for."""
    asked = config.train.device
    if config.engine.kind == "slurm":
        gres = config.engine.slurm.gres
        on_gpu = asked == "cuda" or (asked == "auto" and gres is not None and gpus_asked(gres) is not None)
        said = f"engine.slurm.gres={gres}" if gres else "engine.slurm.gres asks for none"
        return RunDevice(on_gpu=on_gpu, name="" if on_gpu else "cpu", why=f"train.device={asked}, {said}")
    if pick_device(asked).type != "cuda":
        found = "" if asked == "cpu" else ", and torch finds no GPU here"
        return RunDevice(on_gpu=False, name="cpu", why=f"train.device={asked}{found}")
    if not torch.cuda.is_available():
        return RunDevice(on_gpu=True, name="", why=f"train.device={asked}, and torch finds none here")
    return RunDevice(
        on_gpu=True, name=torch.cuda.get_device_name(), why=f"train.device={asked}, and torch finds it here"
    )
