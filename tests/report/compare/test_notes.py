"""What a report says of the study as a whole."""

import json

import pytest
import yaml

from hqsweep.report.compare.compare import compare
from tests.report.conftest import seal_again


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
