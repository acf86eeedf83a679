"""GroupedTensor as a parameter: what optimizers, averages, init functions and copies make of it."""

import copy
import pickle

import pytest
import torch
from cases import FEW
from support.quant.group_tensors import E, K, N, alone, assert_same_bytes, grouped, key_of, values
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.quant import GroupedTensor


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_of_torch_write_it_as_they_write_its_experts(make, foreach):
    """Each step computes on values, and quantizes what it wrote; norms of gradients are those of all experts."""
    whole, parts = nn.Parameter(grouped()), [nn.Parameter(member) for member in alone(values(), "mxfp8")]
    optimizers = [make(params, lr=0.1, foreach=foreach) for params in ([whole], parts)]
    before = whole.dequantize().clone()
    for seed in (3, 4):
        gradient = draw("normal", E * N, K, seed).view(E, N, K)
        whole.grad = gradient.clone()
        for part, own in zip(parts, gradient, strict=True):
            part.grad = own.clone()
        for optimizer in optimizers:
            optimizer.step()
        for member, part in zip(whole.members, parts, strict=True):
            assert_same_bytes(member, part.detach())
    assert not torch.equal(whole.dequantize(), before) and isinstance(whole, GroupedTensor)
    norm = nn.utils.clip_grad_norm_([whole], 1.0)
    torch.testing.assert_close(norm.float(), gradient.float().norm(), rtol=2**-7, atol=0)
    torch.testing.assert_close(whole.grad.float().norm(), torch.tensor(1.0), rtol=2**-7, atol=0)


def test_an_average_of_weights_is_written_to_it():
    model = nn.Module()
    model.weight = nn.Parameter(grouped(x=torch.zeros(E, N, K)))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for expected in (0.5, 0.75):
        average.update_parameters(model)
        held = average.module.weight
        assert isinstance(held, GroupedTensor)
        assert torch.equal(held.dequantize(), torch.full((E, N, K), expected, dtype=held.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_dtype_and_pickling_keep_its_bytes(dtype):
    w = nn.Parameter(grouped("nvfp4+sr"))
    model = nn.Module()
    model.weight = nn.Parameter(copy.deepcopy(w))
    model.to(dtype)
    assert model.weight.dtype == dtype and isinstance(model.weight, GroupedTensor)
    loaded = pickle.loads(pickle.dumps(w))
    for same in (model.weight, loaded):
        assert isinstance(same, nn.Parameter) and same.requires_grad
        assert_same_bytes(same, w)
    with torch.no_grad():
        loaded[0].quantize_(values(1)[0], key=key_of(0))
    assert_same_bytes(w, grouped("nvfp4+sr"))  # memory of its own


@pytest.mark.parametrize(
    ("init", "arguments"),
    [
        ("uniform_", ()), ("normal_", ()), ("xavier_uniform_", ()), ("xavier_normal_", ()),
        ("kaiming_uniform_", ()), ("kaiming_normal_", ()), ("constant_", (0.3,)), ("ones_", ()), ("zeros_", ()),
    ],
)  # fmt: skip
def test_init_functions_write_what_they_write_to_a_plain_tensor(init, arguments):
    w, plain = nn.Parameter(grouped()), nn.Parameter(torch.zeros(E, N, K, dtype=torch.bfloat16))
    for tensor in (w, plain):
        torch.manual_seed(1)
        assert getattr(nn.init, init)(tensor, *arguments) is tensor
    assert_same_bytes(w, grouped(x=plain.detach()))


@pytest.mark.parametrize("text", FEW)
def test_what_is_assigned_to_data_is_written(text):
    """torch.nn.utils.vector_to_parameters assigns so; torch's own setter would leave the operands as they were."""
    w, version = nn.Parameter(grouped(text)), 0
    places = [buffer.data_ptr() for buffer in w.buffers.values()]
    for value, expected in (
        (values(1), values(1)),
        (values(2).float(), values(2)),
        (grouped(text, values(3)), values(3)),
        (grouped("fp32", values(4)), values(4)),
    ):
        w.data = value
        assert_same_bytes(w, grouped(text, expected))
        assert w._version > version and isinstance(w, nn.Parameter)
        version = w._version
    nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector([w]), [w])
    assert_same_bytes(w, grouped(text, 2 * grouped(text, values(4)).dequantize()))
    assert places == [buffer.data_ptr() for buffer in w.buffers.values()]
    for other in (torch.zeros(E, N, 40), torch.zeros(E, N, K, device="meta")):
        with pytest.raises(UserError, match=r"data: got a tensor .* for a quantized one \(3, 32, 48\) on cpu; move it"):
            w.data = other
