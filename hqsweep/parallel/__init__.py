"""Models over several ranks: the mesh, and each kind of parallelism."""

from hqsweep.parallel.wire.local import whole_tensor

__all__ = ["whole_tensor"]
