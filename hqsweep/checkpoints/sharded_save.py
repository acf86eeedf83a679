"""save_sharded, save_sharded_async: the checkpoint of a training over ranks, which any other number of ranks loads.

torch.distributed.checkpoint writes it, each rank its shards, in torchtitan's layout. A program of torch alone, with the
same model and torch.optim.AdamW, finds every key of get_model_state_dict. Under optimizer it finds every key of the
flattened get_optimizer_state_dict, where each parameter has made a step. The checkpoint lies in NAME.partial until all
ranks have written and the disk has it: it is whole or absent.

A save in the background that fails is reported: result() raises its error, else the next save does. Else it is printed
when Python ends, with exit code 120, which is Python's own for an error in the clean-up.
"""

import atexit
import errno
import os
import shutil
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as torch_dcp

from hqsweep.checkpoints.sharded_state import collect, joined
from hqsweep.errors import UserError
from hqsweep.host import sync_folder
from hqsweep.parallel.wire.collectives import by_first, is_many, rank_in, together

PROBE = bytes(1 << 20)
"""Bytes that are written to learn the disk's refusal: more than a failed write leaves free."""
WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is larger than the file system or `ulimit -f` allows",
    errno.EROFS: "the file system is read-only",
}


class Saving:
    """A checkpoint that is being written beside the training, from copies on the CPU."""

    def __init__(self, future: Future, folder: Path) -> None:
        self._future, self._folder = future, folder
        if not _OPEN:
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)  # the threads have ended when it is called
        _OPEN.append(self)

    def done(self) -> bool:
        """Whether this rank is done."""
        return self._future.done()

    def result(self) -> Path:
        """The path of the checkpoint, once all ranks have written it. Raises the error of any rank."""
        try:
            return self._future.result()
        finally:
            if self._future.done() and self in _OPEN:
                _OPEN.remove(self)

    def fault(self) -> str | None:
        """Why it failed, once it has ended, as a sentence; None where it did not."""
        error = self._future.exception()
        return None if error is None else f"save_sharded_async: '{self._folder}' was not saved: {words_of(error)}"


_OPEN: list[Saving] = []
"""Saves whose result() was not called."""


def settle() -> None:
    """Wait for the saves that are under way. Raise RuntimeError for failed saves whose result was not read."""
    saves, faults = _OPEN[:], [fault for saving in _OPEN if (fault := saving.fault())]
    _OPEN[:] = [saving for saving in _OPEN if saving not in saves]
    if faults:
        raise RuntimeError("; ".join(faults))


def _at_exit() -> None:
    try:
        settle()
    except RuntimeError as error:
        print(f"hqsweep: {error}", file=sys.stderr, flush=True)
        sys.stderr = _Failing(sys.stderr)


