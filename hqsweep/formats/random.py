"""Keyed randomness: Philox4x32-10 bits that depend on a key and an element's index, and on nothing else.

Stochastic rounding draws byte i % 16 of the Philox output with counter (i // 16, step) and key (seed, slot) for the
element with linear index i = row * cols + col of the operand. The same bits come out on CPU and CUDA, in a recompute,
and in any order of evaluation. Philox: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
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
"""The number of elements whose bytes one draw gives."""


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
    """int64 [1] on the device of what is rounded: where the step is read when bits are drawn, in place of `step`. A
    captured CUDA graph draws the bits of every step by it."""

    @property
    def words(self) -> tuple[int, int]:
        """The two 32-bit words of the Philox key: seed, and the first four bytes of SHA-256 of the slot's name."""
        return self.seed & _MASK, _slot_word(self.slot)

    def under(self, name: str) -> "RngKey":
        """The stream of a part of the slot."""
        return replace(self, slot=f"{self.slot}/{name}")


@dataclass(frozen=True, kw_only=True)
class RngNumbers:
    """The streams of a slot's two directions, known by their numbers: a trace takes these as inputs, and serves slots
    of every name."""

    seed: int
    numbers: list[int]
    """The words of the slots NAME/rowwise and NAME/columnwise."""
    step: int
    counter: Tensor | None = field(default=None, compare=False, repr=False)

    def under(self, direction: str) -> "RngNumber":
        """The stream of a direction."""
        number = self.numbers[1 if direction == "columnwise" else 0]
        return RngNumber(seed=self.seed, number=number, step=self.step, counter=self.counter)


@dataclass(frozen=True, kw_only=True)
class RngNumber:
    """An RngKey whose slot is known by its word."""

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
    """The streams of the experts of a group in one step: keys that differ in their slots only.

    The words of all slots are computed once, because every step of a training has the same slots.
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
        """The words of each RngKey: the seed's, which all share, and one word for each slot."""
        return self.seed & _MASK, _parts(self.slots, "")[1]

    def under(self, name: str) -> "RngKeys":
        """The streams of a part of every slot."""
        return replace(self, slots=_parts(self.slots, name)[0])


@dataclass(frozen=True)
class PlacedKey:
    """A key for an operand that is a part of a whole one: its elements draw the bits that they draw there.

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
        """The first segment of 16 elements, and how many lie between rows, as the kernels count; ValueError for a part
        that cuts segments."""
        if self.first_col % SEGMENT or self.cols_of_whole % SEGMENT:
            raise ValueError(
                f"a part at column {self.first_col} of {self.cols_of_whole} columns cuts the random bytes of one draw;"
                f" both must be multiples of {SEGMENT}"
            )
        across = self.cols_of_whole // SEGMENT
        return [self.first_row * across + self.first_col // SEGMENT, across]


def _hashed(slot: str) -> int:
    return int.from_bytes(hashlib.sha256(slot.encode()).digest()[:4], "little")


_slot_word = memo(_hashed)


def numbers_of(slot: str) -> list[int]:
    """RngNumbers.numbers of the slot of this name."""
    return [_hashed(f"{slot}/{direction}") for direction in ("rowwise", "columnwise")]


@memo
def _parts(slots: tuple[str, ...], name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The part of this name of every slot ("": the slot itself), and the words of these parts."""
    parts = tuple(f"{slot}/{name}" for slot in slots) if name else slots
    return parts, tuple(map(_slot_word, parts))


def philox(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Ten rounds over int64 tensors holding 32-bit words; four output words of the counters' shape."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return [c0, c1, c2, c3]


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product in int64, split in halves because int64 is signed."""
    low_part, high_part = a * (constant & 0xFFFF), a * (constant >> 16)
    high = (high_part + (low_part >> 16)) >> 16
    return high, (a * constant) & _MASK


def _signed(step: int) -> int:
    """The 64 bits of a step as int64 has them."""
    step &= 2**64 - 1
    return step - 2**64 if step >= 2**63 else step


def random_bytes(key: RngKey | PlacedKey, rows: int, cols: int, device: torch.device | str = "cpu") -> Tensor:
    """uint8 [rows, cols]: the byte of every element of an operand of that shape under this key."""
    if isinstance(key, PlacedKey):
        lines = torch.arange(key.first_row, key.first_row + rows, dtype=torch.int64, device=device)
        along = torch.arange(key.first_col, key.first_col + cols, dtype=torch.int64, device=device)
        index = lines[:, None] * key.cols_of_whole + along
        drawn = _bytes_of(key, (index // SEGMENT).flatten())
        return drawn.gather(1, (index % SEGMENT).view(-1, 1)).view(rows, cols)
    count = rows * cols
    block = torch.arange((count + SEGMENT - 1) // SEGMENT, dtype=torch.int64, device=device)
    return _bytes_of(key, block).flatten()[:count].view(rows, cols)


def _bytes_of(key: RngKey | PlacedKey, block: Tensor) -> Tensor:
    """uint8 [blocks, 16]: the bytes of these segments."""
    now = torch.full_like(block, _signed(key.step)) if key.counter is None else key.counter.expand_as(block)
    step = (now & _MASK, now >> 32 & _MASK)
    words = torch.stack(philox(key.words, (block & _MASK, block >> 32, *step)), dim=-1)
    shifts = torch.arange(0, 32, 8, device=block.device)
    return (words[..., None] >> shifts & 0xFF).to(torch.uint8).flatten(1)
