// Rows of a norm: how the threads of a block share them, units of 4 elements, sums over a row.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "norm.h"

namespace hq {

constexpr int kNormThreads = 256;

// A row belongs to `threads` neighbouring threads of a block, 32 to 256 of them; unit `lane + k * threads` of a row is
// the k-th of the thread `lane`. A warp reads and writes lines without gaps: 512 bytes of fp32, 256 of bf16.
struct RowThreads {
  int threads, group, groups, lane;
};

__device__ __forceinline__ RowThreads row_threads(int threads) {
  const int thread = static_cast<int>(threadIdx.x);
  return {threads, thread / threads, kNormThreads / threads, thread % threads};
}

template <int kUnits>
using RowUnits = float[kUnits][kNormUnit];

__device__ __forceinline__ uint32_t two_bf16(float low, float high) {
  return static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

// As they are in memory: of bf16 the first two words of each unit.
template <int kUnits>
using RawUnits = uint32_t[kUnits][kNormUnit];

// Asks for the thread's units of one row of `units`, 0 beyond them; a row that is not there has 0 units. They are read by
// floats_of, so that all arrays of a row are asked for before the first is waited for.
template <int kUnits>
__device__ __forceinline__ void ask_for_row(const NormArray& from, int64_t row, int cols, int units,
                                            const RowThreads& own, RawUnits<kUnits>& to) {
  if (from.dtype == Dtype::fp32) {
    const uint4* line = reinterpret_cast<const uint4*>(static_cast<const float*>(from.data) + row * cols);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = own.lane + k * own.threads;
      const uint4 four = unit < units ? line[unit] : uint4{0, 0, 0, 0};
      to[k][0] = four.x, to[k][1] = four.y, to[k][2] = four.z, to[k][3] = four.w;
    }
  } else {
    const uint2* line = reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(from.data) + row * cols);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = own.lane + k * own.threads;
      const uint2 two = unit < units ? line[unit] : uint2{0, 0};
      to[k][0] = two.x, to[k][1] = two.y, to[k][2] = 0, to[k][3] = 0;
    }
  }
}

template <int kUnits>
__device__ __forceinline__ void floats_of(const RawUnits<kUnits>& raw, Dtype dtype, RowUnits<kUnits>& to) {
  if (dtype == Dtype::fp32) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
#pragma unroll
      for (int i = 0; i < kNormUnit; ++i) to[k][i] = __uint_as_float(raw[k][i]);
  } else {
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
#pragma unroll
      for (int i = 0; i < kNormUnit; ++i)
        to[k][i] = __uint_as_float(i % 2 ? raw[k][i / 2] & 0xFFFF0000u : raw[k][i / 2] << 16);
  }
}

__device__ __forceinline__ float rounded(float value, Dtype dtype) {
  return dtype == Dtype::fp32 ? value : __bfloat162float(__float2bfloat16_rn(value));
}

// Units of one row of bf16, as they are in memory.
template <int kUnits>
using Bf16Units = uint2[kUnits];

// Asks for the thread's units of one row of what a rank has, as ask_for_row does.
template <int kUnits>
__device__ __forceinline__ void ask_for_summand(const NormArray& from, const Summands& of, int rank, int64_t rows,
                                                int64_t row, int cols, int units, const RowThreads& own,
                                                Bf16Units<kUnits>& to) {
  const int64_t place = (rank < of.rank ? rank : rank - 1) * rows + row;
  const void* data = rank == of.rank ? from.data : of.received;
  const uint2* line = reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(data) +
                                                     (rank == of.rank ? row : place) * cols);
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int unit = own.lane + k * own.threads;
    to[k] = unit < units ? line[unit] : uint2{0, 0};
  }
}

__device__ __forceinline__ float bf16_of(const uint2& unit, int i) {
  const uint32_t word = i < 2 ? unit.x : unit.y;
  return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
}

// The thread's units of one row of a sum over ranks, of which what the first two have was asked for.
template <int kUnits>
__device__ __forceinline__ void summed_row(const NormArray& from, const Summands& of, const Bf16Units<kUnits> (&asked)[2],
                                           int64_t rows, int64_t row, int cols, int units, const RowThreads& own,
                                           RowUnits<kUnits>& to) {
#pragma unroll
  for (int k = 0; k < kUnits; ++k)
#pragma unroll
    for (int i = 0; i < kNormUnit; ++i) to[k][i] = __fadd_rn(bf16_of(asked[0][k], i), bf16_of(asked[1][k], i));
#pragma unroll 1
  for (int rank = 2; rank < of.ranks; ++rank) {
    Bf16Units<kUnits> next;
    ask_for_summand<kUnits>(from, of, rank, rows, row, cols, units, own, next);
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
#pragma unroll
      for (int i = 0; i < kNormUnit; ++i) to[k][i] = __fadd_rn(to[k][i], bf16_of(next[k], i));
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k)
#pragma unroll
    for (int i = 0; i < kNormUnit; ++i) to[k][i] = rounded(to[k][i], Dtype::bf16);
}

// A unit of gain or bias, which stay in the L1 cache.
__device__ __forceinline__ void load_unit(const float* from, int unit, int units, float (&to)[kNormUnit]) {
  const float4 four = unit < units ? __ldg(reinterpret_cast<const float4*>(from) + unit) : float4{0, 0, 0, 0};
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

template <int kUnits>
__device__ __forceinline__ void store_row(const RowUnits<kUnits>& from, int64_t row, int cols, int units,
                                          const RowThreads& own, const NormArray& to) {
  if (to.dtype == Dtype::fp32) {
    float4* line = reinterpret_cast<float4*>(static_cast<float*>(to.data) + row * cols);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = own.lane + k * own.threads;
      if (unit < units) line[unit] = float4{from[k][0], from[k][1], from[k][2], from[k][3]};
    }
  } else {
    uint2* line = reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(to.data) + row * cols);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = own.lane + k * own.threads;
      if (unit < units) line[unit] = uint2{two_bf16(from[k][0], from[k][1]), two_bf16(from[k][2], from[k][3])};
    }
  }
}

// The sum over the threads of a row, which all of them get: by halves in a warp, then warp by warp. All threads of the
// block call it together. shared: one float for each warp.
__device__ __forceinline__ float row_sum(float value, int threads, float* shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = __fadd_rn(value, __shfl_xor_sync(~0u, value, distance));
  if (threads == 32) return value;
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = threads / 32, first = warp / warps * warps;
  __syncthreads();  // the sum before this one has been read
  if (threadIdx.x % 32 == 0) shared[warp] = value;
  __syncthreads();
  float sum = shared[first];
  for (int i = 1; i < warps; ++i) sum = __fadd_rn(sum, shared[first + i]);
  return sum;
}

// An element of the norm's output, in fp32.
template <bool kCentred>
__device__ __forceinline__ float normalized(float x, float mean, float rstd) {
  return kCentred ? __fmul_rn(__fsub_rn(x, mean), rstd) : __fmul_rn(x, rstd);
}

}  // namespace hq
