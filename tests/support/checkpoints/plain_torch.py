"""A program of torch alone, which saves and loads a training by torch.distributed.checkpoint as torchtitan does: the
model's state_dict at the top, and the flattened state of its optimizer under optimizer."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.parallel.sharded_training import Training, assert_same, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hqsweep.checkpoints.sharded_load import load_sharded
from hqsweep.checkpoints.sharded_save import save_sharded_async

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
OWN = ("lr", "betas", "eps", "weight_decay")
"""The options that a test compares."""


class Plain:
    """The model and the groups of a Training, of torch alone: in FSDP2 over the ranks of a mesh (None: plain).
    scheduled: under a schedule of torch, which writes initial_lr into each group, as torchtitan's does."""

    def __init__(self, mesh: DeviceMesh | None = None, seed: int = 5, *, scheduled: bool = False, **options: Any):
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False))
        self.model.register_buffer("calls", torch.zeros(1))
        if mesh is not None:
            for layer in (self.model[0], self.model[2], self.model):
                fully_shard(layer, mesh=mesh)
        matrices, vectors = ([p for p in self.model.parameters() if (p.dim() > 1) == flag] for flag in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.2}]
        self.optimizer = torch.optim.AdamW(groups, **options)
        if scheduled:
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def train(self, steps: int) -> "Plain":
        for _ in range(steps):
            self.model(torch.randn(8, 32)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer)

    def save(self, folder: Path) -> Path:
        return save(self.state(), folder)

    def load(self, folder: Path) -> "Plain":
        """Every key of its state must be in the folder."""
        load(self.model, self.optimizer, folder)
        return self

    def content(self) -> dict[str, Tensor]:
        return content(self.model, self.optimizer)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_model_state_dict(model) | {"optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}


def save(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without ranks that it has none
        dcp.save(state, checkpoint_id=folder)
    return folder


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = state_of(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state.pop("optimizer"), options=FLAT)
    set_model_state_dict(model, state)


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Masters, buffers and moments, whole, and the options of each group as numbers."""
    tensors = {name: whole(value) for name, value in model.named_buffers() if "states" not in name}
    for name, p in model.named_parameters():
        state = dict(optimizer.state[p])
        tensors[name] = whole(state.pop("master_param", p))
        tensors |= {f"{name}.{key}": whole(value) for key, value in state.items()}
    for index, group in enumerate(optimizer.param_groups):
        tensors |= {f"{index}.{key}": torch.tensor(group[key], dtype=torch.float64) for key in OWN}
    return tensors


def to_and_fro(rank: int, folder: Path) -> None:
    """Two ranks: torch alone loads what hqsweep wrote, in this call and beside it, and the other way round."""
    mesh = DeviceMesh("cpu", torch.arange(2))
    one = Training("mxfp8", mesh, kind="bf16")
    one.train(2)
    saving = save_sharded_async(one.model, one.optimizer, folder / "async")
    for written in (one.save(folder / "step-2"), saving.result()):
        assert_same(Plain(mesh).load(written).content(), content(one.model, one.optimizer))
    other = Plain(mesh, lr=3e-3, betas=(0.7, 0.8)).train(2)
    other.save(folder / "plain")
    two = Training("mxfp8", mesh, seed=3, kind="bf16")
    assert load_sharded(two.model, two.optimizer, folder / "plain") == {}
    assert_same(content(two.model, two.optimizer), other.content())
