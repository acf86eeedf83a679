// Cross entropy over a vocabulary. A row of threads, threadIdx.y of a block, has one row of logits, which it reads once
// and, for the gradient, writes once: 2 or 4 bytes a logit. The row waits in shared memory between the two passes over
// it (50,304 logits take 98 KiB, so that an SM of sm_90 has two rows); a row that does not fit is read a second time.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/check.cuh"
#include "cuda/loss_row.cuh"
#include "loss.h"

namespace hq {
namespace {

__device__ __nv_bfloat162 magnitudes(uint32_t word) { return __habs2(*reinterpret_cast<const __nv_bfloat162*>(&word)); }

// The largest magnitudes of both halves of words, NaN aside.
__device__ __nv_bfloat162 most_of(__nv_bfloat162 most, const uint4& unit) {
  most = __hmax2(__hmax2(most, magnitudes(unit.x)), magnitudes(unit.y));
  return __hmax2(__hmax2(most, magnitudes(unit.z)), magnitudes(unit.w));
}

// amax = max(amax, those of a warp). Most calls change nothing and only look.
__device__ void raise(float* amax, __nv_bfloat162 most) {
  float value = fmaxf(__low2float(most), __high2float(most));
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, lane));
  if (threadIdx.x % kWarp == 0 && value > *static_cast<volatile float*>(amax))
    atomicMax(reinterpret_cast<int*>(amax), __float_as_int(value));
}

template <bool kStaged>
__global__ void __launch_bounds__(kMostThreads, 2) cross_entropy(const __grid_constant__ CrossEntropy call) {
  extern __shared__ uint4 staged[];
  const int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (r >= call.rows) return;  // a warp of a block whose warps do not wait for each other
  const int64_t target = call.targets[r];
  const int units = static_cast<int>(call.vocabulary / kLogitsOfLoad);
  __nv_bfloat16* logits = static_cast<__nv_bfloat16*>(call.logits) + r * call.vocabulary;
  uint4* row = reinterpret_cast<uint4*>(logits);
  uint4* kept = kStaged ? staged + threadIdx.y * units : row;
  const bool counted = target != kIgnored, known = target >= 0 && target < call.vocabulary;
  // Before of_row, behind which the row is overwritten.
  const float of_target = known ? __bfloat162float(logits[target]) : __uint_as_float(0x7FC00000u);

  const Partial whole = of_row(read_row(row, units, kStaged ? kept : nullptr));
  if (threadIdx.x == 0) call.losses[r] = counted ? logf(whole.sum) + (whole.largest - of_target) : 0.0f;
  if (!call.gradient) return;
  const float scale = *call.scale, base = base_of(whole.largest);
  const float factor = factor_of(scale / whole.sum, counted, of_target);
  const float at_target = (exp_of(of_target, base) / whole.sum - 1.0f) * scale;
  const int64_t target_unit = known ? target / kLogitsOfLoad : -1;
  __nv_bfloat162 most = __float2bfloat162_rn(0.0f);
  for (int u = threadIdx.x; u < units; u += blockDim.x) {
    uint4 gradient = softmax_of(kept[u], base, factor);
    if (u == target_unit)
      gradient = replaced(gradient, static_cast<int>(target % kLogitsOfLoad), __float2bfloat16_rn(at_target));
    row[u] = gradient;
    if (call.amax) most = most_of(most, gradient);
  }
  if (call.amax) raise(call.amax, most);
}

__device__ void put(float value, float& out) { out = value; }
__device__ void put(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }
__device__ float get(float value) { return value; }
__device__ float get(__nv_bfloat16 value) { return __bfloat162float(value); }

constexpr int kScaleThreads = 256;
constexpr int kScaleBlocks = 2048;

// Whole words of 16 bytes first (there are `words`, and `count` values in all), then what is left of them.
template <class Value>
__global__ void __launch_bounds__(kScaleThreads) scale_values(Value* values, int64_t words, int64_t count,
                                                              const float* factor) {
  constexpr int kOfWord = 16 / static_cast<int>(sizeof(Value));
  const float by = *factor;
  if (by == 1.0f) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kScaleThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kScaleThreads;
  for (int64_t w = first; w < words; w += step) {
    alignas(16) Value word[kOfWord];
    *reinterpret_cast<uint4*>(word) = reinterpret_cast<const uint4*>(values)[w];
#pragma unroll
    for (int i = 0; i < kOfWord; ++i) put(get(word[i]) * by, word[i]);
    reinterpret_cast<uint4*>(values)[w] = *reinterpret_cast<const uint4*>(word);
  }
  for (int64_t i = words * kOfWord + first; i < count; i += step) put(get(values[i]) * by, values[i]);
}

template <class Value>
void launch_scale(const Scaling& call, cudaStream_t stream) {
  constexpr int64_t kOfWord = 16 / static_cast<int64_t>(sizeof(Value));
  Value* values = static_cast<Value*>(call.values);
  const int64_t words = reinterpret_cast<uintptr_t>(values) % 16 == 0 ? call.count / kOfWord : 0;
  const int64_t items = std::max(words, call.count - words * kOfWord);
  const int64_t blocks = std::min<int64_t>((items + kScaleThreads - 1) / kScaleThreads, kScaleBlocks);
  if (blocks == 0) return;
  scale_values<<<static_cast<unsigned>(blocks), kScaleThreads, 0, stream>>>(values, words, call.count, call.factor);
  check(cudaGetLastError(), "scale_values_cuda");
}

}  // namespace

void cross_entropy_cuda(const CrossEntropy& call, uintptr_t stream) {
  if (call.rows == 0) return;
  const int64_t units = call.vocabulary / kLogitsOfLoad;
  const unsigned threads = threads_for(units), rows = rows_of_block(threads);
  const int64_t bytes = rows * units * static_cast<int64_t>(sizeof(uint4));
  const unsigned grid =
      grid_of((call.rows + rows - 1) / rows, "cross_entropy_cuda", "there are too many rows for one launch");
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  if (call.gradient && has_shared(cross_entropy<true>, bytes, "cross_entropy_cuda")) {
    cross_entropy<true><<<grid, dim3(threads, rows), static_cast<size_t>(bytes), queue>>>(call);
  } else {
    cross_entropy<false><<<grid, dim3(threads, rows), 0, queue>>>(call);
  }
  check(cudaGetLastError(), "cross_entropy_cuda");
}

void scale_values_cuda(const Scaling& call, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  if (call.dtype == Dtype::bf16) return launch_scale<__nv_bfloat16>(call, queue);
  launch_scale<float>(call, queue);
}

}  // namespace hq
