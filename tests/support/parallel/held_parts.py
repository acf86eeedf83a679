"""Weights that are held quantized, of which ranks of tp have parts that fully_shard cuts further, and one process."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cases import BASES, DELAYED_IN_PARTS
from support.parallel import shared_models
from support.parallel.fsdp2_ranks import Holder, differing, fits, held
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hqsweep import compat
from hqsweep.checkpoints.sharded_load import load_sharded
from hqsweep.checkpoints.sharded_save import save_sharded
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import autocast, quantization, quantized_model_init
from hqsweep.optim import FusedAdam
from hqsweep.parallel.data import reshard, units
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.parallel.shared.held import hold_part
from hqsweep.parallel.tensor import distribute, fsdp_placement, tensor_parallel
from hqsweep.parallel.wire.local import group_of_shards, local, spread_out, whole_tensor
from hqsweep.quant import HybridQuantizedTensor, quantize_shards_
from hqsweep.recipe import LinearQuantizers
from hqsweep.train.model import GPT


class Cut(NamedTuple):
    """How ranks of tp share a weight of this shape [N, K], or each expert of [E, N, K]: along rows or columns."""

    shape: tuple[int, ...]
    axis: int
    runs: int = 1

    @property
    def dim(self) -> int:
        """The axis of the tensor."""
        return self.axis + len(self.shape) - 2

    def draw(self, seed: int) -> Tensor:
        """Values of the whole."""
        return draw("normal", *torch.empty(self.shape).flatten(0, -2).shape, seed, dtype=torch.float32).view(self.shape)


CUTS = [Cut((256, 48), 0), Cut((768, 32), 0, 3), Cut((208, 256), 1), Cut((37, 256), 1)]
CUTS += [Cut((3, 512, 32), 0, 2), Cut((3, 32, 256), 1)]
"""Of most formats fully_shard's shards cut blocks; of the fourth weight the second rank has fewer rows, and of three
experts one."""
MESHES = [("dp_shard", "tp"), ("dp_replicate", "dp_shard", "tp")]
"""Two ranks along the first axis, and two along the last."""
RECIPES = {
    "delayed": DELAYED_IN_PARTS,
    "random": {"input": "mxfp8", "weight": "nvfp4+tensor+sr|nvfp4+sr@rowwise_dequantized", "grad_output": "mxfp8"},
}


def everything(rank: int, folders: dict[str, Path], texts: list[str]) -> tuple:
    """What differs under fully_shard, of plain weights and of held ones, and what steps() gives of each recipe."""
    plain = shared_models.over_fsdp(rank, 4)
    return (
        plain,
        differences(texts) + of_compat(),
        {name: steps(folders[name], recipe) for name, recipe in RECIPES.items()},
    )


def of_compat() -> list[str]:
    """What TransformerEngine's linears over tp give, step by step, otherwise than the same that fully_shard cuts, whose
    ranks have the same tokens."""
    mesh, faults = init_device_mesh("cpu", (2, 2), mesh_dim_names=MESHES[0]), []
    for name, mode in (("nvfp4|mxfp8", "column"), ("fp8_current", "row"), ("nvfp4+tensor+sr", "column")):
        recipe = LinearQuantizers.parse({"input": "mxfp8", "weight": name, "grad_output": "mxfp8"}, "test")
        x = draw("normal", 64, 128, 1)
        own = x if mode == "column" else x.chunk(2, 1)[mesh["tp"].get_local_rank()]
        alone, cut = (_compat_outputs(recipe, mode, own, mesh, sharded=sharded) for sharded in (False, True))
        faults += [
            f"compat {name} {mode}, step {i}" for i, pair in enumerate(zip(alone, cut, strict=True), 1)
            if not torch.equal(*pair)
        ]  # fmt: skip
    return faults


def _compat_outputs(recipe: LinearQuantizers, mode: str, x: Tensor, mesh: DeviceMesh, *, sharded: bool) -> list[Tensor]:
    """The y of each of three steps."""
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True), quantization(seed=1, step=0):
        module = compat.Linear(
            128, 128, bias=False, name="l", parallel_mode=mode, tp_size=2, tp_group=mesh["tp"].get_group()
        )
    if sharded:
        fully_shard(module, mesh=mesh["dp_shard"])
    optimizer, outputs = FusedAdam(module.parameters(), lr=0.01), []
    for step in (1, 2, 3):
        with quantization(seed=1, step=step), autocast(recipe=recipe):
            y = module(x)
            y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y.detach())
    return outputs


def differences(texts: list[str]) -> list[str]:
    """What of held weights differs from one process: after a first gather, after later values were written to all
    weights at once, and to each by itself; and of values that are shared out and put together again."""
    faults, cases = [], [(text, cut) for text in texts for cut in CUTS if fits(text, cut.shape)]
    by_second = [case for case in cases if _fits_second_axis(case[1])]
    for axes, second, some in (
        (MESHES[0], False, [case for i, case in enumerate(cases) if case[0] in BASES or i % 2]),
        (MESHES[1], False, cases[::7]),
        (MESHES[0], True, by_second[::3]),
    ):
        mesh = init_device_mesh("cpu", (2, *(1,) * (len(axes) - 2), 2), mesh_dim_names=axes)
        modules = {case: _module(mesh, *case, second) for case in some}
        weights = [module.weight for module in modules.values()]
        of_first = {cut: module.weight for (_, cut), module in modules.items()}
        for time in ("at first", "together", "alone")[: 2 if second else 3]:
            values = {cut: cut.draw(len(time)) for cut in CUTS}
            spread = {cut: spread_out(values[cut], weight) for cut, weight in of_first.items()}
            faults += [f"{cut}: values" for cut, x in spread.items() if not torch.equal(whole_tensor(x), values[cut])]
            parts = [spread[cut].to_local() for _, cut in modules]
            if time == "together":
                quantize_shards_(list(map(local, weights)), parts, group=group_of_shards(weights[0]))
            elif time == "alone":
                for weight, part in zip(weights, parts, strict=True):
                    local(weight).quantize_(part)
            for (text, cut), module in modules.items():
                whole = held(text, cut.shape)
                if time != "at first":
                    whole.quantize_(values[cut], key=local(module.weight).metadata.key)
                expected = hold_part(whole, Part(group=mesh["tp"].get_group(), axis=cut.axis, runs=cut.runs))
                faults += [f"{text} {cut} of {axes} {time}: {name}" for name in _differing(module, expected)]
    return faults


def _fits_second_axis(cut: Cut) -> bool:
    """Whether fully_shard may cut the parts along their second axis, into equal ones."""
    return cut.shape[1] // (2 if cut.dim == 1 else 1) % 2 == 0


def _module(mesh: DeviceMesh, text: str, cut: Cut, second: bool) -> Holder:
    module = Holder(held(text, cut.shape))
    placement = Shard(cut.dim) if cut.runs == 1 else _StridedShard(cut.dim, split_factor=cut.runs)
    distribute(module, mesh["tp"], {"weight": placement}, None)
    placement_fn = (lambda _: Shard(1)) if second else None
    fully_shard(module, mesh=mesh[mesh.mesh_dim_names[:-1]], shard_placement_fn=placement_fn)
    return module


def _differing(module: Holder, expected: HybridQuantizedTensor) -> list[str]:
    """The buffers of the gathered weight that are not the expected ones."""
    module.unshard()
    names = differing(local(module.weight), expected)
    module.reshard()
    return names


def training_of(recipe: dict, mesh: DeviceMesh | None = None) -> tuple[GPT, FusedAdam]:
    """A GPT of held weights, which ranks of a mesh share, and its optimizer."""
    with quantized_model_init(), quantization(seed=1):
        model = shared_models.build({"linear": recipe})
    if mesh is not None:
        model = shared_models.cut_further(tensor_parallel(model, mesh["tp"]), mesh, fsdp_placement)
    return model, FusedAdam(model.parameters(), lr=1e-2)


def step(model: GPT, optimizer: FusedAdam, number: int) -> None:
    """A step of the optimizer on gradients that are drawn, after a forward that uses the weights."""
    with quantization(seed=1, step=number):
        model.loss(*shared_models.data(number))
    reshard(model)
    generator = torch.Generator().manual_seed(number)
    for p in model.parameters():
        p.grad = spread_out(torch.randn(p.shape, generator=generator), p)
    optimizer.step()


class Steps(NamedTuple):
    """What a rank returns of a training."""

    parts: dict[str, tuple[int, int, dict[str, Tensor]]]
    """The name of each held weight -> the axis along which tp cuts it, the pieces of a part, and the buffers of this
    rank's part."""
    refusal: str
    """What is said of a checkpoint of codes alone."""


def steps(folder: Path, recipe: dict) -> Steps:
    """Go on from the checkpoint of one process for a step, and save that."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = training_of(recipe, mesh)
    with pytest.raises(UserError) as error:
        save_sharded(model, None, folder / "codes")
    load_sharded(model, optimizer, folder / "one")
    step(model, optimizer, 2)
    save_sharded(model, optimizer, folder / "four")
    for unit in units(model):
        unit.unshard()
    held = {name: p for name, p in model.named_parameters() if isinstance(local(p), HybridQuantizedTensor)}
    parts = {n: (local(p).part.axis, local(p).part.runs, dict(local(p).buffers)) for n, p in held.items()}
    return Steps(parts, str(error.value))
