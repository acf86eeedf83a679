"""Attention of Hugging Face's models without a mask where every row of a batch is one sequence.

transformers looks into position_ids for several sequences that were packed into one row. Run eagerly it finds none and
leaves attention to the kernels for causal attention. In a CUDA graph, or under torch.compile, it cannot look, and gives
them a mask [B, 1, T, T] instead: all pairs of tokens are computed then, half of them for nothing, and the sums have
another order, so that a step has other bits in a graph than without.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any

from torch import Tensor

from hqsweep.errors import UserError

FIND, EXPORTS, TRACES = "find_packed_sequence_indices", "is_torchdynamo_exporting", "is_tracing"
"""Functions of transformers.masking_utils: the one that looks for packed sequences; one that torch before 2.14 answers
wrongly within torch.compile, where masks were then never left out; and, of transformers before 5.18, which lacks that
one, what it asks instead, also where there is no mask to look into."""


@contextmanager
def unpacked() -> Iterator[None]:
    """A context for forwards on rows that hold one sequence each, within or as a CUDA graph, or of a model under
    torch.compile: no attention_mask, and no position_ids that begin anew within a row. Attention that needs a mask for
    other reasons, such as a sliding window, still has it. Models of other libraries are not affected.

    Raises UserError for packed rows in an eager forward; a graph cannot look.
    """
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    if not all(hasattr(masking_utils, name) for name in (FIND, TRACES)):
        yield
        return
    _enter(masking_utils)
    try:
        yield
    finally:
        _leave(masking_utils)


_LOCK = Lock()
_WITHIN: list[dict[str, Any]] = []
"""transformers' own functions, once for each use that is under way, of any thread."""


def _enter(masking_utils: ModuleType) -> None:
    with _LOCK:
        own = _WITHIN[0] if _WITHIN else {name: getattr(masking_utils, name) for name in _replacements()}
        _WITHIN.append(own)
        masking_utils.__dict__.update(_replacements())


def _leave(masking_utils: ModuleType) -> None:
    with _LOCK:
        own = _WITHIN.pop()
        if not _WITHIN:
            masking_utils.__dict__.update(own)


@cache
def _replacements() -> dict[str, Callable[..., Any]]:
    """The functions that replace transformers' own; the same objects each time, because torch.compile has traced for
    these."""
    from transformers import masking_utils

    find, traces = getattr(masking_utils, FIND), getattr(masking_utils, TRACES)

    def none_packed(position_ids: Tensor) -> None:
        if not masking_utils.is_tracing(position_ids) and find(position_ids) is not None:
            raise UserError("unpacked: position_ids begins anew within a row, which so holds several sequences")

    def traces_mask(mask: Tensor | None = None) -> bool:
        return mask is not None and traces(mask)

    return {FIND: none_packed} | (
        {EXPORTS: lambda: False} if hasattr(masking_utils, EXPORTS) else {TRACES: traces_mask}
    )
