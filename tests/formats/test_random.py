"""Keys of random bits: those of a group are those of its members."""

import torch

from hqsweep.formats import RngKey, RngKeys, RngNumbers, numbers_of
from hqsweep.formats.random import PlacedKey, random_bytes
from hqsweep.ops.library import key_table

SLOTS = tuple(f"layers.0.experts/grouped_linear/input/{e}" for e in range(5))
SEED, STEP = 2**32 + 7, 2**40 + 3


def test_keys_of_a_group_are_those_of_its_members():
    keys, alone = RngKeys(seed=SEED, slots=SLOTS, step=STEP), [RngKey(seed=SEED, slot=s, step=STEP) for s in SLOTS]
    assert list(keys) == alone and keys[-1] == alone[-1] and len(keys) == 5
    parts = keys.under("rowwise")
    assert list(parts) == [key.under("rowwise") for key in alone] and parts.step == STEP
    assert parts[2].slot == f"{SLOTS[2]}/rowwise" and list(keys) == alone
    seed, words = parts.words
    assert [(seed, word) for word in words] == [key.words for key in parts]
    assert len(set(words)) == 5 and words != keys.words[1]


def test_the_table_of_a_kernel_is_the_same_however_keys_are_given():
    """Other seeds, slots and parts have another table."""
    cpu, tables = torch.device("cpu"), []
    for keys in (RngKeys(seed=SEED, slots=SLOTS, step=0), RngKeys(seed=3, slots=SLOTS, step=0).under("columnwise")):
        table = key_table(keys, cpu)
        assert torch.equal(table, key_table(list(keys), cpu))
        unsigned = [[word & 0xFFFFFFFF for word in row] for row in table.tolist()]
        assert unsigned == [list(key.words) for key in keys]
        assert key_table(keys, cpu) is table
        tables.append(table)
    assert not torch.equal(*tables)


def test_numbers_of_a_slot_are_the_words_of_its_directions():
    key = RngKey(seed=SEED, slot=SLOTS[0], step=STEP)
    numbered = RngNumbers(seed=SEED, numbers=numbers_of(SLOTS[0]), step=STEP)
    for direction in ("rowwise", "columnwise"):
        assert numbered.under(direction).words == key.under(direction).words


def test_a_part_draws_the_bytes_of_the_whole_wherever_it_is_cut():
    key, whole = RngKey(seed=SEED, slot=SLOTS[0], step=STEP), (23, 37)
    drawn = random_bytes(key, *whole)
    for row, col, rows, cols in ((0, 0, 23, 37), (5, 3, 11, 30), (22, 36, 1, 1), (7, 0, 0, 37)):
        part = random_bytes(PlacedKey(key, row, col, whole[1]), rows, cols)
        assert torch.equal(part, drawn[row : row + rows, col : col + cols])
