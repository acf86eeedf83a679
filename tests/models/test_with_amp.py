"""torch.autocast and GradScaler around a converted model, and gradients that accumulate."""

import pytest
import torch
from cases import LOW_BASES, RANDOM, bare
from support.models.llamas import differences, llama, loss_of, results
from torch import nn

import hqsweep
from hqsweep.formats import parse
from hqsweep.nn import Linear, quantization


def both_ways(linear, x):
    """y, dx and dw, the latter in float32 as the weight."""
    x = x.clone().requires_grad_()
    y = linear(x)
    y.float().square().sum().backward()
    tensors = {"y": y.detach(), "dx": x.grad, "dw": linear.weight.grad}
    return tensors if linear.bias is None else tensors | {"db": linear.bias.grad}


@pytest.mark.parametrize("recipe", [*LOW_BASES, RANDOM])
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_changes_the_dtype_and_no_bit_beyond(recipe, bias):
    """The bits are those of hqsweep.nn.Linear in the dtype of the autocast, which itself is outside of any."""
    torch.manual_seed(0)
    x, plain = torch.randn(32, 64), nn.Linear(64, 48, bias=bias)
    model = nn.Sequential(plain)
    hqsweep.convert(model, bare(recipe))
    ours = Linear(64, 48, name="0", recipe=bare(recipe), bias=bias, dtype=torch.bfloat16)
    ours.load_state_dict(plain.state_dict())
    with quantization(seed=1, step=1), torch.autocast("cpu", torch.bfloat16):
        under = both_ways(plain, x)
    assert under["y"].dtype is torch.bfloat16 and under["dw"].dtype is torch.float32
    with quantization(seed=1, step=1):
        assert not differences(both_ways(ours, x), under)


def trained(recipe, scaler=None, *, steps=2):
    """The weights after some steps of SGD."""
    model = llama()
    hqsweep.convert(model, bare(recipe))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with quantization(step=step):
            loss = loss_of(model, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return dict(model.state_dict())


@pytest.mark.parametrize("recipe", [name for name in LOW_BASES if parse(name).scaling != "ue5m3"])
def test_a_scale_of_the_loss_that_is_a_power_of_two_changes_no_bit(recipe):
    """Scales of blocks and amaxes take it up, but those of UE5M3, which begin at 2^-17."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    assert not differences(trained(recipe), trained(recipe, scaler))


def test_a_step_whose_scaled_gradients_overflow_is_left_out():
    """What a format makes of infinities is still seen by the scaler, which halves its scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    before = dict(llama().state_dict())
    assert not differences(before, trained("mxfp8", scaler, steps=1))
    assert scaler.get_scale() == 2.0**126


@pytest.mark.parametrize("cached", [False, True])
def test_gradients_of_microbatches_accumulate(cached):
    """And each draws random bits of its own, of all tensors but weights."""
    model = llama()
    hqsweep.convert(model, "nvfp4+sr")
    alone = []
    for part in (0, 1):
        with quantization(step=1, microbatch=part):
            alone.append(results(model))
    assert len(differences(*alone)) > 10
    model.zero_grad()
    for part in (0, 1):
        with quantization(step=1, microbatch=part, cache_weights=cached):
            loss_of(model).backward()
    sums = {name: alone[0][name] + alone[1][name] for name in alone[0] if name != "loss"}
    assert not differences(sums, {name: p.grad for name, p in model.named_parameters()})
