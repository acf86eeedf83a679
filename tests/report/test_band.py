"""The checked line passes and fails for each of its reasons."""

import pytest

from hqsweep.errors import UserError
from hqsweep.report.band import within_band
from hqsweep.report.compare import compare


def test_passes_within_the_band_and_below_the_unigram_entropy(make_sweep, fake):
    comparison = compare(
        make_sweep([fake.Run(), fake.Run(arm="mxfp8", gap=0.002), fake.Run(arm="nvfp4", gap=-0.03)]), "bf16"
    )
    ok, line = within_band(comparison, 0.05, floor_nats=3.5)
    gap = comparison.arms.set_index("arm").at["nvfp4", "gap"]
    assert ok and line.startswith("check passed (band 0.05 nats, unigram entropy 3.5000 nats): the largest gap")
    assert f"{gap:+.4f} nats ('nvfp4')" in line


@pytest.mark.parametrize(
    ("changes", "band", "floor", "says"),
    [
        ({"gap": 0.2}, 0.1, 9.0, "'nvfp4' ends +0."),
        ({"gap": -0.2}, 0.1, 9.0, "'nvfp4' ends -0."),
        ({}, 0.1, 1.0, "'bf16' ends at"),
        ({"state": "failed", "reason": "x"}, 0.1, 9.0, "'nvfp4' has 1 failed"),
        ({"nan_from": 150}, 0.1, 9.0, "'nvfp4' has no finite val_loss"),
        ({"seed": 1}, 0.1, 9.0, "'nvfp4' ends an unknown number of nats from 'bf16'"),
    ],
)
def test_fails_and_says_why(make_sweep, fake, changes, band, floor, says):
    ok, line = within_band(compare(make_sweep([fake.Run(), fake.Run(arm="nvfp4", **changes)]), "bf16"), band, floor)
    assert not ok and line.startswith("check failed") and says in line


def test_the_floor_comes_from_the_manifest_when_it_states_one(make_sweep, fake):
    runs = make_sweep([fake.Run()])
    assert f"unigram entropy {fake.entropy:.4f} nats" in within_band(compare(runs, "bf16"), 0.1)[1]
    for run in runs:
        run.update_manifest(data={})
    ok, line = within_band(compare(runs, "bf16"), 0.1)
    assert ok and "entropy" not in line


def test_band_must_be_positive(make_sweep, fake):
    with pytest.raises(UserError, match="band: 0 nats"):
        within_band(compare(make_sweep([fake.Run()]), "bf16"), 0)
