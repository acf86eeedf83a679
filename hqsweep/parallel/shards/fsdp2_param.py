"""HeldParam: the class of torch's FSDPParam of a held weight, where torch's own takes plain tensors alone.

What torch gathers of parts that lie along another axis than the first, Shard(1), it joins along that axis of the
parameter, which the buffers of a held weight have not; they are joined as parts of the first are (Sharding.post).
With reshard_after_forward=<number> torch shards a weight over fewer ranks between forward and backward, and gathers
that from there. Of a held weight each of these ranks keeps its piece of the buffers that backward reads.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hqsweep.memo import memo
from hqsweep.torch_private import fsdp_extensions, fsdp_shard


def take_over(parameter: Any) -> None:
    """Have torch's FSDPParam of a held weight, which is being gathered, be a HeldParam."""
    if not isinstance(parameter, HeldParam):
        parameter.__class__ = _held(type(parameter))
    parameter.is_gathered = True


class HeldParam:
    """An FSDPParam that asks the Sharding of its weight where torch's would take the weight for a plain tensor."""

    kept: Mapping[str, Tensor] = {}
    """The name of a buffer -> this rank's piece of it, between forward and backward."""
    is_gathered = False
    """Whether a gather has begun, of which torch has not made the parameter yet."""

    @property
    def fsdp_placement(self) -> Any:
        """How the parameter is cut; Shard(0) while torch copies what it has gathered."""
        own = self.__dict__["fsdp_placement"]
        return type(own)(0) if self.is_gathered else own

    def init_unsharded_param(self) -> None:
        """Make the parameter of what was gathered."""
        super().init_unsharded_param()
        self.is_gathered = False

    def to_sharded(self) -> None:
        """Have the shards as the parameter."""
        self.kept = {}
        super().to_sharded()

    def to_unsharded(self) -> None:
        """Have the gathered weight as the parameter."""
        self.kept = {}
        super().to_unsharded()

    def to_sharded_post_forward(self) -> None:
        """Have the shards as the parameter, and keep pieces for backward."""
        mesh = self.post_forward_mesh_info
        pieces = fsdp_shard(self).sharding.pieces(mesh.shard_mesh_rank, mesh.shard_mesh_size)
        self.to_sharded()
        self.kept, self.sharded_state = pieces, type(self.sharded_state).SHARDED_POST_FORWARD

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """What this rank sends."""
        if self.sharded_state is not type(self.sharded_state).SHARDED_POST_FORWARD:
            return super().all_gather_inputs
        self.is_gathered = True
        inputs, told = fsdp_shard(self).sharding.pre_of_pieces(self.kept)
        fsdp_extensions(self).all_gather_metadata = told
        fsdp_extensions(self).all_gather_input_sizes = [sent.size() for sent in inputs]
        return inputs


@memo
def _held(kind: type) -> type:
    """The HeldParam of a class of FSDPParams."""
    return type(HeldParam.__name__, (HeldParam, kind), {})
