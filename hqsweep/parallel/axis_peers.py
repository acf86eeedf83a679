"""Ranks of a mesh that stand at one place along an axis."""

from typing import Any

from torch.distributed import new_group
from torch.distributed.device_mesh import DeviceMesh

from hqsweep.errors import UserError


def axis_of(mesh: DeviceMesh, name: str, where: str) -> DeviceMesh:
    """The axis of that name, or the only one; UserError, beginning with `where`, for several axes without it."""
    axes = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return mesh
    if name not in axes:
        raise UserError(f"{where}: the mesh has axes {axes}; it takes one that is named '{name}', or one axis")
    return mesh[name]


def peers(mesh: DeviceMesh, name: str) -> Any:
    """The process group of the ranks of the mesh at this rank's place along the axis: this rank alone, where there is
    no other axis."""
    place = axis_of(mesh, name, "mesh").get_local_rank()
    axis = 0 if mesh.ndim == 1 else mesh.mesh_dim_names.index(name)
    return new_group(mesh.mesh.select(axis, place).flatten().tolist(), use_local_synchronization=True)
