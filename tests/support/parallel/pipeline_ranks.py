"""What ranks of tests/parallel/test_pipeline.py run: a GPT in stages, and the same in one process."""

from collections import Counter

import torch
from cases import LINEARS
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hqsweep.config.model import ModelConfig
from hqsweep.errors import UserError
from hqsweep.nn import quantization
from hqsweep.nn.core.call import Call
from hqsweep.parallel.pipeline import Pipeline
from hqsweep.parallel.tensor import tensor_parallel
from hqsweep.recipe import Recipe
from hqsweep.train.model import GPT

WORLD, VOCAB, LAYERS, MICROBATCHES, STEPS, FIRST = 2, 32, 4, 4, 2, 8
RECIPES = {
    "stochastic": LINEARS["nvfp4"],
    "delayed": {"input": "fp8_delayed|mxfp8", "weight": "fp8_delayed", "grad_output": "fp8_delayed+e5m2|mxfp8"},
    "stochastic weights": {"input": "mxfp8", "weight": "nvfp4+sr|mxfp8", "grad_output": "mxfp8"},
}
CASES = {
    "1f1b": ("stochastic", 1, "none"),
    "delayed": ("delayed", 1, "none"),
    "interleaved": ("stochastic", 2, "none"),
    "stochastic weights": ("stochastic weights", 2, "attention"),
    "tied": ("stochastic", 2, "layer"),
}
"""Recipe, stages of each rank, and what is computed again."""


def gpt(recipe: str, recompute: str = "none", **options) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(**{"dim": 32, "layers": LAYERS, "heads": 2} | options)
    linear = Recipe.from_config({"linear": RECIPES[recipe]})
    model = GPT(config, VOCAB, linear, torch.bfloat16, recompute)
    torch.nn.init.normal_(model.head.weight, std=0.2)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (MICROBATCHES, 33), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model: GPT, step, evaluate) -> dict[str, Tensor]:
    """Losses of some steps, the sums of the gradients up to each, with weights that change between them, and what
    states are left."""
    results, weights_made, plain = {}, Counter(), Call.quantize

    def counted(call: Call, tensor: str, *args, **kwargs):
        weights_made[call.name] += tensor == "weight"
        return plain(call, tensor, *args, **kwargs)

    Call.quantize = counted
    for index in range(1, STEPS + 1):
        results[f"loss {index}"] = step(index, *batch(index))
        for name, parameter in model.named_parameters():
            results[f"d {name} {index}"] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
    Call.quantize = plain
    results["evaluated"] = evaluate(STEPS, *batch(STEPS + 1))
    results["weights"] = torch.tensor([count for name, count in weights_made.items() if name.startswith("layers")])
    return results | {name: tensor for name, tensor in model.state_dict().items() if ".states." in name}


def in_one_process(name: str) -> dict[str, Tensor]:
    """A tied head as one of its own, with the same values, and the sum of both gradients of each step."""
    recipe, _, recompute = CASES[name]
    model = gpt(recipe, recompute)
    if name == "tied":
        model.embedding.weight.data.copy_(model.head.weight)

    def losses(index: int, tokens: Tensor, targets: Tensor):
        for part in range(MICROBATCHES):
            with quantization(seed=1, step=index, microbatch=FIRST + part, cache_weights=True):
                yield model.loss(tokens[part : part + 1], targets[part : part + 1])[0] / MICROBATCHES

    def step(*args) -> Tensor:
        total, before = torch.zeros(()), model.embedding.weight.grad
        if name == "tied":
            model.embedding.weight.grad = model.head.weight.grad = None
        for loss in losses(*args):
            loss.backward()
            total += loss.detach()
        if name == "tied":
            model.embedding.weight.grad += model.head.weight.grad
            if before is not None:
                model.embedding.weight.grad += before
            model.head.weight.grad = model.embedding.weight.grad.clone()
        return total

    def evaluate(index: int, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad(), quantization(seed=1, step=index, microbatch=FIRST, cache_weights=True):
            return torch.stack([model.loss(tokens[i : i + 1], targets[i : i + 1])[0] for i in range(3)])

    results = train(model, step, evaluate)
    return {key: value for key, value in results.items() if not (name == "tied" and key.startswith("d head"))}


def in_stages(name: str, mesh) -> dict[str, Tensor]:
    recipe, stages, recompute = CASES[name]
    model = gpt(recipe, recompute, tied=name == "tied")
    pipeline = Pipeline(model, mesh, MICROBATCHES, stages_per_rank=stages)

    def under(method):
        def call(index: int, tokens: Tensor, targets: Tensor) -> Tensor:
            with quantization(seed=1, step=index, microbatch=FIRST):
                return method(tokens, targets)

        return call

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        return pipeline.step(tokens, targets).total

    def evaluate(tokens: Tensor, targets: Tensor) -> Tensor:
        return pipeline.evaluate(tokens[:3, None], targets[:3, None])

    return train(model, under(step), under(evaluate))


def run(rank: int) -> dict[str, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (WORLD,))
    return {name: in_stages(name, mesh) for name in CASES} | {"refused": refusals(mesh)}


def raised_in_a_layer() -> None:
    """The error of a rank that is a pipeline by itself, so that no other waits."""
    model = gpt("stochastic")
    pipeline = Pipeline(model, init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("dp", "pp")), 1)

    def refuse(*_) -> None:
        raise UserError("this layer refuses")

    model.layers[1].register_forward_pre_hook(refuse)
    pipeline.step(*batch(1))


def cut_between_tokens() -> None:
    """A pipeline of one rank whose matrices, and tokens between them, two share."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("pp", "tp"))
    tokens = torch.zeros(1, 31, dtype=torch.int64)
    Pipeline(tensor_parallel(gpt("stochastic", ffn=64), mesh), mesh, 1).step(tokens, tokens)


def refusals(mesh) -> list[str]:
    said, stages = [], {"stages_per_rank": 2}
    batch_of_three = torch.zeros(3, 32, dtype=torch.int64)
    for call in (
        lambda: Pipeline(torch.nn.Linear(1, 1), mesh, 2),
        lambda: Pipeline(gpt("stochastic", layers=3), mesh, 2, **stages),
        lambda: Pipeline(gpt("stochastic"), mesh, 1),
        lambda: Pipeline(gpt("stochastic"), mesh, 3, **stages),
        lambda: Pipeline(gpt("stochastic"), mesh, 2).step(batch_of_three, batch_of_three),
        raised_in_a_layer,
        cut_between_tokens,
    ):
        try:
            call()
        except UserError as error:
            said.append(str(error))
    return said
