"""What a training reports: rows, entries of the manifest, progress, and lines of the log; and where they go on.

A run goes on after its newest sound checkpoint, with the rows before it, or at its start. Damaged files are reported
and not used.
"""

import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hqsweep.config.job import ConvergenceConfig
from hqsweep.formats import Format
from hqsweep.gemm import native
from hqsweep.gemm.native import gemm_plan
from hqsweep.jobs.sink import Diverged, Sink
from hqsweep.nn.core.module import QuantizedModule, quantized_modules, roles_of
from hqsweep.nn.grouped import GroupedBase
from hqsweep.ops.fingerprint import kernel_digest
from hqsweep.recipe.pairs import MODULE_GEMMS
from hqsweep.recipe.stages import Stage
from hqsweep.train.checkpoint import newest, step_of
from hqsweep.train.fork import ABOVE, above_source
from hqsweep.train.loop import Step, Trainer
from hqsweep.train.record import ANOTHER_RUN, OTHER_DATA, Record, discard, fault_of, read_record, write_record


def go_back(config: ConvergenceConfig, sink: Sink, workspace: Path, data: str) -> Path | None:
    """The newest sound checkpoint with all rows and operands from before it; None for a run that begins at its start.

    Rows after the checkpoint are dropped. Damaged files are reported and deleted. Sound states at a trunk's fork points
    stay, because forks may begin there while the trunk repeats its steps. data: the hash of the data that the run reads
    now.
    """
    folder = workspace / "checkpoint"
    for half in (*folder.glob("*.tmp"), *folder.glob("*.partial")):
        shutil.rmtree(half) if half.is_dir() and not half.is_symlink() else half.unlink()
    path, faults = newest(folder, partial(refusal, config, sink, workspace, data))
    sink.rewind(read_record(path).rows if path else {}, step_of(path) if path else -1)
    how = f"went on from {path.name}" if path else "began again from the start"
    for other, fault in faults.items():
        sink.repaired(f"{fault}; the run {how}")
        if step_of(other) not in config.points or fault_of(other, sink.run_id):
            discard(other)
    return path


def refusal(
    config: ConvergenceConfig, sink: Sink, workspace: Path, data: str, path: Path, record: Record
) -> str | None:
    """The reason not to go on from a sound checkpoint; None to go on. data: the hash of the data that the run reads
    now."""
    if record.run != sink.run_id:
        return ANOTHER_RUN
    if record.data not in ("", data):
        return OTHER_DATA
    captured = config.stats.capture_at is not None and config.stats.capture_at <= step_of(path)
    fault = fault_of(captured_file(config, workspace), sink.run_id) if captured else None
    return f"of the operands that were written before it, {fault}" if fault else sink.fits(record.rows)


def captured_file(config: ConvergenceConfig, workspace: Path) -> Path:
    """The file with the operands of the step stats.capture_at."""
    return workspace / "captured" / f"step_{config.stats.capture_at}.safetensors"


