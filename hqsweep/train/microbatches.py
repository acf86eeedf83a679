"""The forwards and backwards of a step or an evaluation, on the ranks of a training.

The training loop gives this rank's batch and gets losses. Microbatches computes microbatches one after another;
PipelinedMicrobatches gives them to a pipeline, whose stages lie on different ranks. share_out() chooses.
"""

from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.train import ParallelConfig
from hqsweep.formats import RngKey
from hqsweep.nn import quantization
from hqsweep.nn.core.context import unwritten
from hqsweep.nn.core.module import roles_of
from hqsweep.nn.saved_memory import SavedBytes
from hqsweep.optim.adam import Norm
from hqsweep.optim.partial_sums import PartialSums
from hqsweep.parallel.data import reshard, synchronized
from hqsweep.parallel.mesh import Ranks
from hqsweep.train.adapter import Balance, Losses, ModelAdapter, Saving
from hqsweep.train.step import At

T = TypeVar("T")


class Microbatches:
    """Computes the microbatches of a batch one after another, each by the whole model or by this rank's part of it."""

    norm: Norm | None = None
    """Computes the 2-norm of the gradients of all stages; None where no other rank has other layers."""

    def __init__(self, config: ConvergenceConfig, adapter: ModelAdapter, ranks: Ranks) -> None:
        self.config, self.adapter, self.ranks = config, adapter, ranks
        train, self.model = config.train, adapter.model
        self.why_eager = adapter.why_eager or _why_eager(train.parallel)
        self.saved = SavedBytes(self.model)
        self._saving = _offload(self.model) if train.offload else nullcontext
        self._countable = not train.offload and train.recompute == "none" and ranks.size == 1
        self._first = ranks.data_rank * train.microbatches
        # A single microbatch keeps operands of weights only as codes, which are half the size of exact operands.
        keeps_operands = train.microbatches * max(1, config.recipe.comm_ranks) > 1 or config.recipe.gemm == "native"
        self._training = {"cache_weights": keeps_operands}
        self.comm = getattr(config.recipe.build(), "comm", None)
        """The exchange of gradients that steps emulate now."""

    def step(self, inputs: Tensor, targets: Tensor, at: At) -> tuple[Tensor, Balance]:
        """(loss, balance): the loss that a step minimizes, float32 [], and the use of its experts.

        inputs, targets: int64 [B, T]. The loss is the mean over the batches of all ranks. Its gradients are added to
        the parameters' gradients. With recipe.comm parameters have no gradients before.
        """
        own, period = self.config.train.microbatches, object()
        parts = own * (self.comm.ranks if self.comm else 1)
        losses_of, balances, sums = [], [], self._partial_sums(at)
        for index, part in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True)):
            number = self._first + index
            with (
                quantization(microbatch=number, probe=at.probe, **self._training, **self._at(at)),
                unwritten(period),
                synchronized(self.model, last=index == parts - 1),
            ):
                self.adapter.begin((self.config.seed, at.step, number))
                losses = self._losses(*part)
                loss = losses.minimized / (parts * self.ranks.data_size)
                loss.backward()
            losses_of.append(loss.detach())
            balances.append(losses.balance)
            if sums and (index + 1) % own == 0:
                sums.take(index // own)
        if sums:
            sums.finish()
        return self._total(losses_of), Balance.of(balances, self.ranks.in_order)

    def _partial_sums(self, at: At) -> PartialSums | None:
        """The sums of a step in which ranks exchange gradients in a format; None without recipe.comm."""
        if self.comm is None:
            return None
        key = RngKey(seed=self.config.seed, slot="comm", step=at.step, counter=at.counter)
        return PartialSums(self.model.named_parameters(), self.comm, key)

    def evaluate(self, inputs: Tensor, targets: Tensor, at: At) -> Tensor:
        """float64 [batches]: the mean cross entropy of each batch. inputs, targets: int64 [batches, B, T]."""
        with (
            self.adapter.evaluating(),
            quantization(cache_weights=True, **self._at(at)),
            unwritten(object()),
        ):
            return self._cross_entropies(inputs, targets).double()

    def of_all_stages(self, by_module: dict[str, T]) -> dict[str, T]:
        """A value for each module of the whole model, by name. by_module: the values of this rank's modules.

        A collective where ranks hold different layers.
        """
        return by_module

    def _at(self, at: At) -> dict[str, Any]:
        """The arguments of quantization() that a step and an evaluation share."""
        kernels = self.config.train.compile != "off"
        counter = at.counter
        if counter is None and self.adapter.compiled is not None and self.adapter.compiled.on:
            counter = torch.tensor([at.step], device=self.adapter.device)  # as in a CUDA graph: no other trace for it
        return {"seed": self.config.seed, "step": at.step, "counter": counter, "kernels": kernels}

    def _cross_entropies(self, inputs: Tensor, targets: Tensor) -> Tensor:
        batches = zip(inputs, targets, strict=True)
        every = torch.stack([self._losses(*batch).cross_entropy.double() for batch in batches])
        reshard(self.model)
        return every

    def _losses(self, inputs: Tensor, targets: Tensor) -> Losses:
        """The losses of one microbatch. The first forward in training counts the bytes that it saves, where it saves
        all of them."""
        count = self._countable and torch.is_grad_enabled() and not self.saved.nbytes
        return self.adapter.losses(inputs, targets, self.saved.counting if count else self._saving)

    def _total(self, parts: list[Tensor]) -> Tensor:
        """The sum of all shares of a loss, added in the order of the microbatches of all ranks."""
        shares = torch.stack(parts)
        total = torch.zeros((), device=shares.device)
        for share in self.ranks.in_order(shares).flatten():
            total += share
        return total


class PipelinedMicrobatches(Microbatches):
    """Gives the microbatches to a pipeline, whose stages the ranks along the axis pp compute."""

    def __init__(self, config: ConvergenceConfig, adapter: ModelAdapter, ranks: Ranks, pipeline: Any) -> None:
        super().__init__(config, adapter, ranks)
        self.pipeline, self.norm = pipeline, pipeline.norm

    def step(self, inputs: Tensor, targets: Tensor, at: At) -> tuple[Tensor, Balance]:
        with quantization(microbatch=self._first, probe=at.probe, **self._training, **self._at(at)):
            losses = self.pipeline.step(inputs, targets)
        pairs = zip(losses.balances, losses.tokens, strict=True)
        balances = [Balance(loss=balance, tokens=list(tokens)) for balance, tokens in pairs]
        return self._total(list(losses.shares)), Balance.of(balances, self.ranks.in_order)

    def of_all_stages(self, by_module: dict[str, T]) -> dict[str, T]:
        every = {name: value for own in self.ranks.gather(by_module) for name, value in own.items()}
        names = dict.fromkeys(role.name for role in roles_of(self.model))
        return {name: every[name] for name in names if name in every}

    def _cross_entropies(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.pipeline.evaluate(inputs, targets)


def share_out(config: ConvergenceConfig, adapter: ModelAdapter, ranks: Ranks) -> Microbatches:
    """Share out the adapter's model, in place, over the ranks. Returns the object that computes its microbatches."""
    from hqsweep.parallel.parallelize import parallelize, parallelize_layers

    train, model, sequences = config.train, adapter.model, config.microbatch // ranks.data_size
    if ranks.dims.pp == 1:
        parallelize(model, ranks, sequences, adapter.methods, adapter.autocast)
        return Microbatches(config, adapter, ranks)
    pipeline = parallelize_layers(model, ranks, sequences, train.microbatches, config.model.load_balance)
    return PipelinedMicrobatches(config, adapter, ranks, pipeline)


def _offload(model: nn.Module) -> Saving:
    """The context of a forward whose saved tensors wait in CPU memory for backward."""
    from hqsweep.nn.saved_memory import ActivationOffload

    return ActivationOffload(model).saving


def _why_eager(dims: ParallelConfig) -> str | None:
    """Why steps over these ranks cannot be a CUDA graph; None where they can."""
    if dims.pp > 1:
        return "its stages send tensors to each other"
    if dims.ep > 1 and dims.expert_room is None:
        return "the host waits for the numbers of tokens that come to its experts (train.parallel.expert_room is null)"
    return None
