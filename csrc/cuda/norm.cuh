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

__device__ __forceinline__ void read_bf16(uint2 raw, float* to) {
  to[0] = __uint_as_float(raw.x << 16), to[1] = __uint_as_float(raw.x & 0xFFFF0000u);
  to[2] = __uint_as_float(raw.y << 16), to[3] = __uint_as_float(raw.y & 0xFFFF0000u);
}

__device__ __forceinline__ uint32_t two_bf16(float low, float high) {
  return static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

// The thread's units of one row of `units`, 0 beyond them; a row that is not there has 0 units.
template <int kUnits>
__device__ __forceinline__ void load_row(const NormArray& from, int64_t row, int cols, int units, const RowThreads& own,
                                         RowUnits<kUnits>& to) {
  if (from.dtype == Dtype::fp32) {
    const float4* line = reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + row * cols);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = own.lane + k * own.threads;
      const float4 four = unit < units ? line[unit] : float4{0.0f, 0.0f, 0.0f, 0.0f};
      to[k][0] = four.x, to[k][1] = four.y, to[k][2] = four.z, to[k][3] = four.w;
    }
  } else {
    const uint2* line = reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(from.data) + row * cols);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = own.lane + k * own.threads;
      read_bf16(unit < units ? line[unit] : uint2{0, 0}, to[k]);
    }
  }
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

__device__ __forceinline__ float rounded(float value, Dtype dtype) {
  return dtype == Dtype::fp32 ? value : __bfloat162float(__float2bfloat16_rn(value));
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
