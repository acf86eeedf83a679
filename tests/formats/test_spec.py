"""The torch-free tables of formats: what they import, and that each class has the fields they name."""

import subprocess
import sys
from dataclasses import fields

import pytest

from hqsweep.formats import Format, parse
from hqsweep.formats.spec import FAMILIES, NAMES, FormatText, fields_of


@pytest.mark.parametrize("module", ["formats", "formats.spec", "config.keys", "config.recipe_files"])
def test_texts_are_checked_without_torch(module):
    code = f"import sys, hqsweep.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.cls)
def test_a_class_answers_as_its_family_says(family):
    cls = type(parse(next(iter(family.names))))
    assert issubclass(cls, Format)
    assert cls.family is family
    assert cls.scaling == family.scaling
    known = {field.name for field in fields(cls)}
    set_by_texts = [set(values) for values in (*family.names.values(), *family.options.values())]
    assert set().union(*set_by_texts, (field for field, _ in family.numbered.values())) <= known


def test_every_fingerprint_text_names_its_own_family():
    for family in FAMILIES:
        assert [NAMES[fields_of(text)[0]] for text in family.fingerprint] == [family] * len(family.fingerprint)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_tells_the_scaling_of_its_format(name):
    assert FormatText.parse(name).scaling == parse(name).scaling
