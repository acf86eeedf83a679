"""The storage of a quantized tensor, which has no bytes. Code that asks for them gets a UserError, where torch would
read or write at address 0."""

from collections.abc import Callable
from typing import Any

import torch

from hqsweep.errors import UserError

READ_OR_WRITE = (
    "__getitem__", "__setitem__", "byteswap", "clone", "copy_", "cpu", "cuda", "data_ptr", "fill_", "pin_memory",
    "share_memory_", "to", "tolist",
)  # fmt: skip
"""The methods of storages that are for bytes; sizes, devices and comparisons are answered."""


def refuse_memory(owner: str, tensor: str, asked: str) -> UserError:
    """The error for a request for the memory of a tensor, described by `tensor`, that a module owns."""
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
        """The storage itself, of this class from then on: torch compares storages by identity."""
        storage.__class__ = cls
        storage.owner, storage.tensor = owner, tensor
        return storage

    def resize_(self, size: int) -> "NoMemory":
        """Nothing, for the size that it has, which torch.compile gives to its own copy."""
        if size:
            raise refuse_memory(self.owner, self.tensor, "untyped_storage().resize_")
        return self


def _refused(name: str) -> Callable[..., Any]:
    def method(self: NoMemory, *_: Any, **__: Any) -> None:
        raise refuse_memory(self.owner, self.tensor, f"untyped_storage().{name}")

    return method


for _name in READ_OR_WRITE:
    setattr(NoMemory, _name, _refused(_name))
