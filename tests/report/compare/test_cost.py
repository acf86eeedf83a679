"""What one more replicate costs: the seconds that runs took, by what ran at a time."""

import math

from hqsweep.report.compare.compare import compare


def minutes(comparison):
    return set(comparison.arms["replicate_minutes"])


def test_a_seed_costs_a_run_of_every_arm(make_sweep, fake):
    runs = [fake.Run(seed=s, seconds=60) for s in (0, 1)] + [fake.Run(arm="a", seed=s, seconds=180) for s in (0, 1)]
    assert minutes(compare(make_sweep(runs))) == {4.0}


def test_a_trunk_costs_itself_and_its_forks_by_the_workers(make_sweep, fake):
    runs = fake.fork_study({"null": 0.0, "mxfp8": 0.001}, trunks=3, seconds=30.0, workers=2)
    runs = [fake.Run(**vars(run) | {"seconds": 240.0}) if run.arm == "trunk" else run for run in runs]
    assert minutes(compare(make_sweep(runs))) == {3.5}  # (4 + 3 arms x 2 points x 0.5) / 2


def test_needed_minutes_are_those_of_the_replicates_that_lack(make_sweep, fake):
    runs = [fake.Run(seed=s, final=2.0, seconds=60) for s in range(3)]
    runs += [fake.Run(arm="a", seed=s, final=2 + gap, seconds=60) for s, gap in enumerate((0.01, 0.03, -0.01))]
    row = compare(make_sweep(runs)).arms.set_index("arm").loc["a"]
    assert row["more"] == row["needed"] - 3 > 0 and row["needed_minutes"] == 2 * row["more"]


def test_nothing_finished_costs_an_unknown_time(make_sweep, fake):
    runs = [fake.Run(), fake.Run(arm="a", state="running", steps=50)]
    assert math.isnan(minutes(compare(make_sweep(runs))).pop())
