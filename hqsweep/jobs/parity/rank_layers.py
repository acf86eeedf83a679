"""Cases of the check of ranks in which ranks share layers: linears by column and by row, experts, and stages of a GPT.

Expected results come from one process that has the whole layer and all tokens. Sums over ranks are added from its own
operands, part by part, each rounded to the linear's dtype in which it is sent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from hqsweep.config.model import ModelConfig
from hqsweep.jobs.parity.rank_cases import FIRST, PREFIX, Column, Problem, Read, Results, SplitSum, named
from hqsweep.nn import LayerNormMoE, Linear, MoEOptions, quantization
from hqsweep.nn.core.call import LinearCall
from hqsweep.parallel.expert import expert_parallel
from hqsweep.parallel.pipeline import Pipeline
from hqsweep.parallel.tensor import ColwiseLinear, RowwiseLinear
from hqsweep.parallel.wire.local import local
from hqsweep.recipe.sectioned import Recipe
from hqsweep.train.model import GPT

TOKENS, PART = 128, 128
"""TOKENS: the rows of all ranks together. PART: the features of a rank's part, which cuts no block."""
EXPERTS, DIM, FFN = 8, 64, 96
OF_RANK, OF_EACH = (40, 0, 24, 56), (28,) * 4
"""The tokens of each rank for a mixture of experts. With room, every rank has equally many."""


def _linear(problem: Problem) -> Linear:
    size = problem.ranks * PART
    module = Linear(size, size, name="parity", recipe=problem.quantizers, bias=True).to(problem.device)
    with torch.no_grad():
        module.weight.copy_(problem.draw("heavy", size, size, problem.seed, torch.float32))
        module.bias.copy_(problem.draw("normal", 1, size, problem.seed, torch.float32)[0])
    return module


def _tensors(problem: Problem, step: int) -> tuple[Tensor, Tensor]:
    """The x and dy of all tokens and features."""
    size = problem.ranks * PART
    return tuple(problem.draw("heavy", TOKENS, size, problem.seed + 2 * step + i) for i in range(2))


def _linear_pass(problem: Problem, module: Linear, x: Tensor, dy: Tensor, step: int) -> tuple[Results, list[Read]]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    with problem.step(step) as reads:
        y = module(x)
    y.backward(dy)
    results = {"y": y.detach(), "dx": x.grad, "dw": local(module.weight.grad), "db": local(module.bias.grad)}
    return {f"{name} of step {step}": tensor for name, tensor in results.items()}, reads


@dataclass(frozen=True)
class SharedLinear:
    """A linear shared by column (ranks have columns of y) or by row (ranks have columns of x).

    With sequence, each rank also has only a part of the tokens of the other tensor, x or y.
    """

    mode: Literal["column", "row"]
    sequence: bool

    def ranked(self, problem: Problem, rank: int) -> Results:
        """The results of a rank under the style."""
        mesh, results = problem.mesh("tp"), {}
        style = ColwiseLinear if self.mode == "column" else RowwiseLinear
        module = parallelize_module(_linear(problem), mesh, style(sequence=0 if self.sequence else None))
        x_axis, dy_axis = (self._tokens, 1) if self.mode == "column" else (1, self._tokens)
        for step in problem.steps:
            x, dy = _tensors(problem, step)
            own = _part(x, x_axis, problem.ranks)[rank], _part(dy, dy_axis, problem.ranks)[rank]
            passed, reads = _linear_pass(problem, module, *own, step)
            results |= passed | named(reads, step)
        return results

    def expected(self, problem: Problem) -> list[Results]:
        """The results of each rank, computed in one process. Sums over ranks are put together from the ranks' parts.

        A rank has the operands of its part.
        """
        module, results = _linear(problem), [dict[str, Tensor]() for _ in range(problem.ranks)]
        for step in problem.steps:
            passed, reads = _linear_pass(problem, module, *_tensors(problem, step), step)
            sums = {f"{self.summed} of step {step}": self.split_sum(problem, module, step).total}
            for name, tensor in (passed | sums).items():
                parts = _part(tensor, self._axes[name.split(" ")[0]], problem.ranks)
                for result, part in zip(results, parts, strict=True):
                    result[name] = part.contiguous()
            for read in reads:
                parts = read.results(step, problem.ranks, self._cuts.get(read.tensor))
                results = [result | part for result, part in zip(results, parts, strict=True)]
        return results

    @property
    def summed(self) -> str:
        """The name of the tensor that is a sum over ranks."""
        return "dx" if self.mode == "column" else "y"

    @property
    def _tokens(self) -> int | None:
        return 0 if self.sequence else None

    @property
    def _axes(self) -> dict[str, int | None]:
        """Result -> the axis along which ranks have parts; None: each rank has all of it."""
        if self.mode == "column":
            return {"y": 1, "dx": self._tokens, "dw": 0, "db": 0}
        return {"y": self._tokens, "dx": 1, "dw": 1, "db": None}

    @property
    def _cuts(self) -> dict[str, int]:
        """Tensor that products read -> the axis along which ranks have parts. Other tensors are whole on each rank."""
        return {"weight": 0, "grad_output": 1} if self.mode == "column" else {"input": 1, "weight": 1}

    def split_sum(self, problem: Problem, module: Linear, step: int) -> SplitSum:
        """The sum over ranks of a step, after the module has computed the step."""
        x, dy = _tensors(problem, step)
        with quantization(seed=problem.seed, step=step), torch.no_grad():
            call, weight = LinearCall(**module.linear_facts()), module.weight.to(torch.bfloat16)
            if self.mode == "column":
                a = call.quantize("grad_output", dy, rowwise="exact").rowwise
                return SplitSum(a, call.quantize("weight", weight, columnwise="exact").columnwise, problem.ranks)
            a = call.quantize("input", x, rowwise="exact").rowwise
            b, bias = call.quantize("weight", weight, rowwise="exact").rowwise, module.bias.to(torch.bfloat16)
            return SplitSum(a, b, problem.ranks, bias)


