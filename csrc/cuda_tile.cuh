// Where a thread's 16 elements lie, and how they reach its registers as fp32 whatever dtype and strides the source has.
// A thread block holds kRows rows x 128 columns: 8 neighbouring threads share a row, and a warp covers 4 rows.
#pragma once
#include <cuda_runtime.h>

#include "numerics.h"
#include "quantize.h"
#include "segment.h"

namespace hq {

constexpr int kWidth = 128;  // columns of a tile, a multiple of every block length
constexpr int kLanes = kWidth / kSegment;

// flat: threads count segments along rows, for scale tiles of one row and rows of whole tiles' width.
// tiled: thread blocks are tiles. staged: tiled and read through shared memory, for rows as the contiguous axis.
enum class Path { flat, tiled, staged };

struct Place {
  int64_t row, col;  // of the first element
  int count;         // elements inside the matrix: 0 to 16
  int r, segment;    // row and segment within the thread block's tile
};

struct Fp32 {
  float value;
  __device__ float widen() const { return value; }
};
struct Bf16 {
  uint16_t bits;
  __device__ float widen() const { return bf16_to_float(bits); }
};
struct Fp16 {
  uint16_t bits;
  __device__ float widen() const { return half_to_float(bits); }
};

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// a / b for non-negative numbers; 64-bit division costs several times the 32-bit one.
__device__ inline int64_t fast_divide(int64_t a, int64_t b) {
  return ((a | b) >> 32) == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

__device__ inline bool aligned16(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

template <int kRows>
__device__ Place locate(const Source& source, Path path) {
  Place place;
  place.r = threadIdx.x / kLanes;
  place.segment = threadIdx.x % kLanes;
  if (path == Path::flat) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (kRows * kLanes) + threadIdx.x;
    const int64_t per_row = source.cols / kSegment;
    place.row = fast_divide(index, per_row);
    place.col = (index - place.row * per_row) * kSegment;
  } else {
    // Neighbouring thread blocks read neighbouring memory.
    const uint32_t panels = static_cast<uint32_t>(ceil_div(source.rows, kRows));
    const uint32_t columns = static_cast<uint32_t>(ceil_div(source.cols, kWidth));
    const bool down = path == Path::staged;
    const uint32_t panel = down ? blockIdx.x % panels : blockIdx.x / columns;
    const uint32_t column = down ? blockIdx.x / panels : blockIdx.x % columns;
    place.row = static_cast<int64_t>(panel) * kRows + place.r;
    place.col = static_cast<int64_t>(column) * kWidth + place.segment * kSegment;
  }
  const int64_t left = source.cols - place.col;
  const int inside = left >= kSegment ? kSegment : (left > 0 ? static_cast<int>(left) : 0);
  place.count = place.row < source.rows ? inside : 0;
  return place;
}

// 16 aligned bytes, widened.
template <class T>
__device__ void load_chunk(const T* source, float* x) {
  const uint4 raw = *reinterpret_cast<const uint4*>(source);
  T items[16 / sizeof(T)];
  memcpy(items, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) x[i] = items[i].widen();
}

// Straight from global memory; elements outside the matrix are 0.
template <class T>
__device__ void load_direct(const Source& source, const Place& place, float x[kSegment]) {
  constexpr int kChunk = 16 / sizeof(T);
  const T* first = static_cast<const T*>(source.data) + place.row * source.row_stride + place.col * source.col_stride;
  if (place.count == kSegment && source.col_stride == 1 && aligned16(first)) {
#pragma unroll
    for (int i = 0; i < kSegment; i += kChunk) load_chunk(first + i, x + i);
  } else {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) x[i] = i < place.count ? first[i * source.col_stride].widen() : 0.0f;
  }
}

// Element (r, c) of a staged tile. Each segment of 16 columns is shifted by 4 banks, so that the 4 rows x 8 segments
// of a warp lie in 32 different banks; runs of 4 rows stay aligned for float4.
template <int kRows>
__device__ int staged_offset(int r, int c) { return c * kRows + c / kSegment * 4 + r; }

template <int kRows>
constexpr size_t staged_bytes() { return sizeof(float) * (kRows * kWidth + kLanes * 4); }

// Whole tile to shared memory by columns, which are contiguous in memory (row_stride 1), 16 bytes a load where aligned.
template <class T, int kRows>
__device__ void stage(const Source& source, int64_t row0, int64_t col0, float* tile) {
  constexpr int kChunk = 16 / sizeof(T), kPerColumn = kRows / kChunk;
#pragma unroll 4
  for (int i = threadIdx.x; i < kPerColumn * kWidth; i += kRows * kLanes) {
    const int c = i / kPerColumn, r = i % kPerColumn * kChunk;
    const int64_t left = col0 + c < source.cols ? source.rows - (row0 + r) : 0;
    const T* first = static_cast<const T*>(source.data) + (row0 + r) + (col0 + c) * source.col_stride;
    float x[kChunk];
    if (left >= kChunk && aligned16(first)) {
      load_chunk(first, x);
    } else {
#pragma unroll
      for (int j = 0; j < kChunk; ++j) x[j] = j < left ? first[j].widen() : 0.0f;
    }
    float4* to = reinterpret_cast<float4*>(tile + staged_offset<kRows>(r, c));
#pragma unroll
    for (int j = 0; j < kChunk; j += 4) to[j / 4] = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
  }
}

template <class T, int kRows>
__device__ void load_as(const Source& source, Path path, const Place& place, float x[kSegment]) {
  if (path != Path::staged) return load_direct<T>(source, place, x);
  extern __shared__ float4 staged_memory[];
  float* tile = reinterpret_cast<float*>(staged_memory);
  stage<T, kRows>(source, place.row - place.r, place.col - place.segment * kSegment, tile);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSegment; ++i) x[i] = tile[staged_offset<kRows>(place.r, place.segment * kSegment + i)];
}

// The thread's 16 elements, transformed if the format asks for it. Every thread of the block takes part.
template <int kRows>
__device__ void load(const Spec& spec, const Source& source, Path path, const Place& place, float x[kSegment]) {
  switch (source.dtype) {
    case Dtype::fp32: load_as<Fp32, kRows>(source, path, place, x); break;
    case Dtype::bf16: load_as<Bf16, kRows>(source, path, place, x); break;
    case Dtype::fp16: load_as<Fp16, kRows>(source, path, place, x); break;
  }
  if (spec.rht) transform_segment(x, spec.rht_sign);
}

}  // namespace hq
