"""Checkpoints of others are data: no code of them runs, and what they hold is checked, whatever their hash says."""

import io
import os
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from hqsweep.formats.inputs import draw
from hqsweep.quant import HybridQuantizer
from hqsweep.quant.tensor import HybridQuantizedTensor, rebuild
from hqsweep.train.checkpoint import NotAsWritten, read_state


class Code:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Rebuilt:
    """A pickle that calls hqsweep's own function, which torch.load may call, with what it likes."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self):
        return rebuild, self.arguments


def read(state: object, path: Path) -> dict:
    """A checkpoint whose hash is that of the file."""
    file = io.BytesIO()
    torch.save(state, file)
    path.write_bytes(file.getvalue())
    return read_state(path, torch.device("cpu"), sha256(file.getvalue()).hexdigest())


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(NotAsWritten, match=r"a.pt.* it is no checkpoint \(it holds an object of Python, posix.mkdir"):
        read({"model": Code(tmp_path / "made")}, tmp_path / "a.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda buffers, told: buffers.update(rowwise_q=torch.zeros(3, dtype=torch.uint8)), "rowwise_q .* takes"),
        (lambda buffers, told: buffers.pop("rowwise_s"), "rowwise_s .* is missing"),
        (lambda buffers, told: told.update(shape=[2**40, 2**40]), "it is no checkpoint"),
        (lambda buffers, told: told.update(quantizer="nvpf4"), "nvpf4"),
        (lambda buffers, told: told.update(kind="Code"), "Code"),
        (lambda buffers, told: told.clear(), "it is no checkpoint"),
    ],
)  # fmt: skip
def test_a_quantized_tensor_is_what_its_formats_say(change, message, tmp_path: Path) -> None:
    tensor = HybridQuantizedTensor.quantize(draw("normal", 64, 96), HybridQuantizer.parse("nvfp4|mxfp8"))
    _, (buffers, told, *_) = tensor.__reduce_ex__(2)
    assert read({"w": Rebuilt(buffers, told)}, tmp_path / "a.pt")["w"].shape == (64, 96)
    change(buffers, told)
    with pytest.raises(NotAsWritten, match=message):
        read({"w": Rebuilt(buffers, told)}, tmp_path / "a.pt")


def test_nothing_in_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"")
    with pytest.raises(NotAsWritten, match="it is no checkpoint"):
        read_state(tmp_path / "a.pt", torch.device("cpu"), sha256(b"").hexdigest())
