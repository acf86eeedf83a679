"""GPTs shared over ranks, beside one process whose sums are split as theirs: to the byte, but for gains of norms."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.nn import emulated
from support.ranks import rank_device
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hqsweep.config.jobs import ERRORS, LOADS, PARTS
from hqsweep.config.model import ModelConfig
from hqsweep.config.train import ParallelConfig
from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand
from hqsweep.gemm.exact import mm_t
from hqsweep.nn import (
    LayerNormMLP,
    Linear,
    Probe,
    layernorm_linears,
    linear_cross_entropy,
    norm_embedding,
    quantization,
    quantized_model_init,
)
from hqsweep.nn.core.call import LinearCall
from hqsweep.parallel.data import captured_of_all, gather_in_linear_dtype, residual_under_fsdp, rows_of_all
from hqsweep.parallel.expert import expert_parallel
from hqsweep.parallel.mesh import Ranks
from hqsweep.parallel.shared import linear, linear_function, overlap
from hqsweep.parallel.shared.overlap import LeftGradient, LeftOutput, OperandsInTurn
from hqsweep.parallel.shared.vocabulary import cross_entropy, split_embedding, vocabulary_group
from hqsweep.parallel.tensor import ColwiseLinear, fsdp_placement, tensor_parallel
from hqsweep.parallel.wire.local import spread_out, whole_tensor
from hqsweep.parallel.wire.tokens import PendingSum, Summands
from hqsweep.quant import hybrid
from hqsweep.quant.operand import Operand
from hqsweep.recipe import Recipe
from hqsweep.train import model as gpt
from hqsweep.train.model import GPT

VOCABULARY, BATCH, CONTEXT = 128, 2, 64
ROW = ("proj", "fc2")
"""Linears whose products are sums over ranks; of the others the gradients of x are."""
PIECES = {"qkv": 3, "fc1": 2}


def build(recipe: dict, **model: object) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(**{"dim": 128, "layers": 1, "heads": 4, "ffn": 128} | model)
    gpt_model = GPT(config, VOCABULARY, Recipe.from_config(recipe), torch.bfloat16)
    with torch.no_grad():
        gpt_model.head.weight.normal_(std=0.2)
        for parameter in gpt_model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0, std=0.1)
    return gpt_model


def data(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def train(model: GPT, steps: int) -> dict[str, Tensor]:
    """The loss of each step, and the gradients of the last."""
    results = {}
    for step in range(1, steps + 1):
        model.zero_grad()
        with quantization(seed=1, step=step):
            loss, _ = model.loss(*data(step))
            loss.backward()
        results[f"loss {step}"] = loss.detach()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return results | {n: whole_tensor(g) for n, g in gradients.items()}


def split_product(world: int) -> Callable[..., Tensor]:
    """LinearCall.product whose sums over features are split as ranks split them."""
    product = LinearCall.product

    def run(call: LinearCall, gemm: str, a: ExactOperand, b: ExactOperand, dtype: torch.dtype) -> Tensor:
        kind = call.name.rpartition(".")[2]
        if gemm != ("fprop" if kind in ROW else "dgrad"):
            return product(call, gemm, a, b, dtype)
        a, b = (x.operand() if isinstance(x, Operand) else x for x in (a, b))
        pairs = [(a, b)] if call.splits is None else zip(a.members, b.members, strict=True)
        return torch.cat([split_sum(*pair, world, PIECES.get(kind, 1), dtype) for pair in pairs])

    return run


def split_sum(a: ExactOperand, b: ExactOperand, world: int, pieces: int, dtype: torch.dtype) -> Tensor:
    """The sum of the products of each rank's columns, in order."""
    total = None
    for rank in range(world):
        parts = (replace(x, matrix=own_columns(x.matrix, world, rank, pieces)) for x in (a, b))
        part = mm_t(*parts, out_dtype=dtype).float()
        total = part if total is None else total + part
    return total.to(dtype)


def own_columns(matrix: Tensor, world: int, rank: int, pieces: int) -> Tensor:
    return matrix.unflatten(1, (pieces, world, -1))[:, :, rank].flatten(1)


