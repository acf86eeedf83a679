"""NaN and inf that quantization meets, by slot: in the values that it encodes, and inf among amaxes.

TransformerEngine's arithmetic goes on as if nothing had been: a format without a NaN makes a number of one, all formats
saturate, and an inf holds the scale of delayed scaling. So kernels note what they see, in three words for each slot and
direction. They write only where there is something, always the same, and nothing waits: CUDA graphs and recomputation
note what the first call noted. On the CPU a slot is warned about at once; elsewhere when hqsweep.nn.quantization is
called next, or after some hundred calls, as the words have come to the host by then. A training run counts them itself
(train/nonfinite.py).

Who quantizes for a slot says so (for_slot). A traced graph does not know the slot: it has the words of TRACED.
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
"""Entries of a table: two for each slot, rowwise and columnwise. Slots beyond have none, and are not noted."""
NAN, INF, AMAX = range(3)
"""The words of an entry: what was encoded has a NaN, or an inf; an amax that was found is inf."""
KINDS = ("nan", "inf", "amax")
WORDS = len(KINDS)
DIRECTIONS = ("rowwise", "columnwise")
NOBODY, TRACED, NAMED = 0, 1, 5
"""Numbers of slots: none; modules under torch.compile, four by whether their formats keep NaN and inf; the first slot
with a name."""
POLL_EVERY = 256
"""The number of calls on a GPU after which the host asks for the words."""


@dataclass(frozen=True)
class Seen:
    """What a slot has met in one direction."""

    slot: str
    """LAYER.TENSOR.DIRECTION."""
    kind: str
    """ "nan", "inf", or "amax" for an inf that a history of delayed scaling took."""
    format: str | None
    """None where it is not known, as under torch.compile."""
    lost: bool
    """Whether it became a number: a NaN in a format without one, an inf that saturates. An amax: whether it holds the
    scale."""

    def sentence(self, when: str = "", until: int | None = None) -> str:
        """In words. when: such as " at step 12"; until: the last step whose scale an amax holds, where it is known."""
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
    """A slot and the formats that it is quantized to; without formats, what these keep."""

    def __init__(self, name: str, formats: Sequence[Format | None], keeps: Sequence[bool] = ()) -> None:
        self.name, self.formats, self.keeps = name, formats, keeps

    def seen(self, column: int, word: int) -> Seen | None:
        """What a word of the entry says; None where it says nothing, as the amax of a scale that is found anew."""
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
"""Module, expert and tensor -> the quantizer of the last call, and its number: the same object needs no look at its
formats."""


def slot_number(layer: str, tensor: str, quantizer: Any) -> int:
    """The number of a slot under this quantizer; NOBODY where tables are full. layer "": it is not known."""
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
    """The number of entries that slots have by now."""
    return 2 * len(_slots)


def format_at(entry: int) -> Format | None:
    """The format of an entry."""
    return _slots[entry // 2].formats[entry % 2]


def seen_at(entry: int, word: int) -> Seen | None:
    """What a word of a table says where it is set; None where that is nothing to tell."""
    number, column = divmod(entry, 2)
    return _slots[number].seen(column, word)


# ---- tables --------------------------------------------------------------------------------------------------------


class Table:
    """The words of all slots on one device: int32 [CAPACITY, WORDS], which live as long as the process, since CUDA
    graphs have their addresses."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.words = torch.zeros(CAPACITY, WORDS, dtype=torch.int32, device=device)
        self.device, self.address = device, self.words.data_ptr()
        self._host = None if device.type == "cpu" else torch.zeros(CAPACITY, WORDS, dtype=torch.int32, pin_memory=True)
        self._event: torch.cuda.Event | None = None
        self._coming = 0
        self.at_once = (c_int32 * (CAPACITY * WORDS)).from_address(self.address) if self._host is None else None

    def poll(self) -> None:
        """Warn about the words that have arrived from the device, and ask for the present ones; nothing waits."""
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
"""The words of the CPU's table, () before there is one."""


def table_of(device: torch.device) -> Table:
    """The table of a device, made if it is not there; a capture of a CUDA graph must find it there."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    global _cpu_words
    if device not in _tables:
        table = _tables[device] = Table(device)
        _cpu_words = table.at_once or _cpu_words
    return _tables[device]


def address_of(x: Tensor, slot: int, columnwise: bool, format: Format) -> int:
    """The address at which a kernel notes what it sees of one direction of x in a format; 0 for none."""
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
    """Note NaN and inf in x for the current slot, where no kernel quantizes x."""
    if x.device.type not in ("cpu", "cuda"):
        return
    words = table_of(x.device).words[2 * current() + columnwise]
    words[NAN] |= x.isnan().any()
    words[INF] |= x.isinf().any()


# ---- for which slot ------------------------------------------------------------------------------------------------


class _Now(threading.local):
    """The slot for which this thread quantizes, and the calls on a GPU since the host asked last."""

    def __init__(self) -> None:
        self.slot, self.calls = NOBODY, 0


now = _Now()
"""What this thread quantizes for."""
_counted = 0


def current() -> int:
    """The number of the slot for which quantization is called now."""
    return TRACED if torch.compiler.is_compiling() else now.slot


@contextmanager
def for_slot(layer: str, tensor: str, quantizer: Any, x: Tensor) -> Iterator[None]:
    """Inside, this quantizer quantizes x, or values made from x, for this slot (slot_number)."""
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
    """A decorator of a Call's method of a tensor and x: all that it quantizes is quantized for the tensor's slot.

    The host runs this for each quantization of a step, so that a slot that is known costs no call."""

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
"""Slots that are warned about; the list of nonfinite() has all."""
_told: set[tuple[int, int]] = set()
"""The slots that were warned about, and the words."""


@contextmanager
def counted() -> Iterator[None]:
    """Inside, the caller counts NaN and inf itself, and no warning is given."""
    global _counted
    _counted += 1
    try:
        yield
    finally:
        _counted -= 1


def look(slot: int, x: Tensor) -> None:
    """Warn of what a slot has met in a call with x that just ended; on a GPU now and then."""
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
    """look(), where an operator was called for TRACED."""
    if slot == TRACED and x.is_cpu:
        for number in range(TRACED, NAMED):
            look(number, x)


def boundary() -> None:
    """Have the words of all GPUs come, and warn of those that came since the last call; nothing waits."""
    now.calls = 0
    if not _counted:
        for table in _tables.values():
            if table.at_once is None:
                table.poll()


def tell(words: Tensor) -> None:
    """Warn about the set words of a table, [entries, WORDS] on the CPU, that were not warned about before."""
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
    """The NaN and inf that quantization has met, in order of slots and directions; waits for the devices.

    forget: clear the list, so that later ones are listed and warned about again.
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
