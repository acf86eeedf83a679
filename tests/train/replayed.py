"""EagerGraph: a CudaGraph for the CPU, whose replays run again the function that was captured."""

from contextlib import nullcontext

import torch

from hqsweep.nn.saved import tensors_of
from hqsweep.quant.delayed import DelayedState
from hqsweep.quant.tensor import HybridQuantizedTensor


class EagerGraph:
    """As a CUDA graph: capturing computes nothing, a replay finds Python as it was at the capture and leaves it as it
    is now, and results stand where the capture left them."""

    def __init__(self, trainer):
        self.trainer, self.replays, self.captures, self.grows = trainer, 0, 0, []
        self.function = None

    def eager(self):
        return nullcontext()

    def tensors(self):
        state = (value for each in self.trainer.optimizer.state.values() for value in each.values())
        return [*tensors_of(self.trainer.model), *state, self.trainer.loss_sum]

    def python(self):
        model = self.trainer.model
        states = {part: part.step for part in model.modules() if isinstance(part, DelayedState)}
        return states, {p: p.metadata.key for p in model.parameters() if isinstance(p, HybridQuantizedTensor)}

    def set_python(self, python):
        for state, step in python[0].items():
            state.step = step
        for p, key in python[1].items():
            p.set_key(key)

    @torch.no_grad()
    def capture(self, function):
        self.known, before = self.python(), [tensor.clone() for tensor in self.tensors()]
        with torch.enable_grad():
            self.results = function()
        for tensor, value in zip(self.tensors(), before, strict=True):
            tensor.copy_(value)
        self.function, self.captures = function, self.captures + 1
        return self.results

    def settle(self):
        pass

    def grown(self):
        return bool(self.grows) and self.grows.pop()

    def replay(self):
        now = self.python()
        self.set_python(self.known)
        results = self.function()
        self.set_python(now)
        for static, value in zip(self.results, results, strict=True):
            static.copy_(value)
        self.replays += 1

    def drop(self):
        self.function = None
