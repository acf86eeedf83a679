"""convergence: train one model under one recipe and write its loss curve and error statistics."""

import os
import re
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from hqsweep.config.fork import ForkConfig
from hqsweep.config.job import ConvergenceConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.formats import Format
from hqsweep.gemm import native
from hqsweep.gemm.plan import gemm_plan
from hqsweep.jobs.resume import captured_file, go_back, refusal, save_captured
from hqsweep.jobs.sink import Diverged, Sink
from hqsweep.models.build import gemm_modules
from hqsweep.nn.grouped import GroupedBase
from hqsweep.nn.module import QuantizedModule, quantized_modules
from hqsweep.ops.fingerprint import fingerprint
from hqsweep.recipe.pairs import MODULE_GEMMS
from hqsweep.recipe.stages import Stage
from hqsweep.train import data
from hqsweep.train.checkpoint import newest, read_state, save_checkpoint, step_of
from hqsweep.train.data import Dataset
from hqsweep.train.loop import Throughput, Trainer, is_finite, pick_device
from hqsweep.train.record import ANOTHER_RUN, ID_DIGITS, NotAsWritten, discard, fault_of, is_point, read_record
from hqsweep.train.source import UNSETTLED, begin_source, unsettled


def run(config: ConvergenceConfig, sink: Sink, workspace: Path) -> None:
    """Train to config.train.steps, going on from workspace/checkpoint when there is one.

    Raises Diverged when the loss is not finite, UserError when the data or the device is not there, or check_native's.
    """
    train, device = config.train, pick_device(config.train.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device is cuda, but this machine has no CUDA device; use train.device=cpu or auto")
    if device.type == "cuda":
        make_deterministic()
    sink.phase("loading data")
    dataset = data.loaded(config.data)
    check_native(config, device, dataset.vocab_size)
    folder = workspace / "checkpoint"
    path = go_back(config, sink, workspace)
    if path is not None:
        make_up(config, dataset, device, sink, path)
    sink.phase("building the model")
    trainer = Trainer(config, dataset, config.recipe.build(), device)
    known = facts(trainer)
    warnings = known.get("warnings", [])
    sink.manifest(**known)
    for line in warnings:
        print(f"warning: {line}", flush=True)
    if path is not None:
        trainer.load_state(read_state(path, device))
    else:
        begin(trainer, workspace)
    sink.manifest(**trainer.trunk)
    throughput = Throughput(train.batch * train.context)
    throughput.at(trainer.step)
    first, loss, ran = trainer.step + 1, None, None
    sink.phase("first step")
    for done in trainer.steps():
        if done.step == first:
            sink.manifest(saved_for_backward=saved_facts(trainer))
            sink.phase(None)
            if lines := unused_warnings(trainer):
                warnings = [*warnings, *lines]
                sink.manifest(unused=trainer.adapter.unused(), warnings=warnings)
        if (now := steps_facts(trainer)) != ran:
            ran = now
            sink.manifest(steps=ran)
        sink.rows("stats", done.stats)
        if done.captured:
            save_captured(done.captured, captured_file(config, workspace), sink.run_id)
        if done.metrics:
            sink.metric(done.step, done.metrics)
        loss = loss if done.loss is None else done.loss
        sink.progress(done.step, train.steps, loss, throughput.at(done.step))
        if not is_finite(done.loss):
            raise Diverged(done.step, done.loss, train.lr)
        if line := unsettled(trainer):
            print(f"warning: {line}", flush=True)
            sink.manifest(**trainer.trunk)
        due = (done.step - config.start) % train.checkpoint_every == 0 and done.step < train.steps
        if due or done.step in trainer.kept:
            save_checkpoint(trainer, folder, rows=sink.mark(), run=sink.run_id)
    if late := [*trainer.trunk.get(UNSETTLED, ()), *dataset.untrained(trainer.val_loss)]:
        sink.manifest(warnings=[*warnings, *late])
    if config.start:
        shutil.rmtree(folder, ignore_errors=True)  # a fork is short, and its trunk is there
    elif trainer.step not in trainer.kept:
        save_checkpoint(trainer, folder, rows=sink.mark(), run=sink.run_id)


def make_up(config: ConvergenceConfig, dataset: Dataset, device: torch.device, sink: Sink, last: Path) -> None:
    """Train a trunk that goes on from the checkpoint `last` again to each point whose state it lacks, as it was asked
    for after the trunk had passed it, or was damaged. The rows are there already."""
    before = partial(refusal, config, sink, last.parent.parent)
    states = {at: last.with_name(f"step_{at}.pt") for at in config.points if at <= step_of(last)}
    for path in states.values():
        if path.exists() and (fault := fault_of(path, sink.run_id)):
            sink.repaired(f"{fault}; the trunk was trained again to that point")
            discard(path)
    missing, trainer = [at for at, path in states.items() if not is_point(path)], None
    for point in missing:
        sink.phase("training again to fork points that it had passed")
        start, _ = newest(last.parent, before, before=point + 1)
        if trainer is None:
            trainer = Trainer(config, dataset, config.recipe.build(), device)
            if start is None:
                begin(trainer, last.parent.parent)
        if start is not None and trainer.step < step_of(start):
            trainer.load_state(read_state(start, device))
            trainer.val_loss = trainer.evaluate() if trainer.step == point else None
        for done in trainer.steps(last=point):
            if done.loss is not None:
                sink.progress(done.step, config.train.steps, done.loss, None)
        save_checkpoint(trainer, last.parent, rows=sink.mark(point), run=sink.run_id)


def begin(trainer: Trainer, workspace: Path) -> None:
    """Give a trainer that has made no step what it begins with, where that is not its initial state."""
    if trainer.config.start:
        begin_fork(trainer, workspace)
    elif trainer.config.fork and trainer.config.fork.source:
        begin_source(trainer, trainer.config.fork)


def begin_fork(trainer: Trainer, workspace: Path) -> None:
    """Give the trainer the state of its trunk. UserError where that is not there or not what the trunk wrote, or is one
    of another step."""
    fork = trainer.config.fork
    path = fork.state_file(workspace)
    if not path.is_file():
        raise UserError(
            f"fork.trunk: {path} is not there, so its trunk has not come to step {fork.start}, or was trained for other"
            " points; the sweep's command trains it"
        )
    try:
        state, sha256 = read_trunk(fork, path, trainer.device)
    except NotAsWritten as error:
        again = "give the file that was forked" if fork.trunk_hash else "the sweep's command trains the trunk again"
        raise Damaged(path, f"{error.fault}, so it is no state of the trunk {fork.trunk_name}", again) from None
    if state["step"] != fork.start:
        raise UserError(
            f"fork.trunk: {path} holds step {state['step']}; give the file the name step_{state['step']}.pt"
        )
    trainer.fork_from(state)
    trainer.trunk["trunk_sha256"] = sha256


def read_trunk(fork: ForkConfig, path: Path, device: torch.device) -> tuple[dict, str]:
    """The state of a trunk and the hash of its file. Raises NotAsWritten where it is another than the trunk's."""
    if fork.trunk_hash is not None:
        return read_state(path, device, fork.trunk_hash), fork.trunk_hash
    state, record = read_state(path, device), read_record(path)
    if not fork.trunk.endswith(record.run[:ID_DIGITS]):
        raise NotAsWritten(path, ANOTHER_RUN)
    return state, record.sha256


def check_native(config: ConvergenceConfig, device: torch.device, vocab_size: int) -> None:
    """UserError with all GEMMs on gemm=native that the device has no product for; nothing falls back to gemm=exact."""
    recipe = config.recipe.build()
    if "native" not in (recipe.gemm, *(change.recipe.gemm for change in recipe.schedule)):
        return
    capability = native.capability_of(device)
    if missing := native.device_fault(capability):
        here = "the CPU" if capability is None else torch.cuda.get_device_name(device)
        raise UserError(f"recipe: {missing}; this run is on {here}; recipe.gemm=exact multiplies the same operands")
    config.check_recipe(gemm_modules(config, vocab_size), partial(native.refusal, capability))


def make_deterministic() -> None:
    """Runs on a GPU repeat bit for bit, or raise: deterministic kernels only, and no cuDNN attention.

    On CPU the kernels used here repeat anyway, and the switch would cost two seconds of imports.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it did not write


def facts(trainer: Trainer) -> dict[str, object]:
    """For the manifest: device, the hash of its kernels' numbers, data, sizes, and the plan of every GEMM.

    tokens and epochs count from step 1, for a run that goes on from another one's state too.
    """
    device, dataset, train = trainer.device, trainer.dataset, trainer.config.train
    tokens = train.steps * train.batch * train.context
    warnings = dataset.warnings(tokens)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "kernel_digest": fingerprint(device),
        "data_hash": dataset.hash,
        "data": dataset.facts,
        "params": sum(p.numel() for p in trainer.model.parameters()),
        "tokens": tokens,
        "epochs": dataset.epochs(tokens),
        "gemm_plan": stage_plans(trainer, trainer.stages[0]),
        "recipe_schedule": schedule_facts(trainer),
        **({"warnings": warnings} if warnings else {}),
    }


def saved_facts(trainer: Trainer) -> dict[str, object]:
    """For the manifest: what a microbatch's forward keeps for backward.

    bytes and bytes_per_token are what autograd saved beside the model, and there only where it saves all of it (without
    recomputation and offload). input_bytes_per_element: of the input of each linear, layers taken together where they
    have the same number.
    """
    train = trainer.config.train
    tokens = train.batch // train.microbatches * train.context
    inputs: dict[str, set[float]] = {}
    for name, nbytes in trainer.adapter.saved_inputs(tokens):
        inputs.setdefault(re.sub(r"\.\d+\.", ".*.", name), set()).add(nbytes)
    per_element = {name: found.pop() if len(found) == 1 else sorted(found) for name, found in inputs.items()}
    facts: dict[str, object] = {"input_bytes_per_element": per_element}
    if trainer.saved.nbytes:
        facts |= {"bytes": trainer.saved.nbytes, "bytes_per_token": trainer.saved.nbytes / tokens}
    return facts


def unused_warnings(trainer: Trainer) -> list[str]:
    """What a person must know of a model of which modules that were to compute by the recipe did not in a step."""
    unused = trainer.adapter.unused()
    if not unused:
        return []
    more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
    return [
        f"{', '.join(unused[:3])}{more}: converted, but not used in the first step; something reads the weights and"
        " passes by the module, or never calls it, so the recipe says nothing of it"
    ]


def steps_facts(trainer: Trainer) -> dict[str, str | None]:
    """For the manifest: how steps run, "graph" or "eager", and why eagerly."""
    reason = trainer.runner.reason
    return {"run": "graph" if reason is None else "eager", "reason": reason}


def schedule_facts(trainer: Trainer) -> list[dict[str, object]]:
    """For every change of recipe: the first step on the new one, and the GEMM plans that differ from those before."""
    plans = [stage_plans(trainer, stage) for stage in trainer.stages]
    return [
        {
            "first_step": stage.first_step,
            "gemm_plan": {name: new.get(name, {}) for name in old | new if new.get(name) != old.get(name)},
        }
        for stage, (old, new) in zip(trainer.stages[1:], pairwise(plans), strict=True)
    ]


def stage_plans(trainer: Trainer, stage: Stage) -> dict[str, dict[str, str]]:
    """Module -> GEMM -> "a x b: plan", on the recipe of a stage; without attention in high precision (torch's own)."""
    modules = [module for module in quantized_modules(trainer.model) if module.module_type in MODULE_GEMMS]
    found = stage.recipe.resolve(role for module in modules for role in module.slot_roles().values())
    facts = {"gemm_mode": stage.recipe.gemm, "device": trainer.device}
    plans = {}
    for module in modules:
        quantizers = module.chosen(found)
        pairs = {
            gemm: [getattr(quantizers[tensor], direction) for tensor, direction in operands]
            for gemm, operands in MODULE_GEMMS[module.module_type].items()
        }
        low = any(not format.high_precision for pair in pairs.values() for format in pair)
        if low or module.module_type != "dpa":
            plans[module.name] = {
                gemm: f"{a} x {b}: {_plan(module, gemm, a, b, **facts)}" for gemm, (a, b) in pairs.items()
            }
    return plans


def _plan(module: QuantizedModule, gemm: str, a: Format, b: Format, gemm_mode: str, device: torch.device) -> str:
    if not isinstance(module, GroupedBase):
        return str(gemm_plan(a, b, native.capability_of(device), gemm_mode))
    return str(module.plan(gemm, a, b, device, gemm_mode))
