"""What a sweep states about its comparison is what counts, unless something is given."""

import pytest

from hqsweep.config.study import StudyConfig
from hqsweep.errors import UserError
from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.studies import study_of
from hqsweep.sweep.store import sweep_file


def stating(make_sweep, runs, name="sweep", **study):
    """A sweep whose sweep.json has these keys of StudyConfig."""
    run_dirs = make_sweep(runs, name)
    path = run_dirs[0].sweep_path
    keys = StudyConfig.model_validate(study).model_dump(mode="json")
    sweep_file.write(path, sweep_file.read(path) | {"study": keys})
    return run_dirs


def test_the_sweep_says_baseline_and_margin_and_the_call_overrides_them(make_sweep, fake):
    runs = stating(make_sweep, fake.three_arms(), baseline="mxfp8", margin="0.5%")
    comparison = compare(runs)
    assert comparison.baseline == "mxfp8" and comparison.margin_pct == 0.5
    assert comparison.estimates["nvfp4"].margin == 0.5
    overridden = compare(runs, "bf16", margin="0.1%")
    assert overridden.baseline == "bf16" and overridden.margin_pct == 0.1


def test_without_a_word_it_is_bf16_else_the_first_arm_and_a_quarter_of_a_percent(make_sweep, fake):
    assert compare(make_sweep(fake.three_arms())).baseline == "bf16"
    others = compare(make_sweep([run for run in fake.three_arms() if run.arm != "bf16"], "others"))
    assert others.baseline == "mxfp8" and others.margin_pct == 0.25 and others.maximum is None


def test_sweeps_that_state_different_margins_ask_for_one(make_sweep, fake):
    one = stating(make_sweep, [fake.Run(seed=0), fake.Run(arm="nvfp4", seed=0, gap=0.1)], "one", margin=0.5)
    two = stating(make_sweep, [fake.Run(seed=1), fake.Run(arm="nvfp4", seed=1, gap=0.1)], "two", margin=1)
    with pytest.raises(UserError, match=r"margin: the sweeps state different ones \(one 0.5, two 1.0\); give --margin"):
        compare([*one, *two])
    assert compare([*one, *two], margin=0.5).arms["n"].max() == 2


@pytest.mark.parametrize("margin", [0, "0%", -1, 100.5, "101%", "small", float("nan"), True])
def test_a_margin_that_is_none_is_refused(make_sweep, fake, margin):
    with pytest.raises(UserError, match=r"margin: got .*above 0 and at most 100"):
        compare(make_sweep(fake.three_arms()), margin=margin)


def test_a_run_folder_without_its_sweep_has_the_defaults(make_sweep, fake):
    runs = make_sweep(fake.three_arms())
    (runs[0].sweep_path / "sweep.json").unlink()
    assert study_of(runs).margin == 0.25 and study_of(runs).baseline is None


def test_a_study_that_grows_until_decided_is_judged_at_the_levels_of_its_looks(make_sweep, fake):
    """Three seeds of at most eight: the interval is that of t at a two-sided level of .00412 instead of .05."""
    gaps = (0.020, 0.026, 0.021)
    runs = [fake.Run(seed=s, final=2.0) for s in range(3)]
    runs += [fake.Run(arm="nvfp4", seed=s, final=2 + gap) for s, gap in enumerate(gaps)]
    growing = stating(make_sweep, runs, seeds={"until": "decided", "max": 8})
    comparison, fixed = compare(growing), compare(make_sweep(runs, "fixed"))
    half, narrow = (each.arms.set_index("arm").at["nvfp4", "half_pct"] for each in (comparison, fixed))
    assert comparison.maximum == 8 and half / narrow == pytest.approx(15.52 / 4.3027, rel=0.03)
    assert "Looked at after every seed, 8 at most" in " ".join(comparison.notes)
    assert [each.arms["verdict"].iloc[1] for each in (comparison, fixed)] == ["undecided", "worse"]
