// The largest magnitude of memory that lies in one piece, at the speed of reading it.
#pragma once
#include <cuda_runtime.h>

#include "cuda/direction.cuh"
#include "cuda/words.cuh"

namespace hq {

constexpr int kAmaxThreads = 512;
constexpr int kAmaxUnits = 8;  // 16-byte loads in flight in a thread

// found = max(found, amax of units first, first + step, ... below `units`), of 16 bytes each. The whole thread block
// takes part, and neighbouring threads have neighbouring `first`.
template <class T>
__device__ __forceinline__ void raise_to_amax(const uint4* data, int64_t first, int64_t units, int64_t step,
                                              float* found) {
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
  for (int distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kAmaxThreads / 32; ++w) most = fmaxf(most, warps[w]);
  raise(found, most);
}

// The amax of `units` times 16 bytes.
template <class T>
__global__ void __launch_bounds__(kAmaxThreads) find_flat(const uint4* data, int64_t units, float* found) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kAmaxThreads;
  raise_to_amax<T>(data, static_cast<int64_t>(blockIdx.x) * kAmaxThreads + threadIdx.x, units, step, found);
}

}  // namespace hq
