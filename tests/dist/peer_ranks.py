"""What two ranks compute of messages by copy engines, beside the same by collectives of NCCL."""

from collections.abc import Callable
from unittest import mock

import torch
from shared_linears import quantizers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hqsweep.dist import peers
from hqsweep.dist.tokens import begin_lent_rows, begin_sum_rows
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization
from hqsweep.parallel.tensor import ColwiseLinear, RowwiseLinear
from hqsweep.train.graph import GraphPool

ROWS, WIDTH = 4096, 512
"""Tokens of both ranks; features."""


def exchanges(rank: int, group) -> list[Tensor]:
    """Rows of many exchanges, of which two are on their way at a time, in slots that are taken again and again."""
    x = draw("normal", ROWS, WIDTH, rank).cuda()
    results, pending = [], []
    for i in range(24):
        begin = (begin_sum_rows, begin_lent_rows, begin_sum_rows)[i % 3]
        pending.append(begin(x * (i + 1), group))
        if len(pending) == 2:
            results.append(pending.pop(0)().clone())
    return [*results, pending.pop()().clone()]


def linears(rank: int, group) -> list[Tensor]:
    """Outputs and gradients of linears over ranks that have half of the tokens each."""
    mesh, results = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",)), []
    for text in ("bf16", "mxfp8", "nvfp4", "fp8_current"):
        for style in (ColwiseLinear, RowwiseLinear):
            torch.manual_seed(0)
            module = Linear(WIDTH, WIDTH, name="l", recipe=quantizers(text), bias=False, device="cuda")
            module = parallelize_module(module, mesh, style(sequence=0))
            of_column = style is ColwiseLinear
            x, dy = draw("heavy", ROWS, WIDTH).cuda(), draw("row_scaled", ROWS, WIDTH, 1).cuda()
            x, dy = (t.chunk(2, int(t is (dy if of_column else x)))[rank].contiguous() for t in (x, dy))
            x.requires_grad_()
            with quantization(step=1):
                y = module(x)
            y.backward(dy)
            results += [y.detach(), x.grad, module.weight.grad.to_local()]
    return results


WORK: list[Callable] = [exchanges, linears]


def beside_collectives(rank: int, name: str) -> tuple[list[str], int | None]:
    """What differs, eagerly and in a graph, and how many messages were sent; None where the ranks share a GPU."""
    work = next(each for each in WORK if each.__name__ == name)
    group = init_device_mesh("cuda", (2,)).get_group()
    with mock.patch.object(peers, "LEAST_BYTES", peers.MOST_BYTES):
        expected = work(rank, group)
    begin, sent = peers.Mailbox.begin, []

    def counted(mailbox: peers.Mailbox, *messages: object) -> object:
        sent.append(messages)
        return begin(mailbox, *messages)

    with mock.patch.object(peers.Mailbox, "begin", counted):
        results, pool = {"eager": work(rank, group)}, GraphPool()
        with pool.eager():
            work(rank, group)
        if name == "exchanges":
            graph = pool.capture(lambda: work(rank, group))
            for turn in range(3):
                results[f"replay {turn}"] = [result.clone() for result in graph.replay()]
        torch.cuda.synchronize()
    faults = [
        f"{how}: {i}"
        for how, tensors in results.items()
        for i, (one, other) in enumerate(zip(expected, tensors, strict=True))
        if not torch.equal(one, other)
    ]
    return faults, None if torch.cuda.device_count() < 2 else len(sent)
