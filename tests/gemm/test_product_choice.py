"""The choice of an algorithm: only ones with torch's bits, the fastest of these, and none while a graph is captured."""

import pytest
import torch

from hqsweep.gemm import product as product_choice
from hqsweep.gemm.exact import mm_t, plain_product
from hqsweep.gemm.product import Planned, fastest_product, preferred

M, N, K = 4096, 2048, 768


@pytest.mark.parametrize(
    ("times", "scratch", "expected"),
    [
        ([1.0, 0.8], [256], 0),  # the faster one
        ([1.0, 1.2], [256], None),  # torch's
        ([1.0, 0.8, 0.805], [512, 256], 1),  # as fast, and without a workspace
        ([1.0, 0.8, 0.9], [512, 256], 0),
        ([1.0, 1.005], [256], 0),  # as fast as torch's, which may have one
        ([1.0], [], None),
    ],
)
def test_the_fastest_is_preferred(times, scratch, expected):
    choices = [Planned(None, size) for size in scratch]
    assert preferred(choices, times) is (None if expected is None else choices[expected])


def test_without_memory_to_try_any_it_is_torchs(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(product_choice, "_try", fails)
    assert product_choice.choose((), None) is None


def test_cpus_and_small_products_are_left_to_torch():
    a = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert fastest_product(a, a, torch.bfloat16, None) is None


def drawn(rows, cols, *, turned):
    x = torch.randn(*((cols, rows) if turned else (rows, cols)), device="cuda").bfloat16()
    return x.t() if turned else x


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_are_those_of_torch(monkeypatch, turned, dtype):
    monkeypatch.setattr(product_choice, "_CHOICES", choices := {})
    a, b = drawn(M, K, turned=turned[0]), drawn(N, K, turned=turned[1])
    y = plain_product(a, b.t(), dtype)
    assert len(choices) == 1
    monkeypatch.setattr(product_choice, "LEAST_WORK", 1 << 60)
    assert torch.equal(y, plain_product(a, b.t(), dtype))


@pytest.mark.gpu
def test_a_faster_algorithm_with_the_same_bits_is_taken(monkeypatch):
    """All are faster here, so that what is measured does not decide."""
    monkeypatch.setattr(product_choice, "_CHOICES", {})
    monkeypatch.setattr(product_choice, "_times", lambda calls: [2.0] + [1.0] * (len(calls) - 1))
    a, b = drawn(4 * M, K, turned=False), drawn(N, K, turned=False)
    y = fastest_product(a, b, torch.bfloat16, lambda a, b: torch.mm(a, b.t()))
    assert y is not None
    assert torch.equal(y, torch.mm(a, b.t()))


@pytest.mark.gpu
def test_algorithms_with_other_bits_are_refused(monkeypatch):
    """All that the library offers, beside a reference that none of them equals."""
    monkeypatch.setattr(product_choice, "_CHOICES", {})
    a, b = drawn(M, K, turned=False), drawn(N, K, turned=False)
    reference = lambda a, b: torch.mm(a, b.t()) + 1  # noqa: E731
    assert fastest_product(a, b, torch.bfloat16, reference) is None


@pytest.mark.gpu
def test_each_algorithm_that_is_found_multiplies():
    a, b = drawn(M, K, turned=False), drawn(N, K, turned=False)
    key = (0, (1, M, N, K), (K, 0, False, 256), (K, 0, False, 256), torch.float32, 256)
    expected, out = a.double() @ b.double().t(), torch.empty(M, N, device="cuda")
    candidates = product_choice._candidates(key)
    assert len(candidates) > 2
    for choice in candidates:
        choice.run(out.fill_(torch.nan), a, b)
        assert (out - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.gpu
def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(product_choice, "_CHOICES", choices := {})
    a, b = drawn(M, K, turned=False), drawn(N, K, turned=False)
    expected = torch.mm(a, b.t())
    for tried in (0, 1):
        graph, out = torch.cuda.CUDAGraph(), torch.zeros(M, N, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.graph(graph):
            out.copy_(plain_product(a, b.t(), torch.bfloat16))
        graph.replay()
        assert len(choices) == tried
        assert torch.equal(out, expected)
        plain_product(a, b.t(), torch.bfloat16)


@pytest.mark.gpu
def test_rows_of_a_product_do_not_depend_on_those_beside_them():
    """Also where the choice for the whole is another one than for the parts."""
    from hqsweep.formats import ExactOperand

    a, b = drawn(2 * M, K, turned=False), ExactOperand(drawn(N, K, turned=False), None, 1.0)
    whole = mm_t(ExactOperand(a, None, 1.0), b, out_dtype=torch.bfloat16)
    for part, own in zip(whole.chunk(2), a.chunk(2), strict=True):
        out = torch.empty_like(part)
        assert torch.equal(mm_t(ExactOperand(own, None, 1.0), b, out_dtype=torch.bfloat16, out=out), part)
