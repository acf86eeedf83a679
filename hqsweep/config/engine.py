"""The sections that cannot change a number: how runs are executed, and who mirrors them."""

import re
import shlex
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationInfo, field_validator, model_validator

from hqsweep.config.section import Count, Index, Positive, Section
from hqsweep.errors import UserError

AUTO = "auto"
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=|$)")
_GRES = re.compile(r"gpu(:[^:,]*[^:,\d][^:,]*)?(:(?P<count>\d+))?")


def check_installed(kind: str) -> None:
    """UserError where the package of a kind of tracker, which has its name, is not there."""
    if find_spec(kind) is None:
        raise UserError(
            f"track.kind: '{kind}' needs the package {kind}; pip install 'hqsweep[{kind}]', or set track=none"
        )


class TrackConfig(Section):
    """The tracker that mirrors the run folder.

    kind auto is wandb if it is installed, else none. mode auto is online if a user is logged in, else offline. wandb
    takes mode, project, entity and init_timeout_s; trackio takes mode and project. system_s: seconds between two rows
    of the machine's use in system.jsonl; 0 for none. diff: whether the manifest of a run from a changed checkout has
    what git diff says.
    """

    kind: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    mode: Literal["offline", "online", "auto"] = "auto"
    project: str = "hqsweep"
    entity: str | None = None
    init_timeout_s: Positive = 15
    system_s: Annotated[float, Field(ge=0)] = 10
    diff: bool = True

    @field_validator("kind", mode="before")
    @classmethod
    def _installed(cls, kind: Any) -> Any:
        if kind in ("wandb", "tensorboard", "trackio"):
            check_installed(kind)
        return ("none" if find_spec("wandb") is None else "wandb") if kind == "auto" else kind


class SlurmConfig(Section):
    """The request to sbatch for each run; None leaves a value to the partition.

    The ranks of a run (train.parallel) are on `nodes` machines, equally many on each; gres and mem_gb are per machine.
    `options` are further words of sbatch's command line. Each is a line of a shell script, so it may have no line break
    or other control character. A job gets a signal `signal_s` seconds before its time is over, and goes back to the
    queue.
    """

    partition: str | None = None
    gres: str | None = None
    mem_gb: Positive | None = None
    nodes: Count = 1
    time_min: Count | None = None
    signal_s: Count = 60
    options: str | None = None
    detach: bool = False

    @model_validator(mode="after")
    def _in_time(self) -> "SlurmConfig":
        if self.time_min is not None and self.time_min * 60 <= self.signal_s:
            raise UserError(
                f"engine.slurm.signal_s: {self.signal_s} s before the end of {self.time_min} min is before the start;"
                " lower it, or raise engine.slurm.time_min"
            )
        return self

    @field_validator("partition", "gres", "options")
    @classmethod
    def _on_one_line(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None and not text.isprintable():
            raise UserError(f"engine.slurm.{info.field_name}: {text!r} has a control character; leave it out")
        return text

    @field_validator("options")
    @classmethod
    def _long(cls, options: str | None) -> str | None:
        try:
            words = shlex.split(options or "")
        except ValueError as error:
            raise UserError(f"engine.slurm.options: {options!r} has no words of a shell ({error})") from None
        short = next((word for word in words if not _OPTION.match(word)), None)
        if short is not None:
            raise UserError(
                f"engine.slurm.options: '{short}' is no --NAME or --NAME=VALUE; write '--account=lab --requeue'"
            )
        return options


def _workers(value: Any) -> Any:
    """The value of engine.workers. UserError where it is no count, "auto" or None."""
    if value is None or value == AUTO or (type(value) is int and value >= 1):
        return value
    raise UserError(f"engine.workers: got {value!r}; must be an integer of at least 1, auto, or null")


class EngineConfig(Section):
    """How runs are executed: `workers` at a time with `threads` CPU threads each.

    local: workers None is runs_per_gpu times the GPUs, else 1; auto is as many as gain tokens a second on the GPUs, as
    measured before the first run, and 1 on a CPU; threads None is cores // workers. slurm: workers None is
    the most that fit; threads None is 1. A run of several ranks (train.parallel) has gpus_per_run GPUs on each machine.
    None is one for each rank there; with fewer the ranks share them. A run may take timeout_s seconds an attempt. After
    a failed one there are `retries` more, the first after backoff_s seconds, each further one after twice as long. With
    fail_fast no run starts after a run has failed for good.
    """

    kind: Literal["local", "slurm"] = "local"
    workers: Annotated[int | Literal["auto"] | None, PlainValidator(_workers)] = None
    runs_per_gpu: Count | None = None
    gpus_per_run: Count | None = None
    threads: Count | None = None
    timeout_s: Positive | None = None
    retries: Index = 0
    backoff_s: Positive = 1.0
    fail_fast: bool = False
    slurm: SlurmConfig = SlurmConfig()

    @model_validator(mode="after")
    def _of_its_kind(self) -> "EngineConfig":
        if self.kind == "local" and self.slurm != SlurmConfig():
            raise UserError("engine.slurm: given, but the engine is local, which would not read it; add engine=slurm")
        if self.workers == AUTO and (self.kind == "slurm" or self.runs_per_gpu is not None):
            other = "Slurm" if self.kind == "slurm" else "engine.runs_per_gpu"
            raise UserError(
                f"engine.workers: auto measures this machine's GPUs, and {other} decides here; give a number"
            )
        if self.kind == "slurm" and self.runs_per_gpu is not None:
            raise UserError("engine.runs_per_gpu: is for engine=local; a run on Slurm has what engine.slurm.gres asks")
        if self.kind == "slurm" and self.fail_fast:
            raise UserError(
                "engine.fail_fast: is for engine=local; nothing here watches the jobs of Slurm, but hqsweep cancel"
                " takes back those that wait"
            )
        return self


def gpus_asked(gres: str) -> int | None:
    """The number of GPUs that Slurm's gres asks for, as in gpu, gpu:2 or gpu:h200:2; None where it says none."""
    words = _GRES.fullmatch(gres)
    return int(words["count"] or 1) if words else None
