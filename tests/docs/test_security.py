"""docs/security.md is true: every point has a test, and each is there."""

import re
from pathlib import Path

import pytest

from tests.test_features import test_a_named_test_exists as assert_exists

TEXT = (Path(__file__).parents[2] / "docs/security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)::(\w+)`", TEXT)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_exists(path: str, name: str) -> None:
    assert_exists(path, name)


def test_every_point_between_what_is_trusted_and_what_is_not_defended_has_a_test() -> None:
    sections = TEXT.split("\n## ")
    assert (sections[1].splitlines()[0], sections[-1].splitlines()[0]) == ("Trusted", "Not defended against")
    points = [point for section in sections[2:-1] for point in section.split("\n- ")[1:]]
    assert points and not [point for point in points if "`tests/" not in point]
