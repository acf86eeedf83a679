"""Tensor parallelism: styles for torch's parallelize_module, and tensor_parallel for whole models.

All parameters become DTensors, also those that every rank has whole, so that optimizers and norms of gradients see one
kind. With sequence parallelism tokens are split over the ranks wherever a matrix does not need all of them.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from hqsweep.errors import UserError
from hqsweep.nn.core.module import QuantizedWeight
from hqsweep.nn.layernorm_linears import LayerNormLinear, LayerNormMLP
from hqsweep.nn.linears import Linear, LinearBase
from hqsweep.nn.norm_embedding import Norm
from hqsweep.nn.router import Router
from hqsweep.nn.transformer import LayerNormMoE, MultiheadAttention
from hqsweep.ops.elementwise import INPUTS
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.parallel.shared.attention import share_attention
from hqsweep.parallel.shared.call import LinearShare
from hqsweep.parallel.shared.experts import share_features
from hqsweep.parallel.shared.held import hold_part
from hqsweep.parallel.shared.linear import TensorParallel
from hqsweep.parallel.shared.tokens import SharedWeight, SplitTokens
from hqsweep.parallel.wire.local import local
from hqsweep.quant.content import AXES
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.torch_private import strided_shard

AXIS = "tp"
TOKENS = 1
"""The axis of the tokens in x [B, T, D]; ranks may split it for any B. Axis 0 splits whole sequences."""


class SequenceStyle(ParallelStyle):
    """A style with sequence parallelism. sequence: the axis of x along which tokens are split evenly over ranks; None:
    every rank has all tokens."""

    def __init__(self, *, sequence: int | None = None) -> None:
        super().__init__()
        self.sequence = sequence


class ColwiseLinear(SequenceStyle):
    """A Linear or LayerNormLinear whose ranks compute columns of y [..., N], from rows of the weight [N, K].

    x is whole on every rank. With sequence, x is split along that axis: it is gathered, and its gradient comes back
    split. y has N / ranks features of all tokens, with the bits of one process. The gradient of x is a sum over ranks
    of products that are rounded to the linear's dtype. pieces: the number of matrices in the weight, one below the
    other, such as 3 for q, k and v; each rank has rows of every one.

    UserError for features that ranks do not divide, and at the call for parts that cut a block.
    """

    def __init__(self, *, sequence: int | None = None, pieces: int = 1) -> None:
        super().__init__(sequence=sequence)
        self.pieces = pieces

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_linear(module, device_mesh, 0, self.pieces)
        group, options = device_mesh.get_group(), {"sequence": self.sequence, "pieces": self.pieces}
        module.parallel = TensorParallel(group=group, mode="column", **options)
        rows = _cut(0, self.pieces)
        distribute(module, device_mesh, {"weight": rows, "bias": rows}, self.src_data_rank)
        if self.sequence is not None and isinstance(module, LayerNormLinear):
            module.norm.parallel = SharedWeight(tokens=group)
        return module


class RowwiseLinear(SequenceStyle):
    """A Linear whose ranks read columns of x [..., K], by columns of the weight [N, K].

    y is the sum over ranks of their products, each rounded to the linear's dtype. Every rank has all of y; with
    sequence, an equal part of its tokens along that axis. The gradient of x has the bits of one process.

    UserError for features that ranks do not divide, and at the call for parts that cut a block.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_linear(module, device_mesh, 1)
        if isinstance(module, LayerNormLinear):
            raise UserError(f"{module.name}: its norm reads whole rows, of which RowwiseLinear has parts")
        module.parallel = TensorParallel(group=device_mesh.get_group(), mode="row", sequence=self.sequence)
        distribute(module, device_mesh, {"weight": Shard(1)}, self.src_data_rank)
        return module


class SequenceNorm(ParallelStyle):
    """A Norm on each rank's own tokens. Its parameters are whole, and their gradients are summed over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.parallel = SharedWeight(tokens=device_mesh.get_group())
        distribute(module, device_mesh, {}, self.src_data_rank)
        return module


class Whole(ParallelStyle):
    """A module that every rank has whole and computes alike."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, {}, self.src_data_rank)
        return module


class SharedAttention(SequenceStyle):
    """A MultiheadAttention whose ranks compute equally many heads. UserError for heads that ranks do not divide."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_divides(module.qkv.name, module.heads, "heads", device_mesh)
        ColwiseLinear(sequence=self.sequence, pieces=3)._apply(module.qkv, device_mesh)
        RowwiseLinear(sequence=self.sequence)._apply(module.proj, device_mesh)
        module.heads //= device_mesh.size()
        share_attention(module.dpa, heads=device_mesh.get_group())
        return module


class SharedMLP(SequenceStyle):
    """A LayerNormMLP whose ranks compute equally many inner features. UserError for a width that ranks do not
    divide."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        pieces = INPUTS[module.activation]
        ColwiseLinear(sequence=self.sequence, pieces=pieces)._apply(module.fc1, device_mesh)
        RowwiseLinear(sequence=self.sequence)._apply(module.fc2, device_mesh)
        return module


