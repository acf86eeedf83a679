"""inspect_checkpoint: the kind and the contents of a checkpoint, from its headers alone.

Folders with weights of torch.save are one pytorch_model.bin, several with an index, or accelerate's under FSDP: whole
(pytorch_model_fsdp.bin), or sharded (pytorch_model_fsdp_0, of torch.distributed.checkpoint).
"""

import os
from dataclasses import replace
from pathlib import Path

from hqsweep.checkpoints import dcp, deepspeed, huggingface, torch_file
from hqsweep.checkpoints.checkpoint import Checkpoint, first_names, step_in_name
from hqsweep.checkpoints.dcp_metadata import METADATA
from hqsweep.checkpoints.huggingface import state_beside
from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.models.hf_folder import gguf_folder, is_gguf

KINDS = (
    "a Hugging Face folder with safetensors, a .safetensors, .gguf or .pt file, or a folder of"
    " torch.distributed.checkpoint"
)
MEGATRON = (
    "a checkpoint of Megatron-Core, whose tensors are fused and stacked by its own names; export it to Hugging Face"
    " (Megatron Bridge: AutoBridge.export_ckpt) and give that folder, whose optimizer begins anew"
)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def inspect_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The description of a checkpoint. No tensor is read and no code of it is run.

    path: a Hugging Face folder (config.json beside model.safetensors, pytorch_model.bin or their index; also
    accelerate's pytorch_model_fsdp*), a .safetensors file, or a folder of torch.distributed.checkpoint (.metadata
    beside *.distcp). It may also be a file of torch.save with a state_dict, bare or under "model", "state_dict" or
    "module", or a GGUF file, of which the folder that is kept (models.hf_folder) is described.

    A checkpoint that is half written, or cannot be loaded for another reason, says so in .problems; check() raises it.
    UserError for a path that is not a checkpoint at all.
    """
    path = Path(path)
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise UserError(f"'{path}' is not there; give {KINDS}")
    if reason := megatron(path):
        raise UserError(f"'{path}' is {reason}")
    if (path / dcp.METADATA).is_file() or any(path.glob("*.distcp")):
        return dcp.inspect_folder(path)
    checkpoint = huggingface.inspect_folder(path) or _torch_folder(path)
    if checkpoint is not None:
        return checkpoint
    raise UserError(f"'{path}' is no checkpoint: {_instead(path)}")


def megatron(folder: Path) -> str | None:
    """Why a folder of Megatron-Core is not read; None for any other."""
    known = folder / "metadata.json"
    try:
        words = loads(known.read_bytes()) if known.is_file() else {}
    except ValueError:
        words = {}
    if (isinstance(words, dict) and "sharded_backend" in words) or any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        return MEGATRON
    return None


def _file(path: Path) -> Checkpoint:
    if is_gguf(path):
        return inspect_checkpoint(gguf_folder(path, "checkpoint"))
    if path.suffix == ".safetensors":
        return huggingface.inspect_file(path)
    if path.suffix in TORCH_SUFFIXES:
        return torch_file.inspect_file(path)
    if path.name in ("config.json", huggingface.INDEX, dcp.METADATA):
        raise UserError(f"'{path}' is a part of a checkpoint; give its folder, {path.parent}")
    raise UserError(f"'{path}' is no checkpoint that is known by its name; give {KINDS}")


def _instead(folder: Path) -> str:
    """The content of a folder without a checkpoint, and which path to give instead."""
    steps = sorted(path.name for path in folder.iterdir() if path.is_dir() and step_in_name(path) is not None)
    if steps:
        return f"it holds {first_names(steps)}; give one of them"
    if (folder / "adapter_model.safetensors").is_file():
        return "it holds an adapter of PEFT alone; merge it into its model (merge_and_unload) and save that"
    if any(folder.glob("pytorch_model_fsdp_rank*.bin")):
        return "its weights are a file of each rank of FSDP; save it with use_dcp=True, or whole (FULL_STATE_DICT)"
    if (folder / deepspeed.LATEST).is_file():
        return (
            "its weights are in the parts of DeepSpeed's ranks; `python zero_to_fp32.py . . --safe_serialization` in it"
            " writes safetensors beside them"
        )
    if any(folder.glob("zero_pp_rank_*")) or any(folder.glob("bf16_zero_pp_rank_*")):
        return f"it is the folder of one step of DeepSpeed's ranks; give the one above it, {folder.parent}"
    if (folder / "config.json").is_file():
        return "it has a config.json and no weights; copy model.safetensors beside it"
    runs = sorted(path for path in folder.glob("checkpoint/step_*") if path.suffix in ("", ".pt"))
    if runs:
        return f"it is the folder of a run; give one of its checkpoints, such as {runs[-1]}"
    return f"give {KINDS}"


INDEX = "pytorch_model.bin.index.json"
WHOLE = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
SHARDED = "pytorch_model_fsdp_0"


def _torch_folder(folder: Path) -> Checkpoint | None:
    """Return the description of such a folder; None for any other. Moments and step are read from beside the
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
