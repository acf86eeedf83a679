"""Keyed randomness: Philox4x32-10 bits that depend only on a key and an element's index.

Stochastic rounding draws one byte per element. The element with linear index i = row * cols + col of the operand takes
byte i % 16 of the Philox output with counter (i // 16, step) and key (seed, slot). So the bits are the same on CPU and
CUDA, in a recomputation, and in any order of evaluation. Philox: Salmon et al., Parallel random numbers: as easy as 1,
2, 3 (SC 2011).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hqsweep.memo import memo

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
SEGMENT = 16
"""Elements whose bytes come from one draw."""


@dataclass(frozen=True, kw_only=True)
class RngKey:
    """Names one stream of random bits."""

    seed: int
    """The run's seed; its low 32 bits are used."""
    slot: str
    """The tensor, for example "layers.3.attn.qkv/grad_output/columnwise"."""
    step: int
    """The number of the slot's quantization: training step times microbatches; 64 bits."""
    counter: Tensor | None = field(default=None, compare=False, repr=False)
    """int64 [1] on the rounded tensor's device, read as the step when bits are drawn, in place of `step`.

    It lets a captured CUDA graph draw the bits of every step.
    """

    @property
    def words(self) -> tuple[int, int]:
        """The two 32-bit words of the Philox key: the seed, and the first four bytes of SHA-256 of the slot's name."""
        return self.seed & _MASK, slot_word(self.slot)

    def under(self, name: str) -> "RngKey":
        """Return the stream of a part of the slot."""
        return replace(self, slot=f"{self.slot}/{name}")


@dataclass(frozen=True, kw_only=True)
class RngNumbers:
    """The streams of a slot's two directions, by number. A trace takes numbers as inputs, and serves slots of every
    name."""

    seed: int
    numbers: list[int]
    """The words of the slots NAME/rowwise and NAME/columnwise."""
    step: int
    counter: Tensor | None = field(default=None, compare=False, repr=False)

    def under(self, direction: str) -> "RngNumber":
        """Return the stream of a direction."""
        number = self.numbers[1 if direction == "columnwise" else 0]
        return RngNumber(seed=self.seed, number=number, step=self.step, counter=self.counter)


@dataclass(frozen=True, kw_only=True)
class RngNumber:
    """An RngKey whose slot is given by its word."""

    seed: int
    number: int
    step: int
    counter: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def words(self) -> tuple[int, int]:
        """RngKey.words."""
        return self.seed & _MASK, self.number


@dataclass(frozen=True, kw_only=True)
class RngKeys(Sequence[RngKey]):
    """The streams of a group's experts in one step: keys that differ only in their slots.

    All words are computed once, because every training step has the same slots.
    """

    seed: int
    slots: tuple[str, ...]
    step: int
    counter: Tensor | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, expert: int) -> RngKey:
        return RngKey(seed=self.seed, slot=self.slots[expert], step=self.step, counter=self.counter)

    @property
    def words(self) -> tuple[int, tuple[int, ...]]:
        """The seed's word, which all keys share, and one word per slot."""
        return self.seed & _MASK, _parts(self.slots, "")[1]

    def under(self, name: str) -> "RngKeys":
        """Return the streams of a part of every slot."""
        return replace(self, slots=_parts(self.slots, name)[0])


