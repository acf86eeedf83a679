"""Attention of Hugging Face's models without a mask where every row of a batch is one sequence.

transformers looks into position_ids for several sequences that were packed into one row. Run eagerly it finds none and
leaves attention to the kernels for causal attention. In a CUDA graph, or under torch.compile, it cannot look, and gives
them a mask [B, 1, T, T] instead: all pairs of tokens are computed then, half of them for nothing, and the sums have
another order, so that a step has other bits in a graph than without.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor

from hqsweep.errors import UserError

FIND, EXPORTS = "find_packed_sequence_indices", "is_torchdynamo_exporting"
"""Of transformers.masking_utils: what looks for packed sequences, and what torch before 2.14 answers wrongly within
torch.compile, where masks were never left out for it."""


@contextmanager
def unpacked() -> Iterator[None]:
    """For forwards, within or as a CUDA graph or of a model under torch.compile, on rows that hold one sequence each:
    no attention_mask, and no position_ids that begin anew within a row. Attention that needs a mask for other reasons,
    such as a sliding window, has it as ever. Models of other libraries do not notice.

    Raises UserError for packed rows in an eager forward; a graph cannot look.
    """
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    own = masking_utils.__dict__
    before = {name: own[name] for name in (FIND, EXPORTS) if name in own}
    own.update(_replacements() if len(before) == 2 else {})
    try:
        yield
    finally:
        own.update(before)


@cache
def _replacements() -> dict[str, Callable[..., Any]]:
    """The same functions each time, as what torch.compile has traced is for these."""
    from transformers import masking_utils

    find = getattr(masking_utils, FIND)

    def none_packed(position_ids: Tensor) -> None:
        if not masking_utils.is_tracing(position_ids) and find(position_ids) is not None:
            raise UserError("unpacked: position_ids begins anew within a row, which so holds several sequences")

    return {FIND: none_packed, EXPORTS: lambda: False}
