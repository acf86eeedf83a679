"""save_sharded and load_sharded: the checkpoint of a training over any number of ranks, which any other number loads.

torch.distributed.checkpoint writes it, each rank its shards, in torchtitan's layout: a program of torch alone, with the
same model and torch.optim.AdamW, finds every key of get_model_state_dict and, under optimizer, of its flattened
get_optimizer_state_dict, where each parameter has made a step. It is written whole or not at all: it lies in
NAME.partial until all ranks have written and the disk has it.
"""

import os
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as torch_dcp

from hqsweep.checkpoints.sharded.saving import Saving, disk_fault, settle
from hqsweep.checkpoints.sharded.sharded_state import collect, joined
from hqsweep.checkpoints.whole import sync_folder
from hqsweep.errors import UserError
from hqsweep.parallel.wire.objects import by_first, is_many, rank_in, together

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
    own. Each weight is written as its FP32 master (Shard or whole, as it is held), with what the optimizer keeps of it,
    both by its name in the plain model; also histories of delayed scaling, keys of random bits, the groups' options,
    and each rank's state of torch's generators. optimizer: None for the weights alone. extra: what the caller adds:
    numbers, texts, None, tensors, lists, and mappings with text keys, equal on all ranks.

    If it is killed, it leaves at most NAME.partial, which the next call clears; if it fails, nothing. It raises, on all
    ranks: UserError where the folder exists already, and where the model cannot be written so; OSError for what the
    disk refuses; RuntimeError, before it writes, for an asynchronous save before it that failed.
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

    The next save waits for it. One that fails leaves nothing: result() raises why, else the next save does, else it is
    said on stderr when Python ends, with exit code 120.
    """
    state = _collected(model, optimizer, folder, extra or {}, group)
    staged = torch_dcp.FileSystemWriter(folder).stage(state)
    own = _beside(group) if is_many(group) else None
    pool = ThreadPoolExecutor(1, thread_name_prefix="hqsweep-save")
    future = pool.submit(_write, staged, Path(folder), own)
    pool.shutdown(wait=False)
    return Saving(future, Path(folder))


def _collected(model: nn.Module, optimizer: Optimizer, folder: Any, extra: Mapping[str, Any], group: Any) -> dict:
    """What is to be written, after the check that it can be, and the end of the saves before."""
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
    """A group of the same ranks on gloo, made once, because the training goes on with collectives in the other
    group."""
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
    """Clear away what was written, and raise the first failure of a rank, or what the disk refused if that is why.
    What is to stop this process goes on as it is, and clears nothing."""
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
