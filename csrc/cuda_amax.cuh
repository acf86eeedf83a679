// The pass before the quantization that finds the amax it needs: of the whole matrix or of each row, after the Hadamard
// transform where there is one. NaN is ignored. Magnitudes order like their bits, so atomicMax on integers joins them.
#pragma once
#include <cuda_runtime.h>

#include "cuda_scales.cuh"
#include "cuda_tile.cuh"
#include "numerics.h"
#include "quantize.h"
#include "segment.h"

namespace hq {

constexpr int kAmaxRows = 32;

// amax[0], or amax[row] when row_scaled, must be 0 before.
__global__ void __launch_bounds__(kAmaxRows * kLanes)
    find_amax(const __grid_constant__ Spec spec, const __grid_constant__ Source source, Path path, int32_t* amax) {
  const Place place = locate<kAmaxRows>(source, path);
  float x[kSegment];
  load<kAmaxRows>(spec, source, path, place, x);
  int32_t mine = largest_of_lanes(segment_amax(x), 1, kLanes);
  if (spec.row_scaled) {
    if (place.segment == 0 && place.count > 0) atomicMax(amax + place.row, mine);
    return;
  }
  __shared__ int32_t block;
  if (threadIdx.x == 0) block = 0;
  __syncthreads();
  mine = largest_of_lanes(mine, kLanes, 32);
  if (threadIdx.x % 32 == 0) atomicMax(&block, mine);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(amax, block);
}

// The last step of current scaling: its amax was read from `amax`, which may be where scale_inv goes.
__global__ void finish_current(const __grid_constant__ Spec spec, float element_max, const float* amax,
                               float* scale_inv) {
  *scale_inv = 1.0f / fp8_scale(*amax, element_max, spec.amax_epsilon, spec.pow2, kFloatMax);
}

}  // namespace hq
