"""Fractional factorial designs: their sizes, resolutions and aliases are those of the tables in the books."""

import itertools

import numpy as np
import pytest

from hqsweep.config.factorial import fraction
from hqsweep.errors import UserError

TABLE = {
    (3, 3): 4, (4, 4): 8, (5, 3): 8, (5, 5): 16, (6, 3): 8, (6, 4): 16, (6, 5): 32, (7, 3): 8, (7, 4): 16, (8, 4): 16,
    (8, 5): 64, (9, 4): 32,
}  # fmt: skip
"""(factors, resolution) -> the fewest arms (Box, Hunter and Hunter, Statistics for Experimenters, table 12.15)."""


@pytest.mark.parametrize(("factors", "resolution"), TABLE)
def test_a_fraction_is_as_small_as_the_tables_say(factors, resolution):
    design = fraction(factors, resolution)
    assert np.array(design.runs).shape == (TABLE[factors, resolution], factors) and design.resolution >= resolution
    assert not any(design.runs[0]) and len(set(design.runs)) == len(design.runs)
    signs = 2 * np.array(design.runs) - 1
    for order in range(1, resolution):  # any columns of fewer factors are orthogonal to the mean
        for some in itertools.combinations(range(factors), order):
            assert signs[:, some].prod(1).sum() == 0


@pytest.mark.parametrize(("factors", "resolution"), TABLE)
def test_words_are_all_products_that_do_not_vary(factors, resolution):
    design = fraction(factors, resolution)
    sets = [some for n in range(1, factors + 1) for some in itertools.combinations(range(factors), n)]
    constant = {some for some in sets if not (np.array(design.runs)[:, some].sum(1) % 2).any()}
    assert set(design.words) == constant


def test_aliases_have_columns_that_agree_up_to_a_sign():
    design = fraction(6, 4)
    signs = 2 * np.array(design.runs) - 1
    assert design.aliases((0,)) == ()
    for effect in design.effects():
        for other in design.aliases(effect):
            assert abs((signs[:, effect].prod(1) * signs[:, other].prod(1)).sum()) == len(signs)
    assert len(design.effects()) == 6 + 7 and any(design.aliases(effect) for effect in design.effects())
    assert len(fraction(6, 5).effects()) == 21 and not any(map(fraction(6, 5).aliases, fraction(6, 5).effects()))


def test_a_full_design_has_every_combination():
    design = fraction(3, "full")
    assert sorted(map(tuple, design.runs)) == sorted(itertools.product((0, 1), repeat=3))
    assert design.words == () and design.resolution == float("inf")


@pytest.mark.parametrize(("factors", "resolution", "said"), [(1, 3, "2 to 12"), (13, 3, "2 to 12"), (4, 6, "3, 4, 5")])
def test_other_designs_are_refused(factors, resolution, said):
    with pytest.raises(UserError, match=said):
        fraction(factors, resolution)
