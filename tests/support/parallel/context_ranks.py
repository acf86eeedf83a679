"""What ranks of tests/parallel/test_context.py run: a layer whose tokens are spread over them."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import TransformerLayer, TransformerOptions
from hqsweep.parallel.context import context_parallel
from hqsweep.recipe import Recipe

WORLD, BATCH, LENGTH, DIM = 2, 2, 64, 32
CASES = {"fp32": (torch.float32, True), "not causal": (torch.float32, False), "mxfp8": (torch.bfloat16, True)}


def layer(name: str) -> TransformerLayer:
    torch.manual_seed(0)
    dtype, is_causal = CASES[name]
    recipe = Recipe.from_config({"linear": "mxfp8" if name == "mxfp8" else "fp32"})
    options = TransformerOptions(rope_base=1e4, is_causal=is_causal)
    return TransformerLayer(DIM, 48, 2, name="layer", recipe=recipe, dtype=dtype, options=options)


def train(model: TransformerLayer, tokens: slice) -> dict[str, Tensor]:
    """y, dx and the gradients of parameters, of these tokens of every sequence."""
    x, dy = (draw("normal", BATCH * LENGTH, DIM, seed).float().view(BATCH, LENGTH, DIM)[:, tokens] for seed in (1, 2))
    x = x.contiguous().requires_grad_()
    y = model(x)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in model.named_parameters()}


def run(rank: int) -> dict[str, dict[str, Tensor]]:
    mesh, own = init_device_mesh("cpu", (WORLD,)), LENGTH // WORLD
    results = {}
    for name in CASES:
        results[name] = train(context_parallel(layer(name), mesh), slice(rank * own, (rank + 1) * own))
        for key, gradient in results[name].items():
            if key not in ("x", "y"):
                dist.all_reduce(gradient)
    return results | {"refused": refusals(mesh)}


def refusals(mesh) -> list[str]:
    low = Recipe.from_config({"linear": "bf16", "dpa": "mxfp8"})
    spread = context_parallel(TransformerLayer(DIM, 48, 2, name="layer", recipe=low), mesh)
    rounded = TransformerOptions(quantize_boundaries=True)
    other = TransformerLayer(DIM, 48, 2, name="layer", recipe="mxfp8", options=rounded)
    said = []
    for call in (
        lambda: spread(torch.zeros(1, 32, DIM)),
        lambda: context_parallel(other, mesh),
        lambda: context_parallel(torch.nn.Linear(1, 1), mesh),
    ):
        try:
            call()
        except UserError as error:
            said.append(str(error))
    return said
