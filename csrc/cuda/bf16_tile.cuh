// A tile of bf16 words in shared memory, as the fast encoders use it: how it gets there and leaves, and which words a
// thread reads and writes.
#pragma once
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/tile.cuh"

namespace hq {

// A thread's words in shared memory: the two units of a segment of a row in each of four groups, 4 rows apart; or 16 rows
// of one word in each of two groups, whose units lie next to each other.
template <class Order>
struct FastWords {
  uint32_t* first;
  uint32_t* second;

  __device__ __forceinline__ explicit FastWords(uint32_t* tile) {
    if constexpr (std::is_same_v<Order, RowOrder>) {
      first = tile + word_offset<Bf16>(RowOrder::row(0), RowOrder::col(0) / 2);
      second = tile + word_offset<Bf16>(RowOrder::row(0), RowOrder::col(0) / 2 + 4);
    } else {
      first = tile + word_offset<Bf16>(ColumnOrder::col(0), ColumnOrder::row(0) / 2);
      second = tile + word_offset<Bf16>(ColumnOrder::col(0), ColumnOrder::row(2) / 2);
    }
  }
  // Segment k of group h of a column: 16 values where its elements came from.
  __device__ __forceinline__ void put(int h, int k, const uint32_t pairs[kSegment / 2]) const {
    uint16_t* to = reinterpret_cast<uint16_t*>(h ? second : first) + k;
#pragma unroll
    for (int i = 0; i < kSegment; ++i)
      to[i * 2 * kRowWords<Bf16>] = static_cast<uint16_t>(i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2]);
  }
  // Both segments of group h of a column: 16 words of two values each.
  __device__ __forceinline__ void put_pairs(int h, const uint32_t a[kSegment / 2], const uint32_t b[kSegment / 2]) const {
    uint32_t* to = h ? second : first;
#pragma unroll
    for (int i = 0; i < kSegment; ++i)
      to[i * kRowWords<Bf16>] = permute(a[i / 2], b[i / 2], i % 2 ? 0x7632 : 0x5410);
  }
  __device__ __forceinline__ void get(int h, uint32_t words[kGroupWords<Order, Bf16>]) const {
    if constexpr (std::is_same_v<Order, RowOrder>) {
      const int step = h * 4 * kRowWords<Bf16>;
      const uint4 front = *reinterpret_cast<const uint4*>(first + step);
      const uint4 back = *reinterpret_cast<const uint4*>(second + step);
      words[0] = front.x, words[1] = front.y, words[2] = front.z, words[3] = front.w;
      words[4] = back.x, words[5] = back.y, words[6] = back.z, words[7] = back.w;
    } else {
      const uint32_t* from = h ? second : first;
#pragma unroll
      for (int i = 0; i < kSegment; ++i) words[i] = from[i * kRowWords<Bf16>];
    }
  }
};

// A whole tile on its way to shared memory, past the L1 cache, in lines of 256 bytes: a warp loads the rows that it will
// read as rows. wait_tile() or wait_rows() comes before that, and a barrier before columns. The tile begins at a multiple
// of 128 bytes, so that a line lies in two of shared memory and not in parts of three (benchmarks/NOTES.md has times).
// kRagged: only `rows` rows and `cols` columns, in units of 8, are the matrix's; the others are zeros.
template <bool kRagged>
__device__ __forceinline__ void load_tile_async(const Source& source, uint32_t r0, uint32_t c0, uint32_t rows,
                                                uint32_t cols, uint32_t* tile) {
  const uint64_t pitch = static_cast<uint64_t>(source.row_stride) * 2;  // bytes
  const int row = warp_of_block() * 16 + lane_of_warp() / 16, unit = lane_of_warp() % 16;
  const char* from = static_cast<const char*>(source.data) + (r0 + row) * pitch + (c0 + unit * 8) * 2;
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(tile + word_offset<Bf16>(row, unit * 4)));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t target = to + i * 2 * kRowWords<Bf16> * 4;
    if constexpr (kRagged) {
      const bool inside = row + 2 * i < rows && unit * 8 < cols;  // nothing is read for 0 bytes; the address is still one of the tile's
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target),
                   "l"(inside ? from + i * 2 * pitch : static_cast<const char*>(source.data)), "r"(inside ? 16 : 0));
    } else {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from + i * 2 * pitch));
    }
    if (i % 2) asm volatile("cp.async.commit_group;");
  }
}

// Loads the `rows` rows and columns that are left at (r0, c0), at most as many as a tile has.
__device__ __forceinline__ void load_rest_async(const Source& source, uint32_t r0, uint32_t c0, uint32_t rows,
                                                uint32_t* tile) {
  const uint32_t cols = static_cast<uint32_t>(source.cols) - c0;
  if (rows < kTile || cols < kTile)
    load_tile_async<true>(source, r0, c0, rows, cols, tile);
  else
    load_tile_async<false>(source, r0, c0, rows, cols, tile);
}

__device__ __forceinline__ void wait_tile() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// Waits until group h of a thread's words of rows has arrived, and those before it.
__device__ __forceinline__ void wait_rows(int h) {
  switch (h) {
    case 0: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
  __syncwarp();
}

// Stores `rows` rows of the tile, as far as `cols`, to [.., pitch] at `to`, in lines of 256 bytes.
__device__ __forceinline__ void store_tile(const uint32_t* tile, uint16_t* to, uint64_t pitch, uint32_t rows,
                                           uint32_t cols) {
  const uint32_t row = warp_of_block() * 16 + lane_of_warp() / 16, unit = lane_of_warp() % 16;
  const uint32_t* from = tile + word_offset<Bf16>(row, unit * 4);
  to += row * pitch + unit * 8;
  if (unit * 8 >= cols) return;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (row + 2 * i < rows)
      *reinterpret_cast<uint4*>(to + 2 * i * pitch) = *reinterpret_cast<const uint4*>(from + i * 2 * kRowWords<Bf16>);
}

}  // namespace hq
