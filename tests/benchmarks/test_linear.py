"""benchmarks/linear.py: the step it times, and how kernels are sorted."""

import torch

from benchmarks import linear


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
