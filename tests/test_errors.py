"""Messages for people."""

import pytest

from hqsweep.errors import Damaged, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mxfp8 é 中 ▁█ 😀", "mxfp8 é 中 ▁█ 😀"),
        ("\x1b[2J\x07\x00\x9b", "\\x1b[2J\\x07\\x00\\x9b"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("\u202egnp.exe\u2066\ud800", "\\u202egnp.exe\\u2066\\ud800"),
    ],
)
def test_what_is_not_printable_is_shown_as_an_escape(text, shown):
    assert visible(text) == shown and visible(shown) == shown


def test_what_is_to_be_kept_is_kept():
    assert visible("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


def test_a_notebook_shows_the_sentence_and_no_traceback():
    assert Damaged("a\x1b", "is gone", "run again")._render_traceback_() == ["Damaged: a\\x1b: is gone; run again"]
