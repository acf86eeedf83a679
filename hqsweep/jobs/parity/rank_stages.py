"""Cases of the check of ranks that have some layers each: a GPT in stages, and one process that computes microbatch
after microbatch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hqsweep.config.model import ModelConfig
from hqsweep.jobs.parity.rank_cases import Column, Problem, Results, named
from hqsweep.jobs.parity.rank_operands import PREFIX, Read
from hqsweep.parallel.pipeline import Pipeline
from hqsweep.recipe.sectioned import Recipe
from hqsweep.train.model import GPT

DIM, HEADS, FFN, VOCAB, TOKENS = 64, 2, 96, 32, 64
LR = 0.1
Step = Callable[[int, Tensor, Tensor], tuple[Tensor, list[Read]]]


@dataclass(frozen=True)
class Stages:
    """A GPT with a layer for each stage, and a sequence for each of as many microbatches as there are ranks."""

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
        """The results of each rank, computed in one process: the losses, and what belongs to its layers."""
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
        """The rank that has the parameter, or the linear, which a result is named after; None: all have the result."""
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
