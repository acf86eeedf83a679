"""The job convergence: trains one model under one recipe, and writes its loss curve and error statistics."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import hqsweep
from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.safe import loads
from hqsweep.config.study import ForkConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.jobs.isolation import make_deterministic
from hqsweep.jobs.sink import Sink
from hqsweep.jobs.training_report import Report, captured_file, go_back, refusal, trainer_fields
from hqsweep.ops.attention import frontend_version
from hqsweep.ops.fingerprint import kernel_digest
from hqsweep.parallel.mesh import join
from hqsweep.parallel.wire.collectives import by_first
from hqsweep.train import data
from hqsweep.train.build import check_native, pick_device
from hqsweep.train.checkpoint import Saver, go_on_from, newest, read_state, save_checkpoint, step_of
from hqsweep.train.corpus import SHOWN_DIGITS, check_planned, stamp_of
from hqsweep.train.data import Dataset
from hqsweep.train.fork import begin_source
from hqsweep.train.loop import Trainer
from hqsweep.train.record import (
    ANOTHER_FILE,
    ANOTHER_RUN,
    ID_DIGITS,
    NotAsWritten,
    Record,
    check_recorded,
    discard,
    fault_of,
    is_point,
    read_record,
    record_path,
)


def run(config: ConvergenceConfig, sink: Sink, workspace: Path) -> None:
    """Train to config.train.steps, from the newest checkpoint in workspace/checkpoint if there is one.

    Raises Diverged where the loss is not finite, UserError where data or device are missing, and the errors of
    check_native.
    """
    ranks = join(config.train.parallel, _device(config))
    device = ranks.device
    sink.phase("loading data")
    stamp = stamp_of(config.data)
    dataset = data.loaded(config.data)
    check_planned(config.data, config.data.hash or by_first(lambda: seen_before(workspace)), dataset.hash)
    check_native(config, device, dataset.vocab_size)
    ranks.agree(partial(shared_facts, config, dataset, device))
    path = by_first(lambda: go_back(config, sink, workspace, dataset.hash))
    build = partial(Trainer, config, dataset, config.recipe.build(), device, ranks)
    if path is not None:
        make_up(build, config, sink, path, dataset.hash)
    sink.phase("building the model")
    trainer = build()
    ranks.agree(lambda: {"the code of the model": dict(trainer.adapter.facts)})
    known = trainer_fields(trainer)
    sink.manifest(**known)
    for line in known.get("warnings", []):
        ranks.say(f"warning: {line}")
    if path is not None:
        go_on_from(trainer, path)
    else:
        begin(trainer, workspace)
    sink.manifest(**trainer.trunk)
    report = Report(trainer, sink, captured_file(config, workspace), known.get("warnings", []))
    sink.phase("first step")
    _train(trainer, report, sink, workspace / "checkpoint", partial(data.check_same, config.data, dataset, stamp))


def _device(config: ConvergenceConfig) -> torch.device:
    """Return the device of the run, on which torch's algorithms are deterministic. UserError for a missing GPU."""
    device = pick_device(config.train.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device is cuda, but this machine has no CUDA device; use train.device=cpu or auto")
    if device.type == "cuda":
        make_deterministic()
    return device


def _train(trainer: Trainer, report: Report, sink: Sink, folder: Path, check_data: Callable[[], None]) -> None:
    """Run the steps that are left, report them, and save checkpoints in `folder`.

    check_data: raises if the data have changed; called before each checkpoint and at the end.
    """
    config, train, dataset = trainer.config, trainer.config.train, trainer.dataset
    with Saver(trainer, folder, run=sink.run_id, data=dataset.hash) as saver:
        for done in trainer.steps():
            report.step(done)
            due = (done.step - config.start) % train.checkpoint_every == 0 and done.step < train.steps
            if due or done.step in trainer.kept:
                check_data()
                saver.save(sink.mark())
        check_data()
        report.end()
        if not config.start and trainer.step not in trainer.kept:
            saver.save(sink.mark())
    if config.start:
        by_first(lambda: shutil.rmtree(folder, ignore_errors=True))  # a finished fork needs no checkpoint


def seen_before(workspace: Path) -> str | None:
    """The hash of the data that a run of an earlier version has read, from its manifest; None where it does not say.

    The configs of earlier versions have no such hash.
    """
    try:
        return loads((workspace / "manifest.json").read_bytes()).get("data_hash")
    except (OSError, ValueError, AttributeError):
        return None


def shared_facts(config: ConvergenceConfig, dataset: Dataset, device: torch.device) -> dict[str, object]:
    """The facts in which all ranks of a run must agree. Their names are parts of sentences."""
    keys = config.model_dump(mode="json", exclude={"runs_dir", "engine", "track"})
    return {
        "the version of hqsweep": hqsweep.__version__,
        "the version of torch": torch.__version__,
        "the version of nvidia-cudnn-frontend": frontend_version(),
        "recipe": keys.pop("recipe"),
        "seed": keys.pop("seed"),
        "data": dataset.hash,
        "config": keys,
        "the numbers of their kernels": kernel_digest(device),
    }


def make_up(build: Callable[[], Trainer], config: ConvergenceConfig, sink: Sink, last: Path, data_hash: str) -> None:
    """Train a trunk again to each fork point up to the checkpoint `last` whose state it lacks, with a trainer from
    build().

    A state is missing if it was asked for after the trunk had passed the point, or if it is damaged. The rows are there
    already.
    """
    before, trainer = partial(refusal, config, sink, last.parent.parent, data_hash), None
    for point in by_first(lambda: lacking(config, sink, last)):
        sink.phase("training again to fork points that it had passed")
        start, _ = by_first(partial(newest, last.parent, before, before=point + 1))
        if trainer is None:
            trainer = build()
            if start is None:
                begin(trainer, last.parent.parent)
        if start is not None and trainer.step < step_of(start):
            go_on_from(trainer, start)
            trainer.val_loss = trainer.evaluate() if trainer.step == point else None
        for done in trainer.steps(last=point):
            if done.loss is not None:
                sink.progress(done.step, config.train.steps, done.loss, None)
        save_checkpoint(trainer, last.parent, rows=sink.mark(point), run=sink.run_id, data=data_hash)


def lacking(config: ConvergenceConfig, sink: Sink, last: Path) -> list[int]:
    """The fork points up to the checkpoint `last` without a state. Damaged states are deleted."""
    states = {at: last.with_stem(f"step_{at}") for at in config.points if at <= step_of(last)}
    for path in states.values():
        if path.exists() and (fault := fault_of(path, sink.run_id)):
            sink.repaired(f"{fault}; the trunk was trained again to that point")
            discard(path)
    return [at for at, path in states.items() if not is_point(path)]


def begin(trainer: Trainer, workspace: Path) -> None:
    """Give a new trainer the state that its run starts from, if that is not the initial one."""
    if trainer.config.start:
        begin_fork(trainer, workspace)
    elif trainer.config.fork and trainer.config.fork.source:
        begin_source(trainer, trainer.config.fork)


def begin_fork(trainer: Trainer, workspace: Path) -> None:
    """Give the trainer the state of its trunk.

    UserError where the state is missing, is not what the trunk wrote, or belongs to another step.
    """
    fork = trainer.config.fork
    path = fork.state_path(workspace, trainer.config.train.parallel.world)
    if not path.exists():
        raise UserError(
            f"fork.trunk: {path} is not there, so its trunk has not come to step {fork.start}, or was trained for other"
            " points; the sweep's command trains it"
        )
    try:
        trunk, sha256 = read_trunk(fork, path, trainer.device, trainer.dataset.hash)
    except NotAsWritten as error:
        again = "give the file that was forked" if fork.trunk_hash else "the sweep's command trains the trunk again"
        raise Damaged(path, f"{error.fault}, so it is no state of the trunk {fork.trunk_name}", again) from None
    trainer.fork_from(trunk)
    if trainer.step != fork.start:
        name = path.with_stem(f"step_{trainer.step}").name
        raise UserError(f"fork.trunk: {path} holds step {trainer.step}; give it the name {name}")
    trainer.trunk["trunk_sha256"] = sha256


def read_trunk(fork: ForkConfig, path: Path, device: torch.device, data_hash: str) -> tuple[dict | Path, str]:
    """(state, hash) of a trunk: its state and the hash of the file, or the folder that its ranks wrote and the folder's
    hash.

    Raises NotAsWritten where the hash is not the trunk's, UserError where the trunk has read other data.
    """
    if path.is_dir():
        return path, by_first(lambda: check_trunk(fork, check_recorded(path), path, data_hash))
    if fork.trunk_hash is not None:
        if record_path(path).exists():  # earlier versions wrote no record
            check_trunk(fork, read_record(path), path, data_hash)
        return read_state(path, device, fork.trunk_hash), fork.trunk_hash
    return read_state(path, device), check_trunk(fork, read_record(path), path, data_hash)


def check_trunk(fork: ForkConfig, record: Record, path: Path, data_hash: str) -> str:
    """The hash of a checkpoint with this record.

    Raises NotAsWritten where it is not the hash of the fork's trunk, UserError where the data differ.
    """
    if fork.trunk_hash is None and not fork.trunk.endswith(record.run[:ID_DIGITS]):
        raise NotAsWritten(path, ANOTHER_RUN)
    if fork.trunk_hash not in (None, record.sha256):
        raise NotAsWritten(path, ANOTHER_FILE)
    if record.data not in ("", data_hash):
        raise UserError(
            f"fork.trunk: {path} is of a trunk on other data (hash {record.data[:SHOWN_DIGITS]}) than its fork has"
            f" ({data_hash[:SHOWN_DIGITS]}); put the trunk's data back"
        )
    return record.sha256
