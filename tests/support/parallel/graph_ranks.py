"""What each rank does in tests of steps that are CUDA graphs."""

from functools import partial

import torch
import torch.distributed as dist
from support.ranks import rank_device
from support.train.replayed import EagerPool

from hqsweep.jobs.isolation import make_deterministic
from hqsweep.nn.core.residual import is_observed
from hqsweep.parallel.data import is_unit
from hqsweep.parallel.mesh import Ranks, build_mesh
from hqsweep.parallel.wire.local import local
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.train import data
from hqsweep.train.loop import Trainer


class SharedPool(EagerPool):
    """An EagerPool of parameters that are shared out."""

    def tensors(self):
        return [local(tensor) for tensor in super().tensors()]

    def python(self):
        states, _ = super().python()
        parts = [local(p) for p in self.trainer.model.parameters()]
        return states, {p: p.metadata.key for p in parts if isinstance(p, HybridQuantizedTensor)}


def fail_in_backward(training):
    """Have the captures of a trainer fail in their backward."""
    capture = training.runner.pool.capture

    def fail(*_):
        raise RuntimeError("not today")

    def failing(function):
        handle = next(training.model.children()).register_full_backward_hook(fail)
        try:
            return capture(function)
        finally:
            handle.remove()

    training.runner.pool.capture = failing


def trainer(cfg, kind):
    """One of the ranks' Trainer: with graphs, on the CPU their stand-in; eager, it waits for the rows of experts."""
    if kind == "eager":
        dims = cfg.train.parallel.model_copy(update={"expert_room": None})
        cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"parallel": dims})})
    device, dims = rank_device(), cfg.train.parallel
    training = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), device, Ranks(
        dims=dims, mesh=build_mesh(dims, device.type), device=device
    ))  # fmt: skip
    if kind == "eager":
        training.runner.pool = None
    elif device.type == "cpu":
        training.runner.pool = SharedPool(training)
    if kind == "failing":
        fail_in_backward(training)
    return training


def train(cfg, kind):
    """(metrics and statistics of each step, the state at the end, why steps were eager, replays)."""
    training = trainer(cfg, kind)
    # The sum of a branch is left to the next norm: the hooks of fully_shard stand around the layer's residual(), too.
    assert not any(is_observed(layer) for layer in training.model.layers if is_unit(layer))
    steps = [(step.metrics, step.stats) for step in training.steps()]
    reason, pool = training.runner.reason, training.runner.pool
    graphs = getattr(pool, "replays", training.runner.has_graph)
    state = training.state()
    training.runner.forget()  # a communicator waits for the graphs that hold it
    return steps, state, reason, graphs


def train_both(rank: int, configs: list, kind: str) -> list:
    """train() of each config, eagerly and otherwise."""
    if dist.get_backend() == "nccl":
        make_deterministic()
    results = [[train(cfg, each) for each in ("eager", kind)] for cfg in configs]
    return torch.utils._pytree.tree_map_only(torch.Tensor, partial(torch.Tensor.to, device="cpu"), results)
