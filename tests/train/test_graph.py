"""CUDA graphs and eager work in one pool of memory."""

import subprocess
import sys

import pytest
import torch

from hqsweep.train.graph import GraphPool

pytestmark = pytest.mark.gpu
SIZE = 2**22
"""Elements of a float32 tensor of 16 MiB."""


def peak(pool):
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(pool.pool.id))


def work(x):
    """Several tensors that are alive at one time, in forward and in backward."""
    x = x.detach().requires_grad_()
    y = x
    for _ in range(4):
        y = torch.tanh(y)
    y.sum().backward()
    return [x.grad.sum()]


def test_a_graph_takes_the_memory_of_eager_work_and_leaves_it_to_it():
    pool, x = GraphPool(), torch.randn(SIZE, device="cuda")
    with pool.eager():
        expected = work(x)[0].item()
    before = peak(pool)
    assert before >= 4 * x.nbytes  # backward, too, which runs in the thread that calls it
    graph = pool.capture(lambda: work(x))
    pool.settle()
    for _ in range(3):
        assert graph.replay()[0].item() == expected
        with pool.eager():
            assert work(x)[0].item() == expected
    assert peak(pool) <= before + 2**22 and not pool.grown()


def test_what_stays_is_seen():
    pool, x = GraphPool(), torch.randn(SIZE, device="cuda")
    graph = pool.capture(lambda: work(x))
    pool.settle()
    with pool.eager():
        kept = x + 1
    assert pool.grown()
    del kept
    assert not pool.grown()
    assert torch.isfinite(graph.replay()[0])


@pytest.mark.parametrize("error", ["cuda", "python"])
def test_a_capture_that_fails_says_what_was_first_and_work_goes_on(error):
    pool, x = GraphPool(), torch.randn(SIZE, device="cuda")

    def failing():
        work(x)
        if error == "python":
            raise RuntimeError("not today")
        work(x)[0].item()

    with pytest.raises(RuntimeError, match="not today" if error == "python" else "captur"):
        pool.capture(failing)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with pool.eager():
        expected = work(x)[0].item()
    assert work(x)[0].item() == expected
    assert torch.zeros(4).pin_memory().is_pinned() and torch.isfinite(torch.randn(4, device="cuda")).all()
    assert GraphPool().capture(lambda: work(x)).replay()[0].item() == expected


def test_work_of_other_streams_is_waited_for():
    pool, x = GraphPool(), torch.zeros(SIZE, device="cuda")
    for value in range(1, 20):
        x.fill_(value)
        with pool.eager():
            y = x * 2
        assert (y + x)[-1].item() == 3 * value


def test_cublas_works_in_memory_that_nothing_else_takes_when_torch_gives_workspaces_up():
    """As it does where torch.compile captures a graph (mode="reduce-overhead"). The product has one tile and many
    terms, so that cuBLAS splits its sum and adds the parts up in its workspace."""
    torch.cuda.empty_cache()
    pool, x = GraphPool(), torch.randn(64, 2**19, dtype=torch.bfloat16, device="cuda")
    graph = pool.capture(lambda: [x @ x.t()])
    pool.settle()
    expected = graph.replay()[0].clone()
    torch._C._cuda_clearCublasWorkspaces()
    others = [torch.zeros(SIZE // 2, device="cuda") for _ in range(64)]
    with pool.eager():
        eager = (x @ x.t()).equal(expected)
    assert eager and graph.replay()[0].equal(expected)
    assert all(other.count_nonzero() == 0 for other in others) and not pool.grown()


@pytest.mark.parametrize("inside", ["eager work", "a capture"])
def test_pools_that_are_garbage_do_not_end_the_process_that_uses_another(inside):
    """In a process of its own, which torch would abort."""
    code = f"""
import gc, torch
from hqsweep.train.graph import GraphPool
x = torch.ones(1024, device="cuda")

def leave_garbage():
    pool = GraphPool()
    pool.graph, pool.itself = pool.capture(lambda: [x * 2]), pool

def work():
    kept = [[]]
    for _ in range(5000):
        kept.append([kept])  # as much as has Python collect
    return [x * 3]

leave_garbage()
pool = GraphPool()
if {inside!r} == "eager work":
    with pool.eager():
        gc.collect()
        found = work()[0].sum().item()
else:
    found = pool.capture(work).replay()[0].sum().item()
print(found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "3072.0\n"), done.stderr[-2000:]
