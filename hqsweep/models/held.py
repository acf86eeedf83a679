"""Held weights of converted modules: quantized tensors in the place of plain parameters, as quantized_model_init asks.

Here is the choice of weights that can be held, the exchange, and the way back.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.kinds import Kind, parts_of
from hqsweep.models.linear import call_dtype
from hqsweep.nn.core.options import gemm_weight
from hqsweep.nn.linears import LinearBase
from hqsweep.parallel.wire.local import local
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.roles import QuantizerRole, clean_name
from hqsweep.torch_private import storage_id


class Candidate(NamedTuple):
    """A weight of a converted module: its attribute `part.weight_name`. fault: why its kind cannot hold it."""

    module: nn.Module
    part: LinearBase
    weight: Tensor
    fault: str | None

    @property
    def place(self) -> tuple[int, str]:
        return id(self.module), self.part.weight_name


class _Reader(NamedTuple):
    """An entry of a module for a parameter or a buffer."""

    place: tuple[int, str]
    name: str


_Readers = dict[int, list[_Reader]]
"""Memory -> the entries that lie in it."""


def candidates_of(kind: Kind, module: nn.Module, parts: Sequence[nn.Module]) -> list[Candidate]:
    """Return the weights of a module with these parts, except weights that are held already."""
    named = [part for part in parts if getattr(part, "weight_name", None)]
    every = [Candidate(module, p, getattr(module, p.weight_name), kind.held_fault(module, p)) for p in named]
    return [candidate for candidate in every if not isinstance(candidate.weight, HybridQuantizedTensor)]


def held_weights(
    model: nn.Module, candidates: Sequence[Candidate], dtype: torch.dtype | None
) -> tuple[list[tuple[Candidate, nn.Parameter]], list[tuple[Candidate, str]]]:
    """(each weight that can be held, with its quantized parameter, which tied weights share; each other weight, with
    the reason). The model is not changed. dtype: the dtype of the products; None: torch.autocast's where it is on, else
    each weight's."""
    if not candidates:
        return [], []
    readers, held, plain = _readers(model), [], []
    sharing: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        sharing.setdefault(id(candidate.weight), []).append(candidate)
    for tied in sharing.values():
        why = next(filter(None, (_fault(candidate, tied, readers) for candidate in tied)), None)
        parameter = None if why else _quantized(tied[0], dtype)
        for candidate in tied:
            if why:
                plain.append((candidate, why))
            else:
                held.append((candidate, parameter))
    return held, plain


def held_parts(model: nn.Module) -> Iterator[tuple[nn.Module, LinearBase, Tensor]]:
    """Each converted module and part of it whose weight is held quantized, with the weight, which may be spread over
    ranks."""
    for module in model.modules():
        for part in parts_of(module):
            weight = getattr(module, part.weight_name) if getattr(part, "weight_name", None) else None
            if weight is not None and isinstance(local(weight), HybridQuantizedTensor):
                yield module, part, weight


def check_release(model: nn.Module) -> None:
    """UserError where release_weights() cannot be done."""
    for _, part, weight in held_parts(model):
        if weight is not local(weight):
            raise UserError(
                f"{part.name}: its weight is held quantized and shared out over ranks, and revert takes whole ones;"
                " write the model with hqsweep.save_model, and load that into a plain one"
            )


@torch.no_grad()
def release_weights(model: nn.Module) -> None:
    """Give converted modules plain weights: new parameters, tied as before. They have the values that
    preserve_high_precision_init_val keeps, where these are still there; else the decoded operands."""
    released: dict[int, nn.Parameter] = {}
    for module, part, weight in list(held_parts(model)):
        if id(weight) not in released:
            kept = weight.high_precision_init_val
            values = weight.dequantize() if kept is None else kept.to(weight.device, weight.dtype, copy=True)
            released[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad)
        setattr(module, part.weight_name, released[id(weight)])


def _quantized(candidate: Candidate, dtype: torch.dtype | None) -> nn.Parameter:
    part, weight = candidate.part, candidate.weight
    role = QuantizerRole(part.module_type, "weight", part.name)
    source = dtype or call_dtype(weight, weight)
    kind = HybridQuantizedTensor if weight.dim() == 2 else GroupedTensor
    held = gemm_weight(weight, part.quantizers.weight, role, source, part.states, kind)
    return held.requires_grad_(weight.requires_grad)


def _fault(candidate: Candidate, tied: Sequence[Candidate], readers: _Readers) -> str | None:
    """Why a weight that these candidates have in common stays plain."""
    weight, quantizer = candidate.weight, candidate.part.quantizers.weight
    if candidate.fault:
        return candidate.fault
    if candidate.part.weight_name not in dict(candidate.module.named_parameters(recurse=False, remove_duplicate=False)):
        return "it is computed at each use, and no parameter"
    if type(weight) is not nn.Parameter:
        return f"it is a {type(weight).__name__}"
    if not is_quantized(quantizer):
        return f"its format is {quantizer}, which is not quantized"
    own = {one.place for one in tied}
    others = [reader.name for reader in readers[storage_id(weight)] if reader.place not in own]
    if others:
        return f"it is read as {others[0]}, too"
    for other in tied:
        if other.part.quantizers.weight != quantizer:
            return f"it is tied to that of {other.part.name}, whose format is {other.part.quantizers.weight}"
    if quantizer.delayed and len(tied) > 1:
        return "it is tied, and delayed scaling has a history for each module"
    if quantizer.delayed and not weight.requires_grad:
        return "it is frozen, and delayed scaling takes another scale at each use, where it would be written but once"
    if quantizer.delayed and weight.is_meta:
        return "it is on the meta device, where delayed scaling has no history"
    return None


def is_quantized(quantizer: HybridQuantizer) -> bool:
    """Whether weights in these formats are held: a direction is in low precision."""
    return not (quantizer.rowwise.high_precision and quantizer.columnwise.high_precision)


def _readers(model: nn.Module) -> _Readers:
    readers: _Readers = {}
    for fqn, module in model.named_modules():
        for attribute, tensor in _own_tensors(module):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
                name = clean_name(f"{fqn}.{attribute}".lstrip("."))
                readers.setdefault(storage_id(tensor), []).append(_Reader((id(module), attribute), name))
    return readers


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    options = {"recurse": False, "remove_duplicate": False}
    return chain(module.named_parameters(**options), module.named_buffers(**options))
