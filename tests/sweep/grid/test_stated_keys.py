"""What a growing study has stated before its first run stays."""

import pytest

from hqsweep.config.study import parse_study
from hqsweep.errors import UserError
from hqsweep.sweep.grid.stated_keys import check_stated

DECIDED = {"seeds": {"until": "decided", "max": 8}, "baseline": "bf16"}


@pytest.fixture
def begun(store, planned):
    """A sweep with these keys, of which one run has begun."""

    def begin(state: str = "running", **keys):
        study = parse_study(keys).model_dump(mode="json")
        run, _ = store.create(sweep="s", conf="c", overrides=[], runs=[planned(), planned(seed=1)], study=study)
        run.write_status(state=state)
        return store

    return begin


CHANGES = [
    ({"seeds": {"until": "decided", "max": 16}}, "seeds.max: 16, but 's' began to run with seeds.max=8, and"),
    ({"seeds": {"until": "fixed", "max": 8}}, "seeds.until: fixed, but 's' began to run with seeds.until=decided"),
    ({"margin": 1}, "margin: 1.0, but 's' began to run with margin=0.25"),
    ({"baseline": "fp32"}, "baseline: fp32, but 's' began to run with baseline=bf16"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_another_statement_after_the_first_run_is_refused(begun, change, message):
    store = begun(**DECIDED)
    check_stated(store, "s", parse_study(DECIDED))
    with pytest.raises(UserError, match=message):
        check_stated(store, "s", parse_study(DECIDED | change))
    check_stated(store, "another", parse_study(DECIDED | change))


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_before_the_first_run_anything_may_change(begun, change, message):
    check_stated(begun("pending", **DECIDED), "s", parse_study(DECIDED | change))


def test_a_study_of_fixed_size_that_was_seen_cannot_grow(begun):
    store = begun(margin=1)
    check_stated(store, "s", parse_study({"margin": 2}))
    with pytest.raises(UserError, match=r"seeds.until: decided, but 's' began to run with seeds.until=fixed"):
        check_stated(store, "s", parse_study({"margin": 1, "seeds": {"until": "decided"}}))
