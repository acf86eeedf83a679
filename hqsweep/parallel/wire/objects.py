"""Objects with many tensors, sent from every rank to the first: the tensors travel as one."""

import io
import math
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Apart(pickle.Pickler):
    """Pickles an object without the values of its tensors, which it lists."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
        if type(value) is not Tensor:
            return None
        self.tensors.append(value.detach())
        return value.dtype, tuple(value.shape)


class _Together(pickle.Unpickler):
    """Takes the values of tensors, in the order in which they were listed, from their bytes."""

    def __init__(self, data: bytes, values: Tensor) -> None:
        super().__init__(io.BytesIO(data))
        self.values = values

    def persistent_load(self, about: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
        dtype, shape = about
        own, self.values = self.values.tensor_split([math.prod(shape) * dtype.itemsize])
        return own.clone().view(dtype).view(shape)  # a clone, because a view has to begin at a multiple of its items


def gather_to_first(value: Any) -> list[Any] | None:
    """The value of each rank, in order of ranks, on rank 0; None on others. A collective of all ranks.

    value: any that pickle takes. Its tensors arrive on the CPU; those of a GPU are copied to the host at once. pickle
    alone would take a tenth of a millisecond or more for each.
    """
    first = dist.get_rank() == 0
    values: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(_packed(value), values)
    return values and [_Together(data, torch.from_numpy(tensors)).load() for data, tensors in values]


def _packed(value: Any) -> tuple[bytes, Any]:
    """The pickle of an object, and the bytes of its tensors, uint8 [bytes] of numpy."""
    file = io.BytesIO()
    pickler = _Apart(file)
    pickler.dump(value)
    # as_strided, because view() takes the stride of an axis of one element for a gap
    parts = [x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8) for x in pickler.tensors]
    joined = torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.empty(0, dtype=torch.uint8)
    return file.getvalue(), joined.cpu().numpy()
