"""Rounded: notices when others write to a parameter after its master was rounded into it.

A held parameter counts the writes to its values. A plain parameter has torch's version and the address of its memory;
writes to p.data and by numpy change neither.
"""

from collections.abc import Mapping
from weakref import ref

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.parallel.wire.local import local
from hqsweep.quant.tensor import HybridQuantizedTensor

FAR = 0.5
"""A distance between parameter and master, over the larger norm of the two, that no rounding causes."""


class Rounded:
    """The masters that an optimizer has rounded into parameters."""

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[ref[Tensor], tuple[int, ...]]] = {}
        """Parameter -> (the master rounded into it, the count of writes to it at that time)."""

    def note(self, p: Tensor, master: Tensor) -> None:
        """Note that the master has just been rounded into the parameter."""
        self._seen[p] = ref(master), _writes(p)

    def knows(self, p: Tensor, master: Tensor) -> bool:
        """Whether this master was rounded into the parameter, and was not loaded since."""
        return p in self._seen and self._seen[p][0]() is master

    def is_stale(self, p: Tensor, master: Tensor) -> bool:
        """Whether others have written values to the parameter since this master was rounded into it."""
        return self.knows(p, master) and self._seen[p][1] != _writes(p) and not _is_rounded(p, master)

    def check_loaded(self, masters: Mapping[Tensor, Tensor]) -> None:
        """UserError for a loaded master whose parameter, loaded too, cannot be its rounded value."""
        loaded = [(p, master) for p, master in masters.items() if not self.knows(p, master)]
        pairs = [(p, *pair) for p, master in loaded if (pair := _values(p, master))]
        if not pairs or (pairs[0][1].is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        far = [(own - values).norm() > FAR * torch.maximum(own.norm(), values.norm()) for _, own, values in pairs]
        for (p, _, _), is_far in zip(pairs, torch.stack([each.cpu() for each in far]).tolist(), strict=True):
            if is_far:
                raise UserError(
                    f"FusedAdam: the loaded state has a master of other values than a parameter {list(p.shape)} in"
                    f" {_format(p)} holds; load the model and the optimizer of one checkpoint, or build a new optimizer"
                    " for the model"
                )


def values_of(p: Tensor) -> Tensor:
    """float32: the values of this rank's part of a parameter."""
    part = local(p).detach()
    return part.dequantize(torch.float32) if isinstance(part, HybridQuantizedTensor) else part.to(torch.float32)


def _values(p: Tensor, master: Tensor) -> tuple[Tensor, Tensor] | None:
    """(master, values of its parameter). None where a rank lacks part of the values, and for delayed scaling, whose
    first scales fit no values."""
    part = local(p)
    held = isinstance(part, HybridQuantizedTensor)
    if part.is_meta or (held and (part.rowwise is None or part.shared.is_partial or part.quantizer.delayed)):
        return None
    return local(master), values_of(p)


def _format(p: Tensor) -> str:
    part = local(p)
    return str(part.quantizer if isinstance(part, HybridQuantizedTensor) else part.dtype)


def _writes(p: Tensor) -> tuple[int, ...]:
    part = local(p)
    if isinstance(part, HybridQuantizedTensor):
        return tuple(part.shared.writes)
    return p._version, part._version, part.data_ptr()


def _is_rounded(p: Tensor, master: Tensor) -> bool:
    """Whether the parameter is the rounded master, to the bit. False for shards and delayed scaling, whose rounding
    depends on more than the values."""
    part, own = local(p), local(master)
    if not isinstance(part, HybridQuantizedTensor):
        return torch.equal(own.to(part.dtype), part)
    meta = part.metadata
    if meta.place is not None or part.part is not None or part.states is not None or meta.shares_scale:
        return False
    again = torch.empty_like(part).quantize_(own, key=meta.key)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in part.copies(again))
