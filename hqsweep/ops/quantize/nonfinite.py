"""NaN and inf that quantization meets, recorded per slot and direction.

TransformerEngine's arithmetic continues silently: a format without NaN encodes it as a number, all formats saturate,
and an inf keeps the scale of delayed scaling. So kernels record what they see in three words per slot and direction:
NaN values, inf values, an inf amax. A kernel only ever writes the same value, and never waits. Hence CUDA graphs and
recomputation record what the first call recorded.

On the CPU a slot's warning comes at once. On a GPU it comes with the next hqsweep.nn.quantization(), or after some
hundred calls, when the words have reached the host. A training run counts the words itself (train/nonfinite.py).

The caller names the slot (for_slot). A traced graph does not know its slot and uses the words of TRACED.
"""

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int32
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hqsweep.formats import Format

CAPACITY = 1 << 15
"""Entries of a table: two per slot, rowwise and columnwise. Slots beyond it are not recorded."""
NAN, INF, AMAX = range(3)
"""Words of an entry: an encoded value is NaN; an encoded value is inf; a found amax is inf."""
KINDS = ("nan", "inf", "amax")
WORDS = len(KINDS)
DIRECTIONS = ("rowwise", "columnwise")
NOBODY, TRACED, NAMED = 0, 1, 5
"""Slot numbers: no slot; modules under torch.compile, four by whether their formats keep NaN and inf; the first named
slot."""
POLL_EVERY = 256
"""Calls on a GPU between two requests for the words."""


@dataclass(frozen=True)
class Seen:
    """A NaN or inf that a slot met in one direction."""

    slot: str
    """LAYER.TENSOR.DIRECTION."""
    kind: str
    """ "nan", "inf", or "amax" for an inf that entered the history of delayed scaling."""
    format: str | None
    """None if unknown, as under torch.compile."""
    lost: bool
    """Whether it became a number: a NaN in a format without NaN, or an inf that saturates. For an amax: whether it
    keeps the scale."""

    def sentence(self, when: str = "", until: int | None = None) -> str:
        """Return the finding as a sentence.

        when: text such as " at step 12". until: the last step whose scale an amax keeps, if known.
        """
        subject = f"{self.slot}{f' ({self.format})' if self.format else ''}"
        if self.kind == "amax" and self.lost:
            held = "for as long as it is there" if until is None else f"up to step {until}"
            return (
                f"{subject}: its history took an amax of inf{when}, which holds the scale {held}, as in"
                " TransformerEngine; +skip_nonfinite leaves such steps out"
            )
        if self.kind == "amax":
            return f"{subject}: an amax of inf{when} was left out of its history"
        word = "an inf" if self.kind == "inf" else "a NaN"
        if self.lost:
            return f"{subject}: {word} was quantized to a number{when}, as in TransformerEngine, so outputs look sound"
        return f"{subject}: {word} was quantized{when}, and reaches the outputs"


class _Slot:
    """A slot and its formats; without formats, the words that its formats keep."""

    def __init__(self, name: str, formats: Sequence[Format | None], keeps: Sequence[bool] = ()) -> None:
        self.name, self.formats, self.keeps = name, formats, keeps

    def seen(self, column: int, word: int) -> Seen | None:
        """Return the finding that a set word means. None if it means nothing, as for an amax whose scale is
        recomputed."""
        format = self.formats[column]
        if format is None:
            return Seen(self.name, KINDS[word], None, not self.keeps[word])
        if word == AMAX and not format.delayed:
            return None
        keeps = format.keeps_nan, format.keeps_inf, format.delayed and format.skip_nonfinite
        return Seen(f"{self.name}.{DIRECTIONS[column]}", KINDS[word], format.text, not keeps[word])


_UNNAMED, _NO_FORMATS = "a module under torch.compile (without it this message has its name)", (None, None)
_slots = [
    _Slot("", _NO_FORMATS),
    *(_Slot(_UNNAMED, _NO_FORMATS, (nan, inf, False)) for inf in (False, True) for nan in (False, True)),
]
_numbers: dict[tuple[str, ...], int] = {}
_last: dict[tuple[str, int | None, str], tuple[Any, int]] = {}
"""(module, expert, tensor) -> the quantizer of the last call, and its slot number. A known quantizer needs no
lookup."""


