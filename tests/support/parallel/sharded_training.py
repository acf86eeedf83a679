"""What test_sharded.py runs on ranks: small trainings that are saved, loaded on other numbers of ranks, and go on."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from hqsweep.checkpoints.sharded_load import load_sharded
from hqsweep.checkpoints.sharded_save import save_sharded, save_sharded_async
from hqsweep.checkpoints.weights import save_model
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, quantization, quantized_model_init
from hqsweep.nn.linears import Linear
from hqsweep.optim import FusedAdam
from hqsweep.parallel.wire.local import local, whole_tensor
from hqsweep.quant import GroupedTensor, HybridQuantizedTensor
from hqsweep.recipe import Recipe

RECIPES = {
    "mxfp8": "mxfp8",
    "nvfp4": {"input": "nvfp4+rht", "weight": "nvfp4+sr", "grad_output": "nvfp4+rht+sr"},
    "fp8_delayed": "fp8_delayed|fp8_delayed+e5m2+history2",
}
LR = 1e-2


class Experts(GroupedLinear):
    """Two experts, of which one has some of the rows, and the other the rest."""

    def __init__(self, recipe: Recipe) -> None:
        options = GroupedLinearOptions(single_grouped_weight=True)
        super().__init__(2, 64, 64, name="2", recipe=recipe, options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [64, 64]."""
        return super().forward(x, [24, 40])


class Training:
    """A linear, a norm and a linear, or experts, by a recipe, in FSDP2 over the ranks of a mesh (None: plain). kind:
    bf16 or fp32 weights, held ones that start from their values, or held ones that start from their codes, of a
    linear or of experts."""

    def __init__(self, recipe: str, mesh: DeviceMesh | None, seed: int = 0, kind: str = "fp32") -> None:
        slots = Recipe.from_config({"linear": RECIPES[recipe]})
        torch.manual_seed(seed)
        held = quantized_model_init(enabled="held" in kind, preserve_high_precision_init_val="codes" not in kind)
        with held, quantization(seed=1):
            first = Linear(32, 64, name="0", recipe=slots, bias=True)
            last = Experts(slots) if "experts" in kind else Linear(64, 64, name="2", recipe=slots)
        self.model = nn.Sequential(first, nn.LayerNorm(64), last)
        if kind == "bf16":
            self.model.bfloat16()
        self.model.register_buffer("calls", torch.zeros(1))
        if mesh is not None:
            for layer in (self.model[0], self.model[2], self.model):
                fully_shard(layer, mesh=mesh, shard_placement_fn=columns_of_held if mesh.size() > 2 else None)
        self.optimizer = FusedAdam(
            [
                {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=LR,
        )
        self.step, self.mesh = 0, mesh

    def train(self, steps: int) -> None:
        """Steps on the rank's own tokens; the rate falls, and dropout draws from torch's generator."""
        rank, group = (0, None) if self.mesh is None else (self.mesh.get_local_rank(), self.mesh.get_group())
        for _ in range(steps):
            self.step += 1
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(100 * self.step + rank))
            with quantization(seed=1, step=self.step, microbatch=rank, amax_group=group):
                y = self.model(nn.functional.dropout(x, 0.1).to(self.model[1].weight.dtype))
                y.float().square().mean().backward()
            self.model.calls += 1
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.optimizer.set_lr(self.optimizer.param_groups[0]["lr"] * 0.9)

    def content(self) -> dict[str, torch.Tensor]:
        """Every number that training goes on from, whole, but histories of experts whose weights another rank has."""
        tensors = {name: whole(value) for name, value in self.model.state_dict().items() if not is_held(value)}
        experts = local(self.model[2].weight)
        if isinstance(experts, GroupedTensor):
            first = experts.metadata.content.first
            others = set(range(2)) - set(range(first, first + experts.experts))
            parts = tuple(f"2.states.{expert}.weight_" for expert in others)
            tensors = {name: value for name, value in tensors.items() if not name.startswith(parts)}
        for name, p in self.model.named_parameters():
            tensors |= {f"{name}.{key}": whole(value) for key, value in self.optimizer.state[p].items()}
        for index in (0, 2):
            if self.mesh is not None:
                self.model[index].unshard()
            weight = self.model[index].weight
            if isinstance(weight, HybridQuantizedTensor):
                tensors |= {
                    f"{index}.{name}": b.view(torch.uint8).clone()
                    for name, b in weight.buffers.items()
                    if name != "high_precision_init_val"
                }
            if self.mesh is not None:
                self.model[index].reshard()
        tensors["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        return tensors

    def save(self, folder: Path, group=None) -> Path:
        extra = {"step": self.step, "sum": torch.tensor(0.1), "notes": ["a", None]}
        return save_sharded(self.model, self.optimizer, folder, extra, group=group)

    def load(self, folder: Path, group=None) -> "Training":
        extra = load_sharded(self.model, self.optimizer, folder, group=group)
        assert extra == {"step": extra["step"], "sum": torch.tensor(0.1), "notes": ["a", None]}
        self.step = extra["step"]
        return self


def columns_of_held(parameter: nn.Parameter) -> Shard | None:
    """Shard(1) for weights that are held quantized: columns of the matrix, and rows of every expert's."""
    return Shard(1) if isinstance(parameter, HybridQuantizedTensor) else None


def is_held(value: torch.Tensor) -> bool:
    return isinstance(local(value), HybridQuantizedTensor)


def whole(value: torch.Tensor) -> torch.Tensor:
    return whole_tensor(value).detach().clone()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], where: str = "") -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), where + name