class SplitLoss(torch.autograd.Function):
    """The cross entropy whose sums of exponentials are split."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, world: int) -> Tensor:
        x, targets = logits.float().flatten(0, -2), targets.flatten()
        largest, rows = x.amax(1), torch.arange(len(x))
        softmax = (x - largest[:, None]).exp()
        total = sum(part.sum(1) for part in softmax.chunk(world, 1))
        softmax /= total[:, None]
        losses = total.log() + largest - x[rows, targets]
        softmax[rows, targets] -= 1.0
        ctx.save_for_backward((softmax * (1 / torch.tensor(float(len(x))))).view(logits.shape).to(logits.dtype))
        return losses.sum() / len(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0], None, None


@contextmanager
def split_sums(world: int) -> Iterator[None]:
    """One process computes what ranks do."""
    loss = lambda logits, targets, group: SplitLoss.apply(logits, targets, world)  # noqa: E731
    with mock.patch.object(LinearCall, "product", split_product(world)), mock.patch.object(gpt, "cross_entropy", loss):
        yield


def compare(rank: int, world: int, cases: list[dict]) -> list[str]:
    """What differs from one process, in a few words each."""
    mesh, faults = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), []
    for case in cases:
        faults += [f"{case}: {words}" for words in differences(mesh, **case)]
    return faults


def differences(
    mesh: DeviceMesh, recipe: dict, sequence: bool = True, axis: int = 1, steps: int = 1, **model: object
) -> Iterator[str]:
    whole, shared = build(recipe, **model), tensor_parallel(build(recipe, **model), mesh, sequence=sequence, axis=axis)
    with split_sums(mesh.size()):
        expected = train(whole, steps)
    got = train(shared, steps)
    for name, tensor in expected.items():
        if name.endswith("norm.weight"):
            if not torch.allclose(got[name], tensor, rtol=1e-3, atol=1e-6):
                yield f"{name} is not close"
        elif not torch.equal(got[name], tensor):
            yield f"{name} differs by {(got[name] - tensor).abs().max():.2e} of {tensor.abs().max():.2e}"
    tokens = data(1)[0]
    with torch.no_grad(), quantization(seed=1, step=9), split_sums(mesh.size()):
        logits = whole(tokens)
    with torch.no_grad(), quantization(seed=1, step=9):
        if not torch.equal(shared(tokens), logits):
            yield "logits"
    with split_sums(mesh.size()):
        of_one = probe(whole, steps + 1)
    ranks, own = Ranks(dims=ParallelConfig(tp=mesh.size()), mesh=mesh, device=tokens.device), probe(shared, steps + 1)
    yield from different_rows(rows_of_all(own, ranks)[0], of_one.rows if ranks.is_first else [])
    captured = of_one.captured if ranks.is_first else {}
    operands = captured_of_all(own, ranks)
    yield from (f"operand {name}" for name in captured if not torch.equal(operands.get(name), captured[name]))
    if operands.keys() != captured.keys():
        yield f"operands {list(operands)}"


def probe(model: GPT, step: int) -> Probe:
    """A probe that has seen a step of two microbatches."""
    seen = Probe(step, capture=True)
    for microbatch in range(2):
        with quantization(seed=1, step=step, probe=seen, microbatch=microbatch):
            model.loss(*data(10 + microbatch))[0].backward()
    return seen


def different_rows(got: list[dict], expected: list[dict]) -> Iterator[str]:
    """Rows, or their numbers, that are not equal but for the order of sums in float32."""
    if [list(row.values())[:5] for row in got] != [list(row.values())[:5] for row in expected]:
        yield f"{len(got)} other rows than {len(expected)}"
    for own, wanted in zip(got, expected, strict=True):
        for name in (*ERRORS, *LOADS):
            near = {"abs": 0.1} if name in PARTS else {"rel": 1e-5, "abs": 1e-5}  # parts are small differences of sums
            if own[name] != wanted[name] and own[name] != pytest.approx(wanted[name], **near):
                yield f"{list(own.values())[:5]} {name}: {own[name]} is not {wanted[name]}"


def refusals(rank: int, world: int) -> list[str]:
    mesh, said = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), []
    two = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    high = {"linear": "bf16"}
    with quantized_model_init():
        held = build({"linear": "bf16", "grouped_linear": "mxfp8"}, experts=2, expert_ffn=96)
    mixture = build(high, experts=2).layers[0].mlp
    for refused in (
        lambda: tensor_parallel(build(high, heads=1), mesh),
        lambda: tensor_parallel(build(high, ffn=97), mesh),
        lambda: tensor_parallel(build(high, experts=2, expert_ffn=97), mesh),
        lambda: tensor_parallel(held, mesh),
        lambda: expert_parallel(tensor_parallel(build(high, experts=2), mesh), mesh),
        lambda: tensor_parallel(tensor_parallel(mixture, mesh), mesh),
        lambda: tensor_parallel(build(high), two),
        lambda: tensor_parallel(torch.nn.Linear(2, 2), mesh),
        lambda: tensor_parallel(build(high), mesh)(torch.zeros(1, 3, dtype=torch.long)),
        lambda: tensor_parallel(build(high), mesh, axis=0)(torch.zeros(3, 2, dtype=torch.long)),
        lambda: tensor_parallel(build(high), mesh, axis=2),
    ):
        try:
            refused()
        except UserError as error:
            said.append(str(error))
    return said


def mixtures(rank: int, world: int, cases: list[dict]) -> tuple[list[str], bool]:
    """compare(), and whether a mixture without the rest of a model has the output of this rank's tokens."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    mixture = build({"linear": "mxfp8"}, experts=4).layers[0].mlp
    x = torch.randn(BATCH, CONTEXT, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), quantization(step=1), split_sums(world):
        whole, *_ = mixture(x)
    with torch.no_grad(), quantization(step=1):
        part, *_ = tensor_parallel(mixture, mesh)(x.chunk(world, 1)[rank])
    return compare(rank, world, cases), torch.equal(part, whole.chunk(world, 1)[rank])


