"""benchmarks/step.py: what it times is one step of each, and its floors count what a model has."""

import json

import pytest
import torch

from benchmarks import step
from benchmarks.plain_gpt import PlainGPT
from benchmarks.step_floors import Rates, Size, elementwise_bytes, floor_rows, quantize_bytes
from benchmarks.step_rates import products_ms
from hqsweep.config.model import ModelConfig
from hqsweep.sweep.grid.compose import Composer

TINY = {
    "S": Size(model=ModelConfig(dim=64, layers=2, heads=2), batch=2, context=32, vocabulary=96, turn=1),
    "moe": Size(model=ModelConfig(dim=64, layers=2, heads=2, experts=4), batch=2, context=32, vocabulary=96, turn=1),
}
UNIT = Rates(copy_gbs=1.0, matmul_tflops=1.0, fp8_tflops=2.0)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The rows of a call of the command on a CPU; torch.compile gives back what it takes."""
    monkeypatch.setattr(step, "SIZES", TINY)
    monkeypatch.setattr(torch, "compile", lambda model: model)

    def call(*words):
        file = tmp_path / "rows.jsonl"
        try:
            step.main(["--device", "cpu", "--turns", "1", "--out", str(file), *words])
        finally:
            capsys.readouterr()
            rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            call.rows = rows
        return rows

    return call


@pytest.mark.slow
def test_every_case_is_timed_beside_the_compiled_one(run):
    rows = run("--size", "S", "moe", "--recipes", "mxfp8", "--only", "time")
    cases = [(row["size"], row["case"], row.get("recipe")) for row in rows]
    each = [("torch compiled", None), ("torch eager", None), ("hqsweep", "mxfp8")]
    assert cases == [(size, *case) for size in ("S", "moe") for case in each]
    for row in rows:
        assert row["share"] == pytest.approx(row["compiled_ms"] / row["ms"]) and row["first_step_s"] > 0
        assert row["ktokens_s"] == pytest.approx(64 / row["ms"])
        goal = step.GOALS.get((row["size"], row.get("recipe")))
        assert row.get("goal") == goal and row.get("pass") == (None if goal is None else row["share"] >= goal)
    assert rows[0]["share"] == 1 and rows[2]["ran"] == "there are no graphs on the CPU"


@pytest.mark.slow
def test_a_case_that_fails_is_a_row_and_the_next_one_runs(run):
    with pytest.raises(SystemExit) as left:
        run("--size", "S", "--recipes", "current_scaling:native", "bf16", "--references", "--only", "time")
    first, second = run.rows
    assert left.value.code == 1
    assert "gemm=native needs a GPU" in first["error"] and second["recipe"] == "bf16" and second["ms"] > 0


def test_what_has_no_time_left_says_so(run):
    with pytest.raises(SystemExit):
        run("--size", "S", "--recipes", "bf16", "--references", "--only", "time", "--seconds", "0")
    assert [row["error"] for row in run.rows] == ["not begun in --seconds"]


def test_a_step_of_ours_is_one_update():
    data = step.Data(TINY["S"], "cpu")
    call = step.Ours(TINY["S"], data, "mxfp8", "auto", "cpu")
    assert [call().step for _ in range(3)] == [1, 2, 3]


@pytest.mark.slow
def test_our_steps_have_deterministic_kernels_and_those_of_torch_have_not(run, monkeypatch):
    seen = []
    plain, ours = step.plain, step.Ours
    asked = torch.are_deterministic_algorithms_enabled

    def noting(build, *args):
        call = build(*args)
        return lambda: (seen.append((build.__name__, asked())), call())

    monkeypatch.setattr(step, "plain", lambda *args: noting(plain, *args))
    monkeypatch.setattr(step, "Ours", lambda *args: noting(ours, *args))
    words = ("--references", "compiled", "--recipes", "bf16", "--deterministic", "on", "off")
    rows = run("--size", "S", "--only", "time", *words)
    assert [row.get("deterministic") for row in rows] == [None, "on", "off"] and not asked()
    assert dict.fromkeys(seen) == dict.fromkeys([("plain", False), ("Ours", True), ("Ours", False)])


@pytest.mark.parametrize("name", step.RECIPES)
def test_every_recipe_of_the_table_builds(name):
    assert (step.build_recipe(name).gemm == "native") == name.endswith(":native")


@pytest.mark.parametrize("name", TINY)
def test_a_size_counts_the_parameters_of_its_model(name):
    size = TINY[name]
    assert size.parameters() == sum(p.numel() for p in PlainGPT(size.model, size.vocabulary, size.context).parameters())


def test_sizes_are_those_that_are_compared():
    millions = {name: size.parameters() * 1e-6 for name, size in step.SIZES.items()}
    assert millions == pytest.approx({"S": 10.82, "M": 162.2, "L": 609.3, "moe": 97.3}, rel=1e-3)
    assert step.SIZES["M"].flop() == pytest.approx(26.15e12, rel=1e-3)


def test_floors_of_the_docstring():
    """64 tokens, D 64, F 192, V 96, two layers."""
    size = TINY["S"]
    norms, dim = 5, 64
    expected = {"norm": 28 * dim * norms, "positions": 20 * dim * 2, "activation": 16 * 192 * 2, "loss": 4 * 96}
    expected["embedding"] = 8 * dim
    assert elementwise_bytes(size) == {name: 64 * nbytes for name, nbytes in expected.items()}
    weights = 2 * (3 * dim * dim + dim * dim + 2 * 192 * dim + 192 * dim)
    inputs, outputs = 2 * (3 * dim + 192), 2 * (3 * dim + 2 * 192 + 2 * dim)
    nbytes, saved = quantize_bytes(size, step.build_recipe("mxfp8"))
    codes = 8.25 / 8
    quantized = 64 * inputs * (2 + 2 + 2 + 2 * codes) + 64 * outputs * 6 + weights * 8
    assert nbytes == pytest.approx(quantized + 96 * dim * 6)  # the head stays in bf16
    assert saved == 2 * 64 * 4 * (2 * dim + 192 + 2 * 192)
    nbytes, saved = quantize_bytes(size, step.build_recipe("nvfp4"))  # all read twice; 4.5 bits, and an amax for all
    quantized = 64 * inputs * (4 + 4 + 2 * 4.5 / 8) + 64 * outputs * 8 + weights * 12
    assert nbytes == pytest.approx(quantized + 96 * dim * 6, rel=1e-3) and saved == 0
    rows = {row["case"]: row for row in floor_rows(size, UNIT, 3.0, {"bf16": step.build_recipe("bf16")})}
    assert rows["linears"]["tflop"] == pytest.approx(6 * 64 * (weights + 96 * dim) * 1e-12)
    assert rows["attention"]["tflop"] == pytest.approx(3.5 * 2 * 64 * 32 * dim * 2 * 1e-12)
    parts = sum(rows[name]["floor_ms"] for name in rows if name != "whole step")
    assert rows["whole step"]["floor_ms"] == pytest.approx(parts) and rows["whole step"]["share"] == 1


def test_native_products_are_faster_and_decode_nothing():
    recipes = {name: step.build_recipe(name) for name in ("float8_block_scaling", "float8_block_scaling:native")}
    rows = [row for row in floor_rows(TINY["S"], UNIT, 100.0, recipes) if row["case"] == "whole step"]
    head = 96 / (96 + 2 * (4 * 64 + 3 * 192))  # of the FLOPs: it stays in bf16
    saved = 100.0 * (1 - head) / 2
    quantized = [quantize_bytes(TINY["S"], recipe)[0] * 1e-6 for recipe in recipes.values()]
    assert rows[0]["floor_ms"] - rows[1]["floor_ms"] == pytest.approx(saved + quantized[0] - quantized[1])
    assert quantized[1] < quantized[0] and rows[0]["share"] < 1


def test_products_of_a_size_are_all_timed():
    """Each shape is timed once, and counted as often as it occurs."""
    shapes = []

    def medians(calls):
        results = {name: call().shape for name, call in calls.items()}
        shapes.append(tuple(tuple(shape) for shape in results.values()))
        return dict.fromkeys(calls, 1e-3)

    assert products_ms(TINY["moe"], medians, "cpu") == pytest.approx(3 * len(list(TINY["moe"].products())))
    assert ((64, 96), (64, 64), (96, 64)) in shapes and len(shapes) == 5
    assert any(len(shape) == 3 and shape[0] == 4 for of_linear in shapes for shape in of_linear)


@pytest.mark.parametrize(("name", "conf"), [("S", "gpu_study"), ("moe", "moe_100m")])
def test_sizes_of_packaged_sweeps_are_theirs(name, conf):
    config = Composer(conf, [None]).compose([])
    size = step.SIZES[name]
    assert size.model == ModelConfig.model_validate(config["model"])
    assert (size.batch, size.context) == (config["train"]["batch"], config["train"]["context"])
