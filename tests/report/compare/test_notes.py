"""What a report says of the study as a whole."""

import json

import pandas as pd
import pytest
import yaml

from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.frames import Frames
from hqsweep.report.compare.notes import headline, rewarm_notes
from tests.report.conftest import seal_again


def notes(make_sweep, runs, name):
    return " ".join(compare(make_sweep(runs, name)).notes)


@pytest.mark.slow
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


def changed(runs, name, change):
    """The runs with their YAML or JSON file of that name changed in place."""
    for run in runs:
        path = run.path / name
        tree = yaml.safe_load(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))
        seal_again(run)
    return runs


def test_runs_that_have_hardly_learnt_or_that_repeat_their_data_are_told(make_sweep, fake):
    low = make_sweep(fake.three_arms(), "low")
    said = " ".join(compare(changed(low, "manifest.json", lambda m: m["data"].update(unigram_entropy_nats=2.0))).notes)
    assert "9 of 9 runs do not end 0.1 nats below the unigram entropy of their data (2.000 nats)" in said
    again = changed(make_sweep(fake.three_arms(), "again"), "manifest.json", lambda m: m.update(epochs=2.345))
    assert "runs read their training tokens up to 2.35 times" in " ".join(compare(again).notes)


@pytest.mark.parametrize(
    ("every", "why"), [(0, "stats.every is 0"), (400, "stats.every is 400, and a run has 200 steps")]
)
def test_without_samples_a_note_says_which_key_gives_them(every, why, make_sweep, fake):
    def set_keys(config):
        config["stats"], config["train"]["steps"] = {"every": every}, 200

    runs = make_sweep(fake.three_arms(), "unsampled")
    for run in runs:
        run.jsonl("stats").unlink()
    said = " ".join(compare(changed(runs, "config.yaml", set_keys)).notes)
    assert f"No quantization error was sampled ({why})" in said and "stats.every=100 gives them" in said


def test_arms_of_other_code_of_their_model_are_told(make_sweep, fake):
    runs = make_sweep(fake.three_arms(), "code")
    for run in runs:
        other = "b" if "mxfp8" in run.path.name else "a"
        changed([run], "manifest.json", lambda m, code=other: m.update(model_code=f"own {code}"))
        changed([run], "config.yaml", lambda c: c.update(model={"kind": "factory", "target": "own.build", "args": {}}))
    (said,) = [note for note in compare(runs).notes if "code" in note]
    assert said.startswith("The code of own.build changed between runs: some of 'mxfp8' were trained with other code")


def test_arms_that_met_nan_or_inf_are_told_with_the_first_slot(make_sweep, fake):
    first = {
        "slot": "layers.3.fc2.input.rowwise", "kind": "nan", "format": "nvfp4", "lost": True, "first": 120, "last": 120,
        "steps": 1, "until": None, "order": 7, "sentence": "layers.3.fc2.input.rowwise (nvfp4): NaN was quantized",
    }  # fmt: skip
    later = first | {"slot": "layers.4.fc2.input.rowwise", "first": 121, "sentence": "later"}
    runs = make_sweep(fake.three_arms(), "met")
    arm = [run for run in runs if run.manifest()["arm"] == "mxfp8"]
    changed(arm[:1], "manifest.json", lambda manifest: manifest.update(nonfinite=[later, first]))
    said = " ".join(compare(runs).notes)
    assert f"was quantized in 1 of {len(arm)} runs of 'mxfp8', first, with seed" in said
    assert f"{first['sentence']}, and 1 more slots. What became a number" in said
    changed(arm[:1], "manifest.json", lambda manifest: manifest.update(nonfinite=[]))
    assert "NaN or inf" not in " ".join(compare(runs).notes)


def test_each_verdict_is_said_once_with_its_arms_by_gap(make_sweep, fake):
    null = [fake.Run(arm="null", seed=seed, init_noise=0.01, gap=0.0001, fmt="bf16") for seed in range(3)]
    broken = fake.Run(arm="broken", state="failed", reason="x", steps=80)
    comparison = compare(make_sweep([*fake.three_arms(), *null, broken]), "bf16")
    arms = comparison.arms.set_index("arm")
    gaps = {
        arm: f"{arm} ({arms.at[arm, 'slowdown_pct']:+.{tokens}f} % tokens, {arms.at[arm, 'gap_pct']:+.{n}f} %)"
        for arm, tokens, n in (("mxfp8", 1, 3), ("nvfp4", 0, 2))
    }
    assert headline(comparison) == (
        f"{gaps['mxfp8']} is equivalent to bf16 within 0.25 %; {gaps['nvfp4']} is worse than bf16; broken has no"
        " verdict (failed); the null arm is equivalent, as it must be; 1 run is left out."
    )


def test_many_arms_are_a_number_between_two_names(make_sweep, fake):
    many = [fake.Run(arm=f"arm{n}", seed=seed, gap=0.03 * n) for n in range(1, 7) for seed in range(3)]
    bf16 = [fake.Run(seed=seed) for seed in range(3)]
    said = headline(compare(make_sweep([*bf16, *many]), "bf16"))
    assert said.startswith("6 arms, from arm1 (+") and "to arm6 (+" in said and said.endswith("are worse than bf16.")


def test_a_worse_arm_inside_the_margin_and_a_null_arm_that_is_off_are_said(make_sweep, fake):
    study = fake.fork_study({"mxfp8": lambda trunk, point: 0.002 + 1e-6 * trunk, "null": lambda trunk, point: trunk})
    said = headline(compare(make_sweep(study), "bf16"))
    assert said == (
        "mxfp8 (+0.100 %) is worse, inside the margin of 0.25 %; the null arm is not shown equivalent, so that the"
        " machinery is in doubt."
    )
    alone = headline(compare(make_sweep([fake.Run()], name="alone"), "bf16"))
    assert alone == "No arm stands beside bf16."


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
