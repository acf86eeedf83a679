"""Shards over 2 and 4 ranks have the bytes that the whole has there, however it is cut and whoever has the masters."""

import pytest
from support.parallel.agree_ranks import COLS, CUTS, ROWS, all_cases
from support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.feature("F109", "F113")]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return run_ranks(request.param, all_cases, request.param)


@pytest.mark.parametrize("case", [*(f"shards {cut}" for cut in CUTS[2]), "columns", "one_direction"])
def test_shards_equal_the_whole(ranks, case):
    assert [rank[case] for rank in ranks] == [{}] * len(ranks)


@pytest.mark.feature("F126", "F127", "F128", "F131")
def test_flat_fragments_any_offset(ranks):
    assert [rank["fragments"] for rank in ranks] == [{}] * len(ranks)
    assert all(rank["grouped_fragments"] for rank in ranks)
    assert [rank["grouped_shards"] for rank in ranks] == [{}] * len(ranks)


@pytest.mark.feature("F126", "F127", "F128", "F131")
def test_states_of_shards_are_those_of_the_whole(ranks):
    assert [rank["delayed"] for rank in ranks] == [[]] * len(ranks)


@pytest.mark.feature("F130")
def test_codes_that_are_gathered_as_bytes_are_those_of_the_whole(ranks):
    every = [rank["gathered_codes"] for rank in ranks]
    assert [rank["wrong"] for rank in every] == [[]] * len(ranks)
    assert all(rank["by_codes"] > 30 and rank["gathered"] > rank["by_codes"] // 2 for rank in every)
    for by_codes, whole in (rank["sent_values"] for rank in ranks):
        assert by_codes <= 2 * 2 * COLS < whole  # the rows that a fragment cuts at its ends, in bfloat16
    assert {tuple(rank["no_fragments"]) for rank in ranks} == {
        (
            f"quantize_master_weights: the fragments of a weight ({ROWS}, {COLS}) bring its first {ROWS * COLS - 1}"
            f" elements and not all {ROWS * COLS}; every rank of the group brings its own part of one whole",
        )
    }


@pytest.mark.parametrize("collective", ["maximum", "bytes", "sum"])
def test_collectives(ranks, collective):
    assert all(rank["collectives"][collective] for rank in ranks)


def test_parts_that_make_no_whole_are_refused_on_all_ranks(ranks):
    for said in zip(*(rank["refusals"] for rank in ranks), strict=True):
        assert len(set(said)) == 1
    first, second = ranks[0]["refusals"]
    assert "rank 0 needs rows 0:32 and columns 0:160" in first
    assert "of these 33280 elements its group holds" in second
