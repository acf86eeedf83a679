"""Ranks that train under fully_shard, each on its slice of the rows, and one process that does it over all slices."""

from contextlib import nullcontext
from itertools import pairwise, product

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization, quantized_model_init
from hqsweep.optim import FusedAdam, use_main_grads
from hqsweep.parallel.wire.local import local, whole_tensor
from hqsweep.recipe import LinearQuantizers

RANKS, STEPS, ROWS = 2, 3, 64
OPTIONS = {"lr": 3e-2, "weight_decay": 0.1}
CASES = {
    "float32": (torch.float32, {}, "nvfp4|mxfp8", 32),
    "bfloat16": (torch.bfloat16, {}, "mxfp8", 32),
    "gathered in bfloat16": (
        torch.float32, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, "fp8_delayed", 33,
    ),
}  # fmt: skip
"""Name -> dtype of the parameters, policy of fully_shard, recipe, outputs; 33 rows are 17 for one rank and 16 for the
other."""

ONE_ROW = ("mxfp8", "fp8_current", "fp8_delayed")
"""Recipes whose weights may have one row."""


def build(case: str) -> nn.Sequential:
    dtype, _, recipe, outputs = CASES[case]
    torch.manual_seed(0)
    quantizers = LinearQuantizers.parse(recipe, "test")
    shapes = pairwise((64, 96, outputs))
    return nn.Sequential(*(Linear(k, n, name=f"l{n}", recipe=quantizers) for k, n in shapes)).to(dtype)


def gradients(model: nn.Module, step: int, part: int) -> None:
    """Backward of one slice of a step's rows."""
    x, dy = draw("normal", ROWS, 64, step), draw("normal", ROWS, len(list(model.parameters())[-1]), -step)
    with quantization(step=step, microbatch=part):
        model(x.chunk(RANKS)[part]).backward(dy.chunk(RANKS)[part])


