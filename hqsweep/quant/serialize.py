"""Quantized tensors in safetensors files: plain tensors by name, and metadata to restore them.

A tensor "a.weight" is stored as its buffers "a.weight.rowwise_q" and so on. Files without quantized tensors are
ordinary safetensors files, so that a bf16 checkpoint loads into a quantized model.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.quant.tensor import HybridQuantizedTensor, rebuild

METADATA = "hqsweep"


def flatten_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a state_dict as plain contiguous tensors and string metadata. Tied weights are stored once."""
    plain, quantized, aliases, seen = {}, {}, {}, {}
    for name, tensor in state.items():
        held = tensor.buffers if isinstance(tensor, HybridQuantizedTensor) else {"": tensor.detach()}
        place = tuple((b.data_ptr(), b.shape, b.stride(), b.dtype) for b in held.values())
        first = seen.setdefault(place, name) if all(b.numel() for b in held.values()) else name
        if first != name:
            aliases[name] = first
            continue
        if isinstance(tensor, HybridQuantizedTensor):
            quantized[name] = tensor.describe()
        plain |= {f"{name}.{part}" if part else name: _own(buffer) for part, buffer in held.items()}
    return plain, {METADATA: json.dumps({"quantized": quantized, "aliases": aliases})}


def unflatten_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Tensor]:
    """Return the inverse of flatten_state. Tensors of other tools pass unchanged. UserError for missing buffers."""
    try:
        notes = loads((metadata or {}).get(METADATA, '{"quantized": {}, "aliases": {}}'))
        quantized, aliases = dict(notes["quantized"]), dict(notes["aliases"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"its entry {METADATA} does not say what is quantized ({error}); save it again") from None
    state = dict(tensors)
    for name, described in quantized.items():
        parts = [key for key in state if key.startswith(f"{name}.") and "." not in key.removeprefix(f"{name}.")]
        try:
            state[name] = rebuild({key.removeprefix(f"{name}."): state.pop(key) for key in parts}, described)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    return state | {name: state[first] for name, first in aliases.items()}


def save_safetensors(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Write a state_dict, such as module.state_dict(), atomically: the file is complete or unchanged."""
    plain, metadata = flatten_state(state)
    path = Path(path)
    partial = path.with_name(f"{path.name}.tmp")
    save_file(plain, partial, metadata=metadata)
    partial.replace(path)


def load_safetensors(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Return the state_dict of a file for module.load_state_dict, with the saved bytes.

    UserError for a missing file, a file in another format, or missing buffers of a quantized tensor.
    """
    if not Path(path).is_file():
        raise UserError(f"'{path}' is no file; give the path of a safetensors file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return unflatten_state({name: file.get_tensor(name) for name in file.keys()}, file.metadata())  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"'{path}' is no whole safetensors file: {error}") from None


def _own(buffer: Tensor) -> Tensor:
    """Return the buffer contiguous, with a memory of its own, as the file format requires."""
    whole = buffer.untyped_storage().nbytes() == buffer.nbytes
    return buffer.contiguous() if whole else buffer.clone(memory_format=torch.contiguous_format)
