"""StepRunner: runs the steps of a training eagerly, or as replays of a CUDA graph, with the same bits.

A graph runs kernels and no Python. So the Python of a step must do the same in every step, or read tensors. The batch,
the learning rate and the step number (the key of random bits) are tensors that are written before a replay. What
modules remember in Python is updated after it: the steps of delayed scaling's states, and the keys of held weights.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hqsweep.config.train import TrainConfig
from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.nn.core.module import quantized_modules
from hqsweep.nn.core.parameter import WeightWorkspace, note_update
from hqsweep.nn.core.probe import Probe
from hqsweep.ops.library import key_tables
from hqsweep.parallel.shards.fsdp_state import drop_pass
from hqsweep.parallel.wire.local import local
from hqsweep.quant.delayed import DelayedState
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.torch_private import foreach_copy_
from hqsweep.train.graph import GraphPool

EAGER_STEPS = 2
"""The number of eager steps before a capture. The first step on a recipe makes states, moments and tables."""


@dataclass(frozen=True, kw_only=True, eq=False)
class At:
    """The position of an update in the training."""

    step: int
    """The step, counted from 1. In a graph it is the step of the capture, so no result may depend on it."""
    counter: Tensor | None = None
    """int64 [1]: the step, for a graph to read; None outside of a graph."""
    probe: Probe | None = None


Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 [B, T] in training and [batches, B, T] in evaluations."""
Update = Callable[[Tensor, Tensor, At], list[Tensor]]
"""A whole update, or an evaluation, on inputs and targets on the device. It returns the tensors to report."""


class NotCapturable(Exception):
    """A step cannot be captured, because its Python differs from step to step."""


class StepRunner:
    """Runs updates as train.compile says. reason: why they are no graph; None where they are, or may become one.

    why_eager: a reason that lies in the model.
    """

    def __init__(
        self, train: TrainConfig, model: nn.Module, device: torch.device, why_eager: str | None = None
    ) -> None:
        self.mode, self.model, self.device = train.compile, model, device
        self.reason = _reason(train, device) or why_eager
        self.pool = GraphPool() if self.reason is None else None
        self._memory = _PythonMemory(model, device)
        self._update: _Program | None = None
        self._evaluation: _Program | None = None
        self._eager_updates = self._eager_evaluations = 0

    @property
    def has_graph(self) -> bool:
        """Whether updates are a graph now."""
        return self._update is not None

    def run(self, update: Update, batch: Batch, at: At) -> list[Tensor]:
        """The results of update(*batch, at), which runs eagerly or as a graph. They are good until the next call.

        `at` has no counter. Where the update cannot be captured: UserError for train.compile=graph, otherwise one
        warning.
        """
        if self.pool is None:
            return update(*self._moved(batch), at)
        if at.probe is None and (self.has_graph or self._capture_update(update, batch, at.step)):
            self._memory.count(at.step)
            results = self._update(batch)
            self._memory.advance(at.step)
            return results
        with self.eager():
            results = update(*self._moved(batch), at)
            self._eager_updates += 1
            if self.has_graph:  # no other tensors of this step may stay
                foreach_copy_(self._update.graph.results, results)
                results = self._update.graph.results
        return results

    def evaluate(self, measure: Update, batch: Batch, step: int) -> float:
        """Return the single number of measure(*batch, At(step=step)).

        If updates are a graph, it runs as a graph from the second time on.
        """
        if self._evaluation or self._capture_evaluation(measure, batch, step):
            self._evaluation.counter.fill_(step)
            return self._evaluation(batch)[0].item()
        with self.eager():
            value = measure(*self._moved(batch), At(step=step))[0].item()
        self._eager_evaluations += self.has_graph
        return value

    @contextmanager
    def eager(self) -> Iterator[None]:
        """The context of eager work beside graphs. The work must leave no tensors."""
        if self.pool is None:
            yield
            return
        with self.pool.eager():
            yield
            if self.has_graph:
                self._memory.clear_workspaces()
        if self.has_graph and self.pool.grown():  # for instance by a table that was made on its first use
            self.forget()

    def forget(self) -> None:
        """Drop the graphs, because the recipe, or tensors that they read or write, change."""
        if self.has_graph:
            self.pool.wait()
            self._update = self._evaluation = None
            self.pool.renew()
        self._eager_updates = self._eager_evaluations = 0

    def _moved(self, batch: Batch) -> Iterator[Tensor]:
        return (_pinned(tokens, self.device).to(self.device, non_blocking=True) for tokens in batch)

    def _capture_update(self, update: Update, batch: Batch, step: int) -> bool:
        """Capture the update. Returns whether it is a graph now."""
        if self._eager_updates < EAGER_STEPS:
            return False
        counter = self._memory.begin(step)
        try:
            program = _Program(self.pool, update, batch, At(step=step, counter=counter))
            self._memory.learn(step)
        except (RuntimeError, NotCapturable) as error:
            self._fall_back(str(error).strip().partition("\n")[0])
            return False
        finally:
            self._memory.restore()
        self.pool.settle()
        self._update = program
        return True

    def _capture_evaluation(self, measure: Update, batch: Batch, step: int) -> bool:
        """Capture the evaluation. Returns whether it is a graph now; otherwise it runs eagerly without a warning."""
        if not (self.has_graph and self._eager_evaluations):
            return False
        counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            self._evaluation = _Program(self.pool, measure, batch, At(step=step, counter=counter))
        except RuntimeError:
            return False
        finally:
            self._memory.clear_workspaces()
        self.pool.settle()
        return True

    def _fall_back(self, error: str) -> None:
        self.model.zero_grad(set_to_none=True)
        drop_pass(self.model)
        self.pool = None
        self.reason = f"the step cannot be captured: {error}"
        if self.mode == "graph":
            raise UserError(f"train.compile: graph, but {self.reason}; give auto, which runs it eagerly then")
        warnings.warn(f"train.compile: {self.reason}; it runs eagerly, with the same bits", stacklevel=4)


