"""inspect_checkpoint: what a checkpoint is and holds, from its headers alone."""

import os
from pathlib import Path

from hqsweep.checkpoints import dcp, huggingface, torch_file
from hqsweep.checkpoints.checkpoint import Checkpoint, first_names
from hqsweep.errors import UserError

KINDS = (
    "a Hugging Face folder with safetensors, a .safetensors or .pt file, or a folder of torch.distributed.checkpoint"
)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def inspect_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """What a checkpoint holds. No tensor is read and no code of it is run.

    path: a Hugging Face folder (config.json beside model.safetensors or its index), a .safetensors file, a file of
    torch.save with a state_dict, bare or under "model", "state_dict" or "module", or a folder of
    torch.distributed.checkpoint (.metadata beside *.distcp).

    What is half written or otherwise not to be loaded stands in .problems, and check() raises it. UserError for what is
    no checkpoint at all.
    """
    path = Path(path)
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise UserError(f"'{path}' is not there; give {KINDS}")
    if (path / dcp.METADATA).is_file() or any(path.glob("*.distcp")):
        return dcp.inspect_folder(path)
    found = huggingface.inspect_folder(path)
    if found is not None:
        return found
    if (path / "pytorch_model.bin").is_file():
        return torch_file.inspect_file(path / "pytorch_model.bin")
    raise UserError(f"'{path}' is no checkpoint: {_instead(path)}")


def _file(path: Path) -> Checkpoint:
    if path.suffix == ".safetensors":
        return huggingface.inspect_file(path)
    if path.suffix in TORCH_SUFFIXES:
        return torch_file.inspect_file(path)
    if path.name in ("config.json", huggingface.INDEX, dcp.METADATA):
        raise UserError(f"'{path}' is a part of a checkpoint; give its folder, {path.parent}")
    raise UserError(f"'{path}' is no checkpoint that is known by its name; give {KINDS}")


def _instead(folder: Path) -> str:
    """What is in a folder that is no checkpoint, and what to give."""
    steps = sorted(
        each.name for each in folder.iterdir() if each.is_dir() and huggingface.step_in_name(each) is not None
    )
    if steps:
        return f"it holds {first_names(steps)}; give one of them"
    if (folder / "adapter_model.safetensors").is_file():
        return "it holds an adapter of PEFT alone; merge it into its model (merge_and_unload) and save that"
    if (folder / "pytorch_model.bin.index.json").is_file():
        return "its weights are several .bin files; save it again by transformers, which writes safetensors"
    if (folder / "config.json").is_file():
        return "it has a config.json and no weights; copy model.safetensors beside it"
    runs = sorted(folder.glob("checkpoint/step_*.pt"))
    if runs:
        return f"it is the folder of a run; give one of its files, such as {runs[-1]}"
    return f"give {KINDS}"