def state_of(optimizer: FusedAdam, model: nn.Module) -> dict[str, Tensor]:
    """Parameters, masters and moments, whole."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors |= {name: _whole(p), f"{name}.master": _whole(optimizer.master_param(p))}
        tensors |= {f"{name}.{key}": _whole(value) for key, value in optimizer.state[p].items()}
    return tensors


def _whole(x: Tensor) -> Tensor:
    return whole_tensor(x).detach().clone()


def sharded(case: str) -> nn.Module:
    policy = CASES[case][1]
    model, mesh = build(case), init_device_mesh("cpu", (RANKS,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    return model


def of_one_row(text: str, *, sharded: bool) -> list[float]:
    """The loss of each step of held weights: of 33 rows, which torch pads on one rank, also when it loads a state_dict
    after a step; and of one row, all of which the first rank has. Each rank has all rows of the batch."""
    torch.manual_seed(0)
    with quantized_model_init(preserve_high_precision_init_val=True), quantization(step=0):
        quantizers = LinearQuantizers.parse(text, "test")
        layers = [Linear(k, n, name=f"l{n}", recipe=quantizers) for k, n in pairwise((64, 33, 1))]
    model = nn.Sequential(*layers)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer, losses = FusedAdam(model.parameters(), **OPTIONS), []
    for step in range(1, STEPS + 1):
        with quantization(step=step):
            loss = model(draw("normal", ROWS, 64, step)).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(model.state_dict())
        losses.append(loss.item())
    return losses


def run(rank: int) -> dict[str, object]:
    """What test_optim.py compares, of each case."""
    seen = {"main_grads": main_grads(rank)} | {text: of_one_row(text, sharded=True) for text in ONE_ROW}
    for case in CASES:
        model = sharded(case)
        optimizer = FusedAdam(model.parameters(), **OPTIONS)
        for step in range(1, STEPS + 1):
            gradients(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
            seen[case, step] = state_of(optimizer, model)
            if step == 1:
                saved = model.state_dict(), optimizer.state_dict()
                saved = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in saved[0].items()}, _copied(saved[1])]
        model = sharded(case)
        optimizer = FusedAdam(model.parameters(), **OPTIONS)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for step in range(2, STEPS + 1):
            gradients(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
        seen[case, "resumed"] = state_of(optimizer, model)
        seen[case, "parts"] = [local(optimizer.master_param(p)).shape for p in model.parameters()]
        gradients(model, STEPS + 1, rank)
        seen[case, "norm"] = [optimizer.clip_and_step(1e-3) for _ in range(2)]
        seen[case, "clipped"] = state_of(optimizer, model)
    return seen


MAIN_GRADS = ("one reduction", "two reductions", "ddp", "ddp, bfloat16")


def with_main_grads(case: str) -> nn.Module:
    """Two linears with biases, under fully_shard or DistributedDataParallel."""
    model = biased(torch.bfloat16 if "bfloat16" in case else torch.float32)
    if case.startswith("ddp"):
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    use_main_grads(model)
    return model


def biased(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Linear(64, 96, name="a", recipe="mxfp8", bias=True), Linear(96, 32, name="b", recipe="format:nvfp4")
    ).to(dtype)


def main_grads(rank: int) -> dict[str, object]:
    """Main gradients of two steps of two microbatches; then grads, and the refusal of one that had them too early."""
    seen: dict[str, object] = {}
    for case in MAIN_GRADS:
        model = with_main_grads(case)
        optimizer = FusedAdam(model.parameters(), **OPTIONS)
        for step in (1, 2):
            optimizer.zero_grad()
            for microbatch in range(2):
                last = microbatch == 1
                if case == "one reduction":
                    model.set_requires_gradient_sync(last)
                with nullcontext() if last or not case.startswith("ddp") else model.no_sync():
                    gradients(model, 2 * step + microbatch, rank)
            seen[case, step] = [_whole(p.main_grad) for p in model.parameters()]
            optimizer.step()
        seen[case, "grads"] = [p.grad for p in model.parameters()]
        seen[case, "weights"] = [_whole(p) for p in model.parameters()]
    for bias in (False, True):
        weight = DistributedDataParallel(held(rank, bias)).module[0].weight
        seen["held", bias] = dict(weight.buffers) | {"initial": weight.get_high_precision_init_val()}
    model = biased(torch.float32)
    use_main_grads(model)
    gradients(DistributedDataParallel(model), 1, rank)
    try:
        FusedAdam(model.parameters()).step()
    except UserError as error:
        seen["wrapped later"] = str(error)
    try:
        use_main_grads(fully_shard(biased(torch.bfloat16), mesh=init_device_mesh("cpu", (RANKS,))))
    except UserError as error:
        seen["rounded"] = str(error)
    return seen


def held(seed: int, bias: bool) -> nn.Sequential:
    """One linear, or two, whose weight is held with the value that it was drawn with."""
    torch.manual_seed(seed)
    with quantized_model_init(preserve_high_precision_init_val=True):
        options = {"recipe": "mxfp8|nvfp4", "bias": bias}
        return nn.Sequential(*(Linear(64, 64, name=f"held{i}", **options) for i in range(1 + bias)))


def main_grads_of_one_process(case: str) -> dict[object, list[Tensor]]:
    """Sums in FP32 of what each rank has, averaged where that case reduces."""
    dtype, seen = torch.bfloat16 if "bfloat16" in case else torch.float32, {}
    model = biased(dtype)
    optimizer = FusedAdam(model.parameters(), **OPTIONS)
    fused = [getattr(module, kind) for module in model for kind in ("weight",)]
    use_main_grads(model)
    for step in (1, 2):
        parts = []
        for rank, microbatch in product(range(RANKS), range(2)):
            optimizer.zero_grad()
            gradients(model, 2 * step + microbatch, rank)
            own = {p: p.main_grad.clone() for p in model.parameters()}
            if not case.startswith("ddp"):  # autograd rounds all others to the dtype of the gathered ones
                own |= {p: g.bfloat16().float() for p, g in own.items() if not any(p is w for w in fused)}
            parts.append(list(own.values()))
        a, b, c, d = parts
        if case == "two reductions":
            sums = [(x + z) / 2 + (y + w) / 2 for x, y, z, w in zip(a, b, c, d, strict=True)]
        else:
            sums = [((x + y) + (z + w)) / 2 for x, y, z, w in zip(a, b, c, d, strict=True)]
        for p, total in zip(model.parameters(), sums, strict=True):
            p.main_grad.copy_(total)
        seen[step] = sums
        optimizer.step()
    seen["weights"] = [p.detach() for p in model.parameters()]
    return seen


def _copied(state: dict) -> dict:
    groups = [dict(group) for group in state["param_groups"]]
    return {"state": {i: {k: v.clone() for k, v in each.items()} for i, each in state["state"].items()},
            "param_groups": groups}  # fmt: skip


def one_process(case: str) -> dict[str, object]:
    """The same over all slices, whose gradients are rounded as on the wire and averaged in the order of ranks."""
    dtype, policy, *_ = CASES[case]
    model, seen = build(case), {}
    optimizer = FusedAdam(model.parameters(), **OPTIONS)
    for step in range(1, STEPS + 2):
        parts = []
        for part in range(RANKS):
            gradients(model, step, part)
            parts.append([p.grad.to(policy.get("param_dtype", dtype)) for p in model.parameters()])
            optimizer.zero_grad()
        for p, *grads in zip(model.parameters(), *parts, strict=True):
            wire = policy.get("reduce_dtype", dtype)
            p.grad = (sum(grad.to(wire) for grad in grads) / RANKS).to(dtype)
        if step > STEPS:
            seen["norm"] = [optimizer.clip_and_step(1e-3) for _ in range(2)]
            seen["clipped"] = state_of(optimizer, model)
            break
        optimizer.step()
        optimizer.zero_grad()
        seen[step] = state_of(optimizer, model)
    return seen
