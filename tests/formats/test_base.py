"""Format strings: every format prints the text that parses back to it, and a wrong one says what is allowed."""

import itertools

import pytest

from hqsweep.errors import UserError
from hqsweep.formats import NAMES, options, parse


def texts():
    for name in NAMES:
        for count in range(4):
            yield from ("+".join((name, *chosen)) for chosen in itertools.combinations(options(name), count))


def test_every_valid_text_round_trips():
    seen = 0
    for text in texts():
        try:
            format = parse(text)
        except UserError:
            continue  # a combination that the format refuses
        assert parse(str(format)) == format and hash(parse(str(format))) == hash(format), text
        seen += 1
    assert seen > 50


def test_defaults_print_short():
    assert str(parse("fp8_block+pow2")) == "fp8_block"
    assert str(parse("nvfp4+sr+2d")) == "nvfp4+2d+sr"
    assert str(parse("fp8_current+eps16")) == "fp8_current+eps16.0"
    assert str(parse("fp8_delayed+history16+most_recent+e5m2")) == "fp8_delayed+e5m2+most_recent+history16"
    assert str(parse("fp8_delayed+history1024")) == "fp8_delayed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mxfp9", "unknown name 'mxfp9' .did you mean 'mxfp8'.*known: bf16"),
        ("nvfp4+rth", r"unknown option '\+rth' .did you mean 'rht'.*nvfp4 takes \+2d"),
        ("mxfp4+e5m2", r"unknown option '\+e5m2' .did you mean 'e1m2'.*; mxfp4 takes \+2d"),
        ("bf16+sr", "bf16 takes no options"),
        ("mxfp8+eps3", r"unknown option '\+eps3'"),
        ("fp8_current+epsx", r"unknown option '\+epsx'"),
        (
            "fp8_delayed+history1.5",
            r"unknown option '\+history1.5'; fp8_delayed takes \+e5m2, \+most_recent, \+local_amax, "
            r"\+skip_nonfinite, \+historyN",
        ),
        ("fp8_delayed+pow2", r"unknown option '\+pow2'"),
        ("fp8_delayed+history0", "the history has 0 steps; allowed is a whole number >= 1"),
        ("fp8_block+pow2+fp32_scale", r"'\+fp32_scale' sets pow2 a second time"),
        ("nvfp4+row_scaled+2d", "row_scaled cannot be combined with 2d"),
        ("nvfp4+row_scaled+rht", "row_scaled cannot be combined with rht"),
        ("nvfp4+4over6+sr", "4over6 cannot be combined with sr"),
        ("nvfp4+mse", r"add \+4over6"),
        ("nvfp4+nosign", r"add \+rht"),
    ],
)
def test_errors_say_what_is_allowed(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)
