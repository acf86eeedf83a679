// The last step of a GEMM whose operands have factors: out = fl(fl(product * before) * factor) in fp32, rounded once to the
// output's dtype. One read and one write, where torch's broadcast multiplication is not vectorised.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/check.cuh"
#include "quantize.h"

namespace hq {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;

__device__ float get(float value) { return value; }
__device__ float get(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void put(float value, float& out) { out = value; }
__device__ void put(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }
__device__ void put(float value, __half& out) { out = __float2half_rn(value); }

// count is rows * cols. A thread takes 8 neighbouring elements, which lie in one row where cols is a multiple of 8.
template <class In, class Out, bool kVector>
__global__ void __launch_bounds__(kThreads) scale_product(const In* product, float before, const float* factor,
                                                          int64_t count, int64_t cols, int row_step, int col_step,
                                                          Out* out) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPerThread;
  if (first >= count) return;
  if constexpr (kVector) {
    const int64_t row = (first >> 32) == 0 && (cols >> 32) == 0
                            ? static_cast<uint32_t>(first) / static_cast<uint32_t>(cols)
                            : first / cols;
    const int64_t col = first - row * cols;
    alignas(16) In values[kPerThread];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / 16); ++i)
      reinterpret_cast<uint4*>(values)[i] = reinterpret_cast<const uint4*>(product + first)[i];
    alignas(16) Out results[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      put(__fmul_rn(__fmul_rn(get(values[i]), before), factor[row * row_step + (col + i) * col_step]), results[i]);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(results) / 16); ++i)
      reinterpret_cast<uint4*>(out + first)[i] = reinterpret_cast<const uint4*>(results)[i];
  } else {
    for (int64_t i = first; i < first + kPerThread && i < count; ++i)
      put(__fmul_rn(__fmul_rn(get(product[i]), before), factor[i / cols * row_step + i % cols * col_step]), out[i]);
  }
}

template <class In, class Out>
void launch_scale_product(const Product& call, void* to, cudaStream_t stream) {
  const int64_t count = call.rows * call.cols, grid = (count + kThreads * kPerThread - 1) / (kThreads * kPerThread);
  if (count == 0) return;
  const In* product = static_cast<const In*>(call.product);
  Out* out = static_cast<Out*>(to);
  const uintptr_t together = reinterpret_cast<uintptr_t>(product) | reinterpret_cast<uintptr_t>(out);
  const bool vector = call.cols % kPerThread == 0 && together % 16 == 0;
  const auto kernel = vector ? scale_product<In, Out, true> : scale_product<In, Out, false>;
  kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(product, call.before, call.factor, count, call.cols,
                                                              call.row_step, call.col_step, out);
  check(cudaGetLastError(), "scale_product_cuda");
}

template <class In>
void launch_from(const Product& call, void* out, Dtype out_dtype, cudaStream_t stream) {
  switch (out_dtype) {
    case Dtype::fp32: return launch_scale_product<In, float>(call, out, stream);
    case Dtype::bf16: return launch_scale_product<In, __nv_bfloat16>(call, out, stream);
    case Dtype::fp16: return launch_scale_product<In, __half>(call, out, stream);
  }
}

}  // namespace

void scale_product_cuda(const Product& call, void* out, Dtype out_dtype, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  if (call.dtype == Dtype::bf16) return launch_from<__nv_bfloat16>(call, out, out_dtype, queue);
  launch_from<float>(call, out, out_dtype, queue);
}

}  // namespace hq