def save_captured(operands: Mapping[str, Tensor], path: Path, run: str) -> None:
    """Write the operands of a step, for `hqsweep probe`, and their record. The file is written whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    discard(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        save_file(operands, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    write_record(path, Record(file=path.name, sha256=digest, bytes=size, run=run))


class Report:
    """The reports of one training, step by step: rows, manifest, progress and lines of the log."""

    def __init__(self, trainer: Trainer, sink: Sink, captured: Path, warnings: list[str]) -> None:
        train = trainer.config.train
        self.trainer, self.sink, self.captured, self.warnings = trainer, sink, captured, warnings
        self.first = trainer.step + 1
        self.loss: float | None = None
        self._ran: dict[str, str | None] | None = None
        self._met: list[dict] = []
        self._throughput = Throughput(train.batch * train.context)
        self._throughput.at(trainer.step)

    def step(self, done: Step) -> None:
        """Report one step. Raises Diverged where its loss is not finite."""
        if done.step == self.first:
            self._first_step()
        if (now := steps_fields(self.trainer)) != self._ran:
            self._ran = now
            self.sink.manifest(steps=now)
        self.sink.rows("stats", done.stats)
        self.sink.rows("what_if", done.what_if)
        if done.captured:
            save_captured(done.captured, self.captured, self.sink.run_id)
        if done.metrics:
            self.sink.metric(done.step, done.metrics)
        if done.loss is not None:
            self._nonfinite()
        self._progress(done)
        if line := above_source(self.trainer):
            print(f"warning: {line}", flush=True)
            self.sink.manifest(**self.trainer.trunk)

    def end(self) -> None:
        """Add the warnings that only the end of the training can give."""
        trainer = self.trainer
        if late := [*trainer.trunk.get(ABOVE, ()), *trainer.dataset.untrained(trainer.val_loss)]:
            self.sink.manifest(warnings=[*self.warnings, *late])

    def _first_step(self) -> None:
        self.sink.manifest(saved_for_backward=saved_fields(self.trainer))
        self.sink.phase(None)
        if lines := unused_warnings(self.trainer):
            self.warnings = [*self.warnings, *lines]
            self.sink.manifest(unused=self.trainer.adapter.unused(), warnings=self.warnings)

    def _nonfinite(self) -> None:
        nonfinite = self.trainer.nonfinite
        if (rows := nonfinite.manifest()) != self._met:
            self._met = rows
            self.sink.manifest(nonfinite=rows)
            for line in nonfinite.news():
                self.trainer.ranks.say(f"warning: {line}")

    def _progress(self, done: Step) -> None:
        config, speed = self.trainer.config, self._throughput.at(done.step)
        train = config.train
        self.loss = self.loss if done.loss is None else done.loss
        self.sink.progress(done.step, train.steps, self.loss, speed, first=config.start)
        if done.loss is None:
            return
        rate = "" if speed is None else f", {speed:,.0f} tokens/s"
        self.trainer.ranks.say(f"step {done.step} of {train.steps}: train_loss {done.loss:.4f}{rate}")
        if not math.isfinite(done.loss):
            raise Diverged(done.step, done.loss, train.lr, self.trainer.nonfinite.began())


class Throughput:
    """Tokens a second since the first call, with the time of evaluations and samples."""

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.tokens_per_step, self.clock = tokens_per_step, clock
        self.start: tuple[int, float] | None = None

    def at(self, step: int) -> float | None:
        """The speed at a step; None until a step has passed since the first call."""
        if self.start is None:
            self.start = (step, self.clock())
            return None
        steps, seconds = step - self.start[0], self.clock() - self.start[1]
        return steps * self.tokens_per_step / seconds if steps and seconds > 0 else None


SHARED_GPU = "{} ranks share a GPU and exchange by sockets, so steps take much longer than with one each"


def trainer_fields(trainer: Trainer) -> dict[str, object]:
    """The fields that are known before the first step: device, kernel digest, data, sizes, and the plan of every GEMM.

    tokens and epochs count from step 1, also for a run that continues another run's state.
    """
    device, dataset, train = trainer.device, trainer.dataset, trainer.config.train
    tokens = train.steps * train.batch * train.context
    warnings = dataset.warnings(tokens)
    if trainer.ranks.per_gpu > 1:
        warnings.append(SHARED_GPU.format(trainer.ranks.per_gpu))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "kernel_digest": kernel_digest(device),
        "data_hash": dataset.hash,
        "data": dataset.facts,
        "params": sum(shape.numel() for shape in trainer.shapes.values()),
        "tokens": tokens,
        "epochs": dataset.epochs(tokens),
        "gemm_plan": stage_plans(trainer, trainer.stages[0]),
        "recipe_schedule": schedule_fields(trainer),
        **trainer.adapter.facts,
        **trainer.adapter.taken,
        **({"warnings": warnings} if warnings else {}),
    }


def saved_fields(trainer: Trainer) -> dict[str, object]:
    """Return the field saved_for_backward: the bytes that a microbatch's forward keeps for backward.

    bytes and bytes_per_token: tensors that autograd saved beside the model. They are given only if autograd saves all
    of it, which excludes recomputation, offload and several ranks. input_bytes_per_element: the number for the input of
    each linear; layers with the same number are one entry.
    """
    train = trainer.config.train
    tokens = train.batch // train.microbatches * train.context
    inputs: dict[str, set[float]] = {}
    for name, nbytes in trainer.microbatches.of_all_stages(dict(trainer.adapter.saved_inputs(tokens))).items():
        inputs.setdefault(re.sub(r"\.\d+\.", ".*.", name), set()).add(nbytes)
    per_element = {name: sizes.pop() if len(sizes) == 1 else sorted(sizes) for name, sizes in inputs.items()}
    fields: dict[str, object] = {"input_bytes_per_element": per_element}
    if saved := trainer.microbatches.saved.nbytes:
        fields |= {"bytes": saved, "bytes_per_token": saved / tokens}
    return fields


def unused_warnings(trainer: Trainer) -> list[str]:
    """A warning about modules that should compute by the recipe but did not compute in a step; else []."""
    unused = trainer.adapter.unused()
    if not unused:
        return []
    more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
    return [
        f"{', '.join(unused[:3])}{more}: converted, but not used in the first step; something reads the weights and"
        " passes by the module, or never calls it, so the recipe says nothing of it"
    ]


def steps_fields(trainer: Trainer) -> dict[str, str | None]:
    """The field on how steps run: "graph" or "eager", the reason for "eager", and for a user's model what TorchInductor
    has compiled."""
    reason, compiled = trainer.runner.reason, trainer.adapter.compiled
    steps = {"run": "graph" if reason is None else "eager", "reason": reason}
    return steps if compiled is None else steps | {"compiled": str(compiled)}


def schedule_fields(trainer: Trainer) -> list[dict[str, object]]:
    """For each change of the recipe: the first step on the new recipe, and the GEMM plans that change."""
    plans = [stage_plans(trainer, stage) for stage in trainer.stages]
    return [
        {
            "first_step": stage.first_step,
            "gemm_plan": {name: new.get(name, {}) for name in old | new if new.get(name) != old.get(name)},
        }
        for stage, (old, new) in zip(trainer.stages[1:], pairwise(plans), strict=True)
    ]


def stage_plans(trainer: Trainer, stage: Stage) -> dict[str, dict[str, str]]:
    """Module -> GEMM -> "a x b: plan", in the recipe of a stage. Attention in high precision is left out, as torch
    computes it."""
    modules = [module for module in quantized_modules(trainer.model) if module.module_type in MODULE_GEMMS]
    resolved = stage.recipe.resolve(roles_of(trainer.model))
    place = {"gemm_mode": stage.recipe.gemm, "device": trainer.device}
    plans = {}
    for module in modules:
        quantizers = module.chosen(resolved)
        pairs = {
            gemm: [getattr(quantizers[tensor], direction) for tensor, direction in operands]
            for gemm, operands in MODULE_GEMMS[module.module_type].items()
        }
        low = any(not format.high_precision for pair in pairs.values() for format in pair)
        if low or module.module_type != "dpa":
            plans[module.name] = {
                gemm: f"{a} x {b}: {_plan(module, gemm, a, b, **place)}" for gemm, (a, b) in pairs.items()
            }
    return trainer.microbatches.of_all_stages(plans)


def _plan(module: QuantizedModule, gemm: str, a: Format, b: Format, gemm_mode: str, device: torch.device) -> str:
    if not isinstance(module, GroupedBase):
        return str(gemm_plan(a, b, native.capability_of(device), gemm_mode))
    return str(module.plan(gemm, a, b, device, gemm_mode))
