"""What ranks of tests/parallel/test_expert.py run: mixtures whose experts are spread over them."""

from functools import partial

import torch
import torch.distributed as dist
from support.nn.experts import SECTIONS, recipe_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import LayerNormMoE, MoEOptions, quantization, quantized_model_init
from hqsweep.parallel.expert import check_room, expert_parallel
from hqsweep.parallel.wire.local import local

WORLD, EXPERTS, DIM, FFN, STEPS = 4, 8, 32, 48, 2
TOKENS = (40, 0, 24, 56)
"""Tokens of each rank."""
EQUAL = (28,) * WORLD
ROOMY = ("high", "stochastic", "delayed", "codes", "per tensor")
"""The recipes of experts whose rows have room."""
RECIPES = {
    "high": "bf16",
    "stochastic": SECTIONS[0],
    "dequantized": SECTIONS[1],
    "delayed": SECTIONS[2],
    "unlike": SECTIONS[3],
}
CODES = {
    "input": "nvfp4|mxfp8@rowwise_dequantized",
    "weight": "mxfp8",
    "grad_output": "mxfp8|nvfp4+sr@rowwise_dequantized",
}
"""Both of which go as codes."""
PER_TENSOR = {
    "input": "fp8_current@rowwise_dequantized",
    "weight": "mxfp8",
    "grad_output": "fp8_block@rowwise_dequantized",
}
RECIPES |= {"codes": CODES, "per tensor": PER_TENSOR}
HELD = {"input": "mxfp8", "weight": "nvfp4+2d|mxfp8", "grad_output": "mxfp8"}


def mixture(recipe: dict | str, held: bool = False) -> LayerNormMoE:
    torch.manual_seed(0)
    recipe = recipe_of(recipe) if isinstance(recipe, dict) else recipe
    options = MoEOptions(experts=EXPERTS, top_k=2)
    with quantized_model_init(enabled=held), quantization(seed=1):
        module = LayerNormMoE(DIM, FFN, name="m", recipe=recipe, options=options)
    torch.nn.init.normal_(module.router.weight)
    return module


def tokens(rank: int, step: int, counts: tuple[int, ...] = TOKENS) -> tuple[Tensor, Tensor]:
    """A rank's x, and the gradient of its y."""
    return tuple(draw("normal", counts[rank] + 1, DIM, 100 * rank + 10 * step + i)[1:].float() for i in range(2))


def train(
    module: LayerNormMoE, ranks: list[int], microbatch: int = 0, of_gradient=local, counts: tuple[int, ...] = TOKENS
) -> dict[str, Tensor]:
    """y and dx of the tokens of these ranks in every step, what of_gradient makes of the gradients, and the states."""
    results = {}
    for step in range(1, STEPS + 1):
        x, dy = (torch.cat(parts) for parts in zip(*(tokens(rank, step, counts) for rank in ranks), strict=True))
        x = x.requires_grad_()
        with quantization(seed=1, step=step, microbatch=microbatch):
            y = module(x)[0]
            y.backward(dy)
        results |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
        for name, parameter in module.named_parameters():
            if name.startswith("fc"):
                results[f"d {name} {step}"] = of_gradient(parameter.grad)
        module.zero_grad()
    state = module.state_dict().items()
    return results | {name: tensor for name, tensor in state if ".states." in name}


class Sent:
    """Bytes of the rows that all_to_all sends for each row, call by call; the counts that go first are left out."""

    def __init__(self) -> None:
        self.plain, self.bytes = dist.all_to_all_single, []
        dist.all_to_all_single = self

    def __call__(self, out: Tensor, x: Tensor, *args, **kwargs) -> None:
        if x.dtype != torch.int64:
            self.bytes.append(x.shape[1] * x.element_size())
        self.plain(out, x, *args, **kwargs)

    def stop(self) -> list[int]:
        dist.all_to_all_single = self.plain
        return self.bytes


def sent_by_one_step(recipe: dict | str, rank: int, mesh) -> list[int]:
    module, (x, dy) = expert_parallel(mixture(recipe), mesh), tokens(rank, 1)
    sent = Sent()
    with quantization(seed=1, step=1):
        module(x.requires_grad_())[0].backward(dy)
    return sent.stop()


def run(rank: int) -> dict[str, dict[str, Tensor]]:
    """Results of every recipe over all ranks, and of delayed scaling over two groups of two."""
    everyone, pairs = init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    results = {name: train(expert_parallel(mixture(r), everyone), [rank], rank) for name, r in RECIPES.items()}
    results["bytes"] = {
        name: sent_by_one_step(RECIPES[name], rank, everyone) for name in ("high", "codes", "per tensor")
    }
    with torch.no_grad():
        sent = Sent()
        y = expert_parallel(mixture("mxfp8"), everyone)(tokens(rank, 1)[0])[0]
    results["evaluated"] = {"y": y, "bytes": sent.stop()}
    results["held"] = train(expert_parallel(mixture(HELD, held=True), everyone), [rank])
    results["pairs"] = train(expert_parallel(mixture(RECIPES["delayed"]), pairs), [rank])
    results["cut"], results["held and cut"] = (
        fully_sharded(mixture(CODES), rank),
        fully_sharded(mixture(HELD, True), rank),
    )
    results["room"] = {name: roomy(name, rank, everyone) for name in ROOMY}
    results["no room"] = no_room(rank, everyone)
    return results | {"refused": refusals(everyone)}


def roomy(name: str, rank: int, mesh) -> dict[str, Tensor]:
    """train() of experts that have room for all rows of all ranks."""
    module = expert_parallel(mixture(RECIPES[name]), mesh, expert_room=WORLD)
    results = train(module, [rank], rank, counts=EQUAL)
    check_room(module)
    return results


def no_room(rank: int, mesh) -> tuple[bool, str, str]:
    """Where rows have no room: whether outputs are NaN, and what is said afterwards; what is said of unlike tokens."""
    module = expert_parallel(mixture("mxfp8"), mesh, expert_room=1)
    y = module(tokens(rank, 1, EQUAL)[0])[0]
    said = []
    for call in (partial(check_room, module, "here: "), partial(module, tokens(rank, 1)[0])):
        try:
            call()
        except UserError as error:
            said.append(str(error))
    check_room(module)  # which has been said
    return y.isnan().all().item(), *said


def fully_sharded(module: LayerNormMoE, rank: int) -> dict[str, Tensor]:
    """train() of experts over two ranks, each of which fully_shard cuts over two more; gradients are sums over all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    module = expert_parallel(module, mesh, average=False)
    for grouped in (module.fc1, module.fc2):
        fully_shard(grouped, mesh=mesh["efsdp"])
        grouped.set_gradient_divide_factor(1.0)
        grouped.set_force_sum_reduction_for_comms(True)
    return train(module, [rank], rank, lambda gradient: gradient.full_tensor())


def refusals(mesh) -> list[str]:
    spread = expert_parallel(mixture("bf16"), mesh)
    plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    three = LayerNormMoE(DIM, FFN, name="m", recipe="bf16", options=MoEOptions(experts=6, top_k=1))
    said = []
    for model, on in ((spread, mesh), (mixture("bf16"), plain), (torch.nn.Linear(1, 1), mesh), (three, mesh)):
        try:
            expert_parallel(model, on)
        except UserError as error:
            said.append(str(error))
    dist.barrier()
    return said
