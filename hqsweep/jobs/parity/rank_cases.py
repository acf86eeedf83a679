"""Steps of a linear for the check of ranks: computed by ranks, each on its slice of the rows, and by one process.

Both sides of a column give results of the same names. One process computes the slices one after the other, and adds in
the ranks' order what ranks add. The operands that products have read are results, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hqsweep.formats import WHOLE
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization, quantized_model_init
from hqsweep.nn.core.context import current, within
from hqsweep.optim import FusedAdam
from hqsweep.parallel.wire.collectives import gather_bytes, ordered_reduce_scatter
from hqsweep.parallel.wire.local import whole_tensor
from hqsweep.quant.operand import Operand
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.pairs import GEMMS
from hqsweep.recipe.sections import LinearQuantizers

PREFIX = "operand of "
"""The beginning of the names of results that are operands."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """An operand that a product has read."""

    layer: str
    """The name of the linear; for an expert it ends with the expert's number."""
    tensor: str
    direction: str
    microbatch: int
    operand: Operand

    def results(self, step: int, ranks: int = 1, cut: int | None = None) -> list[dict[str, Tensor]]:
        """For each rank: name -> buffer of the operand, or of the rank's part where the matrix is cut along `axis`."""
        axis = None if cut is None else cut if self.direction == "rowwise" else 1 - cut
        parts = [dict[str, Tensor]() for _ in range(ranks)]
        for name, buffer in self.operand.format.layout.items():
            tensor = self.operand.buffers[name]
            is_cut = axis is not None and (buffer.rows, buffer.cols)[axis] != WHOLE
            pieces = tensor.chunk(ranks, axis) if is_cut else [tensor] * ranks
            text = f"{self.tensor} {self.direction} {name}, microbatch {self.microbatch}, step {step}"
            for part, piece in zip(parts, pieces, strict=True):
                part[f"{PREFIX}{self.layer}: {text}"] = piece
        return parts


@contextmanager
def reading() -> Iterator[list[Read]]:
    """The context that lists the operands of all products of linears, in forward and backward."""
    reads: list[Read] = []
    with within(replace(current(), reader=_reader(reads))):
        yield reads


def _reader(reads: list[Read]) -> Callable[[Any, str, Any, Any], None]:
    def note(call: Any, gemm: str, *operands: Any) -> None:
        for (tensor, direction), operand in zip(GEMMS[gemm], operands, strict=True):
            members = [operand] if call.splits is None else operand.members
            for single, member in zip(call.singles, members, strict=True):
                # Copies, because fully_shard frees gathered memory, and a high-precision matrix is its own operand.
                buffers = {name: buffer.clone() for name, buffer in member.buffers.items()}
                names = {"layer": single.layer, "tensor": tensor, "direction": direction}
                microbatch = call.context.microbatch
                reads.append(Read(**names, microbatch=microbatch, operand=replace(member, buffers=buffers)))

    return note


