"""The page for users of TransformerEngine names all that hqsweep.compat has, and nothing of it that is not there."""

import re
from pathlib import Path

from hqsweep import compat

PAGE = (Path(__file__).parents[2] / "docs" / "transformer_engine.md").read_text()
CODE = re.findall(r"`([^`]+)`", PAGE)


def test_every_name_is_on_the_page():
    words = {word for code in CODE for word in re.findall(r"\w+", code)}
    assert sorted(set(compat.__all__) - words) == []


def test_every_class_on_the_page_is_there():
    classes = {
        code for code in CODE if re.fullmatch(r"([A-Z]\w+)(Quantizer|Tensor|Storage|Recipe|Scaling|Request)", code)
    }
    assert len(classes) > 25 and sorted(name for name in classes if not hasattr(compat, name)) == []