def embedded(rank: int, world: int) -> list[int | None]:
    """The axes along which a rank's rows, or their gradients, are not those of the whole table."""
    mesh, wrong = init_device_mesh("cpu", (world,)), []
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 8 * world, (2 * world, 3 * world), generator=generator)
    table = torch.randn(8 * world, 4, generator=generator).requires_grad_()
    dy = torch.randn(*tokens.shape, 4, generator=generator)
    whole = torch.nn.functional.embedding(tokens, table)
    whole.backward(dy)
    for axis in (None, 0, 1):
        part = table.detach().chunk(world)[rank].clone().requires_grad_()
        own = (lambda x: x) if axis is None else (lambda x, axis=axis: x.chunk(world, axis)[rank])
        rows = split_embedding(tokens, part, mesh.get_group(), split=axis)
        rows.backward(own(dy))
        if not torch.equal(rows, own(whole)) or not torch.allclose(part.grad, table.grad.chunk(world)[rank], rtol=1e-5):
            wrong.append(axis)
    return wrong


def everything(rank: int, world: int, cases: list[dict]) -> tuple:
    return compare(rank, world, cases), refusals(rank, world), embedded(rank, world)


def fused(rank: int, world: int, recipes: list[str]) -> list:
    """For each recipe: whether fc1 and fc2 of an MLP that ranks share are one function, where there are kernels, on a
    CPU emulated ones; in how many turns the activation is computed where ranks have parts of sequences, and whole
    ones; what then differs from two linears; and what differs of a head's loss by chunks from that of whole logits."""
    device = rank_device()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    results = []
    for recipe in recipes:
        by_axis = [_joined_mlp(mesh, recipe, device, axis) for axis in (1, 0)]
        joined, turned, faults = zip(*by_axis, strict=True)
        results.append((set(joined), list(turned), [*faults[0], *faults[1]], _loss_by_chunks(mesh, recipe, device)))
    return results


def _joined_mlp(mesh: DeviceMesh, recipe: str, device: torch.device, axis: int) -> tuple[bool, int, list[str]]:
    asked, results, turned = [], [], []
    joins, of_rank = layernorm_linears.joins, OperandsInTurn._of_rank
    for join in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overlap, "hides", lambda x: True)
            patch.setattr(OperandsInTurn, "_of_rank", lambda *call: turned.append(call) or of_rank(*call))
            if device.type == "cpu":
                emulated.install(patch, (layernorm_linears, layernorm_linears), hybrid)
                patch.setattr(overlap, "activation_into", emulated.activation_into)
            patch.setattr(
                layernorm_linears, "joins", lambda *call, join=join: asked.append(joins(*call)) or (join and asked[-1])
            )
            torch.manual_seed(0)
            module = tensor_parallel(LayerNormMLP(128, 256, name="m", recipe=recipe).to(device), mesh, axis=axis)
            torch.manual_seed(1 + mesh.get_local_rank())
            x, dy = torch.randn(2, 32, 128), torch.randn(2, 32, 128)
            x = x.to(device).requires_grad_()
            with quantization(step=1):
                y = module(x)
            y.backward(dy.to(y))
            gradients = {name: whole_tensor(p.grad) for name, p in module.named_parameters()}
            results.append({"y": y.detach(), "dx": x.grad} | gradients)
    one, other = results
    return asked[0], len(turned), [name for name, value in other.items() if not torch.equal(one[name], value)]


def left_sums(rank: int, world: int, recipes: list[str]) -> list[tuple[list[int], list[str]]]:
    """For each recipe, and each kind of recomputation: of two layers, how many sums are left to norms, how many of them
    are there after forward, how many gradients norms send, and how many of weights are computed behind the norm; and
    what of the loss and the gradients differs from where no sum is left."""
    mesh = init_device_mesh(rank_device().type, (world,), mesh_dim_names=("tp",))
    results = []
    for case in product(recipes, ("none", "layer")):
        (one, counts), (other, _) = (_leaving(mesh, *case, leaves=leaves) for leaves in (True, False))
        results.append((counts, [name for name, value in other.items() if not torch.equal(one[name], value)]))
    return results


