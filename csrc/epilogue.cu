// The last step of a GEMM whose operands have a factor: out = fl(product * factor), rounded once to the output's dtype.
// One read and one write, where torch's broadcast multiplication is not vectorised.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "quantize.h"

namespace hq {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;

__device__ void put(float value, float& out) { out = value; }
__device__ void put(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }
__device__ void put(float value, __half& out) { out = __float2half_rn(value); }

// count is rows * cols. A thread takes 8 neighbouring elements, which lie in one row where cols is a multiple of 8.
template <class Out, bool kVector>
__global__ void __launch_bounds__(kThreads) scale_product(const float* product, const float* factor, int64_t count,
                                                          int64_t cols, int row_step, int col_step, Out* out) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPerThread;
  if (first >= count) return;
  if constexpr (kVector) {
    const int64_t row = (first >> 32) == 0 && (cols >> 32) == 0
                            ? static_cast<uint32_t>(first) / static_cast<uint32_t>(cols)
                            : first / cols;
    const int64_t col = first - row * cols;
    float values[kPerThread];
    *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(product + first);
    *reinterpret_cast<float4*>(values + 4) = *reinterpret_cast<const float4*>(product + first + 4);
    alignas(16) Out results[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      put(__fmul_rn(values[i], factor[row * row_step + (col + i) * col_step]), results[i]);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(results) / 16); ++i)
      reinterpret_cast<uint4*>(out + first)[i] = reinterpret_cast<const uint4*>(results)[i];
  } else {
    for (int64_t i = first; i < first + kPerThread && i < count; ++i)
      put(__fmul_rn(product[i], factor[i / cols * row_step + i % cols * col_step]), out[i]);
  }
}

template <class Out>
void launch(const float* product, const float* factor, int64_t rows, int64_t cols, int row_step, int col_step, void* out,
            cudaStream_t stream) {
  const int64_t count = rows * cols, grid = (count + kThreads * kPerThread - 1) / (kThreads * kPerThread);
  if (count == 0) return;
  const bool vector = cols % kPerThread == 0 && (reinterpret_cast<uintptr_t>(product) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
  const auto kernel = vector ? scale_product<Out, true> : scale_product<Out, false>;
  kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(product, factor, count, cols, row_step, col_step,
                                                              static_cast<Out*>(out));
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("hqsweep._C.scale_product_cuda: ") + cudaGetErrorString(status));
}

}  // namespace

void scale_product_cuda(const float* product, const float* factor, int64_t rows, int64_t cols, int row_step,
                        int col_step, void* out, Dtype out_dtype, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  switch (out_dtype) {
    case Dtype::fp32: return launch<float>(product, factor, rows, cols, row_step, col_step, out, queue);
    case Dtype::bf16: return launch<__nv_bfloat16>(product, factor, rows, cols, row_step, col_step, out, queue);
    case Dtype::fp16: return launch<__half>(product, factor, rows, cols, row_step, col_step, out, queue);
  }
}

}  // namespace hq
