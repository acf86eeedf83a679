// The tile of 128 x 128 elements that a thread block holds, as the words of its rows: in shared memory, and in the two
// orders in which threads take segments of it. A warp covers 16 rows of an operand over the whole tile either way, and
// a thread 4 segments, so both orders serve the same code.
#pragma once
#include <cuda_runtime.h>

#include "cuda/words.cuh"
#include "quantize.h"

namespace hq {

constexpr int kThreads = 256;
constexpr int kSegments = 4;  // of a thread

__device__ __forceinline__ int warp_of_block() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_of_warp() { return threadIdx.x % 32; }

// Rows of X: 8 neighbouring threads share a row, and a warp reads 4 rows at a time.
struct RowOrder {
  static constexpr int kNext = 1;  // lanes to the next segment of a line
  static __device__ int row(int q) { return warp_of_block() * 16 + q * 4 + lane_of_warp() / 8; }
  static __device__ int col(int) { return lane_of_warp() % 8 * kSegment; }

  // Over `cols` elements of a row.
  template <class Join>
  static __device__ __forceinline__ float join_near(float value, int cols, Join join) {
    for (int distance = 1; distance < cols / kSegment; distance *= 2)
      value = join(value, __shfl_xor_sync(~0u, value, distance));
    return value;
  }
  // Over the 16 rows of the warp as a tree: rows 8, 4, 2 and 1 apart.
  template <class Join>
  static __device__ void join_rows(float values[kSegments], Join join) {
    float total = join(join(values[0], values[2]), join(values[1], values[3]));
    for (int distance = 16; distance >= 8; distance /= 2) total = join(total, __shfl_xor_sync(~0u, total, distance));
#pragma unroll
    for (int q = 0; q < kSegments; ++q) values[q] = total;
  }
};

// Rows of X.T, which are columns of X: a thread takes 2 neighbouring columns, 16 rows at a time; 8 threads with the same
// columns hold the operand's row over the whole tile, so that their stores join to lines of 128 bytes.
struct ColumnOrder {
  static constexpr int kNext = 4;
  static __device__ int row(int q) { return warp_of_block() * 16 + q / 2 * 8 + lane_of_warp() % 4 * 2 + q % 2; }
  static __device__ int col(int) { return lane_of_warp() / 4 * kSegment; }

