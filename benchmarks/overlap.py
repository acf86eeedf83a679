"""The gain of what overlaps between ranks that share linears: steps of our Trainer with tp=2, with each part taken out,
and with torch's own exchanges in its place.

    python -m benchmarks.overlap [--size M L] [--recipes bf16 mxfp8] [--engines ours no_prefetch ... nccl torch fused]

ours        parallel/shared/overlap, and messages by copy engines (p2p_copy)
no_X        ours without one part: chunked_input, prefetch, deferred_reduce, overlapped_gemm, loss_mailbox
nccl        none of them: the product, then a collective, then the next
torch       as nccl, with torch.ops.symm_mem's _low_contention_all_gather and _low_contention_reduce_scatter
fused       as torch, with fused_all_gather_matmul and fused_matmul_reduce_scatter in fprop and dgrad, as torchtitan's
            async tensor parallelism has them: operands travel in bfloat16

All compute the same products of the same operands, on the same ranks, in one process each.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
from torch import Tensor

import hqsweep.parallel.tensor  # noqa: F401, so that everywhere() sees what models over ranks import
from benchmarks import rows
from benchmarks.ranks import Ours, divisible
from benchmarks.step import Data, Prepared, alternated
from benchmarks.step_cases import SIZES
from hqsweep.config.train import ParallelConfig
from hqsweep.parallel.mesh import backend
from hqsweep.parallel.shared import overlap, overlapped_gemm, vocabulary
from hqsweep.parallel.shared.call import RankRows, decoded
from hqsweep.parallel.shared.overlapped_gemm import LayerWeights, hides
from hqsweep.parallel.wire import collectives, p2p_copy, tokens
from hqsweep.parallel.wire.spawn import spawn_ranks
from hqsweep.quant.operand import HybridOperand

COLUMNS = ("section", "device", "size", "case", "recipe", "ranks", "ms")
Patch = tuple[Any, str, Any]


def everywhere(original: Any, replacement: Any) -> list[Patch]:
    """The name of a function in every module of ours that has imported it."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("hqsweep.")]
    return [(module, name, replacement) for module in ours for name, value in vars(module).items() if value is original]


def no_overlap() -> list[Patch]:
    return [
        *everywhere(hides, lambda x: False),
        *everywhere(tokens.left_by, lambda pending: None),
        *everywhere(vocabulary.meeting, lambda *_: None),
        (p2p_copy, "start", lambda *_, **__: None),
    ]


def low_contention() -> list[Patch]:
    """torch's exchanges by copy engines in place of NCCL's."""

    def begin(collective: Callable[..., Any], *tensors: Any, group: Any) -> Callable[[], None]:
        if collective is not collectives.all_gather:
            return collectives_begin(collective, *tensors, group=group)
        whole, own = tensors
        gathered = torch.ops.symm_mem._low_contention_all_gather(own.view(-1).view(torch.uint8), group.group_name)

        def wait() -> None:
            arrived = torch.ops._c10d_functional.wait_tensor(gathered)
            whole.set_(arrived.view(whole.dtype).view(whole.shape))
            del own_until_then[:]

        own_until_then = [own]
        return wait

    def begin_sum_rows(x: Tensor, group: Any, lead: int = 1) -> Callable[[], Tensor]:
        if lead > 1 or group.size() == 1:
            return tokens_begin_sum_rows(x, group, lead)
        x = x.contiguous()
        total, alive = torch.ops.symm_mem._low_contention_reduce_scatter(x, "sum", group.group_name), [x]

        def wait() -> Tensor:
            arrived = torch.ops._c10d_functional.wait_tensor(total)
            del alive[:]
            return arrived

        return wait

    collectives_begin, tokens_begin_sum_rows = collectives.begin, tokens.begin_sum_rows
    return [*everywhere(collectives.begin, begin), *everywhere(tokens.begin_sum_rows, begin_sum_rows)]


class FusedRows(RankRows):
    """The rowwise operand of all tokens, of which this rank's are gathered while they are multiplied."""

    def product(self, b: Any, out_dtype: torch.dtype) -> Tensor:
        own, b = self.of_rank(self.part.group.rank()), decoded(b)
        fused, name = torch.ops.symm_mem.fused_all_gather_matmul, self.part.group.group_name
        return of_its_own(fused(own.matrix, [b.matrix.t()], 0, name, return_A=False)[1][0])