class SharedMixture(SequenceStyle):
    """A LayerNormMoE whose ranks compute equally many inner features of every expert.

    With sequence the tokens of all ranks are gathered after the norm, and every rank routes all of them alike.
    UserError for a width of experts that ranks do not divide, for held experts whose parts cut a block, and for experts
    that already lie over ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        if module.dispatcher is not None or module.fc1.parallel is not None:
            raise UserError(f"{module.name}: its experts lie over ranks already; tensor_parallel comes first")
        check_divides(module.fc2.name, module.fc2.in_features, "input features of each expert", device_mesh)
        cuts = {"fc1": ("column", INPUTS["swiglu"], -2), "fc2": ("row", 1, -1)}
        for name, (mode, pieces, axis) in cuts.items():
            grouped = module.get_submodule(name)
            placements = {n: _cut(axis % p.dim(), pieces) for n, p in grouped.named_parameters()}
            share_features(grouped, LinearShare(group=group, mode=mode, pieces=pieces))
            distribute(grouped, device_mesh, placements, self.src_data_rank)
        if module.shared is not None:
            ColwiseLinear(pieces=INPUTS["swiglu"])._apply(module.shared.fc1, device_mesh)
            RowwiseLinear()._apply(module.shared.fc2, device_mesh)
        if self.sequence is not None:
            module.tokens = SplitTokens(group=group, axis=self.sequence)
            module.norm.parallel = SharedWeight(tokens=group)
        distribute(module, device_mesh, {}, self.src_data_rank)
        return module


class SharedVocabulary(SequenceStyle):
    """An embedding whose ranks have equally many entries of the table [V, D]. With sequence each rank returns its part
    of the tokens [B, T]. UserError for a vocabulary that ranks do not divide."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_divides(module.name, module.weight.shape[0], "entries of the vocabulary", device_mesh)
        module.parallel = SharedWeight(part=Part(group=device_mesh.get_group(), axis=0), split=self.sequence)
        distribute(module, device_mesh, {"weight": Shard(0)}, self.src_data_rank)
        return module


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = True, axis: int = TOKENS) -> nn.Module:
    """Share a model's matrices, in place, over the ranks along an axis of the mesh: "tp", or the only one. Returns the
    model.

    model: hqsweep's GPT, or one of its modules: a TransformerLayer or MoELayer, a MultiheadAttention, a LayerNormMLP or
    a LayerNormMoE. All ranks have it whole before this call. Rank 0's values are taken, except for weights that are
    held quantized: each rank takes its own, which must be equal. Afterwards every rank calls the model with the same
    tokens.

    sequence: split tokens over ranks between matrices, so that norms and tensors kept for backward cost 1 / ranks. A
    module that is no GPT then takes and returns its part of the tokens of x [B, T, D]. axis: the axis of x along which
    tokens are split. 1: each rank has an equal part of each sequence. 0: each rank has whole sequences, and ranks must
    divide every batch; messages then need no copy. Sums for the gains of norms have another order.

    The loss of a GPT is the loss of all tokens on every rank, and no rank ever has all logits of a token. The GPT's
    forward gathers the logits.

    Raises:
        UserError: for another axis, a mesh of several axes without "tp", heads, widths or a vocabulary that ranks do
            not divide, held weights whose parts cut a block, weights that lie over ranks already, and linears outside
            of attention, MLP, mixture and head. At a call: for tokens that ranks do not divide, and parts of matrices
            that cut a block.
    """
    axes = mesh.mesh_dim_names or ()
    if axis not in (0, TOKENS):
        raise UserError(
            f"tensor_parallel: axis is {axis}; tokens of x [B, T, D] lie split along 1, or sequences along 0"
        )
    if mesh.ndim > 1 and AXIS not in axes:
        raise UserError(f"tensor_parallel: the mesh has axes {axes}; it takes one that is named '{AXIS}', or one axis")
    along = mesh[AXIS] if AXIS in axes and mesh.ndim > 1 else mesh
    plan = _plan(model, axis if sequence else None)
    head = getattr(model, "head", None)
    tied = head is not None and head.weight is model.embedding.weight
    for module, style in plan:
        style._apply(module, along)
    if tied:
        head.weight = model.embedding.weight
    return model


def fsdp_placement(parameter: nn.Parameter) -> Shard | None:
    """The shard_placement_fn of torch's fully_shard for a model that tensor_parallel has shared.

    Returns Shard(1) for matrices whose pieces are cut separately, such as q, k and v. Returns None, which means
    Shard(0), for all others and for experts. If fully_shard cut pieces along rows, the DTensor would name other rows
    than it has. hqsweep and its checkpoints know the rows, but full_tensor() returns them in another order.

    Where ranks do not divide the columns, torch refuses Shard(1) with NotImplementedError. Give fully_shard
    partial(shard_placement, ranks=N) then, as hqsweep's own runs do.
    """
    spread = parameter.placements if isinstance(parameter, DTensor) else ()
    in_pieces = any(isinstance(placement, strided_shard()) and placement.dim == 0 for placement in spread)
    return Shard(1) if in_pieces and parameter.dim() > 1 else None


