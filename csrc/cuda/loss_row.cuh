// A row of logits: its largest one and the sum of its exponentials, by the threads that read it together, and its
// softmax. A row of threads, threadIdx.y of a block, has one row of logits.
//
// Bits: the sums of a thread are in the order of its logits, those of a warp in that of a butterfly, those of warps in
// that of the warps; the number of threads of a row depends on the vocabulary alone.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/check.cuh"

namespace hq {
namespace {

constexpr int kWarp = 32;
constexpr int kMostThreads = 512;
constexpr unsigned kRowsOfBlock = 8;  // where a warp has a row
constexpr int kTogether = 4;  // loads of a thread that are on their way at once
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kInfinity = __builtin_huge_valf();

// 2^x to 2 units in the last place; results below 2^-126 are 0. NaN gives NaN.
__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The two logits of a word.
__device__ inline float low_of(uint32_t word) { return __uint_as_float(word << 16); }
__device__ inline float high_of(uint32_t word) { return __uint_as_float(word & 0xFFFF0000u); }

// The largest logit of those seen, and the sum of exp(x - largest). A NaN is in the sum, and never the largest.
struct Partial {
  float largest, sum;
};

// What is subtracted from logits: 0 where all of them are -inf, for -inf - -inf is NaN.
__device__ inline float base_of(float largest) { return largest == -kInfinity ? 0.0f : largest; }

// exp(x - base), whose difference is exact where it matters.
__device__ inline float exp_of(float x, float base) { return exp2_of((x - base) * kLog2E); }

// The sum of a part, under another largest logit.
__device__ inline float rescaled(Partial part, float largest) {
  return part.largest == largest ? part.sum : part.sum * exp_of(part.largest, largest);
}

__device__ inline float largest_of(const uint4& unit) {
  const float a = fmaxf(fmaxf(low_of(unit.x), high_of(unit.x)), fmaxf(low_of(unit.y), high_of(unit.y)));
  const float b = fmaxf(fmaxf(low_of(unit.z), high_of(unit.z)), fmaxf(low_of(unit.w), high_of(unit.w)));
  return fmaxf(a, b);
}

__device__ inline float sum_of(uint32_t word, float base) {
  return exp_of(low_of(word), base) + exp_of(high_of(word), base);
}

__device__ inline float sum_of(const uint4& unit, float base) {
  return (sum_of(unit.x, base) + sum_of(unit.y, base)) + (sum_of(unit.z, base) + sum_of(unit.w, base));
}

// The row's logits of one thread, units threadIdx.x, threadIdx.x + blockDim.x and so on; kept in `kept`, unless it is
// null.
__device__ inline Partial read_row(const uint4* row, int units, uint4* kept) {
  Partial part{-kInfinity, 0.0f};
  const int step = blockDim.x;
  for (int first = threadIdx.x; first < units; first += kTogether * step) {
    uint4 loaded[kTogether];
    float largest = part.largest;
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (first + i * step < units) loaded[i] = row[first + i * step];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (first + i * step < units) largest = fmaxf(largest, largest_of(loaded[i]));
    part = {largest, rescaled(part, largest)};
    const float base = base_of(largest);
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (first + i * step < units) {
        part.sum += sum_of(loaded[i], base);
        if (kept) kept[first + i * step] = loaded[i];
      }
  }
  return part;
}

// The parts of a row's threads together; each of them gets the same one, after all have come here. They are a warp, or
// a number of whole warps that are all of the block.
__device__ inline Partial of_row(Partial part) {
  __shared__ Partial of_warps[kMostThreads / kWarp];
  float largest = part.largest;
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lane));
  float sum = rescaled(part, largest);
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lane);
  if (blockDim.x == kWarp) {
    __syncwarp();
    return {largest, sum};
  }
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = {largest, sum};
  __syncthreads();
  const int warps = blockDim.x / kWarp;
  for (int w = 0; w < warps; ++w) largest = fmaxf(largest, of_warps[w].largest);
  sum = 0.0f;
  for (int w = 0; w < warps; ++w) sum += rescaled(of_warps[w], largest);
  return {largest, sum};
}

// What exponentials are multiplied by: 0 in a row without a loss, NaN in one whose target is no entry, so that of_target
// is NaN.
__device__ inline float factor_of(float factor, bool counted, float of_target) {
  if (!counted) return 0.0f;
  return of_target != of_target ? of_target : factor;
}

__device__ inline uint32_t rounded(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ inline uint32_t scaled_softmax(uint32_t word, float base, float factor) {
  return rounded(exp_of(low_of(word), base) * factor, exp_of(high_of(word), base) * factor);
}

// exp(x - base) * factor of a unit's logits, each rounded to bfloat16.
__device__ inline uint4 softmax_of(const uint4& unit, float base, float factor) {
  return {scaled_softmax(unit.x, base, factor), scaled_softmax(unit.y, base, factor),
          scaled_softmax(unit.z, base, factor), scaled_softmax(unit.w, base, factor)};
}

// The unit with its logit `at` (0 to 7) replaced.
__device__ inline uint4 replaced(uint4 unit, int at, __nv_bfloat16 by) {
  const uint32_t bits = __bfloat16_as_ushort(by);
  const auto in = [&](uint32_t word) { return at % 2 ? (word & 0xFFFFu) | bits << 16 : (word & 0xFFFF0000u) | bits; };
  return {at / 2 == 0 ? in(unit.x) : unit.x, at / 2 == 1 ? in(unit.y) : unit.y, at / 2 == 2 ? in(unit.z) : unit.z,
          at / 2 == 3 ? in(unit.w) : unit.w};
}

// So many threads of a row that each has kTogether loads, up to the most.
inline unsigned threads_for(int64_t units) {
  const int64_t threads = std::max<int64_t>((units + kTogether - 1) / kTogether, 1);
  return static_cast<unsigned>(std::min<int64_t>((threads + kWarp - 1) / kWarp * kWarp, kMostThreads));
}

// Rows of a block of so many threads a row.
inline unsigned rows_of_block(unsigned threads) { return threads == kWarp ? kRowsOfBlock : 1; }

constexpr int64_t kUnasked = 48 * 1024;  // bytes of shared memory that a kernel has without asking

// Whether a block of the kernel can have so many bytes of dynamic shared memory; where it has to ask for them, it asks for
// as much as there is, so that an SM has as many rows as fit.
template <class Kernel>
bool has_shared(Kernel kernel, int64_t bytes, const char* binding) {
  if (bytes <= kUnasked / 2) return true;  // beside what kernels have anyway
  int device = 0, most = 0;
  cudaFuncAttributes own;
  check(cudaGetDevice(&device), binding);
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), binding);
  check(cudaFuncGetAttributes(&own, kernel), binding);
  most -= static_cast<int>(own.sharedSizeBytes);
  if (bytes > most) return false;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), binding);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        binding);
  return true;
}

}  // namespace
}  // namespace hq