def of_its_own(y: Tensor) -> Tensor:
    """y without a base of the same shape, which autograd would take for a view of something that is written."""
    return y if y._base is None or y._base.shape != y.shape else y._base


def fused() -> list[Patch]:
    quantize_tokens, begin_product = overlapped_gemm.quantize_tokens, overlapped_gemm.begin_summed_product

    def quantize(
        call: Any, tensor: str, x: Tensor, *, rowwise: Any = None, columnwise: Any = None, **options: Any
    ) -> Any:
        part, both = call.tokens_of(tensor, x), {"rowwise": rowwise, "columnwise": columnwise}
        if part is None or part.runs > 1 or rowwise != "exact" or call.layer.endswith("head"):
            return quantize_tokens(call, tensor, x, **both, **options)
        own = call.quantize_part(tensor, x, part, rowwise="exact").rowwise
        if own.factor is not None:
            return quantize_tokens(call, tensor, x, **both, **options)
        row = FusedRows(part=part, rows=len(x), of_rank=lambda _: own)
        others = quantize_tokens(call, tensor, x, columnwise=columnwise, **options) if columnwise else None
        return HybridOperand(rowwise=row, columnwise=others and others.columnwise)

    def begin(call: Any, gemm: str, tensor: str, a: Any, b: Any) -> Callable[[], Tensor]:
        splits = call.exchange is not None and call.exchange.splits_tokens(tensor)
        a = decoded(a) if splits and not isinstance(a, RankRows) else a
        if not splits or isinstance(a, RankRows) or a.matrix.dim() != 2 or call.exchange.lead > 1:
            return begin_product(call, gemm, tensor, a, b)
        b, name = decoded(b), call.exchange.parallel.group.group_name
        if a.factor is not None or b.factor is not None:
            return begin_product(call, gemm, tensor, a, b)
        y = of_its_own(torch.ops.symm_mem.fused_matmul_reduce_scatter(a.matrix, b.matrix.t(), "sum", 0, name))
        return lambda: y

    return [*everywhere(quantize_tokens, quantize), *everywhere(begin_product, begin)]


ENGINES: dict[str, Callable[[], list[Patch]]] = {
    "ours": lambda: [],
    "no_chunked_input": lambda: everywhere(overlap.part_in_turn, lambda *_: None),
    "no_prefetch": lambda: [
        (LayerWeights, "owe", lambda *_: None),
        (LayerWeights, "made_in_backward", lambda *makers: []),
    ],
    "no_deferred_reduce": lambda: everywhere(overlap.left_by, lambda pending: None),
    "no_overlapped_gemm": lambda: everywhere(hides, lambda x: False),
    "no_loss_mailbox": lambda: everywhere(vocabulary.meeting, lambda *_: None),
    "nccl": no_overlap,
    "torch": lambda: [*no_overlap(), *low_contention()],
    "fused": lambda: [*no_overlap(), *low_contention(), *fused()],
}


def _work(rank: int, world: int, args: argparse.Namespace) -> None:
    writer = rows.Writer("overlap", args.device, args) if rank == 0 else None
    for name in args.size:
        size, dims = divisible(SIZES[name], world), ParallelConfig(tp=world)
        data = Data(size, args.device)
        for recipe in args.recipes:
            for engine in args.engines:
                with ExitStack() as stack:
                    for module, attribute, replacement in ENGINES[engine]():
                        stack.enter_context(mock.patch.object(module, attribute, replacement))
                    row = {"section": "tp", "size": name, "case": engine, "recipe": recipe, "ranks": world}
                    try:
                        build = partial(Ours, size, data, recipe, dims, args.device)
                        case = Prepared(build, args.device, is_deterministic=True)
                        row |= {"ms": alternated([case], size.turn, args.turns)[0] * 1e3} | case.facts
                        del case
                    except RuntimeError as error:
                        row["error"] = str(error)[:200]
                if writer:
                    writer.add(row)
                dist.barrier()
    if writer:
        rows.finish(writer, COLUMNS, fail=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=["M", "L"])
    parser.add_argument("--recipes", nargs="+", default=["bf16", "mxfp8"])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--turns", type=int, default=3)
    rows.add_arguments(parser, ("tp",))
    args = parser.parse_args()
    spawn_ranks(2, _work, 2, args, backend=backend("cuda"), timeout_s=600)


if __name__ == "__main__":
    main()
