"""An optimizer of any class on FP32 masters: to the bit what it is on FP32 parameters, also from a saved state."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from hqsweep.errors import UserError
from hqsweep.optim import MASTER
from hqsweep.optim.other import OtherOptimizer

CLASSES = [
    partial(torch.optim.NAdam, momentum_decay=0.01),
    partial(torch.optim.SGD, momentum=0.9),
    partial(torch.optim.Adam, amsgrad=True),
]


class Halved(torch.optim.Optimizer):
    """Keeps a moment in bfloat16, and says how often it was built."""

    count = 0

    def __init__(self, params, lr, weight_decay=0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        Halved.count += 1

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("m", torch.zeros_like(p, dtype=torch.bfloat16)).mul_(0.9).add_(p.grad)
                p.sub_(state["m"].float(), alpha=group["lr"])


class NeedsClosure(Halved):
    def step(self, closure) -> None:
        pass


def pair(build, dtype=torch.float32):
    """(parameters by ours, our optimizer, parameters by theirs, theirs), in two groups."""
    torch.manual_seed(0)
    start = [torch.randn(8, 4).to(dtype), torch.randn(4).to(dtype)]
    ours, theirs = ([nn.Parameter(value.to(kind)) for value in start] for kind in (dtype, torch.float32))

    def groups(params):
        return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]

    own = OtherOptimizer(groups(ours), build, where="here", lr=0.02)
    return ours, own, theirs, build(groups(theirs), lr=0.02)


def step(params, optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape).bfloat16().to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize("build", [*CLASSES, Halved])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_class_itself_on_masters(build, dtype):
    ours, own, theirs, other = pair(build, dtype)
    for seed in range(3):
        own.set_lr(0.02 / (seed + 1))
        for group in other.param_groups:
            group["lr"] = 0.02 / (seed + 1)
        step(ours, own, seed)
        step(theirs, other, seed)
    for p, expected in zip(ours, theirs, strict=True):
        assert torch.equal(own.master_param(p), expected) and torch.equal(p, expected.to(dtype))
        assert (MASTER in own.state[p]) == (dtype != torch.float32)


@pytest.mark.parametrize("build", [*CLASSES, Halved])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_to_the_bit(build, dtype):
    ours, own, _, _ = pair(build, dtype)
    for seed in range(2):
        step(ours, own, seed)
    state, values = copy.deepcopy(own.state_dict()), [p.detach().clone() for p in ours]
    step(ours, own, 2)
    again, second, _, _ = pair(build, dtype)
    with torch.no_grad():
        for p, value in zip(again, values, strict=True):
            p.copy_(value)
    second.load_state_dict(state)
    assert second.state_dict().keys() == state.keys()  # the state is there before the first step
    step(again, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_a_write_of_others_keeps_moments_and_builds_nothing():
    ours, own, _, _ = pair(Halved, torch.bfloat16)
    step(ours, own, 0)
    built = Halved.count
    with torch.no_grad():
        ours[0].copy_(torch.ones(8, 4))
    step(ours, own, 1)
    assert Halved.count == built and (ours[0] - 1).abs().max() < 0.2


def test_a_main_grad_is_read_and_no_grad_stays():
    ours, own, _, _ = pair(Halved)
    for p in ours:
        p.main_grad = torch.ones_like(p)
    before = ours[0].detach().clone()
    own.step()
    assert torch.allclose(ours[0], before - 0.02) and ours[0].grad is None


def test_clipping_scales_the_gradients():
    ours, own, theirs, other = pair(Halved)
    for p in (*ours, *theirs):
        p.grad = torch.full_like(p, 3.0)
    expected = nn.utils.clip_grad_norm_(theirs, 1.0)
    other.step()
    assert torch.equal(own.clip_and_step(1.0), expected)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (partial(torch.optim.NAdam, momentum=1), r"here raised TypeError: .*unexpected keyword argument 'momentum'"),
        (lambda groups, lr: groups, "here gave list; it must give a torch.optim.Optimizer"),
        (NeedsClosure, r"here: its step\(\) needs an argument"),
        (torch.optim.LBFGS, "here raised ValueError: LBFGS doesn't support per-parameter options"),
    ],
)
def test_faults_are_sentences(build, said):
    p = nn.Parameter(torch.ones(2))
    own = OtherOptimizer([{"params": [p]}, {"params": [nn.Parameter(torch.ones(3))]}], build, where="here")
    p.grad = torch.ones(2)
    with pytest.raises(UserError, match=said):
        own.step()
