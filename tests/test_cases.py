"""tests/cases.py leaves no format, option or direction out."""

from cases import ALL, DELAYED, EVERY_OPTION, FEW_KERNEL_PAIRS, KERNEL_PAIRS, LINEARS, PAIRS, REPRESENTATIVE

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


def test_every_format_meets_another_in_both_directions() -> None:
    pairs = [HybridQuantizer.parse(text) for text in PAIRS]
    assert {str(parse(text).rowwise_form) for text in REPRESENTATIVE} == {str(pair.rowwise) for pair in pairs}
    assert {str(parse(text).columnwise_form) for text in REPRESENTATIVE} == {str(pair.columnwise) for pair in pairs}
    assert {pair.columnwise_source for pair in pairs} == {"original", "rowwise_dequantized"}


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
