// The largest magnitude of memory that lies in one piece, and of transformed columns, at the speed of reading.
#pragma once
#include <cuda_runtime.h>

#include "cuda/direction.cuh"
#include "cuda/words.cuh"

namespace hq {

constexpr int kAmaxThreads = 512;
constexpr int kAmaxUnits = 8;  // 16-byte loads in flight in a thread

// found = max(found, the largest of all threads of the block). warps: shared memory for one value of each warp. seen: of
// the direction, or null.
__device__ __forceinline__ void raise_together(float most, float* warps, int count, float* found,
                                               int32_t* seen = nullptr) {
  for (int distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < count; ++w) most = fmaxf(most, warps[w]);
  raise(found, most, seen);
}

// found = max(found, amax of units first, first + step, ... below `units`), of 16 bytes each. The whole thread block
// takes part, and neighbouring threads have neighbouring `first`.
template <class T>
__device__ __forceinline__ void raise_to_amax(const uint4* data, int64_t first, int64_t units, int64_t step,
                                              float* found, int32_t* seen) {
  float most = 0.0f;
  for (; first < units; first += kAmaxUnits * step) {
    uint32_t words[4 * kAmaxUnits];
#pragma unroll
    for (int i = 0; i < kAmaxUnits; ++i) {
      const int64_t unit = first + i * step;
      const uint4 loaded = unit < units ? __ldg(data + unit) : make_uint4(0, 0, 0, 0);
      words[4 * i] = loaded.x, words[4 * i + 1] = loaded.y, words[4 * i + 2] = loaded.z, words[4 * i + 3] = loaded.w;
    }
    const Largest part = largest<T>(words, 4 * kAmaxUnits);
    most = fmaxf(most, fmaxf(part.of[0], part.of[1]));
  }
  __shared__ float warps[kAmaxThreads / 32];
  raise_together(most, warps, kAmaxThreads / 32, found, seen);
}

// The amax of `units` times 16 bytes.
template <class T>
__global__ void __launch_bounds__(kAmaxThreads) find_flat(const uint4* data, int64_t units, float* found,
                                                          int32_t* seen) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kAmaxThreads;
  raise_to_amax<T>(data, static_cast<int64_t>(blockIdx.x) * kAmaxThreads + threadIdx.x, units, step, found, seen);
}

// The largest magnitude of 16 elements of a column, half `half` of words `step` apart, after the random Hadamard transform,
// not rounded yet. flipped: the factor of those whose sign changes.
__device__ __forceinline__ float transformed_amax(const uint32_t* words, int step, int half, float flipped) {
  float v[kSegment], most = 0.0f;
#pragma unroll
  for (int i = 0; i < kSegment; ++i)
    v[i] = __fmul_rn(widen<Bf16>(words[i * step], half), (kRhtSignMask >> i) & 1u ? flipped : 0.25f);
  butterfly16(v);
#pragma unroll
  for (int i = 0; i < kSegment; ++i) most = fmaxf(most, fabsf(v[i]));
  return most;
}

// The amax of the columns of a bf16 matrix after the random Hadamard transform of each 16 elements, rounded to bf16, and
// (row_found) that of its own elements, from one read of it: 2 bytes an element, and 7 instructions. A thread takes units
// of 16 rows and 4 columns; neighbouring threads take neighbouring columns. across: units in a row; pitch: from a row to
// the next, in units' widths. Rounding keeps order, so the largest value is rounded and not each; NaN counts as 0.
constexpr int kTransformThreads = 256;

static __global__ void __launch_bounds__(kTransformThreads, 4)
    find_transformed(const uint2* data, uint32_t units, uint32_t across, int64_t pitch, bool signs, float* row_found,
                     float* column_found) {
  const float flipped = signs ? -0.25f : 0.25f;
  float own = 0.0f, transformed = 0.0f;
  for (uint32_t unit = blockIdx.x * kTransformThreads + threadIdx.x; unit < units; unit += gridDim.x * kTransformThreads) {
    const uint32_t strip = unit / across;
    const uint2* from = data + static_cast<int64_t>(strip) * kSegment * pitch + (unit - strip * across);
    uint32_t words[2 * kSegment];
#pragma unroll
    for (int i = 0; i < kSegment; ++i) {
      const uint2 loaded = __ldg(from + i * pitch);
      words[2 * i] = loaded.x, words[2 * i + 1] = loaded.y;
    }
    if (row_found) {
      const Largest part = largest<Bf16>(words, 2 * kSegment);
      own = fmaxf(own, fmaxf(part.of[0], part.of[1]));
    }
#pragma unroll
    for (int column = 0; column < 4; ++column)
      transformed = fmaxf(transformed, transformed_amax(words + column / 2, 2, column % 2, flipped));
  }
  __shared__ float warps[2][kTransformThreads / 32];
  if (row_found) raise_together(own, warps[0], kTransformThreads / 32, row_found);
  raise_together(round_to_bf16(transformed), warps[1], kTransformThreads / 32, column_found);
}

}  // namespace hq
