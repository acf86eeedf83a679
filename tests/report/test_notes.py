"""What a report says of the study as a whole."""

from hqsweep.report.compare import compare


def notes(make_sweep, runs, name):
    return " ".join(compare(make_sweep(runs, name)).notes)


def test_forks_say_what_their_intervals_cover_and_what_they_do_not_see(make_sweep, fake):
    gaps = {"null": 1e-5, "mxfp8": lambda trunk, point: 0.001 + 0.0001 * trunk}
    four, two, one = (notes(make_sweep, fake.fork_study(gaps, trunks=n), f"s{n}") for n in (4, 2, 1))
    assert "cover trunks of this model, data and recipe (4 are here), at the fork points 40 / 80, averaged" in four
    assert "the fork points 40 / 80 of these two trunks; a verdict about all trunks needs three." in two
    assert "the fork points 40 / 80 of this one trunk, and say nothing about another seed." in one
    for said in (four, two, one):
        assert "A fork does not see damage that builds up from the start of training" in said
        assert "null_arm=true" not in said


def test_a_study_without_a_null_arm_says_so_and_whole_runs_are_not_blind(make_sweep, fake):
    said = notes(make_sweep, fake.three_arms(), "whole")
    assert said == "No null arm of 'bf16' checks the machinery; null_arm=true adds one."


def test_arms_that_left_the_family_are_named(make_sweep, fake):
    runs = [*fake.three_arms(), fake.Run(arm="mxfp4", nan_from=30, state="failed", reason="loss is nan at step 30")]
    said = notes(make_sweep, runs, "left")
    assert said.startswith("No part of the arms that are judged together: 'mxfp4' (diverged).")
