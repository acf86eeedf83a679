"""Parameters that somebody writes to after FusedAdam has made their masters: the weight as it is now trains."""

import copy
import pickle

import pytest
import torch
from support.optim.adam_cases import OPTIONS, quantized, value
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

import hqsweep
from hqsweep.errors import UserError
from hqsweep.nn import quantization, quantized_model_init
from hqsweep.optim import FusedAdam
from hqsweep.quant import HybridQuantizedTensor

FORMATS = ["mxfp8", "nvfp4|mxfp8", "nvfp4+sr", "fp8_current", "bf16"]
SMALL = 1e-6
"""A learning rate that moves no code."""


def build(text, held=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64, bias=False))
    with quantized_model_init(enabled=held), quantization(step=0):
        hqsweep.convert(model, text)
    return model


def parameter(text):
    return nn.Parameter(value().bfloat16()) if text == "bf16" else quantized(text)


def values(p):
    p = p.detach()
    return p.dequantize(torch.float32) if isinstance(p, HybridQuantizedTensor) else p.float()


def step(optimizer, p, number=0):
    p.grad = value(number + 1).to(p.dtype)
    optimizer.step()


def load(module, tensor, **options):
    module.load_state_dict({"weight": tensor}, **options)


WRITES = {
    "copy_": lambda p, new: p.copy_(new),
    "data": lambda p, new: setattr(p, "data", new.to(p.dtype)),
    "mul_ and add_": lambda p, new: p.mul_(0).add_(new),
    "lerp_": lambda p, new: p.lerp_(new.to(p.dtype), 1.0),
    "foreach": lambda p, new: torch._foreach_copy_([p], [new.to(p.dtype)]),
    "swapped bytes": lambda p, new: p.copy_(torch.empty_like(p).copy_(new)),
    "zeros": lambda p, new: (p.zero_(), p.add_(new)),
    "vector": lambda p, new: nn.utils.vector_to_parameters(new.flatten(), [p]),
}


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_what_trains(write, text):
    p, new = parameter(text), 3 * value(7)
    optimizer = FusedAdam([p], **OPTIONS)
    step(optimizer, p)
    moments = {name: optimizer.state[p][name].clone() for name in ("exp_avg", "exp_avg_sq", "step")}
    with torch.no_grad():
        WRITES[write](p, new)
    start = values(p)
    assert (start - new).norm() < 0.3 * new.norm()
    assert torch.equal(optimizer.master_param(p), start)
    assert all(torch.equal(optimizer.state[p][name], moment) for name, moment in moments.items())
    expected = nn.Parameter(start.clone())
    reference = torch.optim.AdamW([expected], **OPTIONS)
    reference.load_state_dict({**optimizer.state_dict(), "state": {0: moments}})
    step(optimizer, p, 1)
    expected.grad = value(2).to(p.dtype).float()
    reference.step()
    assert torch.equal(optimizer.state[p]["master_param"], expected)


LOADS = {
    "values": lambda m, state: m.load_state_dict(state),
    "torch's state_dict": lambda m, state: set_model_state_dict(m, state),
    "a part": lambda m, state: m.load_state_dict(state, strict=False),
    "the weight alone": lambda m, state: m[0].load_state_dict({"weight": state["0.weight"]}),
}


@pytest.mark.parametrize("of_held", [False, True])
@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "fp8_block"])
def test_a_state_that_is_loaded_is_what_trains(text, way, of_held):
    model, other = build(text), build(text)
    optimizer = FusedAdam(model.parameters(), lr=SMALL)
    p = model[0].weight
    step(optimizer, p)
    with torch.no_grad():
        other[0].weight.mul_(-2.0)
    state = other.state_dict() if of_held else {"0.weight": values(other[0].weight)}
    LOADS[way](model, state)
    step(optimizer, p, 1)
    assert model[0].weight is p and (values(p) - values(other[0].weight)).norm() <= 1e-2 * values(p).norm()


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4|mxfp8", "nvfp4+sr", "bf16"])
def test_weights_that_are_swapped_and_put_back_keep_their_masters(text):
    """An evaluation with averaged weights leaves no bit behind."""
    p, other = parameter(text), parameter(text)
    optimizers = [FusedAdam([x], **OPTIONS) for x in (p, other)]
    for number in range(4):
        for optimizer, x in zip(optimizers, (p, other), strict=True):
            step(optimizer, x, number)
        kept = p.detach().clone()
        with torch.no_grad():
            p.copy_(value(9))
            p.copy_(kept)
    assert torch.equal(optimizers[0].state[p]["master_param"], optimizers[1].state[other]["master_param"])
    assert torch.equal(values(p), values(other))


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "bf16"])
def test_a_checkpoint_of_both_goes_on_bit_for_bit_in_any_order(text, model_first):
    runs = [(p := parameter(text), FusedAdam([p], **OPTIONS)) for _ in range(2)]
    (p, optimizer), (other, resumed) = runs
    for number in range(3):
        step(optimizer, p, number)
    step(resumed, other, 8)
    state, weight = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    with torch.no_grad():
        if model_first:
            other.copy_(weight)
        resumed.load_state_dict(state)
        if not model_first:
            other.copy_(weight)
    for number in range(3, 6):
        step(optimizer, p, number)
        step(resumed, other, number)
    assert torch.equal(values(p), values(other))
    assert all(torch.equal(resumed.state[other][name], x) for name, x in optimizer.state[p].items())


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "bf16"])
def test_masters_of_another_model_are_refused(text):
    p, other = parameter(text), parameter(text)
    optimizer, resumed = FusedAdam([p], **OPTIONS), FusedAdam([other], **OPTIONS)
    step(optimizer, p)
    resumed.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        other.zero_()
    match = r"FusedAdam: the loaded state has a master of other values than a parameter \[64, 96\] in .* holds; load"
    with pytest.raises(UserError, match=match):
        step(resumed, other)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("text", [*FORMATS, "float32", "fp8_delayed"])
def test_copies_and_pickles_go_on_as_the_original(text, written, copied):
    """With the model, alone from the groups, also after somebody wrote to the weight."""
    held = text not in ("bf16", "float32")
    model = build(text if held else "mxfp8", held)
    model = model.bfloat16() if text == "bf16" else model
    optimizer = FusedAdam(model.parameters(), **OPTIONS)

    def train(model, optimizer, number):
        optimizer.zero_grad()
        with quantization(step=number):
            model(value(number).view(-1, 96).to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()

    for number in (1, 2):
        train(model, optimizer, number)
    if written:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    for pair in (copied((model, optimizer)), copied((optimizer, model))[::-1]):
        own, mine = pair if isinstance(pair[0], nn.Module) else pair[::-1]
        assert type(mine) is FusedAdam and mine.master_weights and mine.param_groups[0]["params"][0] is own[0].weight
        again, theirs = copied((model, optimizer))
        for number in (3, 4):
            train(own, mine, number)
            train(again, theirs, number)
        assert torch.equal(values(own[0].weight), values(again[0].weight))
    train(model, optimizer, 3)
    train(model, optimizer, 4)
    assert torch.equal(values(own[0].weight), values(model[0].weight))
    for name, x in optimizer.state[model[0].weight].items():
        assert torch.equal(x, mine.state[own[0].weight][name]), name


def test_a_copy_keeps_its_own_settings():
    p = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = FusedAdam([p], lr=0.1, master_weights=False)
    step_grad = torch.ones(4).bfloat16()
    for own in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (q,) = own.param_groups[0]["params"]
        q.grad = step_grad
        own.step()
        assert not own.master_weights and "master_param" not in own.state[q]