@dataclass(frozen=True)
class PlacedKey:
    """A key for an operand that is part of a whole: its elements draw the same bits as in the whole.

    The element (row, col) of the part has the index (first_row + row) * cols_of_whole + first_col + col.
    """

    key: RngKey | RngNumber
    first_row: int
    first_col: int
    cols_of_whole: int

    @property
    def words(self) -> tuple[int, int]:
        """RngKey.words."""
        return self.key.words

    @property
    def step(self) -> int:
        """RngKey.step."""
        return self.key.step

    @property
    def counter(self) -> Tensor | None:
        """RngKey.counter."""
        return self.key.counter

    @property
    def segments(self) -> list[int]:
        """(first segment of 16 elements, segments between rows), as kernels count. ValueError for a part that cuts
        segments."""
        if self.first_col % SEGMENT or self.cols_of_whole % SEGMENT:
            raise ValueError(
                f"a part at column {self.first_col} of {self.cols_of_whole} columns cuts the random bytes of one draw;"
                f" both must be multiples of {SEGMENT}"
            )
        across = self.cols_of_whole // SEGMENT
        return [self.first_row * across + self.first_col // SEGMENT, across]


def _hashed(slot: str) -> int:
    return int.from_bytes(hashlib.sha256(slot.encode()).digest()[:4], "little")


slot_word = memo(_hashed)
"""slot -> the first four bytes of SHA-256 of its name, little-endian: the second word of its Philox key."""


def numbers_of(slot: str) -> list[int]:
    """Return RngNumbers.numbers of the slot with this name."""
    return [_hashed(f"{slot}/{direction}") for direction in ("rowwise", "columnwise")]


@memo
def _parts(slots: tuple[str, ...], name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the part with this name of every slot ("": the slot itself), and the words of these parts."""
    parts = tuple(f"{slot}/{name}" for slot in slots) if name else slots
    return parts, tuple(map(slot_word, parts))


def philox(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return four output words in the counters' shape, after ten rounds on int64 tensors of 32-bit words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return [c0, c1, c2, c3]


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a 32 x 32 bit product in int64. It is split in halves because int64 is
    signed."""
    low_part, high_part = a * (constant & 0xFFFF), a * (constant >> 16)
    high = (high_part + (low_part >> 16)) >> 16
    return high, (a * constant) & _MASK


def _signed(step: int) -> int:
    """Return the 64 bits of a step as an int64."""
    step &= 2**64 - 1
    return step - 2**64 if step >= 2**63 else step


def random_bytes(key: RngKey | PlacedKey, rows: int, cols: int, device: torch.device | str = "cpu") -> Tensor:
    """Return uint8 [rows, cols]: the byte of each element of an operand under this key."""
    if isinstance(key, PlacedKey):
        lines = torch.arange(key.first_row, key.first_row + rows, dtype=torch.int64, device=device)
        along = torch.arange(key.first_col, key.first_col + cols, dtype=torch.int64, device=device)
        index = lines[:, None] * key.cols_of_whole + along
        drawn = _bytes_of(key, (index // SEGMENT).flatten())
        return drawn.gather(1, (index % SEGMENT).view(-1, 1)).view(rows, cols)
    count = rows * cols
    block = torch.arange((count + SEGMENT - 1) // SEGMENT, dtype=torch.int64, device=device)
    return _bytes_of(key, block).flatten()[:count].view(rows, cols)


def words_at(words: tuple[int, int], key: RngKey | PlacedKey, block: Tensor) -> Tensor:
    """Return int64 [blocks, 4]: the 32-bit words of Philox under these key words, in the key's step, for the counters
    `block` int64 [blocks]."""
    now = torch.full_like(block, _signed(key.step)) if key.counter is None else key.counter.expand_as(block)
    step = (now & _MASK, now >> 32 & _MASK)
    return torch.stack(philox(words, (block & _MASK, block >> 32, *step)), dim=-1)


def segment_words(key: RngKey | PlacedKey, rows: int, cols: int, device: torch.device | str = "cpu") -> Tensor:
    """Return int64 [rows, cols / 16]: the first word of the draw of each segment of an operand; cols is a multiple of
    16."""
    first, across = key.segments if isinstance(key, PlacedKey) else (0, cols // SEGMENT)
    lines = torch.arange(rows, dtype=torch.int64, device=device)[:, None] * across
    block = first + lines + torch.arange(cols // SEGMENT, dtype=torch.int64, device=device)
    return words_at(key.words, key, block.flatten())[:, 0].view(block.shape)


def _bytes_of(key: RngKey | PlacedKey, block: Tensor) -> Tensor:
    """Return uint8 [blocks, 16]: the bytes of these segments."""
    words = words_at(key.words, key, block)
    shifts = torch.arange(0, 32, 8, device=block.device)
    return (words[..., None] >> shifts & 0xFF).to(torch.uint8).flatten(1)
