"""tests/cases.py leaves no format, option or direction out."""

from itertools import product

from cases import (
    ALL,
    DELAYED,
    EVERY_OPTION,
    FEW_KERNEL_PAIRS,
    KERNEL_PAIRS,
    LINEARS,
    PAIRS,
    REPRESENTATIVE,
    SOME,
    crossed,
)

from hqsweep.formats import NAMES, options, parse, words_of
from hqsweep.quant import HybridQuantizer
from hqsweep.sweep.grid.compose import load_recipe


def test_every_name_and_option_is_there() -> None:
    for name, family in NAMES.items():
        plain = vars(parse(name))
        changing = {option for option in options(name) if not family.options[option].items() <= plain.items()}
        for texts in (ALL, EVERY_OPTION):
            own = [words for known, words in map(words_of, texts) if known == name]
            assert {word for words in own for word in words} >= changing and name in REPRESENTATIVE


def test_every_scaling_meets_another_in_both_directions() -> None:
    pairs = [HybridQuantizer.parse(text) for text in PAIRS]
    scalings = {parse(text).scaling for text in REPRESENTATIVE}
    assert {pair.rowwise.scaling for pair in pairs} == scalings
    assert {pair.columnwise.scaling for pair in pairs} == scalings
    assert {pair.columnwise_source for pair in pairs} == {"original", "rowwise_dequantized"}


def test_every_text_and_every_value_is_there_and_those_of_few_texts_meet_all() -> None:
    rows = crossed(ALL, "abc", (1, 2))
    assert {text for text, *_ in rows} == set(ALL) and {row[1:] for row in rows} == set(product("abc", (1, 2)))
    assert len(rows) == len(ALL) + 5 * sum(text in SOME for text in ALL)


def test_few_pairs_of_kernels_have_each_scaling_and_random_bits() -> None:
    wanted, had = (
        {answer for pair in pairs for f in map(parse, pair) for answer in (f.scaling, f.stochastic)}
        for pairs in (KERNEL_PAIRS, FEW_KERNEL_PAIRS)
    )
    assert had == wanted and len(FEW_KERNEL_PAIRS) < len(KERNEL_PAIRS) / 2


def test_sections_of_recipes_have_one_format_and_are_those_that_people_train_with() -> None:
    for name, section in LINEARS.items():
        texts = section.values() if isinstance(section, dict) else [section]
        assert {HybridQuantizer.parse(text).rowwise.name for text in texts} == {name}
    assert LINEARS["nvfp4"] == load_recipe("nvfp4")["linear"]
    assert LINEARS[DELAYED] == load_recipe("delayed_scaling")["linear"]
