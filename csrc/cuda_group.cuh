// Which expert a thread block works for, found on the device from the offsets: no host needs to know them.
#pragma once
#include <cuda_runtime.h>

#include "group.h"
#include "quantize.h"

namespace hq {

// An expert, and the first row of the tile. rows 0: no expert has a tile of that number.
struct Member {
  Before before;
  int rows, r0;
};

constexpr int kPerLane = 4;  // experts

__device__ __forceinline__ uint32_t up(int rows, int shift) {
  return static_cast<uint32_t>(rows + (1 << shift) - 1) >> shift;
}

// The expert whose rows contain tile `wanted`, counted in tiles of 128 rows that restart at each expert. A whole warp. It
// goes through the experts 128 at a time, each lane with 4 neighbours. Offsets outside of X are moved into it, so that
// none of them leads to memory that is not the call's.
__device__ __forceinline__ void find_member(const Group& group, const Units& units, int64_t rows_of_x, uint32_t wanted,
                                            Member& member) {
  const int lane = threadIdx.x % 32;
  uint32_t tiles = 0;
  int64_t row_units = 0, column_units = 0;
  for (int64_t first = 0; first < group.experts; first += 32 * kPerLane) {
    int edges[kPerLane + 1];
#pragma unroll
    for (int k = 0; k <= kPerLane; ++k) {
      const int64_t at = min(first + lane * kPerLane + k, group.experts);
      edges[k] = static_cast<int>(min(max(__ldg(group.offsets + at), int64_t{0}), rows_of_x));
    }
    uint32_t counts[kPerLane], mine = 0;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      counts[k] = up(max(edges[k + 1] - edges[k], 0), 7);
      mine += counts[k];
    }
    uint32_t below = mine;  // of this lane and those below, then of those below
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, below, distance);
      if (lane >= distance) below += other;
    }
    const uint32_t all = __shfl_sync(~0u, below, 31);
    below += tiles - mine;
    uint32_t sum = below, row_part = 0, column_part = 0, before = below;
    int expert = kPerLane;  // of this lane: the first that `wanted` does not lie beyond
#pragma unroll
    for (int k = kPerLane - 1; k >= 0; --k) {
      uint32_t until = below;
#pragma unroll
      for (int j = 0; j <= k; ++j) until += counts[j];
      if (until > wanted) expert = k;
    }
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      sum += counts[k];
      if (k >= expert) continue;
      const int rows = max(edges[k + 1] - edges[k], 0);
      before = sum;
      row_part += up(rows, units.row_shift);
      column_part += up(rows, units.column_shift);
    }
    row_units += __reduce_add_sync(~0u, row_part);
    column_units += __reduce_add_sync(~0u, column_part);
    if (wanted < tiles + all) {
      int begin = edges[0], end = edges[1];
#pragma unroll
      for (int k = 1; k < kPerLane; ++k)
        if (k == expert) begin = edges[k], end = edges[k + 1];
      if (expert < kPerLane && below <= wanted)
        member = {{first + lane * kPerLane + expert, begin, before, row_units, column_units},
                  end - begin,
                  static_cast<int>(wanted - before) * kTile};
      return;
    }
    tiles += all;
  }
  if (lane == 0) member.rows = 0;
}

}  // namespace hq
