// Stores to rows that begin at any byte, as in the columnwise operand of an expert whose number of rows is no multiple of
// 16. Lanes hand the end of their piece to the next one, so that all but the ends of a line are aligned stores.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace hq {

template <int kUnit>
__device__ __forceinline__ void store_unit(uint8_t* to, const uint32_t words[kUnit]) {
  if constexpr (kUnit == 2)
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  else
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Bytes [from, until) of an aligned unit.
template <int kUnit>
__device__ __forceinline__ void store_part(uint8_t* to, const uint32_t words[kUnit], int from, int until) {
  const int front = from / 4, back = until / 4;
  uint32_t first = words[0], last = words[0];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (4 * i >= from && 4 * i + 4 <= until) *reinterpret_cast<uint32_t*>(to + 4 * i) = words[i];
    if (i == front) first = words[i];
    if (i == back) last = words[i];
  }
  if (from % 4)
#pragma unroll
    for (int j = 1; j < 4; ++j)
      if (j >= from % 4 && 4 * front + j < until) to[4 * front + j] = static_cast<uint8_t>(first >> 8 * j);
  if (from % 4 == 0 || back > front)
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (j < until % 4) to[4 * back + j] = static_cast<uint8_t>(last >> 8 * j);
}

// The pieces of a line, one in each of 8 lanes that are 4 apart. to: where the lane's own begins; bytes: how many it has
// inside of the line, all but for the line's end; more: whether the next lane has any. All lanes of the warp.
template <int kWords>
__device__ __forceinline__ void store_ragged(uint8_t* to, const uint32_t words[kWords], int bytes, bool more) {
  constexpr int unit = kWords < 4 ? kWords : 4, unit_bytes = 4 * unit, all = unit + kWords + unit;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) % unit_bytes);
  uint32_t shifted[all] = {};  // the end of the piece before, this one, and nothing, moved by `shift`
#pragma unroll
  for (int i = 0; i < unit; ++i) shifted[i] = __shfl_up_sync(~0u, words[kWords - unit + i], 4);
#pragma unroll
  for (int i = 0; i < kWords; ++i) shifted[unit + i] = words[i];
  if (bytes == 0) return;
  if (unit == 4) {
#pragma unroll
    for (int i = all - 1; i >= 2; --i) shifted[i] = shift & 8 ? shifted[i - 2] : shifted[i];
  }
#pragma unroll
  for (int i = all - 1; i >= 1; --i) shifted[i] = shift & 4 ? shifted[i - 1] : shifted[i];
#pragma unroll
  for (int i = all - 1; i >= 1; --i) shifted[i] = __funnelshift_l(shifted[i - 1], shifted[i], shift % 4 * 8);
  const int begin = threadIdx.x % 32 < 4 ? 0 : -shift, end = more ? 4 * kWords - shift : bytes;
#pragma unroll
  for (int i = 0; i <= kWords / unit; ++i) {
    const int at = i * unit_bytes - shift, from = max(begin - at, 0), until = min(end - at, unit_bytes);
    if (until - from == unit_bytes)
      store_unit<unit>(to + at, shifted + unit + i * unit);
    else if (from < until)
      store_part<unit>(to + at, shifted + unit + i * unit, from, until);
  }
}

}  // namespace hq