def left_under_fsdp(rank: int, world: int) -> tuple[list[int], list[str]]:
    """The same for layers that fully_shard cuts further, over `world` ranks of which two share matrices."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))

    def cut(model: GPT) -> GPT:
        model = cut_further(model, mesh, fsdp_placement)
        for layer in model.layers:
            residual_under_fsdp(layer)
        return model

    (one, counts), (other, _) = (
        _leaving(mesh["tp"], "mxfp8", "none", leaves=leaves, cut=cut) for leaves in (True, False)
    )
    return counts, [name for name, value in other.items() if not torch.equal(one[name], value)]


def _leaving(
    mesh: DeviceMesh, recipe: str, recompute: str, *, leaves: bool, cut: Callable[[GPT], GPT] = lambda model: model
) -> tuple[dict[str, Tensor], list[int]]:
    """The loss and the gradients of a step, and the counts of left_sums()."""
    device, left, summands = rank_device(), [], PendingSum.summands
    sent, order = [], []
    operands, take, wgrad = LeftOutput.operands, LeftGradient.take, linear_function.wgrad

    def of(pending: PendingSum) -> Summands | None:
        found = summands(pending) if leaves else None
        left.extend([weakref.ref(found.parts)] if found else [])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingSum, "summands", of)
        patch.setattr(LeftOutput, "operands", lambda *call: sent.append(operands(*call)) or sent[-1])
        patch.setattr(LeftGradient, "take", lambda own, dh: order.append(own.name) or take(own, dh))
        patch.setattr(
            linear_function, "wgrad", lambda own, *call, **k: order.append(own.call) or wgrad(own, *call, **k)
        )
        if device.type == "cpu":
            for module in (norm_embedding, linear):
                patch.setattr(module, "use_kernels", lambda x: True)
            for name in ("norm", "norm_backward"):
                patch.setattr(norm_embedding.norm, name, getattr(emulated, name))
        model = cut(tensor_parallel(build({"linear": recipe}, layers=2).to(device), mesh, axis=0))
        for layer in model.layers:
            layer.recompute = recompute
        with quantization(seed=1, step=1):
            loss, _ = model.loss(*(x.to(device) for x in data(1)))
            kept = sum(parts() is not None for parts in left)
            loss.backward()
    late = sum(getattr(call, "name", None) in order[:i] for i, call in enumerate(order))
    gradients = {name: whole_tensor(p.grad) for name, p in model.named_parameters()}
    return {"loss": loss.detach()} | gradients, [len(left), kept, sum(each is not None for each in sent), late]


def turned(rank: int, world: int, recipes: list[str]) -> list[tuple[list[int], list[str]]]:
    """For each recipe: in how many turns inputs of two layers' proj and fc2 were computed, with turns and without; and
    what of the loss and the gradients differs. Of whole sequences, whose rows are many, on GPUs."""
    mesh, results = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",)), []
    tokens = torch.randint(0, VOCABULARY, (8, 1025), generator=torch.Generator().manual_seed(0)).cuda()
    of_rank = OperandsInTurn._of_rank
    for recipe in recipes:
        counts, values = [], []
        for in_turn in (True, False):
            count = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(OperandsInTurn, "_of_rank", lambda *call, of=count: of.append(call) or of_rank(*call))
                if not in_turn:
                    patch.setattr(overlap, "hides", lambda x: False)
                torch.use_deterministic_algorithms(True)
                model = tensor_parallel(build({"linear": recipe}, layers=2, dim=256).cuda(), mesh, axis=0)
                with quantization(seed=1, step=1):
                    loss, _ = model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
                    loss.backward()
            counts.append(len(count))
            gradients = {name: whole_tensor(p.grad) for name, p in model.named_parameters()}
            values.append({"loss": loss.detach()} | gradients)
        one, other = values
        results.append((counts, [name for name, value in other.items() if not torch.equal(one[name], value)]))
    return results


def _loss_by_chunks(mesh: DeviceMesh, recipe: str, device: torch.device) -> list[str]:
    """Names of what is not close to the loss of whole logits, of the same ranks and in one process: the loss itself,
    and the gradients of h and the weight; as close as logits, and operands of dy, that are formed of other last digits
    leave them. Some tokens have no target. A target beyond the whole vocabulary is refused."""
    results, chunk = [], 256 if "nvfp4" in recipe else 128
    rank, ranks = mesh.get_local_rank(), mesh.size()
    targets = torch.randint(0, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(0)).to(device)
    targets[1:3, 5:] = -100
    for way in ("chunks", "whole", "one process"):
        torch.manual_seed(0)
        head = Linear(64, VOCABULARY, name="head", recipe=f"format:{recipe}").to(device)
        own = (0.3 * torch.randn(4, 64, 64)).to(device)
        if way != "one process":
            head, own = ColwiseLinear(sequence=1)._apply(head, mesh), own.chunk(ranks, 1)[rank].clone()
        own.requires_grad_()
        with quantization(step=1):
            if way == "chunks":
                loss = linear_cross_entropy(own, head, targets, chunk)
            elif way == "whole":
                loss = cross_entropy(head(own), targets, vocabulary_group(head))
            else:
                loss = F.cross_entropy(head(own).float().flatten(0, 1), targets.flatten())
            loss.backward()
        dh, dw = own.grad, head.weight.grad
        whole = way == "one process"
        dh, dw = (dh.chunk(ranks, 1)[rank], dw.chunk(ranks)[rank]) if whole else (dh, dw.to_local())
        results.append({"loss": loss.detach(), "dh": dh, "dw": dw})
        if way != "one process" and device.type == "cpu":
            beyond = targets.clone().fill_(VOCABULARY)
            with pytest.raises(UserError, match=f"target {VOCABULARY} is no entry of a vocabulary of {VOCABULARY}; "):
                linear_cross_entropy(own, head, beyond, chunk if way == "chunks" else None)
    one, *others = results
    limits = {"loss": 1e-6 if device.type == "cpu" else 1e-5, "dh": 1e-2, "dw": 1e-2}
    return [
        name
        for other in others
        for name, value in other.items()
        if not (one[name] - value).norm() <= limits[name] * value.norm()
    ]


def over_fsdp(rank: int, world: int) -> list[str]:
    """Parameters that are not what they were, also where rows of pieces are cut, and a loss and gradients that are
    others once weights travel in bfloat16, once fully_shard cuts parts further."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    shared = tensor_parallel(build({"linear": "mxfp8"}), mesh)
    expected = {name: whole_tensor(p.detach()) for name, p in shared.named_parameters()}
    with torch.no_grad(), quantization(step=1):
        loss = shared.loss(*data(1))[0]
    faults, gradients = [], []
    for narrow in (False, True):
        model = cut_further(
            shared if narrow else tensor_parallel(build({"linear": "mxfp8"}), mesh), mesh, fsdp_placement
        )
        if narrow:
            gather_in_linear_dtype(model)
        whole = {name: whole_tensor(p.detach()) for name, p in model.named_parameters()}
        with quantization(step=1):
            own = model.loss(*data(1))[0]
            own.backward()
        faults += [] if torch.equal(own, loss) else ["loss"]
        faults += [name for name in expected if not torch.equal(whole[name], expected[name])]
        gradients.append({name: p.grad.to_local() for name, p in model.named_parameters()})
    faults += [name for name, gradient in gradients[0].items() if not torch.equal(gradients[1][name], gradient)]
    rows = dict(cut_further(tensor_parallel(build({"linear": "mxfp8"}), mesh), mesh, None).named_parameters())
    for name, p in rows.items():
        spread = spread_out(expected[name], p)
        if not all(torch.equal(whole_tensor(x.detach()), expected[name]) for x in (p, spread)):
            faults.append(f"{name} by rows")
    return faults + ([] if _experts_are_whole(rank, world) else ["experts"])


def _experts_are_whole(rank: int, world: int) -> bool:
    """Whether the whole is put together of parts of experts that ep, and fully_shard within that, have shared out."""
    axes, whole = ("efsdp", "ep", "tp"), torch.arange(8 * 6).view(8, 6)
    mesh = init_device_mesh("cpu", (2, world // 2, 1), mesh_dim_names=axes)
    own = whole.view(world // 2, 2, -1, 6)[mesh["ep"].get_local_rank(), mesh["efsdp"].get_local_rank()]
    cuts = [_StridedShard(0, split_factor=world // 2), Shard(0), _StridedShard(1, split_factor=2)]
    spread = DTensor.from_local(own, mesh, cuts, run_check=False, shape=whole.shape, stride=whole.stride())
    return torch.equal(whole_tensor(spread), whole)


def cut_further(model: gpt.GPT, mesh: DeviceMesh, placement: Callable | None) -> gpt.GPT:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=placement)
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=placement)
    register_fsdp_forward_method(model, "loss")
    return model
