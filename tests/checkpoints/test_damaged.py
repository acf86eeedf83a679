"""Bytes of a checkpoint that were flipped, cut, doubled or swapped at random: it is refused in a sentence, or is read,
and nothing else is raised."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints.titan import write
from torch import nn

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.weights import load_checkpoint
from hqsweep.errors import UserError

TRIES = 100


class Small(nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4))


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(4, 3), "b": torch.ones(4)}


def damaged(content: bytes, draw: random.Random, most: int) -> bytes:
    """One random damage in the first `most` bytes."""
    data = bytearray(content)
    at, length = draw.randrange(min(most, len(data))), draw.choice([1, 2, 4, 8, 40])
    kind = draw.choice(["flip", "set", "cut", "delete", "double"])
    if kind == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "set":
        data[at : at + length] = draw.choice([b"\0", b"\xff", b"A"]) * length
    elif kind == "cut":
        del data[at:]
    elif kind == "delete":
        del data[at : at + length]
    else:
        data[at:at] = data[at : at + length]
    return bytes(data)


def safetensors(folder: Path) -> tuple[Path, Path]:
    save_file(state(), folder / "model.safetensors")
    return folder, folder / "model.safetensors"


def torch_file(folder: Path, *, zipped: bool = True) -> tuple[Path, Path]:
    torch.save({"model": state(), "step": 1}, folder / "a.pt", _use_new_zipfile_serialization=zipped)
    return folder / "a.pt", folder / "a.pt"


def metadata(folder: Path) -> tuple[Path, Path]:
    write(state(), folder / "a")
    return folder / "a", folder / "a/.metadata"


def chunks(folder: Path) -> tuple[Path, Path]:
    write(state(), folder / "a")
    return folder / "a", folder / "a/__0_0.distcp"


@pytest.mark.parametrize("make", [safetensors, torch_file, metadata, chunks])
def test_it_is_read_or_refused(make, tmp_path: Path) -> None:
    path, file = make(tmp_path)
    content, draw, refused = file.read_bytes(), random.Random(make.__name__), 0
    for _ in range(TRIES):
        file.write_bytes(damaged(content, draw, 1500))
        model = Small()
        try:
            inspect_checkpoint(path)
            load_checkpoint(path, model)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
            assert not any(p.any() for p in model.parameters())
    assert refused > TRIES // 4
    file.write_bytes(content)
    load_checkpoint(path, model)
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters())
