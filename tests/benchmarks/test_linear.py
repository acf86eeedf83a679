"""benchmarks/linear.py: the step it times, and how kernels are sorted."""

import json

import pytest
import torch

from benchmarks import linear
from benchmarks.timing import TURN, host_steps


def test_a_step_is_forward_and_backward_of_both():
    torch.manual_seed(0)
    step = linear.Step(32, 64, 96, "cpu")
    step.plain()
    expected = step.x.grad.clone()
    assert step.flops == 6 * 32 * 64 * 96
    step.hybrid("bf16", torch.bfloat16)()
    assert step.x.grad.shape == expected.shape and not torch.equal(step.x.grad, expected)  # its own weight


def test_every_recipe_builds_and_runs():
    step = linear.Step(128, 128, 256, "cpu")
    for recipe in linear.RECIPES.values():
        step.hybrid(recipe, torch.bfloat16)()
        assert step.x.grad.isfinite().all()


def test_kernels_are_sorted_by_what_they_do():
    times = [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 10.0),
        ("void hq::(anonymous namespace)::quantize_tiles<hq::E4M3>", 3.0),
        ("void at::native::vectorized_elementwise_kernel<4, mul>", 2.0),
        ("sm90_xmma_gemm_bf16bf16", 1.0),
    ]
    row = linear.breakdown(times)
    assert (row["gemm_us"], row["quantize_us"], row["other_us"]) == (11.0, 3.0, 2.0)
    assert row["other_kernels"] == "void at::native::vectorized_elementwise_kernel<4, mul> 2"


def test_the_hosts_time_of_every_recipe_is_a_row_on_the_cpu(tmp_path):
    out = tmp_path / "rows.jsonl"
    linear.main(["--device", "cpu", "--steps", "1", "--out", str(out), "--commit", "abc"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in rows] == list(linear.RECIPES)
    for row in rows:
        assert (row["section"], row["weight"], row["tokens"], row["in"], row["out"]) == ("host", "bfloat16", 64, 64, 64)
        assert 0 < row["host_us_p5"] <= row["host_us"] and 0 < row["torch_host_us_p5"] <= row["torch_host_us"]
        assert row["ratio"] == pytest.approx(row["host_us_p5"] / row["torch_host_us_p5"])


def test_steps_of_both_are_timed_in_turns():
    order = []
    times = host_steps({name: lambda name=name: order.append(name) for name in "ab"}, TURN + 1, "cpu")
    assert order == (["a"] * TURN + ["b"] * TURN) * 3  # the first turns warm up
    assert all(time.low <= time.median for time in times.values())


@pytest.mark.parametrize("sections", [["time"], ["time", "host"]])
def test_sections_of_a_gpu_are_refused_on_the_cpu(sections, capsys):
    with pytest.raises(SystemExit):
        linear.main(["--device", "cpu", "--only", *sections])
    assert "--device cpu has the section host alone" in capsys.readouterr().err