class _Program:
    """A function of a batch as a graph, with the tensors that it reads: batch, step counter, tables of keys."""

    def __init__(self, pool: GraphPool, function: Update, batch: Batch, at: At) -> None:
        self.inputs = [tokens.to(at.counter.device, copy=True) for tokens in batch]
        self.counter = at.counter
        self.graph = pool.capture(partial(function, *self.inputs, at))
        self.tables = key_tables()

    def __call__(self, batch: Batch) -> list[Tensor]:
        for static, tokens in zip(self.inputs, batch, strict=True):
            static.copy_(_pinned(tokens, static.device), non_blocking=True)
        return self.graph.replay()


def _pinned(tokens: Tensor, device: torch.device) -> Tensor:
    """The tokens in pinned memory, from which a GPU copies while the host goes on."""
    return tokens.pin_memory() if device.type == "cuda" else tokens


def _reason(train: TrainConfig, device: torch.device) -> str | None:
    """Return why steps cannot be a graph, as far as config and device show; None if they may be."""
    if device.type != "cuda":
        return "there are no graphs on the CPU"
    if train.compile == "off":
        return "train.compile is off"
    return "train.offload copies on streams of its own" if train.offload else None


class _PythonMemory:
    """Changes that a step makes to Python objects of a model. They are learned during the capture, and repeated after
    every replay."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self._states: dict[DelayedState, int | None] = {}
        self._following: list[DelayedState] = []
        self._keys: dict[HybridQuantizedTensor, RngKey] = {}
        self._ahead: dict[HybridQuantizedTensor, int] = {}
        self._counters: dict[int, Tensor] = {}
        """Distance -> the counter of keys that are so far ahead of the training's step. A held weight's key counts its
        writes."""

    def _modules(self) -> Iterator[nn.Module]:
        """All modules of the model. The parts of converted modules are added, since model.modules() does not list
        them."""
        yield from self.model.modules()
        for part in quantized_modules(self.model):
            yield from part.modules()

    def begin(self, step: int) -> Tensor:
        """Prepare for a capture: note all states and keys, and have held weights draw random bits by counters.

        Returns the counter of the training's step.
        """
        self.clear_workspaces()
        self._states = {part: part.step for part in self._modules() if isinstance(part, DelayedState)}
        parts = [local(p) for p in self.model.parameters()]
        held = [p for p in parts if isinstance(p, HybridQuantizedTensor)]
        self._keys = {p: p.metadata.key for p in held if p.quantizer.stochastic}
        self._ahead = {p: key.step + 1 - step for p, key in self._keys.items()}
        for ahead in (0, *self._ahead.values()):
            self._counters.setdefault(ahead, torch.zeros(1, dtype=torch.int64, device=self.device))
        for p, key in self._keys.items():
            p.set_key(replace(key, counter=self._counters[self._ahead[p]]))
        self.count(step)
        return self._counters[0]

    def count(self, step: int) -> None:
        """Set the counters for a replay of this step."""
        for ahead, counter in self._counters.items():
            counter.fill_(step + ahead)

    def learn(self, step: int) -> None:
        """Note the changes of states and keys during the capture. NotCapturable if other steps would change other
        objects."""
        after = {part: part.step for part in self._modules() if isinstance(part, DelayedState)}
        self._following = [state for state, now in after.items() if now == step]
        others = [state for state in after if after[state] not in (step, self._states.get(state))]
        if others or after.keys() != self._states.keys():
            raise NotCapturable("states of delayed scaling began or ended with it")
        if any(p.metadata.key.step != key.step + 1 for p, key in self._keys.items()):
            raise NotCapturable("a held weight is not written once a step")

    def restore(self) -> None:
        """Restore states and keys after the capture, which has computed nothing."""
        self.clear_workspaces()
        for state, step in self._states.items():
            state.step = step
        for p, key in self._keys.items():
            p.set_key(key)

    def advance(self, step: int) -> None:
        """Update states and keys for a replay of this step."""
        for state in self._following:
            state.step = step
        for p, ahead in self._ahead.items():
            p.set_key(replace(p.metadata.key, step=step + ahead))
        torch.autograd.graph.increment_version(list(self.model.parameters()))
        note_update()

    def clear_workspaces(self) -> None:
        """Drop the cached operands of weights, which would lie in the memory of the graph."""
        for module in self._modules():
            if isinstance(workspace := getattr(module, "workspace", None), WeightWorkspace):
                workspace.clear()
