"""What a report says of a checkpoint whose trunks rose to their rate without an optimizer's state."""

import pandas as pd
import pytest

from hqsweep.report.compare.frames import Frames
from hqsweep.report.figures.rewarm import rewarm_notes


def trunks(*curves: dict[int, float], before: float = 3.0) -> Frames:
    """Trunks from one checkpoint with these validation losses by step."""
    names = [f"trunk-s{seed}" for seed in range(len(curves))]
    runs = pd.DataFrame({"run": names, "config.fork.source": "/models/mine", "config.fork.source_hash": "ab",
                         "config.fork.warmup": 100, "manifest.source_val_loss": before})  # fmt: skip
    rows = [
        {"run": name, "arm": "trunk", "seed": seed, "step": step, "metric": "val_loss", "value": value}
        for seed, (name, curve) in enumerate(zip(names, curves, strict=True))
        for step, value in curve.items()
    ]
    columns = ["run", "arm", "seed", "step", "metric", "value"]
    return Frames(runs=runs, metrics=pd.DataFrame(rows, columns=columns), stats=pd.DataFrame())


def test_a_loss_that_came_back_is_told_with_its_peak_its_steps_and_its_noise():
    curve = {50: 2.99, 100: 3.3, 150: 3.1, 200: 3.007, 300: 2.9}
    other = {step: value + 0.02 * (step in (50, 200)) for step, value in curve.items()}
    # at 200 and 300 variances are 0.0002 and 0: t(0.95, 2) = 2.920 times sqrt(0.0001 / 2)
    assert rewarm_notes(trunks(curve, other | {250: 9.0}), [200, 300]) == (
        "Re-warm: val_loss of the checkpoint mine is 3.0000; over 100 steps of rising rate it rises to 3.3000 at step"
        " 100 and is back after 200 steps (mean of 2 trunks; back is within 0.69 %, the noise of 2 trunks at 2"
        " points).",
    )


@pytest.mark.parametrize(("spread", "notes"), [(0.001, 2), (0.02, 1)])
def test_what_is_settled_follows_from_the_spread_of_the_trunks(spread, notes):
    """The same mean excess of 0.4 % is noise of loud trunks, and none of quiet ones."""
    pair = ({100: 3.3, 200: 3.012 + sign * spread} for sign in (-1, 1))
    sentences = rewarm_notes(trunks(*pair), [200])
    assert len(sentences) == notes and ("The re-warm has not settled" in sentences[-1]) == (notes == 2)


def test_one_trunk_takes_the_noise_of_the_null_arm():
    frames = trunks({100: 3.3, 200: 3.012})
    told, warning = rewarm_notes(frames, [200], [0.002, -0.002, 0.001])
    assert "back is within 0.14 %, the noise of 3 forks of the null arm" in told and "0.40 % above it" in warning
    (told,) = rewarm_notes(frames, [200], [0.02, -0.02, 0.01])
    assert "is back after 200 steps" in told


def test_a_loss_that_never_rose_is_told():
    (note,) = rewarm_notes(trunks({100: 2.99, 200: 2.95}), [200])
    assert "over 100 steps of rising rate it never rises (mean of 1 trunk; back is within 0 %, as one trunk" in note


def test_points_before_the_loss_is_back_are_warned_of():
    told, warning = rewarm_notes(trunks({100: 3.3, 200: 3.03, 300: 3.0}), [100, 200, 300])
    assert "rises to 3.3000 at step 100 and is back after 300 steps" in told
    assert warning.startswith(
        "The re-warm has not settled: the trunks are 10.00 % above it at step 100, 1.00 % above it at step 200, so"
    )
    told, _ = rewarm_notes(trunks({100: 3.3, 200: 3.03}), [200])
    assert "is not back after 200" in told


def test_nothing_is_said_of_other_trunks():
    plain = trunks({100: 3.0})
    assert rewarm_notes(Frames(runs=plain.runs.drop(columns="manifest.source_val_loss"), metrics=plain.metrics,
                               stats=plain.stats), [100]) == ()  # fmt: skip
    assert rewarm_notes(trunks({}), [100]) == ()