def shard_placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """fsdp_placement() for this number of ranks of fully_shard, where all ranks get equal parts if that is possible.

    torch cuts columns evenly only, so the result is None where ranks do not divide the columns. For weights [E, N, K]
    of experts, where ranks do not divide E, it is the first later axis that ranks divide and that is not cut yet.
    torch's placements cannot name uneven parts of experts that already lie over ranks.
    """
    own = local(parameter)
    if own.dim() == AXES and own.shape[0] % ranks:
        spread = parameter.placements if isinstance(parameter, DTensor) else ()
        cut = {placement.dim for placement in spread if not placement.is_replicate()}
        free = (axis for axis in range(1, AXES) if axis not in cut and own.shape[axis] % ranks == 0)
        axis = next(free, None)
        if axis is not None:
            return Shard(axis)
    placement = fsdp_placement(parameter)
    return None if placement is not None and own.shape[placement.dim] % ranks else placement


def _cut(axis: int, pieces: int) -> Placement:
    """The placement of parts along an axis. pieces: how many matrices lie one after the other there, each cut
    separately."""
    return Shard(axis) if pieces == 1 else strided_shard()(axis, split_factor=pieces)


def _plan(model: nn.Module, sequence: int | None) -> list[tuple[nn.Module, ParallelStyle]]:
    """Each module that has a style, with its style, in order."""
    styles: list[tuple[nn.Module, ParallelStyle]] = []
    within: set[nn.Module] = set()
    for module in model.modules():
        if module in within:
            continue
        style = _style(module, sequence, is_head=module is getattr(model, "head", None))
        if style is not None:
            styles.append((module, style))
            within |= set(module.modules())
        elif isinstance(module, LinearBase):
            raise UserError(
                f"{module.name}: tensor_parallel does not share linears outside of attention and MLP; give tp=1, or"
                " styles of your own"
            )
    if not styles:
        raise UserError(f"tensor_parallel: {type(model).__name__} has no module of hqsweep.nn that ranks can share")
    return styles


def _style(module: nn.Module, sequence: int | None, *, is_head: bool) -> ParallelStyle | None:
    if isinstance(module, MultiheadAttention):
        return SharedAttention(sequence=sequence)
    if isinstance(module, LayerNormMLP):
        return SharedMLP(sequence=sequence)
    if isinstance(module, LayerNormMoE):
        return SharedMixture(sequence=sequence)
    if is_head:
        return ColwiseLinear(sequence=sequence)
    if isinstance(module, Norm):
        return Whole() if sequence is None else SequenceNorm()
    if isinstance(module, QuantizedWeight):
        return SharedVocabulary(sequence=sequence)
    return None


def check_linear(module: nn.Module, mesh: DeviceMesh, axis: int, pieces: int = 1) -> None:
    """Raise UserError for a module that is no Linear, a weight already over ranks, and features that ranks do not
    divide."""
    name = getattr(module, "name", "") or type(module).__name__
    if not isinstance(module, Linear):
        got = f"{type(module).__module__}.{type(module).__name__}"
        raise UserError(f"{name}: the style takes hqsweep.nn.Linear, and got {got}")
    if mesh.ndim != 1:
        raise UserError(f"{name}: the mesh has {mesh.ndim} axes; give the one of tensor parallelism, mesh['tp']")
    if module.parallel is not None:
        raise UserError(f"{name}: its weight lies over ranks already")
    check_divides(name, module.weight.shape[axis] // pieces, ("output features", "input features")[axis], mesh)


def check_divides(name: str, size: int, what: str, mesh: DeviceMesh) -> None:
    """UserError for a size that ranks do not divide."""
    if size % mesh.size():
        raise UserError(f"{name}: {size} {what} do not divide by tp={mesh.size()}")


def distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement], source: Any) -> None:
    """Make every parameter of the module and its submodules a DTensor, whole where `placements` names none.

    Values are taken from rank `source`; a weight that is held quantized keeps this rank's own values.
    """
    for name, parameter in list(module.named_parameters()):
        if isinstance(parameter, DTensor):
            continue
        placement = placements.get(name, Replicate())
        if isinstance(parameter, HybridQuantizedTensor):
            try:
                placed = _held(parameter.detach(), mesh, placement)
            except UserError as error:
                raise UserError(f"{module.name}: {error}") from None
        else:
            placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    for part in module.modules():
        if isinstance(part, QuantizedWeight | Router) and part.parallel is None:
            part.parallel = SharedWeight()


def _held(weight: HybridQuantizedTensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """This rank's part of a held weight, as a DTensor."""
    if placement.is_replicate():
        return DTensor.from_local(weight, mesh, [placement], run_check=False)
    axis, runs = placement.dim - (weight.dim() - 2), getattr(placement, "split_factor", 1)
    own = hold_part(weight, Part(group=mesh.get_group(), axis=axis, runs=runs))
    whole = {"shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(own, mesh, [placement], run_check=False, **whole)
