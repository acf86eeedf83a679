"""The optimizer's state that trainers keep beside the weights of a folder: its files, and its layout."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

from hqsweep.checkpoints.foreign import deepspeed
from hqsweep.checkpoints.foreign.dcp_metadata import METADATA

FILES = ("optimizer.pt", "optimizer.bin")
"""The files of Hugging Face's Trainer, and of accelerate: a plain optimizer's state_dict, or FSDP's whole one, by
names."""
SHARDED = "optimizer_0"
"""The folder of accelerate's sharded state of FSDP."""
RANKS = "optimizer_0_rank*.bin"


@dataclass(frozen=True, kw_only=True)
class StateBeside:
    """The optimizer's state beside weights. kind: as Checkpoint.optimizer; paths: as Checkpoint.moments; hashed: its
    files; problems and notes: as those of Checkpoint."""

    kind: str = "none"
    paths: tuple[Path, ...] = ()
    hashed: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


NO_STATE = StateBeside()


def state_beside(folder: Path) -> StateBeside:
    """The state beside the weights of a folder; no tensor is read."""
    for name in FILES:
        if (file := folder / name).is_file():
            if not zipfile.is_zipfile(file):
                fault = f"{name} is cut short, or no file of torch.save: copy it again, or take it out of the folder"
                return StateBeside(problems=(fault,))
            return StateBeside(kind="indexed" if name == FILES[0] else "named", paths=(file,), hashed=(file,))
    sharded = folder / SHARDED
    if (sharded / METADATA).is_file():
        files = (sharded / METADATA, *sorted(sharded.glob("*.distcp")))
        return StateBeside(kind="named", paths=(sharded,), hashed=files)
    if any(folder.glob(RANKS)):
        note = "the optimizer's state of FSDP is a file of each rank, which is not read; save it with use_dcp=True"
        return StateBeside(notes=(note,))
    if (folder / deepspeed.LATEST).is_file():
        files, fault = deepspeed.state_files(folder)
        if fault:
            return StateBeside(notes=(f"the optimizer's state of DeepSpeed is not read: {fault}",))
        return StateBeside(kind="named", paths=files, hashed=files)
    return NO_STATE
