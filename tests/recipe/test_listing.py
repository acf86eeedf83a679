"""Slots of a recipe and the differences of two."""

import pytest

from hqsweep.recipe import find_factory, parse_recipe
from hqsweep.recipe.listing import diff, slots


def recipe(linear="mxfp8", **sections):
    return parse_recipe({"linear": linear, **sections})


def factory(role):
    return "mxfp8"


def test_every_slot_is_listed_with_the_gemms_that_read_it():
    rows = {slot.name: slot.row() for slot in slots(recipe("nvfp4|mxfp8@rowwise_dequantized"))}
    assert len(rows) == 3 + 3 + 4 + 3 + 1 + 1
    assert rows["linear.weight"] == {
        "slot": "linear.weight", "rowwise": "nvfp4", "columnwise": "mxfp8", "columnwise_source": "rowwise_dequantized",
        "rowwise_reads": ["fprop"], "columnwise_reads": ["dgrad"], "projection": None,
    }  # fmt: skip
    assert rows["dpa.qkv"]["columnwise_reads"] == ["pv", "dq", "dk"] and rows["head.input"]["rowwise_reads"] == [
        "fprop"
    ]
    assert rows["norm.weight"]["rowwise_reads"] == []


def test_overrides_and_stages_are_listed_under_their_key_paths():
    overrides = [{"layers": 1, "linear": "bf16", "dpa": "mxfp8"}]
    listed = recipe(overrides=overrides, schedule=[{"at": 0.5, "fprop": "bf16"}])
    names = {slot.name: str(slot.quantizer) for slot in slots(listed)}
    assert names["overrides[0].linear.input"] == "bf16" and names["overrides[0].dpa.s"] == "mxfp8"
    assert names["schedule[0].linear.input"] == "bf16|mxfp8" and names["schedule[0].overrides[0].dpa.s"] == "mxfp8"


@pytest.mark.parametrize(
    ("a", "b", "rows"),
    [
        ({}, {}, []),
        ({"linear": "mxfp8"}, {"linear": {"rowwise": "mxfp8", "columnwise": "mxfp8"}, "name": "other"}, []),
        ({}, {"head": {"input": "mxfp8"}},
         [("head.input", "rowwise", "bf16", "mxfp8"), ("head.input", "columnwise", "bf16", "mxfp8")]),
        ({"linear": "nvfp4|mxfp8"},
         {"linear": "nvfp4|mxfp8", "grouped_linear": {"weight": "nvfp4|mxfp8@rowwise_dequantized"}},
         [("grouped_linear.weight", "columnwise_source", "original", "rowwise_dequantized")]),
        ({}, {"gemm": "strict"}, [("gemm", None, "exact", "strict")]),
        ({"overrides": [{"layers": 0, "dpa": "bf16"}]}, {"overrides": [{"layers": "last(1)", "dpa": "bf16"}]},
         [("overrides[0]", None, "layers 0", "layers last(1)")]),
        ({"schedule": [{"at": 0.5, "gemm": "exact"}]}, {"schedule": [{"at": 0.6, "gemm": "exact"}]},
         [("schedule[0].at", None, 0.5, 0.6)]),
        ({"schedule": [{"at": 5, "norm": "fp32"}]}, {"schedule": [{"at": 5, "norm": "fp32|bf16"}]},
         [("schedule[0].norm.weight", "columnwise", "fp32", "bf16")]),
    ],
)  # fmt: skip
def test_differences_are_by_value(a, b, rows):
    differences = diff(recipe(**a), recipe(**b))
    assert [(row["slot"], row["field"], row["a"], row["b"]) for row in differences] == rows
    assert bool(rows) == (recipe(**a) != recipe(**b))


def test_what_only_one_has_is_missing_in_the_other():
    rows = diff(recipe(), recipe(overrides=[{"name": "a.*", "dpa": "mxfp8"}]))
    assert {"slot": "overrides[0].dpa.qkv", "field": "rowwise", "a": None, "b": "mxfp8"} in rows
    assert rows[-1] == {"slot": "overrides[0]", "field": None, "a": None, "b": "'a.*'"}


def test_a_factory_is_compared_by_what_it_gives_and_by_its_path():
    custom = parse_recipe({"qfactory": f"{__name__}.factory"}, find_factory)
    rows = diff(recipe(), custom)
    assert not any(row["slot"].startswith(("linear", "grouped_linear", "dpa")) for row in rows)
    assert {"slot": "qfactory", "field": None, "a": None, "b": f"{__name__}.factory"} in rows
