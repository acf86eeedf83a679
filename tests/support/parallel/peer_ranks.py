"""What two ranks compute of messages by copy engines, beside the same by collectives of NCCL."""

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from support.parallel.shared_linears import quantizers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, linear_cross_entropy, quantization
from hqsweep.parallel.fsdp_exchanges import Gather, Sum
from hqsweep.parallel.shared import linear as shared_linear
from hqsweep.parallel.shared.vocabulary import split_embedding
from hqsweep.parallel.tensor import ColwiseLinear, RowwiseLinear
from hqsweep.parallel.wire import p2p_copy
from hqsweep.parallel.wire.tokens import begin_lent_rows, begin_sum_rows, gather_rows, start_lent_rows, start_sum_rows
from hqsweep.train.graph import GraphPool

ROWS, WIDTH = 4096, 512
"""Tokens of both ranks; features."""
Work = Callable[[], list[Tensor]]


def exchanges(mesh: DeviceMesh) -> Work:
    """Rows of many exchanges, of which two are on their way at a time, in slots that are taken again and again."""
    group = mesh.get_group()
    x = draw("normal", ROWS, WIDTH, group.rank()).cuda()

    def run() -> list[Tensor]:
        results, pending = [], []
        for i in range(24):
            begin = (begin_sum_rows, begin_lent_rows, begin_sum_rows)[i % 3]
            pending.append(begin(x * (i + 1), group))
            if len(pending) == 2:
                results.append(pending.pop(0)().clone())
        return [*results, pending.pop()().clone()]

    return run