def _part(x: Tensor, axis: int | None, ranks: int) -> Sequence[Tensor]:
    return [x] * ranks if axis is None else x.chunk(ranks, axis)


def _mixture(problem: Problem) -> LayerNormMoE:
    options = MoEOptions(experts=EXPERTS, top_k=2)
    torch.manual_seed(problem.seed)
    module = LayerNormMoE(DIM, FFN, name="parity", recipe=problem.quantizers, options=options)
    nn.init.normal_(module.router.weight)
    return module.to(problem.device)


def _mixture_pass(
    problem: Problem, module: LayerNormMoE, tokens: dict[int, int], step: int
) -> tuple[Results, list[Read]]:
    """Return (results, operands): y and dx of these ranks' tokens, gradients of the experts' weights, and the operands
    read."""
    x, dy = (
        torch.cat(
            [
                problem.draw("normal", count + 1, DIM, problem.seed + 100 * rank + 10 * step + i)[1:]
                for rank, count in tokens.items()
            ]
        )
        for i in range(2)
    )
    module.zero_grad()
    x = x.float().requires_grad_()
    with problem.step(step) as reads:
        y = module(x)[0]
        y.backward(dy.float())
    weights = {f"d {name}": local(p.grad) for name, p in module.named_parameters() if name.startswith("fc")}
    results = {"y": y.detach(), "dx": x.grad} | weights
    return {f"{name} of step {step}": tensor for name, tensor in results.items()}, reads


