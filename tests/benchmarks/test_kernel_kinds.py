"""benchmarks/kernel_kinds.py: which kernels are what, and what a row says of them."""

import pytest
import torch

from benchmarks.kernel_kinds import KINDS, Kernel, by_kind, kind, profile

NAMES = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "gemm",
    "void hq::(anonymous namespace)::quantize_tiles<hq::E4M3>(hq::QuantizeJob)": "quantize",
    "void hq::(anonymous namespace)::find_flat<__nv_bfloat16>(uint4 const*, long, float*)": "quantize",
    "void hq::(anonymous namespace)::scale_product<float, __nv_bfloat16>": "quantize",
    "void hq::cuda::(anonymous namespace)::norm_forward<float, 768>": "elementwise",
    "void hq::cuda::swiglu_quantize_mx<hq::E4M3>": "quantize",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_f16": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>": "optimizer",
    "triton_poi_fused__to_copy_mul_silu_3": "elementwise",
    "triton_poi_fused__scaled_dot_product_flash_attention_view_4": "elementwise",
    "void at::native::vectorized_elementwise_kernel<4, mul>": "elementwise",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": "copies",
}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_sorted_by_what_they_do(name):
    assert kind(name) == NAMES[name]


def test_a_row_has_all_kinds_and_names_the_longest():
    kernels = [Kernel(name, 1.0 + i, 2.0) for i, name in enumerate(NAMES)]
    row = by_kind(kernels)
    assert sum(row[f"{name}_ms"] for name in KINDS) == row["device_ms"] == sum(k.ms for k in kernels)
    assert row["kernels"] == 2 * len(NAMES) and row["gemm_ms"] == 3.0
    assert row["longest"].startswith("1.00 ms x2 nvjet") and len(row["longest"].split("; ")) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_profile_has_what_ran(graph):
    x = torch.randn(512, 512, device="cuda")

    def step():
        return (x @ x).add_(1)

    step()
    call = step
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            step()
        call = recorded.replay
    kernels, launches = profile(call)
    assert {kind(k.name) for k in kernels} >= {"gemm", "elementwise"} and all(k.ms > 0 for k in kernels)
    assert launches == 1 if graph else launches >= 2