def pieces(mesh: DeviceMesh) -> Work:
    """Sums of rows that are written, and leave, a quarter at a time; between them rows that leave early, beside
    products that have been enqueued since all was read."""
    group, rank = mesh.get_group(), mesh.get_local_rank()
    x, y = (draw("normal", ROWS, WIDTH, 2 * i + rank).cuda() for i in range(2))
    message, other = y[: ROWS // 2].contiguous(), 1 - rank

    def run() -> list[Tensor]:
        results = []
        for i in range(12):
            total = torch.empty_like(x)
            parts = start_sum_rows(total, group)
            for first in range(other * ROWS // 2, (1 + other) * ROWS // 2, ROWS // 8):
                total[first : first + ROWS // 8] = x[first : first + ROWS // 8] * (i + 1)
                parts.ready(first, first + ROWS // 8)
            own = slice(rank * ROWS // 2, (1 + rank) * ROWS // 2)
            total[own] = x[own] * (i + 1)
            results.append(parts.begun()().clone())
            p2p_copy.all_read(group, x.device)
            results.append(x.t() @ y)  # beside what follows
            arriving = p2p_copy.begin({other: (message,)}, group, own=(message,), early=True)
            whole = gather_rows(message, group) if arriving is None else arriving().clone().view(x.dtype)
            results.append(whole.view_as(x))
        return results

    return run


def places(mesh: DeviceMesh) -> Work:
    """Rows that kernels write to where they belong: on the other rank, and among those of all on this one."""
    group, rank = mesh.get_group(), mesh.get_local_rank()
    x = draw("normal", ROWS, WIDTH, rank).cuda()

    def run() -> list[Tensor]:
        results = []
        for i in range(12):
            own, sending = x * (i + 1), p2p_copy.start(x.nbytes, group, x.device)
            if sending is None:
                received = gather_rows(own, group).view(2, ROWS, WIDTH)[1 - rank]
            else:
                torch.mul(x, i + 1, out=sending.place(1 - rank).view(x.dtype).view(x.shape))
                sending.written()
                received = sending.received().view(x.dtype).view(x.shape)
            results.append(received.clone())
            lent = start_lent_rows(tuple(x.shape), x.dtype, group, x.device)
            if lent is not None:
                own = torch.mul(x, i + 1, out=lent.rows)
            results.append((begin_lent_rows(own, group) if lent is None else lent.begun())().clone())
        return results

    return run


def rows_of_a_table(mesh: DeviceMesh) -> Work:
    """Rows of a table whose entries lie over both ranks, and its gradient, whose values are whole numbers."""
    group, rank = mesh.get_group(), mesh.get_local_rank()
    draw_on = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 300, (2, ROWS), generator=draw_on).cuda()
    tokens[:, ::3] = 7
    table = draw("normal", 150, WIDTH, rank).cuda().float().requires_grad_()
    gradient = torch.randint(-8, 8, (1, ROWS, WIDTH), generator=draw_on).cuda().float() * (1 + rank)

    def run() -> list[Tensor]:
        table.grad = None
        rows = split_embedding(tokens, table, group, split=0)
        rows.backward(gradient)
        return [rows.detach(), table.grad]

    return run


def losses(mesh: DeviceMesh) -> Work:
    """Losses of rows whose logits lie over both ranks, and their gradients, chunk by chunk. Of the last, each rank has
    half of the rows: they are read where they have arrived, until all chunks are done."""
    calls = []
    for entries, rows, sequence in ((1008, 640, None), (6000, 1000, None), (1008, ROWS, 0)):
        torch.manual_seed(0)
        head = Linear(WIDTH, entries, name="head", recipe=quantizers("bf16"), bias=False).cuda()
        head = parallelize_module(head, mesh, ColwiseLinear(sequence=sequence))
        targets, h = (torch.arange(rows) * 37 % entries).cuda(), draw("normal", rows, WIDTH).cuda()
        targets[3:50] = -100
        calls.append((head, h if sequence is None else h.chunk(2)[mesh.get_local_rank()], targets))

    def run() -> list[Tensor]:
        results = []
        for head, h, targets in calls:
            h, head.weight.grad = h.clone().requires_grad_(), None
            with quantization(step=1):
                loss = linear_cross_entropy(h, head, targets, chunk=256)
            loss.backward()
            results += [loss.detach(), h.grad, head.weight.grad.to_local()]
        return results

    return run


def linears(mesh: DeviceMesh) -> Work:
    """Outputs and gradients of linears over ranks that have half of the tokens each."""
    rank, calls = mesh.get_local_rank(), []
    for text in ("bf16", "mxfp8", "nvfp4", "fp8_current"):
        for style, axes in ((ColwiseLinear, (0, 1)), (RowwiseLinear, (1, 0))):
            torch.manual_seed(0)
            module = Linear(WIDTH, WIDTH, name="l", recipe=quantizers(text), bias=False).cuda()
            module = parallelize_module(module, mesh, style(sequence=0))
            whole = draw("heavy", ROWS, WIDTH), draw("row_scaled", ROWS, WIDTH, 1)
            x, dy = (t.chunk(2, axis)[rank].contiguous().cuda() for t, axis in zip(whole, axes, strict=True))
            calls.append((module, x, dy))

    def run() -> list[Tensor]:
        results = []
        for module, x, dy in calls:
            x, module.weight.grad = x.clone().requires_grad_(), None
            with quantization(step=1):
                y = module(x)
            y.backward(dy)
            results += [y.detach(), x.grad, module.weight.grad.to_local()]
        return results

    return run


def units(mesh: DeviceMesh) -> Work:
    """What units of fully_shard exchange, gathers and sums in turn, each in a stream of its own."""
    group, streams = mesh.get_group(), [torch.cuda.Stream(), torch.cuda.Stream()]
    x = draw("normal", ROWS, WIDTH, group.rank()).cuda()

    def run() -> list[Tensor]:
        results = []
        for i in range(8):
            for stream, exchange in zip(streams, (Gather(), Sum()), strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    own = x * (i + 1)
                    if isinstance(exchange, Sum):
                        whole = torch.empty_like(own[: ROWS // 2])
                        exchange(whole, own, group, dist.ReduceOp.SUM)
                    else:
                        whole = own.new_empty(2 * ROWS, WIDTH)
                        exchange(whole, own, group)
                    results.append(whole)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return results

    return run


WORK = {exchanges: 12, pieces: 12, places: 12, rows_of_a_table: 2, losses: 7 + ROWS // 256 + 2, linears: 12, units: 12}
"""What is computed -> the number of messages that a run of it sends at least, or of chunks whose parts kernels tell."""


def beside_collectives(rank: int, which: int) -> tuple[list[str], int | None]:
    """What differs, eagerly and in replays of a graph, and how many messages were sent; None where ranks share a
    GPU."""
    run, pool, start, sent = list(WORK)[which](init_device_mesh("cuda", (2,))), GraphPool(), p2p_copy.Mailbox.start, []
    with (
        mock.patch.object(p2p_copy, "LEAST_BYTES", 1 << 40),
        mock.patch.object(shared_linear, "meeting", lambda *_: None),
    ):
        expected = run()

    def counted(mailbox: p2p_copy.Mailbox, size: int, **options: bool) -> object:
        sent.append(size)
        return start(mailbox, size, **options)

    joint = shared_linear.joint_cross_entropy_

    def joined(*call: object) -> Tensor | None:
        result = joint(*call)
        sent.extend([] if result is None else [len(result)])
        return result

    losses = mock.patch.object(shared_linear, "joint_cross_entropy_", joined)
    with mock.patch.object(p2p_copy.Mailbox, "start", counted), losses:
        results = {"eager": run()}
        with pool.eager():
            run()
        graph = pool.capture(run)
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


def units_by_collectives(rank: int) -> list[list[float]]:
    """What Gather and Sum give on CPUs, which have no copies: of rank + 1 in each place, and of the place's number."""
    group = init_device_mesh("cpu", (2,)).get_group()
    whole, part = torch.zeros(4), torch.zeros(2)
    Gather()(whole, torch.full((2,), rank + 1.0), group)
    Sum()(part, torch.arange(4.0) * (rank + 1), group, dist.ReduceOp.SUM)
    return [whole.tolist(), part.tolist()]
