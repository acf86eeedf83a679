// The expert of a thread block, found on the device from the offsets: no host needs to know them.
#pragma once
#include <cuda_runtime.h>

#include "group.h"
#include "quantize.h"

namespace hq {

// An expert, and the first row of the tile; rows is 0 where no expert has a tile of that number.
struct Member {
  Before before;
  int rows, r0;
};

__device__ __forceinline__ uint32_t up(int rows, int shift) {
  return static_cast<uint32_t>(rows + (1 << shift) - 1) >> shift;
}

// `offset`, or X's first or last edge for one outside of it: nothing else is ever read.
__device__ __forceinline__ int inside(int64_t offset, int rows_of_x) {
  const auto low = static_cast<uint32_t>(offset), rows = static_cast<uint32_t>(rows_of_x);
  const int high = static_cast<int>(offset >> 32);
  return static_cast<int>(high == 0 ? min(low, rows) : (high < 0 ? 0u : rows));
}

// The expert whose rows contain tile `wanted`, counted in tiles of 128 rows that restart at each expert. A whole warp, of
// which the lane that has the expert gets true and `member`. It goes through the experts 32 * kEach at a time, each lane
// with kEach neighbours. A tile's loads wait for this, so instructions count.
template <int kEach>
__device__ __forceinline__ bool search(const Group& group, const Units& units, int rows_of_x, uint32_t wanted,
                                       Member& member) {
  const int lane = threadIdx.x % 32, experts = static_cast<int>(group.experts);
  uint32_t tiles = 0, row_units = 0, column_units = 0;
  for (int first = 0; first < experts; first += 32 * kEach) {
    int edges[kEach + 1];
#pragma unroll
    for (int k = 0; k <= kEach; ++k)
      edges[k] = inside(__ldg(group.offsets + min(first + lane * kEach + k, experts)), rows_of_x);
    uint32_t counts[kEach], mine = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      counts[k] = up(max(edges[k + 1] - edges[k], 0), 7);
      mine += counts[k];
    }
    uint32_t sum = mine;  // and those of the lanes below
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    uint32_t at = tiles + sum - mine;
    bool found = false;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int rows = max(edges[k + 1] - edges[k], 0);
      const bool passed = at + counts[k] <= wanted;
      if (!passed && at <= wanted) {
        found = true;
        member = {{first + lane * kEach + k, edges[k], at, 0, 0}, rows, static_cast<int>(wanted - at) * kTile};
      }
      row_units += passed ? up(rows, units.row_shift) : 0;
      column_units += passed ? up(rows, units.column_shift) : 0;
      at += counts[k];
    }
    if (__any_sync(~0u, found)) {
      member.before.row_units = __reduce_add_sync(~0u, row_units);
      member.before.column_units = __reduce_add_sync(~0u, column_units);
      return found;
    }
    tiles += __shfl_sync(~0u, sum, 31);
  }
  member = {};
  return lane == 0;
}

__device__ __forceinline__ bool search(const Group& group, const Units& units, int64_t rows_of_x, uint32_t wanted,
                                       Member& member) {
  const int rows = static_cast<int>(rows_of_x);
  return group.experts <= 32 ? search<1>(group, units, rows, wanted, member)
                             : search<4>(group, units, rows, wanted, member);
}

// search() by the first warp, into a shared `member` that all threads may read after a barrier.
__device__ __forceinline__ void find_member(const Group& group, const Units& units, int64_t rows_of_x, uint32_t wanted,
                                            Member& member) {
  Member mine;
  if (search(group, units, rows_of_x, wanted, mine)) member = mine;
}

}  // namespace hq
