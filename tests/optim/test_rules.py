"""SGD and Muon are torch's own; rounded moments are on their grid, and training goes on with them."""

import pytest
import torch

from hqsweep.config.train import ParallelConfig, TrainConfig
from hqsweep.optim.rules import BLOCK, RuledOptimizer, orthogonal, round_moment_
from hqsweep.sweep.grid.compose import expand
from hqsweep.sweep.store.names import run_id


def both(rule: str, theirs, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix after four steps, by ours and by torch's."""
    torch.manual_seed(0)
    start, grads = torch.randn(48, 32), torch.randn(4, 48, 32)
    ours, other = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = RuledOptimizer([{"params": [ours], "rule": rule}], lr=0.02, weight_decay=0.1, **options), theirs(other)
    for grad in grads:
        for p, optimizer in zip((ours, other), optimizers, strict=True):
            p.grad = grad.clone()
            optimizer.step()
    return ours.detach(), other.detach()


def test_sgd_is_torchs():
    ours, theirs = both("sgd", lambda p: torch.optim.SGD([p], lr=0.02, momentum=0.9, weight_decay=0.1), momentum=0.9)
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_torchs():
    def muon(p):
        return torch.optim.Muon([p], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")

    ours, theirs = both("muon", muon)
    assert torch.allclose(ours, theirs, atol=1e-5) and not torch.equal(ours, torch.zeros_like(ours))


def test_a_group_without_another_rule_is_adamw_to_the_byte():
    ours, theirs = both("adamw", lambda p: torch.optim.AdamW([p], lr=0.02, weight_decay=0.1))
    assert torch.equal(ours, theirs)


def test_singular_values_become_about_one():
    for shape in ((64, 32), (32, 64)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(*shape)).float())
        assert values.min() > 0.5 and values.max() < 1.4


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_moments_are_rounded_once_and_the_second_stays_above_zero(kind):
    torch.manual_seed(0)
    moment = torch.randn(3, 100) * torch.logspace(-6, 0, 100)
    for root in (False, True):
        first = moment.square() if root else moment.clone()
        values = first.clone()
        round_moment_(values, kind, root=root)
        again = values.clone()
        round_moment_(again, kind, root=root)
        assert torch.allclose(again, values, rtol=1e-5, atol=0) and not torch.equal(values, first)
        assert not root or ((values > 0) == (first > 0)).all()
    large = torch.linspace(1, 2, BLOCK)
    rounded = large.clone()
    round_moment_(rounded, kind)
    assert ((rounded - large).abs() / large).max() <= 2.0**-4


def test_the_optimizer_rounds_its_moments():
    p = torch.nn.Parameter(torch.randn(16, 16))
    optimizer = RuledOptimizer([p], lr=0.01, moments="bf16")
    p.grad = torch.randn(16, 16)
    optimizer.step()
    state = optimizer.state[p]
    assert all(torch.equal(state[name], state[name].bfloat16().float()) for name in ("exp_avg", "exp_avg_sq"))


def test_the_config_states_optimizers_and_refuses_ranks():
    with pytest.raises(ValueError, match=r"train.optimizer: muon .* takes whole parameters"):
        TrainConfig(optimizer="muon", parallel=ParallelConfig(dp_shard=2))
    (plain,), (muon,) = (expand("convergence", words).points for words in ([], ["train.optimizer=muon"]))
    before = plain.config | {"train": {k: v for k, v in plain.config["train"].items() if k[:4] not in ("opti", "mome")}}
    assert run_id(plain.config) == run_id(before) != run_id(muon.config)
