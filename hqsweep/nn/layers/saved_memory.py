"""Memory that autograd keeps for backward: its owner and its size."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hqsweep.nn.experts.grouped_linear import GroupedLinear
from hqsweep.nn.linear.linear import Linear, LinearBase
from hqsweep.quant.gathered_weight import GatheredWeight
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.torch_private import local_tensor


def memory_of(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, equal for all views of a tensor."""
    return tensor.untyped_storage().data_ptr()


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers, the operands of quantized ones, and this rank's parts of shared ones.

    All of these stay alive anyway, so that saving them for backward costs no memory.
    """
    for part in map(local_tensor, model.parameters()):
        if isinstance(part, HybridQuantizedTensor):
            yield from part.buffers.values()
        else:
            yield part.value if isinstance(part, GatheredWeight) else part
    yield from model.buffers()


class SavedBytes:
    """Counts the bytes that a forward keeps for backward besides the model. Shared memory counts once."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.nbytes = model, 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside this context, which is entered around forward."""
        counted = {memory_of(tensor) for tensor in tensors_of(self.model)}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided and memory_of(tensor) not in counted:
                counted.add(memory_of(tensor))
                self.nbytes += tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def saved_input_bytes(linear: Linear | GroupedLinear, rows: int) -> float:
    """Return the bytes per element that a linear keeps of its input x [rows, K].

    It keeps codes and scales of the columnwise operand, or x itself with save_original_input. For a grouped linear,
    rows is the number of one expert's rows, at least 1.
    """
    weight = linear.weights[0] if isinstance(linear, GroupedLinear) else linear.weight
    return input_bytes(linear, weight.shape[-1], rows)


def input_bytes(linear: LinearBase, columns: int, rows: int) -> float:
    """Return saved_input_bytes() for x [rows, columns], for a linear that may lack its weight."""
    quantizer = linear.quantizers.input
    if linear.save_original_input and quantizer.may_save_original:
        return float(linear.dtype.itemsize)
    format = quantizer.columnwise
    shapes = format.shapes(columns, rows)
    nbytes = sum(shapes[name][0] * shapes[name][1] * buffer.dtype.itemsize for name, buffer in format.layout.items())
    return nbytes / (rows * columns)
