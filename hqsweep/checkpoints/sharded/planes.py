"""Held weights without a master in a checkpoint: their codes and scales, unchanged, as tensors of bytes.

Each rank of a sharding gives what it would send for a gather, as many bytes as every other rank. Together they are a
tensor uint8 [ranks * bytes] that any number of ranks reads.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.parallel.shards.shard import Cut, buffer_cuts
from hqsweep.parallel.wire.local import is_spread, local, type_of_spread
from hqsweep.quant.metadata import Metadata
from hqsweep.quant.tensor import KINDS, HybridQuantizedTensor


def planes_of(p: nn.Parameter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A description of the whole tensor and its cut, in texts and numbers, and "rowwise_q" and so on -> its bytes.

    UserError for a tensor that is cut otherwise than fully_shard does it alone."""
    own, (cut, axis) = local(p), _cut_of(p)
    ranks, rank = (p.device_mesh.size(axis), p.device_mesh.get_local_rank(axis)) if axis is not None else (1, 0)
    cuts = buffer_cuts(cut, ranks)
    planes = {name: buffer_cut.pack(own.buffers[name], rank) for name, buffer_cut in cuts.items()}
    if axis is not None:
        options = {"run_check": False}
        placements = [type(each)(0) if i == axis else each for i, each in enumerate(p.placements)]
        planes = {n: type_of_spread().from_local(x, p.device_mesh, placements, **options) for n, x in planes.items()}
    described = {"metadata": cut.metadata.describe(), "kind": type(own).__name__, "dim": cut.dim}
    return described | {"shape": list(cut.shape), "each": cut.each, "ranks": ranks}, planes


def _cut_of(p: nn.Parameter) -> tuple[Cut, int | None]:
    """The cut of a parameter, and the axis of its mesh along which it is cut; None for one that is whole."""
    own = local(p)
    axes = [i for i, cut in enumerate(p.placements) if not cut.is_replicate()] if is_spread(p) else []
    if not axes:
        return Cut.of(own.metadata, own.shape, max(own.shape[0], 1)), None
    if len(axes) > 1 or own.sharding is None or own.part is not None:
        raise UserError(
            f"save_sharded: a weight in {own.quantizer} without a master, of which ranks of tp or ep have parts, is"
            " not saved as codes; give the optimizer that has its master, or build the model with"
            " quantized_model_init(preserve_high_precision_init_val=True)"
        )
    return own.sharding.cut, axes[0]


def whole_of(described: Mapping[str, Any], planes: Mapping[str, Tensor], device: torch.device) -> HybridQuantizedTensor:
    """The whole tensor of this description and these bytes. UserError for bytes that are not those of its formats."""
    metadata, shape = Metadata.parse(described["metadata"]), tuple(described["shape"])
    dim = described.get("dim", described.get("axis", 0) * (len(shape) - 1))  # older files have the matrix's axis
    cuts = buffer_cuts(Cut(metadata, shape, described["each"], dim), described["ranks"])
    buffers = metadata.empty(device)
    for name, buffer in buffers.items():
        plane = planes.get(name)
        if plane is None or plane.numel() != described["ranks"] * cuts[name].nbytes:
            raise UserError(f"{name} of a weight in {metadata.quantizer} has another size than its format says")
        cuts[name].unpack(plane.to(device), buffer)
    return KINDS[described["kind"]](buffers, metadata, shape)


def take_(p: nn.Parameter, whole: HybridQuantizedTensor) -> None:
    """Give a parameter of the same formats this rank's part of the whole. UserError for other formats."""
    own, (cut, axis) = local(p), _cut_of(p)
    if whole.quantizer != own.quantizer or not set(own.metadata.directions) <= set(whole.metadata.directions):
        raise UserError(f"the checkpoint holds a weight in {whole.quantizer}, and the model in {own.quantizer}")
    rank = 0 if axis is None else p.device_mesh.get_local_rank(axis)
    if own.numel():
        own.write_(whole if axis is None else whole.split(cut.each, cut.dim)[rank])
    own.set_key(whole.metadata.key)
