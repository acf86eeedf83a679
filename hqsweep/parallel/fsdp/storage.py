"""Memory of tensors that ranks gather: torch's fully_shard gives it up between passes, and takes it anew."""

from torch import Tensor


def is_free(tensor: Tensor) -> bool:
    """Whether the memory of a tensor that has elements is given up."""
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def allocate(tensor: Tensor) -> None:
    """Take the memory of a tensor that has all of it, if it is given up; values are open."""
    if is_free(tensor):
        tensor.untyped_storage().resize_(tensor.nbytes)


def free(tensor: Tensor) -> None:
    """Give up the memory of a tensor, and of all that share it."""
    tensor.untyped_storage().resize_(0)
