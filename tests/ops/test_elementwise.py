"""hqsweep::adamw_: torch's own AdamW on a CPU, in one pass on a GPU."""

import numpy as np
import pytest
import torch

from hqsweep.ops.elementwise import adamw_

pytestmark = pytest.mark.gpu
RULE = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
RATE = 3e-2
COUNTS = [1, 3, 4, 1024, 16384, 16385, 100003, *range(5, 90)]
"""Elements: parts of words, whole thread blocks and more, and more tensors than one launch takes."""


class Training:
    """Parameters with all that an update of them has, on a GPU. begin: the element of a buffer at which each begins."""

    def __init__(self, counts, begin=0):
        torch.manual_seed(0)
        self.params = [torch.randn(begin + n)[begin:] for n in counts]
        self.device_params, *self.averages = (
            [torch.zeros(begin + n, device="cuda")[begin:] for n in counts] for _ in range(3)
        )
        for p, ours in zip(self.params, self.device_params, strict=True):
            ours.copy_(p)
        self.steps = [torch.zeros((), device="cuda") for _ in counts]
        self.begin = begin

    def gradients(self, step):
        torch.manual_seed(step)
        return [torch.randn_like(p) * 10.0 ** (-step) for p in self.params]

    def step(self, gradients, factor=None, **rule):
        torch._foreach_add_(self.steps, 1)
        buffers = [torch.zeros(self.begin + len(g), device="cuda")[self.begin :] for g in gradients]
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.copy_(gradient)
        lr = torch.tensor(RATE, dtype=torch.float64, device="cuda")
        factor = None if factor is None else torch.tensor(factor, device="cuda")
        adamw_(self.device_params, buffers, *self.averages, self.steps, lr=lr, factor=factor, **RULE | rule)
        assert all(b.cpu().equal(g) for b, g in zip(buffers, gradients, strict=True))


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.4, 0.999)], ids=str)
@pytest.mark.parametrize("begin", [0, 1])
def test_averages_are_torchs_on_a_cpu_to_the_bit_and_parameters_but_for_its_root(begin, betas):
    training = Training(COUNTS, begin)
    theirs = [torch.nn.Parameter(p.clone()) for p in training.params]
    optimizer = torch.optim.AdamW(theirs, lr=RATE, foreach=False, **RULE | {"betas": betas})
    for step in range(1, 6):
        gradients = training.gradients(step)
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        training.step(gradients, betas=betas)
        for p, ours, *averages in zip(theirs, training.device_params, *training.averages, strict=True):
            state = optimizer.state[p]
            for name, average in zip(("exp_avg", "exp_avg_sq"), averages, strict=True):
                assert average.cpu().equal(state[name]), name
            torch.testing.assert_close(ours.cpu(), p.detach(), rtol=2**-22, atol=RATE * 2**-20)


def test_parameters_are_the_formula_to_the_bit():
    """In numpy's float32, whose root is the nearest; the averages are those of the test before."""
    training, f32 = Training([50_000]), np.float32
    for step in range(1, 6):
        before = training.device_params[0].cpu().numpy()
        training.step(training.gradients(step), factor=0.5)
        average, square = (each[0].cpu().numpy() for each in training.averages)
        sizes = [1 - beta**step for beta in RULE["betas"]]
        root = np.sqrt(square) / f32(sizes[1] ** 0.5) + f32(RULE["eps"])
        expected = before * f32(1 - RATE * RULE["weight_decay"]) + f32(-(RATE / sizes[0])) * average / root
        np.testing.assert_array_equal(training.device_params[0].cpu().numpy(), expected)


def test_the_factor_scales_gradients():
    scaled, plain = Training([1000]), Training([1000])
    gradients = scaled.gradients(1)
    scaled.step(gradients, factor=0.3)
    plain.step([g * torch.tensor(0.3) for g in gradients])
    assert scaled.device_params[0].equal(plain.device_params[0])


def test_what_the_kernel_does_not_take_is_refused():
    training = Training([64])
    kinds = (torch.zeros(64, device="cuda", dtype=torch.bfloat16), torch.zeros(128, device="cuda")[::2])
    for wrong in (*kinds, torch.zeros(63, device="cuda"), torch.zeros(64)):
        averages, lr = training.averages, torch.tensor(RATE, dtype=torch.float64, device="cuda")
        with pytest.raises(ValueError, match=r"it takes float32 \[64\], contiguous, on cuda:0"):
            adamw_(training.device_params, [wrong], *averages, training.steps, lr=lr, factor=None, **RULE)
    with pytest.raises(ValueError, match=r"lr is .*; it is one float64 on cuda:0"):
        grads = [torch.zeros(64, device="cuda")]
        adamw_(training.device_params, grads, *training.averages, training.steps, lr=lr.float(), factor=None, **RULE)