  template <class Join>
  static __device__ __forceinline__ float join_near(float value, int cols, Join join) {
    for (int distance = 4; distance < cols / kSegment * 4; distance *= 2)
      value = join(value, __shfl_xor_sync(~0u, value, distance));
    return value;
  }
  template <class Join>
  static __device__ void join_rows(float values[kSegments], Join join) {
    float columns[2] = {join(values[0], values[2]), join(values[1], values[3])};
    for (int distance = 2; distance > 0; distance /= 2)
#pragma unroll
      for (int k = 0; k < 2; ++k) columns[k] = join(columns[k], __shfl_xor_sync(~0u, columns[k], distance));
    const float total = join(columns[0], columns[1]);
#pragma unroll
    for (int q = 0; q < kSegments; ++q) values[q] = total;
  }
};

struct Larger {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

// ---- shared memory -------------------------------------------------------------------------------------------------

template <class T>
constexpr int kRowWords = kTile / T::kPack;

template <class T>
constexpr int kTileBytes = kTile * kRowWords<T> * 4;

// Where word w of row r lies. Units of 16 bytes are swapped within their row so that neither the rows' 16-byte stores
// nor the columns' 4-byte loads meet in a bank.
template <class T>
__device__ __forceinline__ int word_offset(int r, int w) {
  constexpr int per_segment = 4 / T::kPack;  // units
  int unit = w / 4;
  unit ^= (unit >> 3) & (per_segment - 1);
  unit ^= (r >> 4) & 7;
  return r * kRowWords<T> + unit * 4 + w % 4;
}

template <class T>
__device__ __forceinline__ void put_segment(uint32_t* tile, int r, int c, const uint32_t words[kWords<T>]) {
#pragma unroll
  for (int i = 0; i < kWords<T>; i += 4)
    *reinterpret_cast<uint4*>(tile + word_offset<T>(r, c / T::kPack + i)) =
        make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
}

template <class T>
__device__ __forceinline__ void get_segment(const uint32_t* tile, int r, int c, uint32_t words[kWords<T>]) {
#pragma unroll
  for (int i = 0; i < kWords<T>; i += 4) {
    const uint4 unit = *reinterpret_cast<const uint4*>(tile + word_offset<T>(r, c / T::kPack + i));
    words[i] = unit.x, words[i + 1] = unit.y, words[i + 2] = unit.z, words[i + 3] = unit.w;
  }
}

// 16 words down a column of words, from row r.
template <class T>
__device__ __forceinline__ void get_column(const uint32_t* tile, int r, int w, uint32_t words[kSegment]) {
  const uint32_t* first = tile + word_offset<T>(r, w);  // r is a multiple of 16: the swap is the same for all 16 rows
#pragma unroll
  for (int i = 0; i < kSegment; ++i) words[i] = first[i * kRowWords<T>];
}

// The words that a thread works on at a time: one segment along a row, or 16 rows of a column of words.
template <class Order, class W>
constexpr int kGroups = std::is_same_v<Order, RowOrder> ? kSegments : kSegments / W::kPack;
template <class Order, class W>
constexpr int kGroupWords = std::is_same_v<Order, RowOrder> ? kWords<W> : kSegment;
template <class Order, class W>
constexpr int kGroupSegments = kSegments / kGroups<Order, W>;

template <class Order, class W>
__device__ __forceinline__ void get_group(const uint32_t* tile, int h, uint32_t words[kGroupWords<Order, W>]) {
  const int q = h * kGroupSegments<Order, W>;
  if constexpr (std::is_same_v<Order, RowOrder>)
    get_segment<W>(tile, Order::row(q), Order::col(q), words);
  else
    get_column<W>(tile, Order::col(q), Order::row(q) / W::kPack, words);
}

// Element i of segment k of a group.
template <class Order, class W>
__device__ __forceinline__ float value_of(const uint32_t words[kGroupWords<Order, W>], int k, int i) {
  if constexpr (std::is_same_v<Order, RowOrder>) return widen<W>(words[i / W::kPack], i % W::kPack);
  return widen<W>(words[i], k);
}

// ---- global memory -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float element_of(const Source& source, int64_t offset) {
  const void* data = source.data;
  switch (source.dtype) {
    case Dtype::fp32: return static_cast<const float*>(data)[offset];
    case Dtype::bf16: return bf16_to_float(static_cast<const uint16_t*>(data)[offset]);
    case Dtype::fp16: break;
  }
  return half_to_float(static_cast<const uint16_t*>(data)[offset]);
}

// A thread's segment of a row of X as words of W: Bf16 for bf16, Fp32 for all dtypes. Rows are contiguous and aligned.
template <class W>
__device__ __forceinline__ void load_segment(const Source& source, int64_t r, int64_t c, uint32_t words[kWords<W>]) {
  const int64_t offset = r * source.row_stride + c;
  if (std::is_same_v<W, Bf16> || source.dtype == Dtype::fp32) {
    const uint4* units = reinterpret_cast<const uint4*>(static_cast<const char*>(source.data) + offset * (4 / W::kPack));
#pragma unroll
    for (int i = 0; i < kWords<W> / 4; ++i) {
      const uint4 unit = __ldg(units + i);
      words[4 * i] = unit.x, words[4 * i + 1] = unit.y, words[4 * i + 2] = unit.z, words[4 * i + 3] = unit.w;
    }
  } else if constexpr (std::is_same_v<W, Fp32>) {
    const uint4* units = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(source.data) + offset);
#pragma unroll
    for (int i = 0; i < kSegment / 8; ++i) {
      const uint4 unit = __ldg(units + i);
      const uint32_t pairs[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
      for (int k = 0; k < 8; ++k)
        words[8 * i + k] = to_bits(source.dtype == Dtype::bf16 ? widen<Bf16>(pairs[k / 2], k % 2)
                                                              : widen<Fp16>(pairs[k / 2], k % 2));
    }
  }
}

// The whole tile at (r0, c0), 0 outside the matrix. vector: rows of X are contiguous and 16-byte aligned. What a thread
// reads back as its own segments of rows, it has put there itself, or has waited for.
template <class W>
__device__ __forceinline__ void load_tile(const Source& source, int64_t r0, int64_t c0, bool vector, uint32_t* tile) {
  if (vector && r0 + kTile <= source.rows && c0 + kTile <= source.cols) {
    uint32_t rows[kSegments][kWords<W>];
#pragma unroll
    for (int q = 0; q < kSegments; ++q)
      load_segment<W>(source, r0 + RowOrder::row(q), c0 + RowOrder::col(q), rows[q]);
#pragma unroll
    for (int q = 0; q < kSegments; ++q) put_segment<W>(tile, RowOrder::row(q), RowOrder::col(q), rows[q]);
    return;
  }
  const bool down = source.row_stride == 1 && source.col_stride != 1;  // neighbouring threads read neighbouring memory
#pragma unroll 1
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    const int r = down ? i % kTile : i / kTile, c = down ? i / kTile : i % kTile;
    const bool inside = r0 + r < source.rows && c0 + c < source.cols;
    const int64_t offset = (r0 + r) * source.row_stride + (c0 + c) * source.col_stride;
    const uint32_t bits = inside ? to_bits(element_of(source, offset)) : 0;
    uint32_t* word = tile + word_offset<W>(r, c / W::kPack);
    if constexpr (W::kPack == 1)
      *word = bits;
    else
      reinterpret_cast<uint16_t*>(word)[c % 2] = static_cast<uint16_t>(bits >> 16);
  }
  __syncthreads();
}

}  // namespace hq