def slot_number(layer: str, tensor: str, quantizer: Any) -> int:
    """Return the number of a slot under this quantizer; NOBODY if tables are full. layer "": the layer is unknown."""
    last = _last.get((layer, None, tensor))
    if last is not None and last[0] is quantizer:
        return last[1]
    formats = quantizer.rowwise, quantizer.columnwise
    key = layer, tensor, formats[0].text, formats[1].text
    number = _numbers.get(key, NOBODY)
    if number == NOBODY and 2 * len(_slots) < CAPACITY:
        number = _numbers[key] = len(_slots)
        _slots.append(_Slot(f"{layer}.{tensor}" if layer else f"a held {tensor}", formats))
    _last[layer, None, tensor] = quantizer, number
    return number


def entries() -> int:
    """Return the number of entries in use."""
    return 2 * len(_slots)


def format_at(entry: int) -> Format | None:
    """Return the format of an entry."""
    return _slots[entry // 2].formats[entry % 2]


def seen_at(entry: int, word: int) -> Seen | None:
    """Return the finding that a set word of a table means, or None if it means nothing."""
    number, column = divmod(entry, 2)
    return _slots[number].seen(column, word)


# ---- tables --------------------------------------------------------------------------------------------------------


class Table:
    """The words of all slots on one device: int32 [CAPACITY, WORDS].

    A table lives as long as the process, since CUDA graphs hold its addresses.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.words = torch.zeros(CAPACITY, WORDS, dtype=torch.int32, device=device)
        self.device, self.address = device, self.words.data_ptr()
        self._host = None if device.type == "cpu" else torch.zeros(CAPACITY, WORDS, dtype=torch.int32, pin_memory=True)
        self._event: torch.cuda.Event | None = None
        self._coming = 0
        self.at_once = (c_int32 * (CAPACITY * WORDS)).from_address(self.address) if self._host is None else None

    def poll(self) -> None:
        """Warn about words that have arrived from the device, and request the present ones; never waits."""
        if torch.cuda.is_current_stream_capturing():
            return
        with torch.cuda.device(self.device):
            if self._event is not None:
                if not self._event.query():
                    return
                tell(self._host[: self._coming])
            self._coming = entries()
            self._host[: self._coming].copy_(self.words[: self._coming], non_blocking=True)
            self._event = self._event or torch.cuda.Event()
            self._event.record()


_tables: dict[torch.device, Table] = {}
_cpu_words: Sequence[int] = ()
"""The words of the CPU's table; () before there is one."""


def table_of(device: torch.device) -> Table:
    """Return the table of a device, created on first use. It must exist before a CUDA graph is captured."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    global _cpu_words
    if device not in _tables:
        table = _tables[device] = Table(device)
        _cpu_words = table.at_once or _cpu_words
    return _tables[device]


def address_of(x: Tensor, slot: int, columnwise: bool, format: Format) -> int:
    """Return the address at which a kernel records findings for one direction of x; 0 for none."""
    if slot == NOBODY:
        return 0
    table = _tables.get(x.device)
    if table is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return 0  # its memory would be the graph's
        table = table_of(x.device)
    if slot == TRACED:
        slot += format.keeps_nan + 2 * format.keeps_inf
    return table.address + (2 * slot + columnwise) * WORDS * 4


def see(x: Tensor, columnwise: bool) -> None:
    """Record NaN and inf of x for the current slot, for calls without a kernel."""
    if x.device.type not in ("cpu", "cuda"):
        return
    words = table_of(x.device).words[2 * current() + columnwise]
    words[NAN] |= x.isnan().any()
    words[INF] |= x.isinf().any()


# ---- for which slot ------------------------------------------------------------------------------------------------


class _Now(threading.local):
    """This thread's current slot, and its GPU calls since the last poll."""

    def __init__(self) -> None:
        self.slot, self.calls = NOBODY, 0


now = _Now()
"""This thread's state."""
_counted = 0


def current() -> int:
    """Return the number of the current slot."""
    return TRACED if torch.compiler.is_compiling() else now.slot


@contextmanager
def for_slot(layer: str, tensor: str, quantizer: Any, x: Tensor) -> Iterator[None]:
    """Make this slot (see slot_number) current while the quantizer quantizes x or values made from x."""
    if torch.compiler.is_compiling():
        yield
        return
    number = slot_number(layer, tensor, quantizer)
    before, now.slot = now.slot, number
    try:
        yield
    finally:
        now.slot = before
    if before != number:
        look(number, x)


def for_its_slot(quantize: Any) -> Any:
    """Decorate a Call's method (tensor, x): its quantizations are recorded for the tensor's slot.

    The host runs this for each quantization of a step, so a known slot costs no call.
    """

    @wraps(quantize)
    def noted(call: Any, tensor: str, x: Tensor, *others: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return quantize(call, tensor, x, *others, **options)
        quantizer, key = getattr(call.quantizers, tensor), (call.name, call.expert, tensor)
        last = _last.get(key)
        if last is None or last[0] is not quantizer:
            last = _last[key] = quantizer, slot_number(call.layer, tensor, quantizer)
        before, now.slot = now.slot, last[1]
        try:
            result = quantize(call, tensor, x, *others, **options)
        finally:
            now.slot = before
        first = 2 * last[1] * WORDS
        if before != last[1] and not _counted and (not x.is_cpu or any(_cpu_words[first : first + 2 * WORDS])):
            look(last[1], x)
        return result

    return noted


# ---- warnings --------------------------------------------------------------------------------------------------

MOST_TOLD = 20
"""Warnings are given for this many slots; nonfinite() lists all."""
_told: set[tuple[int, int]] = set()
"""(slot, word) pairs that have had their warning."""


@contextmanager
def counted() -> Iterator[None]:
    """Suppress warnings while the caller counts NaN and inf itself."""
    global _counted
    _counted += 1
    try:
        yield
    finally:
        _counted -= 1


def look(slot: int, x: Tensor) -> None:
    """Warn about findings of a slot after a call with x; on a GPU only every POLL_EVERY calls."""
    if _counted:
        return
    if x.is_cpu:
        table = _tables.get(x.device)
        if table is not None:
            words, first = table.at_once, 2 * slot * WORDS
            if any(words[first : first + 2 * WORDS]):
                _tell_entry(2 * slot, words[first : first + WORDS])
                _tell_entry(2 * slot + 1, words[first + WORDS : first + 2 * WORDS])
    elif x.is_cuda:
        now.calls += 1
        if now.calls >= POLL_EVERY:
            boundary()


def look_at_trace(slot: int, x: Tensor) -> None:
    """Call look() after an operator ran for TRACED."""
    if slot == TRACED and x.is_cpu:
        for number in range(TRACED, NAMED):
            look(number, x)


def boundary() -> None:
    """Request the words of all GPUs, and warn about words that have arrived; never waits."""
    now.calls = 0
    if not _counted:
        for table in _tables.values():
            if table.at_once is None:
                table.poll()


def tell(words: Tensor) -> None:
    """Warn about set words that have not had a warning. words: [entries, WORDS] on the CPU."""
    for entry in words.any(dim=1).nonzero().flatten().tolist():
        _tell_entry(entry, words[entry].tolist())


def _tell_entry(entry: int, words: Sequence[int]) -> None:
    number = entry // 2
    for word in range(WORDS):
        if not words[word] or (number, word) in _told or len(_told) > MOST_TOLD:
            continue
        seen, format = seen_at(entry, word), format_at(entry)
        if seen is None or not seen.lost or (word == INF and format is not None and format.delayed):
            continue  # the history of delayed scaling tells
        _told.add((number, word))
        last = f"; more than {MOST_TOLD} slots have met such" if len(_told) > MOST_TOLD else ""
        message = f"{seen.sentence()} (said once; hqsweep.nonfinite() lists all){last}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def nonfinite(*, forget: bool = False) -> list[Seen]:
    """Return all NaN and inf that quantization has met, by slot and direction; waits for the devices.

    forget: clear the list, so that later findings are listed and warned about again.
    """
    found: dict[Seen, None] = {}
    for table in _tables.values():
        words = table.words[: entries()].cpu()
        for entry, word in words.nonzero().tolist():
            if (seen := seen_at(entry, word)) is not None:
                found[seen] = None
    if forget:
        _told.clear()
        for table in _tables.values():
            table.words.zero_()
    return list(found)
