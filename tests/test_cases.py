"""tests/cases.py leaves no format, option or direction out."""

from cases import ALL, EVERY_OPTION, PAIRS, REPRESENTATIVE

from hqsweep.formats import FORMATS, options, parse, words_of
from hqsweep.quant import HybridQuantizer


def test_every_name_and_option_is_there() -> None:
    for name, (cls, _) in FORMATS.items():
        plain = vars(parse(name))
        changing = {option for option in options(name) if not cls.OPTIONS[option].items() <= plain.items()}
        for texts in (ALL, EVERY_OPTION):
            own = [words for known, words in map(words_of, texts) if known == name]
            assert {word for words in own for word in words} >= changing and name in REPRESENTATIVE


def test_every_format_meets_another_in_both_directions() -> None:
    pairs = [HybridQuantizer.parse(text) for text in PAIRS]
    assert {str(parse(text).rowwise_form) for text in REPRESENTATIVE} == {str(pair.rowwise) for pair in pairs}
    assert {str(parse(text).columnwise_form) for text in REPRESENTATIVE} == {str(pair.columnwise) for pair in pairs}
    assert {pair.columnwise_source for pair in pairs} == {"original", "rowwise_dequantized"}
