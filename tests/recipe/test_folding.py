"""Slots that are alike are one line, and nothing is lost by it."""

from hqsweep.recipe import parse_recipe
from hqsweep.recipe.listing import diff, folded, of_both_directions, slots, together

FIELDS = ("rowwise", "columnwise", "columnwise_source")


def lines(linear: object, **more: object) -> dict[str, str]:
    rows = [slot.row() for slot in slots(parse_recipe({"name": "r", "linear": linear, **more}))]
    names = [row["slot"] for row in rows]
    return {row["slot"]: f"{row['rowwise']}|{row['columnwise']}" for row in folded(rows, FIELDS, names)}


def test_a_part_whose_slots_are_alike_has_its_name_alone():
    assert lines("mxfp8") == {
        "linear, grouped_linear": "mxfp8|mxfp8", "dpa, head": "bf16|bf16", "embedding, norm": "fp32|fp32",
    }  # fmt: skip


def test_parts_with_the_same_tensors_alike_are_named_once():
    linear = {"input": "nvfp4|mxfp8", "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"}
    assert list(lines(linear)) == [
        "input, weight of linear, grouped_linear", "grad_output of linear, grouped_linear", "dpa, head",
        "embedding, norm",
    ]  # fmt: skip
    assert "linear; grouped_linear.grad_output" in lines("mxfp8", grouped_linear=linear)


def test_slots_of_overrides_and_of_changes_keep_their_place():
    texts = lines(
        "mxfp8", overrides=[{"name": "layers.0.*", "linear": "bf16"}], schedule=[{"at": 0.5, "fprop": "bf16"}]
    )
    assert texts["linear, grouped_linear"] == "mxfp8|mxfp8"
    assert any("overrides[0].linear" in name for name in texts) and any("schedule[0]." in name for name in texts)


def test_every_slot_is_on_exactly_one_line():
    every = ["linear.input", "linear.weight", "dpa.s", "gemm"]
    assert together(every, every) == "linear, dpa; gemm"
    assert together(["linear.input", "gemm"], every) == "linear.input; gemm"
    alike = ["overrides[0]", "schedule[0].overrides[0]"]
    assert together(alike, [*alike, "schedule[0].at"]) == "overrides[0]; schedule[0].overrides[0]"
    assert together(["gemm", "fp8_dpa"], []) == "gemm, fp8_dpa"


def test_a_difference_of_both_directions_is_one_row():
    mixed = {"input": "nvfp4|mxfp8", "weight": "nvfp4", "grad_output": "mxfp8"}
    a, b = parse_recipe({"name": "a", "linear": "mxfp8"}), parse_recipe({"name": "b", "linear": mixed, "dpa": "mxfp8"})
    rows = {(row["slot"], row["field"]): (row["a"], row["b"]) for row in of_both_directions(diff(a, b))}
    assert rows["linear.input", "rowwise"] == ("mxfp8", "nvfp4")
    assert rows["linear.weight", "rowwise, columnwise"] == ("mxfp8", "nvfp4")
    assert rows["dpa.s", "rowwise, columnwise"] == ("bf16", "mxfp8")
