"""Gradients of GroupedLinear against torch in float64, and their accumulation in float32."""

import pytest
import torch
from cases import BASES, BY_STEP, RANDOM
from support.nn.experts import (
    EXPERTS,
    ROWS,
    SECTIONS,
    SPLITS,
    K,
    N,
    assert_same_gradients,
    gradients,
    grouped,
    held,
    ids,
    singles,
    train,
)

from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.nn import quantization
from hqsweep.optim import FusedAdam

SINGLE = [False, True]


def close(actual, expected, rtol):
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=rtol * largest)


@pytest.mark.parametrize("single", SINGLE)
def test_high_precision_is_torch(single):
    """Operands in bfloat16: dx is rounded once, y before its bias and after, gradients of float32 parameters never."""
    module = grouped("bf16", bias=True, single_grouped_weight=single, single_grouped_bias=single)
    x, dy = draw("normal", ROWS, K).requires_grad_(), draw("normal", ROWS, N, 1)
    y = module(x, SPLITS)
    y.backward(dy)
    plain = x.detach().double().requires_grad_()
    weights = [w.detach().bfloat16().double().requires_grad_() for w in module.expert_weights()]
    rows = [row for bias in module.biases for row in bias.view(-1, N)]
    biases = [b.detach().bfloat16().double().requires_grad_() for b in rows]
    parts = zip(plain.split(SPLITS), weights, biases, strict=True)
    expected = torch.cat([torch.nn.functional.linear(*part) for part in parts])
    expected.backward(dy.double())
    close(y, expected, 2**-7)
    close(x.grad, plain.grad, 2**-8)
    dw = torch.cat([w.grad.view(-1, N, K) for w in module.weights])
    db = torch.cat([b.grad.view(-1, N) for b in module.biases])
    close(dw, torch.stack([w.grad for w in weights]), 1e-6)
    close(db, torch.stack([b.grad for b in biases]), 1e-6)


@pytest.mark.parametrize("single", SINGLE)
def test_main_grad_adds_up_in_float32(single):
    """No product of bfloat16 weights is rounded to bfloat16 on its way, over microbatches."""
    module = grouped("bf16", single_grouped_weight=single, fuse_wgrad_accumulation=True).to(torch.bfloat16)
    expected = torch.zeros(EXPERTS, N, K, dtype=torch.float64)
    for weight in module.weights:
        weight.main_grad = torch.zeros(weight.shape)
    for microbatch in range(3):
        x, dy = draw("normal", ROWS, K, microbatch), draw("normal", ROWS, N, 7 + microbatch)
        with quantization(seed=1, step=1, microbatch=microbatch):
            module(x, SPLITS).backward(dy)
        for e, (own, gradient) in enumerate(zip(x.split(SPLITS), dy.split(SPLITS), strict=True)):
            expected[e] += gradient.double().t() @ own.double()
    sums = torch.cat([weight.main_grad.view(-1, N, K) for weight in module.weights])
    assert sums.dtype == torch.float32 and all(weight.grad is None for weight in module.weights)
    close(sums, expected, 1e-6)


@pytest.mark.parametrize("quantizers", [*BASES, *SECTIONS], ids=ids)
@pytest.mark.parametrize("single", SINGLE)
def test_main_grads_of_bfloat16_weights_are_those_of_linears(quantizers, single):
    module = grouped(quantizers, single_grouped_weight=single, fuse_wgrad_accumulation=True).to(torch.bfloat16)
    linears = [linear.to(torch.bfloat16) for linear in singles(module)]
    for weight in (*module.weights, *(linear.weight for linear in linears)):
        weight.main_grad = torch.zeros(weight.shape)
    for step in (1, 2):
        x, dy = draw("normal", ROWS, K, step), draw("normal", ROWS, N, 7 + step)
        with quantization(seed=1, step=step):
            module(x, SPLITS).backward(dy)
            for linear, own, gradient in zip(linears, x.split(SPLITS), dy.split(SPLITS), strict=True):
                linear(own).backward(gradient)
    ours = {name: p.main_grad for name, p in module.named_parameters()}
    assert_same_gradients(ours, [{"weight": linear.weight.main_grad} for linear in linears])


@pytest.mark.parametrize("single", SINGLE)
def test_cached_weights_draw_the_bits_of_their_step(single):
    """Nobody has written them, and yet another step rounds them otherwise."""
    module = grouped("nvfp4+sr", single_grouped_weight=single)

    def context(step):
        return quantization(seed=1, step=step, cache_weights=True)

    assert_same_gradients(*train(module, singles(module), steps=3, context=context))


@pytest.mark.parametrize("single", SINGLE)
@pytest.mark.parametrize("quantizers", [*BY_STEP, SECTIONS[2]], ids=ids)
def test_held_weights_train_as_those_of_linears(quantizers, single):
    """With an optimizer that writes them: histories of delayed scaling end their step when it has used the weight."""
    module = held(quantizers, preserve=True, single_grouped_weight=single)
    linears = singles(grouped(quantizers))
    with quantization(seed=1, step=0):
        modules = [held(quantizers, preserve=True, single_grouped_weight=single) for _ in linears]
    weights = [m.expert_weights()[e] for e, m in enumerate(modules)]  # as many copies, of which each gives one expert
    for expert, (linear, weight) in enumerate(zip(linears, weights, strict=True)):
        linear.weight = torch.nn.Parameter(weight.detach())
        linear.states = modules[expert].states[expert]
        linear.weight.states = weight.states
    optimizers = [FusedAdam(m.parameters(), lr=0.05) for m in (module, *linears)]
    for step in (1, 2, 3):
        x, dy = draw("normal", ROWS, K, step), draw("normal", ROWS, N, 7 + step)
        with quantization(seed=1, step=step):
            module(x, SPLITS).backward(dy)
            for linear, own, gradient in zip(linears, x.split(SPLITS), dy.split(SPLITS), strict=True):
                linear(own).backward(gradient)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for expert, (own, linear) in enumerate(zip(module.expert_weights(), linears, strict=True)):
        buffers = linear.weight.buffers
        assert all(torch.equal(own.buffers[name], buffers[name]) for name in buffers), expert
        for name, state in linear.states.items():
            assert torch.equal(module.states[expert][name].history, state.history), (expert, name)
    if quantizers == RANDOM:
        assert own.metadata.key == RngKey(seed=1, slot="experts/grouped_linear/weight/3", step=3)


def trained(module, steps):
    """Gradients after these steps."""
    for step in steps:
        with quantization(seed=1, step=step):
            module(draw("heavy", ROWS, K, step).clamp(-50, 50), SPLITS).backward(draw("normal", ROWS, N, step))
    return gradients(module)


@pytest.mark.parametrize("make", [grouped, held])
@pytest.mark.parametrize("single", SINGLE)
def test_weights_that_are_drawn_again_forget_their_histories(make, single):
    """What was trained before is gone: as a module that is new, to the byte."""
    used, fresh = (make("fp8_delayed", single_grouped_weight=single, bias=True) for _ in range(2))
    trained(used, (1, 2))
    for module in (used, fresh):
        torch.manual_seed(5)
        module.reset_parameters()
        module.zero_grad()
    ours, theirs = trained(used, (3, 4)), trained(fresh, (3, 4))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    state = {name: tensor for name, tensor in fresh.state_dict().items() if "states" in name}
    assert len(state) == 6 * 3 * EXPERTS
    assert all(torch.equal(used.state_dict()[name], tensor) for name, tensor in state.items())
