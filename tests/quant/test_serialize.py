"""Quantized tensors on disk: pickle, torch.save, safetensors and torch's distributed checkpoint, to the byte."""

import io
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import STATELESS, crossed
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer
from hqsweep.quant.serialize import flatten_state, load_safetensors, save_safetensors

pytestmark = pytest.mark.feature("F133", "F154")

KEY = RngKey(seed=3, slot="w", step=2**40)


def quantized(text, **options):
    return HybridQuantizedTensor.quantize(draw("normal", 64, 96), HybridQuantizer.parse(text), key=KEY, **options)


def by_pickle(tensor):
    return pickle.loads(pickle.dumps(tensor))


def by_torch_save(tensor):
    file = io.BytesIO()
    torch.save({"w": tensor}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["w"]


def assert_same(a, b):
    assert type(a) is type(b) is HybridQuantizedTensor and a.metadata == b.metadata and a.shape == b.shape
    assert a.buffers.keys() == b.buffers.keys()
    for name in a.buffers:
        assert torch.equal(a.buffers[name], b.buffers[name]), name


def model(texts=STATELESS):
    linears = nn.ModuleDict({str(i): nn.Linear(96, 64) for i in range(len(texts))})
    for i, text in enumerate(texts):
        linears[str(i)].weight = nn.Parameter(quantized(text, preserve_high_precision_init_val=i == 1))
    return linears


@pytest.mark.feature("F50", "F107")
@pytest.mark.parametrize(
    ("text", "copy", "directions"),
    crossed(STATELESS, [by_pickle, by_torch_save], [("rowwise", "columnwise"), ("columnwise",)]),
)
def test_round_trip(copy, text, directions):
    w = quantized(text, directions=directions, preserve_high_precision_init_val=True)
    again = copy(w.view(2, 32, 96))
    assert_same(again, w.view(2, 32, 96))
    parameter = copy(nn.Parameter(w, requires_grad=False))
    assert isinstance(parameter, nn.Parameter) and not parameter.requires_grad
    assert copy(nn.Parameter(w)).requires_grad and not isinstance(again, nn.Parameter)


def test_parts_of_one_tensor_still_share_its_memory_after_loading():
    w = quantized("fp8_current")
    whole, part = by_torch_save([w, w[32:]])
    assert whole.rowwise_s.data_ptr() == part.rowwise_s.data_ptr() and part.metadata.shares_scale


@pytest.mark.feature("F52", "F53", "F54", "F55")
def test_safetensors_round_trip_of_a_module(tmp_path):
    saved, path = model(), tmp_path / "model.safetensors"
    save_safetensors(saved.state_dict(), path)
    state = load_safetensors(path)
    assert list(tmp_path.iterdir()) == [path]
    for name, tensor in saved.state_dict().items():
        if name.endswith("weight"):
            assert_same(state[name], tensor)
        else:
            assert torch.equal(state[name], tensor)
    target = model()
    for linear in target.values():
        nn.init.zeros_(linear.weight)
    target.load_state_dict(state)
    for a, b in zip(saved.values(), target.values(), strict=True):
        assert_same(a.weight, b.weight)


def test_the_file_is_one_that_other_tools_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_safetensors(model(["nvfp4|mxfp8"]).state_dict(), path)
    with safe_open(path, framework="np") as file:
        shapes = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        notes = json.loads(file.metadata()["hqsweep"])
    assert shapes == {
        "0.bias": ("F32", [64]),
        "0.weight.rowwise_q": ("U8", [64, 48]), "0.weight.rowwise_s": ("U8", [64, 6]),
        "0.weight.rowwise_g": ("F32", [1, 1]),
        "0.weight.columnwise_q": ("U8", [96, 64]), "0.weight.columnwise_s": ("U8", [96, 2]),
    }  # fmt: skip
    assert notes["quantized"]["0.weight"]["quantizer"] == "nvfp4|mxfp8"


def test_tied_weights_and_views_are_stored_once(tmp_path):
    w, plain = quantized("mxfp8"), torch.arange(12.0).view(3, 4)
    state = {"a": w, "tied": w.detach(), "b": plain, "c": plain, "part": plain[1:], "turned": plain.t()}
    tensors, _ = flatten_state(state)
    assert {name.split(".")[0] for name in tensors} == {"a", "b", "part", "turned"}
    save_safetensors(state, tmp_path / "f")
    again = load_safetensors(tmp_path / "f")
    assert_same(again["tied"], w)
    for name in ("b", "c", "part", "turned"):
        assert torch.equal(again[name], state[name]), name


def test_a_bf16_file_of_any_tool_loads_into_quantized_weights(tmp_path):
    target = model(["nvfp4|mxfp8"])
    value = draw("heavy", 64, 96)
    save_file({"0.weight": value, "0.bias": torch.zeros(64)}, tmp_path / "f")
    target.load_state_dict(load_safetensors(tmp_path / "f"))
    assert_same(
        target["0"].weight.detach(), HybridQuantizedTensor.quantize(value, HybridQuantizer.parse("nvfp4|mxfp8"))
    )


def test_files_that_are_not_whole_are_refused(tmp_path):
    path = tmp_path / "f"
    with pytest.raises(UserError, match=r"f' is no file; give the path of a safetensors file"):
        load_safetensors(path)
    path.write_bytes(b"no header")
    with pytest.raises(UserError, match=r"f' is no whole safetensors file: "):
        load_safetensors(path)
    tensors, metadata = flatten_state({"w": quantized("nvfp4|mxfp8")})
    save_file({n: t for n, t in tensors.items() if n != "w.columnwise_s"}, path, metadata=metadata)
    with pytest.raises(UserError, match=r"w: buffer columnwise_s of a tensor in nvfp4\|mxfp8 is missing"):
        load_safetensors(path)
    save_file(tensors | {"w.rowwise_g": torch.zeros(2)}, path, metadata=metadata)
    with pytest.raises(UserError, match=r"rowwise_g .* is torch.float32 \(2,\); it takes torch.float32 \(1, 1\)"):
        load_safetensors(path)


@pytest.mark.feature("F134", "F167")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_round_trip_in_one_process(tmp_path):
    saved, target = model(), model()
    for linear in target.values():
        nn.init.zeros_(linear.weight)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = target.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    target.load_state_dict(state)
    for a, b in zip(saved.values(), target.values(), strict=True):
        assert_same(a.weight, b.weight)
