"""Attention on the CPU as an operator: torch's bits and gradients, the rules of torch.library, and no tag of numbers
that are drawn, for which torch.compile would keep a generator's state."""

import pytest
import torch
import torch.nn.functional as F

from hqsweep.ops.attention import attention_on_cpu, attention_on_cpu_back


def drawn(shape=(2, 3, 37, 16)):
    """q, k, v and the output's gradient, [B, T, H, E] turned."""
    b, h, t, e = shape
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(b, t, h, e, generator=generator).transpose(1, 2) for _ in range(4)]


@pytest.mark.parametrize("is_causal", [False, True])
def test_outputs_and_gradients_are_those_of_torch(is_causal):
    *qkv, do = drawn()
    leaves = [x.detach().requires_grad_() for x in qkv]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    expected.backward(do)
    o, sums = attention_on_cpu(*qkv, is_causal)
    assert torch.equal(o, expected)
    gradients = attention_on_cpu_back(do, *qkv, o, sums, is_causal=is_causal)
    assert all(torch.equal(own, leaf.grad) for own, leaf in zip(gradients, leaves, strict=True))


def test_it_keeps_the_rules_of_torch_library_and_draws_nothing():
    dispatched = torch.ops.hqsweep.attention_on_cpu.default
    torch.library.opcheck(dispatched, (*drawn()[:3], True))
    assert torch.Tag.nondeterministic_seeded not in dispatched.tags
