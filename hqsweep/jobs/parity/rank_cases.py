"""Steps of a linear for the check of ranks: computed by ranks, each on its slice of the rows, and by one process.

Both sides of a column give results of the same names. One process computes the slices one after the other, and adds in
the ranks' order what ranks add. The operands that products have read are results, too.

Sums that ranks split are bounded by the effect of their order alone. A float32 sum of n products is off by at most n *
2^-24 * |a_i| |b_j|, in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), and two such
sums differ by at most twice that. Ranks send values in bfloat16, which rounds them by at most 2^-8 of their size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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

from hqsweep.formats import WHOLE, ExactOperand
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import mm_t
from hqsweep.jobs.parity.compare_bytes import row
from hqsweep.nn import Linear, quantization, quantized_model_init
from hqsweep.nn.core.context import current, within
from hqsweep.optim import FusedAdam
from hqsweep.parallel.wire.collectives import gather_bytes, ordered_reduce_scatter
from hqsweep.parallel.wire.local import whole_tensor
from hqsweep.quant.hybrid import HybridQuantizer
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
        """The context of a step under quantization(). It gives the list of operands that products read in the last
        step.

        Operands of backward are appended later.
        """
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


NAME = "order of sums"
ROUNDING = 2.0**-24
"""The relative error bound of a float32 addition."""
TRAVEL = 2.0**-8 * (1 + 2.0**-6)
"""The error bound of rounding a value to bfloat16, relative to the rounded value."""


class SplitSum:
    """mm_t(a, b) by parts of the contracted axis, plus a bias.

    Each part is rounded to bfloat16, as it is sent, and the parts are added in float32 in order and rounded.
    """

    def __init__(self, a: ExactOperand, b: ExactOperand, ranks: int, bias: Tensor | None = None) -> None:
        self.operands, self.bias = (a, b), bias
        pairs = zip(a.matrix.chunk(ranks, 1), b.matrix.chunk(ranks, 1), strict=True)
        self.parts = [mm_t(replace(a, matrix=x), replace(b, matrix=w), out_dtype=torch.bfloat16) for x, w in pairs]
        total = in_order(self.parts).bfloat16()
        self.total = total if bias is None else total + bias


def order_of_sums(
    subject: str, problem: Problem, shared: Iterable[tuple[str, SplitSum, Tensor]]
) -> Iterator[dict[str, object]]:
    """Rows of the sums that ranks split: gradients of a weight by slices of the rows, and sums of linears that ranks
    share.

    Gradients are left out where the slices' operands differ from the whole's, as with scales of a whole tensor. The
    sums are given as (case, sum, whole product).
    """
    slices = _by_slices(problem)
    if slices is not None:
        yield _row(subject, f"{problem.ranks} ranks, wgrad of slices", *slices)
    for case, split, whole in shared:
        error = (split.total.double() - whole.double()).abs()
        yield _row(subject, f"{problem.ranks} ranks, {case}", error, _allowed(split, whole))


def _row(subject: str, case: str, error: Tensor, allowed: Tensor) -> dict[str, object]:
    missed = int((~(error <= allowed)).sum())
    largest = (error / allowed).nan_to_num(0.0).max()
    note = f"largest difference from one process: {largest:.1e} of what the order of sums allows"
    counted = {"status": "FAIL" if missed else "PASS", "total": error.numel(), "mismatches": missed, "note": note}
    return row(NAME, subject, case, {}) | counted


def _allowed(split: SplitSum, whole: Tensor) -> Tensor:
    """float64, of whole's shape: the allowed error. It covers the sums, and the roundings of each part and of both
    sums, and of both again where a bias is added."""
    a, b = (_magnitudes(operand) for operand in split.operands)
    sums = 2 * split.operands[0].matrix.shape[1] * ROUNDING * a[:, None] * b[None, :]
    rounded = sum(part.double().abs() for part in split.parts) + 2 * (split.total.double().abs() + whole.double().abs())
    return sums + TRAVEL * (rounded if split.bias is None else rounded + 2 * split.bias.double().abs())


def _magnitudes(operand: ExactOperand) -> Tensor:
    """float64 [rows]: the 2-norms of the rows that a product reads."""
    norms = operand.matrix.double().norm(dim=1) / operand.divisor
    return norms if operand.factor is None else norms * operand.factor.double().view(-1)


def _by_slices(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """(errors, allowed errors) of the weight's gradient; None where the slices' operands differ from the whole's."""
    step = FIRST
    split = one_process(problem)[0][f"weight.grad of step {step}"] * problem.ranks
    parts = [problem.slice(step, rank) for rank in range(problem.ranks)]
    x, dy = (torch.cat(column) for column in zip(*parts, strict=True))
    quantizers = problem.quantizers
    tensors = ((quantizers.input, x, 0), (quantizers.grad_output, dy, 1))
    if any(q.stochastic or q.delayed or not _same_by_slices(q, t, [p[i] for p in parts]) for q, t, i in tensors):
        return None
    module = problem.linear()
    with quantization(seed=problem.seed, step=step):
        module(x).backward(dy)
    of_x, of_dy = (_values(q, t).double().norm(dim=1) for q, t, _ in tensors)
    return (split - module.weight.grad).abs(), 2 * len(x) * ROUNDING * of_dy[:, None] * of_x[None, :]


def _same_by_slices(quantizer: HybridQuantizer, x: Tensor, slices: list[Tensor]) -> bool:
    """Whether the columnwise operand of x consists of the operands of its slices. A scale of all rows prevents it."""
    if quantizer.quantize(x, rowwise=None, columnwise="exact").columnwise.factor is not None:
        return False
    return torch.equal(_values(quantizer, x), torch.cat([_values(quantizer, part) for part in slices], dim=1))


def _values(quantizer: HybridQuantizer, x: Tensor) -> Tensor:
    """float32 [cols, rows]: the values of the columnwise operand that a product reads."""
    return quantizer.quantize(x, rowwise=None, columnwise="exact").columnwise.matrix.float()
