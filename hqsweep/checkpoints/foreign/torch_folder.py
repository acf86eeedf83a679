"""Folders with weights of torch.save: one pytorch_model.bin, several with an index, or those that accelerate writes
under FSDP, whole (pytorch_model_fsdp.bin) or sharded (pytorch_model_fsdp_0, of torch.distributed.checkpoint)."""

from dataclasses import replace
from pathlib import Path

from hqsweep.checkpoints.foreign import dcp, huggingface, torch_file
from hqsweep.checkpoints.foreign.checkpoint import Checkpoint
from hqsweep.checkpoints.foreign.dcp_metadata import METADATA
from hqsweep.checkpoints.foreign.state_beside import state_beside

INDEX = "pytorch_model.bin.index.json"
WHOLE = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
SHARDED = "pytorch_model_fsdp_0"


def inspect_folder(folder: Path) -> Checkpoint | None:
    """The description of such a folder; None for any other. Its moments and its step are those that lie beside the
    weights."""
    weights = _weights(folder)
    if weights is None:
        return None
    state, config = state_beside(folder), folder / "config.json"
    files = (*weights.files, *([config] if config.is_file() else ()), *state.hashed)
    own = {"optimizer": state.kind, "moments": state.paths} if state.paths else {}
    return replace(
        weights,
        step=weights.step if weights.step is not None else huggingface.trainer_step(folder),
        problems=(*weights.problems, *state.problems),
        notes=(*weights.notes, *state.notes),
        files=files,
        **own,
    )


def _weights(folder: Path) -> Checkpoint | None:
    if (folder / INDEX).is_file():
        try:
            files = huggingface.indexed(folder / INDEX)
        except huggingface.Damage as damage:
            return Checkpoint(
                path=folder, kind="torch", step=None, tensors={}, problems=(str(damage),), files=(), saved_as={}
            )
        return torch_file.inspect_files(folder, files)
    for name in WHOLE:
        if (folder / name).is_file():
            return torch_file.inspect_files(folder, [folder / name])
    if (folder / SHARDED / METADATA).is_file():
        return dcp.inspect_folder(folder / SHARDED)
    return None
