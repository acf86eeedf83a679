"""The storage of a quantized tensor, which has no bytes. Access raises UserError; torch would use address 0."""

from collections.abc import Callable
from typing import Any

import torch

from hqsweep.errors import UserError

READ_OR_WRITE = (
    "__getitem__", "__setitem__", "byteswap", "clone", "copy_", "cpu", "cuda", "data_ptr", "fill_", "pin_memory",
    "share_memory_", "to", "tolist",
)  # fmt: skip
"""Storage methods that access bytes. Sizes, devices and comparisons work."""


def refuse_memory(owner: str, tensor: str, asked: str) -> UserError:
    """Return the error for access to the memory of a weight. owner: its module; tensor: its description; asked: the
    call."""
    where = f"{owner}: " if owner else ""
    return UserError(
        f"{where}{asked} asks for the memory of a weight that is held quantized, {tensor}, which lies in its operands;"
        " write a model by hqsweep.save_model, a state_dict by torch.save, and read values by dequantize()"
    )


class NoMemory(torch.UntypedStorage):
    """The storage of a quantized tensor."""

    owner: str
    tensor: str

    @classmethod
    def of(cls, storage: torch.UntypedStorage, owner: str, tensor: str) -> "NoMemory":
        """Change the class of the storage itself and return it: torch compares storages by identity."""
        storage.__class__ = cls
        storage.owner, storage.tensor = owner, tensor
        return storage

    def resize_(self, size: int) -> "NoMemory":
        """Accept size 0, its present size, which torch.compile gives to its own copy. UserError for any other."""
        if size:
            raise refuse_memory(self.owner, self.tensor, "untyped_storage().resize_")
        return self


def _refused(name: str) -> Callable[..., Any]:
    def method(self: NoMemory, *_: Any, **__: Any) -> None:
        raise refuse_memory(self.owner, self.tensor, f"untyped_storage().{name}")

    return method


for _name in READ_OR_WRITE:
    setattr(NoMemory, _name, _refused(_name))