ROWS, K, N = 64, 128, 96
"""ROWS: the rows of a rank. K, N: sizes of a weight whose halves and quarters cut blocks of 32 and 128 rows."""
SMALLER = 0.7
"""The ratio between the magnitudes of a rank's part and the part of the rank before."""
FIRST = 1
"""The first step."""
CPU = torch.device("cpu")
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """One linear under these quantizers, whose rows `ranks` ranks share."""

    quantizers: LinearQuantizers
    seed: int
    ranks: int
    device: torch.device = CPU
    held: bool = False
    """Whether the weight is held quantized."""

    def draw(self, distribution: str, rows: int, cols: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """[rows, cols] on the device, of at most 1,000 in magnitude.

        Parts of later ranks are smaller along both axes, so that an amax of a part is not the amax of the whole.
        """
        x = draw(distribution, rows, cols, seed, dtype).clamp(-1e3, 1e3)
        of_row, of_col = (SMALLER ** (torch.arange(size) * self.ranks // size) for size in (rows, cols))
        return (x * of_row[:, None] * of_col).to(self.device, dtype)

    def mesh(self, *names: str) -> DeviceMesh:
        """The mesh with all ranks along one axis."""
        return init_device_mesh(self.device.type, (self.ranks,), mesh_dim_names=names or None)

    def linear(self) -> Linear:
        as_held = quantized_model_init(preserve_high_precision_init_val=True) if self.held else nullcontext()
        with self.device, as_held:
            module = Linear(K, N, name="parity", recipe=self.quantizers, bias=True)
        with torch.no_grad():
            module.weight.copy_(self.draw("heavy", N, K, self.seed, torch.float32))
        return module

    @property
    def steps(self) -> Sequence[int]:
        """The steps of a problem. Products take operands as in a run, and in the last step codes, so that codes are
        compared.

        Scales from the amaxes of earlier steps exist from the second step on.
        """
        quantizers = self.quantizers
        delayed = any(q.delayed for q in (quantizers.input, quantizers.weight, quantizers.grad_output))
        return range(FIRST, FIRST + (3 if delayed else 2))

    @contextmanager
    def step(self, step: int, **options: Any) -> Iterator[list[Read]]:
        """The context of a step under quantization(). Gives the list of operands that products read in the last step;
        those of backward follow later."""
        noting = reading() if step == self.steps[-1] else nullcontext([])
        with quantization(seed=self.seed, step=step, **options), noting as reads:
            yield reads

    def slice(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """The x and dy of a rank."""
        whole = ROWS * self.ranks
        both = (self.draw("heavy", whole, width, self.seed + 2 * step + i) for i, width in enumerate((K, N)))
        return tuple(matrix.chunk(self.ranks)[rank] for matrix in both)

    def pass_(self, module: Any, step: int, rank: int) -> Results:
        """Forward and backward of a rank's slice."""
        x, dy = self.slice(step, rank)
        x = x.requires_grad_()
        with self.step(step, microbatch=rank) as reads:
            y = module(x)
            y.backward(dy)
        return {f"y of step {step}": y.detach(), f"dx of step {step}": x.grad} | named(reads, step)


def named(reads: Sequence[Read], step: int) -> Results:
    """Name -> the operands that one process has read in a step."""
    return {name: tensor for read in reads for name, tensor in read.results(step)[0].items()}


def optimizer_of(module: torch.nn.Module) -> FusedAdam:
    return FusedAdam(module.parameters(), lr=1e-2)


@lru_cache(maxsize=2)
def one_process(problem: Problem) -> list[Results]:
    """The results of each rank, computed in one process slice by slice. Gradients are added in the order of ranks."""
    module, results = problem.linear(), [dict[str, Tensor]() for _ in range(problem.ranks)]
    optimizer = optimizer_of(module)
    for step in problem.steps:
        gradients = []
        for rank, result in enumerate(results):
            result |= problem.pass_(module, step, rank)
            gradients.append([p.grad for p in module.parameters()])
            optimizer.zero_grad()
        for p, *parts in zip(module.parameters(), *gradients, strict=True):
            p.grad = in_order(parts) / problem.ranks
        shared = _state(module, optimizer, step)
        results = [result | shared for result in results]
    return results


def products(problem: Problem) -> list[Results]:
    """The products of each rank with a constant weight, and their operands."""
    module, results = problem.linear(), [dict[str, Tensor]() for _ in range(problem.ranks)]
    for step in problem.steps:
        for rank, result in enumerate(results):
            result |= problem.pass_(module, step, rank)
    return results


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum in float32, added one part after the other."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def ddp(problem: Problem, rank: int) -> Results:
    """The results of a rank under DistributedDataParallel."""
    module = problem.linear()
    parallel = DistributedDataParallel(module)
    parallel.register_comm_hook(None, _in_rank_order)
    return _trained(problem, parallel, module, rank)


def fsdp2(problem: Problem, rank: int) -> Results:
    """The results of a rank under fully_shard."""
    module = problem.linear()
    fully_shard(module, mesh=problem.mesh(), reshard_after_forward=True)
    module.set_custom_reduce_scatter(_InRankOrder())
    return _trained(problem, module, module, rank)


def fsdp2_bf16(problem: Problem, rank: int) -> Results:
    """The products() of a rank whose weights are gathered in bfloat16."""
    module = problem.linear()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=problem.mesh(), mp_policy=policy)
    results: Results = {}
    for step in problem.steps:
        results |= problem.pass_(module, step, rank)
    return results


def _trained(problem: Problem, model: torch.nn.Module, module: Linear, rank: int) -> Results:
    results: Results = {}
    optimizer = optimizer_of(module)
    for step in problem.steps:
        results |= problem.pass_(model, step, rank)
        results |= _state(module, optimizer, step)
    return results


def _state(module: Linear, optimizer: FusedAdam, step: int) -> Results:
    """The gradients; after an update also the masters, and the operands of a held weight."""
    results = {f"{name}.grad of step {step}": _whole(p.grad) for name, p in module.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    results |= {f"{name} after step {step}": _whole(optimizer.master_param(p)) for name, p in module.named_parameters()}
    sharded = hasattr(module, "unshard")
    if sharded:
        module.unshard()
    if isinstance(module.weight, HybridQuantizedTensor):
        buffers = module.weight.buffers.items()
        results |= {f"{name} after step {step}": buffer.clone() for name, buffer in buffers}
    if sharded:
        module.reshard()
    return results


def _whole(x: Tensor) -> Tensor:
    return whole_tensor(x).detach().clone()


def _in_rank_order(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of DistributedDataParallel that adds in the order of ranks, on any backend."""
    own = bucket.buffer()
    every = gather_bytes(own).view(own.dtype)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(in_order(every.unbind()).to(own.dtype) / len(every))
    return done


class _InRankOrder:
    """_in_rank_order as the reduction of FSDP."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        total = ordered_reduce_scatter(input_tensor, group)
        output_tensor.copy_(total / dist.get_world_size(group) if op == dist.ReduceOp.AVG else total)


@dataclass(frozen=True)
class Column:
    """A way to share work, which is a column of the parity matrix."""

    name: str
    case: str
    ranked: Callable[[Problem, int], Results]
    expected: Callable[[Problem], list[Results]]
    held: bool = False


DATA_COLUMNS = (
    Column("ddp", "plain weights", ddp, one_process),
    Column("ddp", "held weights", ddp, one_process, held=True),
    Column("fsdp2", "plain weights", fsdp2, one_process),
    Column("fsdp2", "gathered in bfloat16", fsdp2_bf16, products),
    Column("fsdp2", "held weights", fsdp2, one_process, held=True),
)
