"""EagerPool: a GraphPool for the CPU, whose graphs run again the function that was captured."""

from contextlib import nullcontext

import torch

from hqsweep.nn.saved_memory import tensors_of
from hqsweep.quant.delayed import DelayedState
from hqsweep.quant.tensor import HybridQuantizedTensor


class EagerPool:
    """A stand-in for CUDA graphs: capturing computes nothing, a replay finds Python as it was at the capture and leaves
    it as it is now, and results stand where the capture left them. `replays` has a number for each capture."""

    def __init__(self, trainer):
        self.trainer, self.replays, self.grows = trainer, [], []

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

    def capture(self, function):
        return EagerGraph(self, function)

    def settle(self):
        pass

    def grown(self):
        return bool(self.grows) and self.grows.pop(0)

    def wait(self):
        pass

    def renew(self):
        pass


class EagerGraph:
    def __init__(self, pool, function):
        self.pool, self.function, self.number, self.known = pool, function, len(pool.replays), pool.python()
        before = [tensor.detach().clone() for tensor in pool.tensors()]
        self.results = function()
        with torch.no_grad():
            for tensor, value in zip(pool.tensors(), before, strict=True):
                tensor.copy_(value)
        pool.replays.append(0)

    def replay(self):
        now = self.pool.python()
        self.pool.set_python(self.known)
        results = self.function()
        self.pool.set_python(now)
        for static, value in zip(self.results, results, strict=True):
            static.copy_(value)
        self.pool.replays[self.number] += 1
        return self.results
