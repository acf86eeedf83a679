"""Memory that autograd keeps for backward: its owner, its size, and ActivationOffload, which moves it to the CPU.

torch.autograd.graph.save_on_cpu copies on the computing stream, which stalls for every byte. It also copies parameters
and operands of held weights, which frees nothing. Here copies run on two streams of their own, in both directions at
once, and tensors whose copy would free nothing stay on the device. The bytes come back unchanged.

Memory is handed over in the order of the computing stream. A tensor that leaves is dropped after its copy's event. A
tensor that returns is written after the kernels that used its memory before. The host never waits. With
Tensor.record_stream instead, memory would be reusable only when the GPU has caught up with the host, which runs whole
layers ahead, and the peak would not fall.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hqsweep.nn.linears import Linear, LinearBase
from hqsweep.quant.gathered_weight import GatheredWeight
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.torch_private import fsdp_parameters, fsdp_storages, local_tensor, storage_id


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


def saved_input_bytes(linear: LinearBase, rows: int) -> float:
    """Return the bytes per element that a linear keeps of its input x [rows, K].

    It keeps codes and scales of the columnwise operand, or x itself with save_original_input. For a grouped linear,
    rows is the number of one expert's rows, at least 1.
    """
    weight = linear.weight if isinstance(linear, Linear) else linear.weights[0]
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


MIN_BYTES = 4096
"""Smaller tensors stay, since latency dominates their copy."""
WINDOW_BYTES = 64 * 2**20
"""Bytes on the device per direction while their copies run: a millisecond of PCIe 5, a hundred times its latency."""


class _Saved:
    """One tensor [...] in contiguous host memory, with the strides and device to restore it."""

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.number, self.nbytes, self.was_read = number, tensor.nbytes, False
        self.strides, self.device = tensor.stride(), tensor.device
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class _Lane:
    """Copies in one direction on their own stream, with the device tensors of copies that are not awaited yet.

    These have at most `limit` bytes, or are a single tensor. On the CPU a copy is finished when the call returns.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.limit, self.nbytes = limit, 0
        self.held: dict[_Saved, tuple[Tensor, torch.cuda.Event | None]] = {}

    def copy(self, saved: _Saved, target: Tensor, source: Tensor, on_device: Tensor) -> None:
        """Copy after all work enqueued so far. Hold on_device, which is the target or the source, until take()."""
        event = None
        if self.stream is None:
            target.copy_(source)
        else:
            self.stream.wait_stream(torch.cuda.current_stream(on_device.device))
            with torch.cuda.stream(self.stream):
                target.copy_(source, non_blocking=True)
                event = self.stream.record_event()
        self.held[saved] = on_device, event
        self.nbytes += saved.nbytes

    def take(self, saved: _Saved) -> Tensor:
        """Return the device tensor of a copy. Work enqueued from now on may use it, or overwrite its memory once it is
        dropped."""
        tensor, event = self.held.pop(saved)
        self.nbytes -= saved.nbytes
        if event is not None:
            torch.cuda.current_stream(tensor.device).wait_event(event)
        return tensor

    def has_room(self, nbytes: int) -> bool:
        return not self.held or self.nbytes + nbytes <= self.limit

    def shrink(self) -> None:
        """Drop the oldest tensors beyond the limit."""
        while self.nbytes > self.limit and len(self.held) > 1:
            self.take(next(iter(self.held)))

    def clear(self) -> None:
        for saved in list(self.held):
            self.take(saved)


class ActivationOffload:
    """Keeps the tensors that autograd saves for one model on one device in CPU memory:

        offload = ActivationOffload(model)
        with offload.saving():
            loss = model(x)
        loss.backward()  # outside: recomputed tensors need not leave the device

    These stay on the device: the model's parameters and buffers, operands of its quantized weights, and memory that
    fully_shard gathers into (torch frees it, and waits for no copy of it). So do tensors that are on other devices,
    smaller than min_bytes, sparse, of a subclass, expanded (stride 0), or lazily conjugated.

    Backward reads the same bytes with the same strides. It reads tensors in about the reverse order of forward, so
    earlier tensors are prefetched, window_bytes at a time. Host memory is pinned. torch's caching allocator keeps it,
    rounded up to powers of two, for the next step. On the CPU tensors are copied too, which frees nothing but runs the
    same code.
    """

    def __init__(self, model: nn.Module, *, min_bytes: int = MIN_BYTES, window_bytes: int = WINDOW_BYTES) -> None:
        self.model, self.min_bytes = model, min_bytes
        self.device = next(model.parameters()).device
        self.leaving, self.arriving = (_Lane(self.device, window_bytes) for _ in range(2))
        self._saved: WeakValueDictionary[int, _Saved] = WeakValueDictionary()
        self._count = 0
        self._model_memory: frozenset[int] = frozenset()
        self._gathered: frozenset[int] = frozenset()
        """The storages that fully_shard gathers into."""
        self._ungathered: list[Any] = []
        """torch's FSDPParams without such a storage yet."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Offload inside this context, which is entered around forward. Tensors of earlier forwards stay valid."""
        self.leaving.clear()
        self.arriving.clear()
        self._count = max(self._saved.keys(), default=-1) + 1
        self._model_memory = frozenset(memory_of(t) for t in tensors_of(self.model))
        self._gathered = frozenset()
        self._note_gathered(fsdp_parameters(self.model))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory that backward has yet to read."""
        return sum(saved.nbytes for saved in self._saved.values())

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if not self._is_worth_it(tensor):
            return tensor
        tensor = tensor.detach()
        saved = self._saved[self._count] = _Saved(self._count, tensor)
        self._count += 1
        self.leaving.copy(saved, saved.host, tensor, tensor)
        self.leaving.shrink()
        return saved

    def _unpack(self, packed: Tensor | _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed in self.leaving.held:
            tensor = self.leaving.take(packed)
        else:
            if packed not in self.arriving.held:
                self._fetch(packed)
            tensor = self.arriving.take(packed)
        packed.was_read = True
        self._prefetch(packed.number)
        return tensor

    def _prefetch(self, number: int) -> None:
        """Start to bring back tensors saved before tensor `number`, the latest first."""
        for earlier in range(number - 1, -1, -1):
            saved = self._saved.get(earlier)
            if saved is None or saved.was_read or saved in self.leaving.held or saved in self.arriving.held:
                continue  # a second backward may read it again, but not soon
            if not self.arriving.has_room(saved.nbytes):
                return
            self._fetch(saved)

    def _fetch(self, saved: _Saved) -> None:
        tensor = torch.empty_strided(saved.host.shape, saved.strides, dtype=saved.host.dtype, device=saved.device)
        self.arriving.copy(saved, tensor, saved.host, tensor)

    def _note_gathered(self, parameters: Sequence[Any]) -> None:
        self._gathered |= fsdp_storages(parameters)
        self._ungathered = [parameter for parameter in parameters if not parameter.all_gather_outputs]

    def _is_gathered(self, tensor: Tensor) -> bool:
        """Return whether fully_shard gathers into the tensor's memory."""
        if self._ungathered:
            self._note_gathered(self._ungathered)
        return storage_id(tensor) in self._gathered

    def _is_worth_it(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device == self.device
            and tensor.layout is torch.strided
            and tensor.nbytes >= self.min_bytes
            and 0 not in tensor.stride()
            and not (tensor.is_conj() or tensor.is_neg())
            and memory_of(tensor) not in self._model_memory
            and not self._is_gathered(tensor)
        )