class _Failing:
    """A stream that cannot be flushed. It makes Python exit with a failure, while other exit handlers still run."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        raise OSError(errno.EIO, "a checkpoint was not saved")


def words_of(error: BaseException) -> str:
    """An error in one line, plain where the disk refused."""
    known = WORDS.get(error.errno) if isinstance(error, OSError) else None
    return known or " ".join(f"{type(error).__name__}: {error}".split())


def disk_fault(folder: Path) -> OSError | None:
    """Return the disk's error if a folder's largest file cannot grow; None if it can, or the folder is missing.

    torch's own message of a failed write ("unexpected pos 704 vs 598") does not say it.
    """
    if not folder.is_dir():
        return None
    files = [path for path in folder.rglob("*") if path.is_file()]
    try:
        with open(max(files, key=lambda path: path.stat().st_size, default=folder / "probe"), "ab") as file:
            file.write(PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return OSError(error.errno, WORDS.get(error.errno, error.strerror), str(folder).removesuffix(".partial"))
    return None


Optimizer = torch.optim.Optimizer | None


def save_sharded(
    model: nn.Module,
    optimizer: Optimizer,
    folder: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
    *,
    group: Any = None,
) -> Path:
    """Write a training's state as a new folder of torch.distributed.checkpoint; all ranks of `group` call it.

    model: plain, fully_shard'ed, in DistributedDataParallel, of DTensors, or one stage of several with names of its
    own. Each weight is written by its name in the plain model, as its FP32 master (Shard or whole, as it is held), with
    the optimizer's other states. Also written are histories of delayed scaling, keys of random bits, the groups'
    options, and each rank's state of torch's generators. optimizer: None for the weights alone. extra: the caller's own
    numbers, texts, None, tensors, lists, and mappings with text keys, equal on all ranks.

    If it is killed, it leaves at most NAME.partial, which the next call clears; if it fails, nothing. It raises on all
    ranks: UserError where the folder exists already, and for a model that cannot be written so; OSError where the disk
    refuses; RuntimeError, before it writes, for an earlier asynchronous save that failed.
    """
    state = _collected(model, optimizer, folder, extra or {}, group)
    return _write(state, Path(folder), group)


def save_sharded_async(
    model: nn.Module,
    optimizer: Optimizer,
    folder: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
    *,
    group: Any = None,
) -> Saving:
    """save_sharded in the background: when it returns, everything is copied to the CPU, and training may go on.

    The next save waits for it. One that fails leaves nothing: result() raises its error, else the next save does. Else
    it is printed on stderr when Python ends, with exit code 120.
    """
    state = _collected(model, optimizer, folder, extra or {}, group)
    staged = torch_dcp.FileSystemWriter(folder).stage(state)
    own = _beside(group) if is_many(group) else None
    pool = ThreadPoolExecutor(1, thread_name_prefix="hqsweep-save")
    future = pool.submit(_write, staged, Path(folder), own)
    pool.shutdown(wait=False)
    return Saving(future, Path(folder))


def _collected(model: nn.Module, optimizer: Optimizer, folder: Any, extra: Mapping[str, Any], group: Any) -> dict:
    """The state to write, after earlier saves have ended and checks have passed."""
    together(settle, group)
    by_first(lambda: _check_new(Path(folder)), group)
    return joined(together(lambda: collect(model, optimizer, extra, rank_in(group)), group), group)


def _check_new(folder: Path) -> None:
    if folder.exists():
        raise UserError(f"save_sharded: '{folder}' is there already; give the name of a new folder, or remove it")
    shutil.rmtree(_partial(folder), ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


_BESIDE: WeakKeyDictionary = WeakKeyDictionary()


def _beside(group: Any) -> Any:
    """Return a gloo group of the same ranks, made once. The training goes on with collectives in the other group."""
    group = group or dist.group.WORLD
    if group not in _BESIDE:
        ranks = dist.get_process_group_ranks(group)
        _BESIDE[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _BESIDE[group]


def _write(state: dict, folder: Path, group: Any) -> Path:
    partial = _partial(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without ranks that it has none
        try:
            torch_dcp.save(
                state,
                storage_writer=torch_dcp.FileSystemWriter(partial),
                process_group=group,
                no_dist=not is_many(group),
            )
        except torch_dcp.api.CheckpointException as error:
            _raise(error, partial, group)
    try:
        by_first(lambda: _name(partial, folder), group)
    except (OSError, UserError):
        _clear(partial, group)
        raise
    return folder


def _raise(error: Any, partial: Path, group: Any) -> None:
    """Clear away the partial folder, and raise the first failure of a rank, or the disk's refusal if that caused it. An
    exception that stops this process is raised as it is, and nothing is cleared."""
    rank, (first, _) = next(iter(error.failures.items()))
    if not isinstance(first, Exception):
        raise first
    refused = together(lambda: disk_fault(partial), group)
    _clear(partial, group)
    if refused is not None:
        raise refused from first
    if isinstance(first, OSError):
        raise first
    raise RuntimeError(f"rank {rank}: {type(first).__name__}: {first}") from first


def _clear(partial: Path, group: Any) -> None:
    by_first(lambda: shutil.rmtree(partial, ignore_errors=True), group)


def _name(partial: Path, folder: Path) -> None:
    sync_folder(partial)
    partial.rename(folder)
    sync_folder(folder.parent)