RESUMED = [
    ("mxfp8", "bf16"),
    ("fp8_delayed", "fp32"),
    ("nvfp4", "held"),
    ("fp8_delayed", "held"),
    ("mxfp8", "held_codes"),
    ("fp8_delayed", "held_experts"),
]


def resumed(rank: int, folder: Path, cases: list[tuple[str, str]]) -> None:
    """Two ranks: four steps without a break, and two, a checkpoint, and two in another process's place; and the same
    from a checkpoint before the first step, or one in the background, in turn."""
    mesh = DeviceMesh("cpu", torch.arange(2))
    save_model(Training("mxfp8", mesh, kind="held").model, folder / "whole")
    for index, (recipe, kind) in enumerate(cases):
        one, name = Training(recipe, mesh, kind=kind), f"{recipe}_{kind}"
        one.save(folder / f"{name}_0")
        one.train(2)
        one.save(folder / name)
        saving = save_sharded_async(one.model, one.optimizer, folder / f"{name}_async", {"step": 2})
        one.train(2)
        assert saving.result() == folder / f"{name}_async" and saving.done()
        last = torch.get_rng_state()
        for step, file in ((2, name), ((0, f"{name}_0"), (2, f"{name}_async"))[index % 2]):
            two = Training(recipe, mesh, seed=7, kind=kind)
            two.train(1)
            if step == 0:
                two.optimizer.state.clear()
            two.step = load_sharded(two.model, two.optimizer, folder / file)["step"]
            assert two.step == step
            two.train(4 - step)
            assert_same(one.content(), two.content(), f"{file}: ")
            assert torch.equal(torch.get_rng_state(), last)


def killed(rank: int, folder: Path) -> None:
    """Two ranks, the second of which is killed while it writes its second checkpoint."""
    training = Training("mxfp8", DeviceMesh("cpu", torch.arange(2)), kind="held")
    training.train(1)
    training.save(folder / "step-1")
    if rank == 1:
        FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    training.save(folder / "step-2")


RESHARDED = [
    ("fp8_delayed", "bf16"),
    ("nvfp4", "held"),
    ("mxfp8", "held_codes"),
    ("nvfp4", "held_experts"),
    ("mxfp8", "held_codes_of_experts"),
]


def reshard(rank: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Four ranks: what two and one of them wrote in all four, of which each has columns of a held matrix and rows of
    held experts, and what four write in two."""
    two, four = (DeviceMesh("cpu", torch.arange(n)) for n in (2, 4))
    contents = {}
    for recipe, kind in RESHARDED:
        name = f"{recipe}_{kind}"
        if rank < 2:
            first = Training(recipe, two, kind=kind)
            first.train(0 if "codes" in kind else 2)
            first.save(folder / f"{name}_two", group=two.get_group())
            contents[f"{name} saved"] = first.content()
        dist.barrier()
        other = Training(recipe, four, seed=rank, kind=kind).load(folder / f"{name}_two")
        contents[f"{name} on four"] = other.content()
        other.save(folder / f"{name}_four")
        one = Training(recipe, four, seed=1, kind=kind).load(folder / f"{name}_one")
        contents[f"{name}_one on four"] = one.content()
        if rank < 2:
            again = Training(recipe, two, seed=3, kind=kind).load(folder / f"{name}_four", two.get_group())
            contents[f"{name} on two"] = again.content()
    return contents