@dataclass(frozen=True)
class SharedExperts:
    """A mixture whose ranks each have a part of the experts, and tokens for all of them.

    With room, the host waits for no numbers of rows.
    """

    of_rank: tuple[int, ...]
    room: bool

    def ranked(self, problem: Problem, rank: int) -> Results:
        """The results of a rank."""
        room = problem.ranks if self.room else None
        module, results = expert_parallel(_mixture(problem), problem.mesh(), expert_room=room), {}
        for step in problem.steps:
            passed, reads = _mixture_pass(problem, module, {rank: self.of_rank[rank]}, step)
            results |= passed | named(reads, step)
        return results

    def expected(self, problem: Problem) -> list[Results]:
        """The results of ranked() for each rank. Gradients of weights are divided by the number of ranks."""
        module, results = _mixture(problem), [dict[str, Tensor]() for _ in range(problem.ranks)]
        counts = self.of_rank[: problem.ranks]
        for step in problem.steps:
            passed, reads = _mixture_pass(problem, module, dict(enumerate(counts)), step)
            for name, tensor in passed.items():
                is_weight = name.startswith("d ")
                parts = (tensor / problem.ranks).chunk(problem.ranks) if is_weight else tensor.split(counts)
                for result, part in zip(results, parts, strict=True):
                    result[name] = part
            for read in reads:
                expert = int(read.layer.rpartition(".")[2])
                results[expert * problem.ranks // EXPERTS] |= read.results(step)[0]
        return results


SHARED = {
    "by column": SharedLinear("column", sequence=False),
    "by row": SharedLinear("row", sequence=False),
    "by column, tokens split": SharedLinear("column", sequence=True),
    "by row, tokens split": SharedLinear("row", sequence=True),
}
EXPERT_CASES = {
    "": SharedExperts(OF_RANK, room=False),
    "rows of any numbers have room": SharedExperts(OF_EACH, room=True),
}
LAYER_COLUMNS = (
    *(Column("tp", case, shared.ranked, shared.expected) for case, shared in SHARED.items()),
    *(Column("ep", case, shared.ranked, shared.expected) for case, shared in EXPERT_CASES.items()),
)


def shared_sums(problem: Problem) -> Iterator[tuple[str, SplitSum, Tensor]]:
    """(case, sum over ranks of the first step, the same product in one process)."""
    for case, shared in SHARED.items():
        if not shared.sequence:
            module = _linear(problem)
            passed, _ = _linear_pass(problem, module, *_tensors(problem, FIRST), FIRST)
            split = shared.split_sum(problem, module, FIRST)
            yield f"{shared.summed} {case}", split, passed[f"{shared.summed} of step {FIRST}"]


DIM, HEADS, FFN, VOCAB, TOKENS = 64, 2, 96, 32, 64
LR = 0.1
Step = Callable[[int, Tensor, Tensor], tuple[Tensor, list[Read]]]


@dataclass(frozen=True)
class Stages:
    """A GPT with one layer in each stage, one sequence in each microbatch, and a microbatch for each rank."""

    per_rank: int

    def ranked(self, problem: Problem, rank: int) -> Results:
        """The results of a rank with its stages."""
        model = self._gpt(problem)
        pipeline = Pipeline(model, problem.mesh(), problem.ranks, stages_per_rank=self.per_rank)

        def step(index: int, tokens: Tensor, targets: Tensor) -> tuple[Tensor, list[Read]]:
            with problem.step(index) as reads:
                return pipeline.step(tokens, targets).total, reads

        return _trained(problem, model, step)

    def expected(self, problem: Problem) -> list[Results]:
        """The results of each rank, computed in one process: the losses, and the results of its layers."""
        model = self._gpt(problem)

        def step(index: int, tokens: Tensor, targets: Tensor) -> tuple[Tensor, list[Read]]:
            total, every = torch.zeros((), device=problem.device), []
            for microbatch in range(problem.ranks):
                own = slice(microbatch, microbatch + 1)
                with problem.step(index, cache_weights=True, microbatch=microbatch) as reads:
                    loss = model.loss(tokens[own], targets[own])[0] / problem.ranks
                    loss.backward()
                total += loss.detach()
                every += reads
            return total, every

        results = _trained(problem, model, step)
        return [
            {name: t for name, t in results.items() if self._rank_of(name, problem.ranks) in (rank, None)}
            for rank in range(problem.ranks)
        ]

    def _gpt(self, problem: Problem) -> GPT:
        torch.manual_seed(problem.seed)
        layers = self.per_rank * problem.ranks
        config = ModelConfig(dim=DIM, layers=layers, heads=HEADS, ffn=FFN)
        model = GPT(config, VOCAB, Recipe(linear=problem.quantizers), torch.bfloat16)
        nn.init.normal_(model.head.weight, std=0.2)
        return model.to(problem.device)

    def _rank_of(self, name: str, ranks: int) -> int | None:
        """The rank with the parameter, or linear, of a result's name; None: all ranks have the result."""
        if name.startswith("loss"):
            return None
        part = name.removeprefix("d ").removeprefix(PREFIX).split(".")
        if part[0] == "layers":
            return int(part[1]) % ranks
        return 0 if part[0] == "embedding" else ranks - 1


def _trained(problem: Problem, model: GPT, step: Step) -> Results:
    """The losses, gradients, weights and operands of all steps."""
    results: Results = {}
    for index in problem.steps:
        generator = torch.Generator().manual_seed(problem.seed + index)
        text = torch.randint(0, VOCAB, (problem.ranks, TOKENS + 1), generator=generator).to(problem.device)
        results[f"loss of step {index}"], reads = step(index, text[:, :-1].contiguous(), text[:, 1:].contiguous())
        results |= named(reads, index)
        for name, parameter in model.named_parameters():
            results[f"d {name} of step {index}"] = parameter.grad
            with torch.no_grad():
                parameter -= LR * parameter.grad
            parameter.grad = None
            results[f"{name} after step {index}"] = parameter.detach().clone()
    return results


STAGES = {"one stage a rank": Stages(1), "two stages a rank": Stages(2)}
STAGE_COLUMNS = tuple(Column("pp", case, stages.ranked, stages.expected) for case, stages in STAGES.items())
