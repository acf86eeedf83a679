// Scale of the tile that a thread's segment belongs to: amax over the threads that share the tile, then numerics.h.
#pragma once
#include <cuda_runtime.h>

#include "cuda_tile.cuh"
#include "numerics.h"
#include "quantize.h"
#include "segment.h"

namespace hq {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// Largest value over groups of `count` neighbouring lanes (a power of two).
__device__ inline int32_t largest_of_lanes(int32_t value, int first, int count) {
  for (int distance = first; distance < count; distance *= 2)
    value = max(value, __shfl_xor_sync(kFullWarp, value, distance));
  return value;
}

// amax of the scale tile of this thread. Tiles of one row live within 8 lanes; higher ones meet in shared memory. Every
// thread of the block takes part, with 0 for what lies outside the matrix.
template <int kRows>
__device__ float tile_amax(const Spec& spec, const Place& place, int32_t amax) {
  const int lanes = spec.tile_cols / kSegment;
  amax = largest_of_lanes(amax, 1, lanes);
  if (spec.tile_rows == 1) return to_float(static_cast<uint32_t>(amax));
  __shared__ int32_t tiles[kRows / 16 * kLanes];
  if (threadIdx.x < kRows / 16 * kLanes) tiles[threadIdx.x] = 0;
  __syncthreads();
  int32_t* mine = &tiles[place.r / spec.tile_rows * kLanes + place.segment / lanes];
  amax = largest_of_lanes(amax, kLanes, 32);  // the warp's 4 rows
  if (threadIdx.x % 32 < kLanes && place.segment % lanes == 0) atomicMax(mine, amax);
  __syncthreads();
  return to_float(static_cast<uint32_t>(*mine));
}

// 4over6 error of the scale tile: that of the segment, or of the 16 rows of a 16 x 16 tile added as a tree.
template <int kRows>
__device__ void tile_errors(const Spec& spec, const Place& place, float errors[2]) {
  if (spec.tile_rows == 1) return;
  __shared__ float rows[2][kRows][kLanes];
#pragma unroll
  for (int k = 0; k < 2; ++k) rows[k][place.r][place.segment] = errors[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float column[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) column[i] = rows[k][place.r / 16 * 16 + i][place.segment];
    errors[k] = sum_row_errors(column);
  }
}

// The scale that maps the amax to 6, or the one that maps it to 4 where that has strictly less error.
template <int kRows>
__device__ BlockScale four_over_six_scale(const Spec& spec, const Place& place, const float x[kSegment], float amax,
                                          float global_amax) {
  const float global_encode = nvfp4_global_scale(global_amax, 6.0f * spec.e4m3_max);
  BlockScale candidates[2];
  float errors[2] = {0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t code = nvfp4_candidate_scale(amax, global_encode, k ? 1.5f : 1.0f);
    candidates[k] = nvfp4_scale_of(code, global_encode);
    // Rows outside the matrix add 0, also when the global amax is infinite.
    if (place.count > 0) errors[k] = segment_error(x, candidates[k], global_amax, global_encode, spec);
  }
  tile_errors<kRows>(spec, place, errors);
  return errors[1] < errors[0] ? candidates[1] : candidates[0];
}

// One thread of each scale tile writes its scale.
__device__ inline void write_scale(const Spec& spec, const Source& source, const Place& place, const BlockScale& scale,
                                   void* scales) {
  const int lanes = spec.tile_cols / kSegment;
  const bool leads = place.segment % lanes == 0 && (spec.tile_rows == 1 || place.r % spec.tile_rows == 0);
  if (!scales || !leads || place.count == 0) return;
  const int64_t per_row = ceil_div(source.cols, spec.tile_cols);
  const int64_t tile_row = spec.tile_rows == 1 ? place.row : place.row / spec.tile_rows;
  const int64_t offset = tile_row * per_row + place.col / spec.tile_cols;
  if (spec.family == Family::block)
    static_cast<float*>(scales)[offset] = scale.decode;
  else
    static_cast<uint8_t*>(scales)[offset] = static_cast<uint8_t>(scale.code);
}

}  // namespace hq
