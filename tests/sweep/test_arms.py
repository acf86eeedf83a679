"""What arms are called, from what differs; and that a run is found again whatever its arm was called."""

import re
from pathlib import Path

import pytest

from hqsweep.sweep.arms import LONGEST, Difference, labels
from hqsweep.sweep.compose import expand
from hqsweep.sweep.launch import plan
from hqsweep.sweep.names import id_in, run_name
from hqsweep.sweep.store import RunStore

SLOTS = ("input", "weight", "grad_output")
GRID = ["conf=convergence", "recipe=mxfp8", "recipe.linear.input=mxfp8,nvfp4|mxfp8", "track=none"]


def arms(*differences: Difference) -> list[str]:
    return [label.arm for label in labels(differences).values()]


def slots(**formats: str) -> Difference:
    return Difference(name="bf16", fields=tuple((f"recipe.linear.{slot}", text) for slot, text in formats.items()))


def test_a_grid_of_slots_has_the_recipe_itself_and_what_differs_from_it() -> None:
    words = ["recipe=mxfp8", "recipe.linear.input=mxfp8,nvfp4", "recipe.linear.grad_output=mxfp8,mxfp8+e5m2"]
    assert [point.arm for point in expand("convergence", words).points] == [
        "mxfp8", "mxfp8_grad_output-mxfp8+e5m2", "mxfp8_input-nvfp4", "mxfp8_input-nvfp4_grad_output-mxfp8+e5m2",
    ]  # fmt: skip


def test_all_labels_of_a_grid_take_a_shorter_form_where_one_is_long() -> None:
    pair = "nvfp4|mxfp8@rowwise_dequantized"
    assert arms(slots(input=pair)) == ["bf16_input-nvfp4-mxfp8-dequantized"]
    assert arms(slots(input=pair), slots(input="mxfp8", grad_output="nvfp4|mxfp8+e5m2")) == [
        "bf16_input-nvfp4-mxfp8-dq", "bf16_input-mxfp8_grad-nvfp4-mxfp8+e5m2",
    ]  # fmt: skip
    assert arms(slots(**dict.fromkeys(SLOTS, pair)), slots(input="mxfp8")) == [
        "bf16_xw-nvfp4-mxfp8-dq_dy-nvfp4-mxfp8-dq", "bf16_x-mxfp8",
    ]  # fmt: skip


def test_pairs_has_short_names_of_its_own() -> None:
    found = {point.arm for point in expand("pairs").points}
    assert len(found) == 18 and {"bf16", "bf16_xw-nvfp4-mxfp8-dq_dy-mxfp8"} < found
    assert max(map(len, found)) <= LONGEST and not any(re.search(r"[^A-Za-z0-9._+-]", arm) for arm in found)


def test_what_is_too_long_or_would_be_the_same_gets_a_hash() -> None:
    paths = [Difference(name="a", settings=(("data.path", f"{'x' * 60}/{end}"),)) for end in "ab"]
    long = arms(*paths)
    assert len(set(long)) == 2 and max(map(len, long)) <= LONGEST
    same = [Difference(name="a", settings=(("data.path", text),)) for text in ("x/y", "x y")]
    assert len(set(arms(*same))) == 2 and all(arm.startswith("a_path-x-y_") for arm in arms(*same))
    assert arms(Difference(name="n" * 60)) == ["n" * 60]


@pytest.mark.parametrize(
    ("keys", "label"),
    [
        ((("train.lr", "0.002"),), "a_lr-0.002"),
        ((("train.lr", "-1"), ("model.tied", "true")), "a_lr--1_tied-true"),
        ((("model.dim", "8"), ("data.dim", "9")), "a_model.dim-8_data.dim-9"),
        ((("data.path", "'/a b/c.txt'"),), "a_path--a-b-c.txt"),
        ((("data.path", ""),), "a_path-none"),
    ],
)
def test_a_setting_is_named_by_the_last_part_of_its_key(keys: tuple[tuple[str, str], ...], label: str) -> None:
    assert arms(Difference(name="a", settings=keys)) == [label]


def test_folder_and_arm_are_called_the_same_and_the_id_is_as_before(tmp_path: Path) -> None:
    made = plan([*GRID, f"runs_dir={tmp_path}"])
    names = [row["run"] for row in made.rows()]
    assert [name.rpartition("-s0-")[0] for name in names] == ["mxfp8", "mxfp8_input-nvfp4-mxfp8"]
    assert [id_in(name) for name in names] == [id_in(run_name(point.config)) for point in made.points]


def test_a_run_is_found_again_whatever_its_arm_was_called(tmp_path: Path) -> None:
    store, made = RunStore(tmp_path), plan([*GRID, f"runs_dir={tmp_path}"])
    for name in store.names("s", made.points):
        assert not (tmp_path / "s" / name).exists()
    before = [run_name(point.config) for point in made.points]  # as earlier versions called them
    for name in before:
        (tmp_path / "s" / name).mkdir(parents=True)
    asked = {"sweep": "s", "conf": "c", "overrides": [], "runs": made.points}
    assert [run.name for run in store.create(**asked)] == before == store.names("s", made.points)
    (_, run) = store.runs("s")
    assert run.manifest()["arm"] == "mxfp8_input-nvfp4-mxfp8"
    run.update_manifest(arm="mxfp8 input=nvfp4|mxfp8")
    run.write_status(state="finished")
    more = plan([*GRID, "seed=0,1", f"runs_dir={tmp_path}"])
    store.create(**asked | {"runs": more.points})
    assert {run.manifest()["arm"] for run in store.runs("s")} == {"mxfp8", "mxfp8 input=nvfp4|mxfp8"}
