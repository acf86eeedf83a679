"""What asks a held weight for its memory: a sentence in place of a crash, or the operands' own."""

import subprocess
import sys

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn

import hqsweep
from hqsweep.errors import UserError
from hqsweep.nn import quantized_model_init

ASKED = {
    "untyped_storage.*copy_": lambda w: w.untyped_storage().copy_(torch.zeros(4096).untyped_storage()),
    "untyped_storage.*fill_": lambda w: w.untyped_storage().fill_(0),
    "untyped_storage.*byteswap": lambda w: w.untyped_storage().byteswap(torch.float32),
    "untyped_storage.*share_memory_": lambda w: w.untyped_storage().share_memory_(),
    "untyped_storage.*data_ptr": lambda w: w.untyped_storage().data_ptr(),
    "untyped_storage.*__getitem__": lambda w: w.untyped_storage()[0],
    "untyped_storage.*resize_": lambda w: w.untyped_storage().resize_(10),
    "storage asks": lambda w: w.storage(),
    "numpy": lambda w: w.numpy(),
    "numpy asks": lambda w: numpy.asarray(w),
    "__dlpack__": torch.from_dlpack,
    "asks for the memory of a weight": lambda w: safetensors.torch.save({"w": w}),
}


def held(recipe="mxfp8"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with quantized_model_init():
        hqsweep.convert(model, recipe)
    return model


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.detach(), lambda w: w.detach().clone()], ids=range(3))
def test_memory_that_is_not_there_is_refused(view, asked):
    weight = view(held()[1].weight)
    with pytest.raises(UserError, match=rf"^1: .*{asked}.* held quantized, .*mxfp8.* hqsweep\.save_model"):
        ASKED[asked](weight)


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.detach(), lambda w: w.data, lambda w: w.detach().clone()])
def test_a_dlpack_capsule_is_refused_by_torch(view):
    """torch makes one without asking the tensor's class; reading it ended the process."""
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(view(held()[0].weight).detach())


def test_nothing_else_of_a_storage_is_refused():
    weight = held()[0].weight
    storage = weight.untyped_storage()
    assert storage.nbytes() == 0 and storage.device.type == "cpu" and weight.data_ptr() == 0
    assert weight.detach().untyped_storage()._cdata != 0 and storage.resize_(0) is storage


@pytest.mark.slow
def test_memory_that_torch_reads_by_itself_is_none():
    """No address is read, whatever way torch takes; in a process of its own, for it might crash."""
    code = """
import torch
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer
w = HybridQuantizedTensor.quantize(torch.randn(64, 64), HybridQuantizer.parse("mxfp8"))
try:
    torch.Tensor.untyped_storage(w).copy_(torch.zeros(4096).untyped_storage())
except RuntimeError as error:
    print("refused", error)
torch.zeros(64, 64).set_(w.untyped_storage()).sum()
try:
    w._typed_storage().fill_(1)
except RuntimeError as error:
    print("refused", error)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("refused") and done.stdout.endswith("alive\n"), done.stderr


def _doubled(model):
    with torch.no_grad():
        model[0].weight.mul_(2.0)


@pytest.mark.slow
def test_processes_share_the_operands():
    model = held().share_memory()
    before = model[0].weight.dequantize().detach().clone()
    assert model[0].weight.is_shared() and all(buffer.is_shared() for buffer in model[0].weight.buffers.values())
    process = torch.multiprocessing.get_context("spawn").Process(target=_doubled, args=(model,))
    process.start()
    process.join()
    assert process.exitcode == 0 and torch.equal(model[0].weight.dequantize(), 2 * before)


def test_a_model_of_hugging_face_names_the_module_and_the_remedy(tmp_path):
    from support.models.tiny import tiny

    model = tiny("llama")
    with quantized_model_init():
        hqsweep.convert(model, "mxfp8")
    with pytest.raises(
        UserError, match=r"^model\.layers\.0\.self_attn\.q_proj: .*write a model by hqsweep\.save_model"
    ):
        model.save_pretrained(tmp_path / "own")
    hqsweep.save_model(model, tmp_path / "ours")
    assert (tmp_path / "ours" / "model.safetensors").exists()
