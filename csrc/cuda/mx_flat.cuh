// MXFP8 of rows alone, of a matrix without gaps: blocks of 32 that no row ends in, whose codes and scales lie one after
// the other. So a thread block takes a piece of memory whatever the shape, and stores whole lines of scales, where a tile
// has 4 bytes of each row.
#pragma once
#include <cuda_runtime.h>

#include "cuda/job.cuh"
#include "cuda/mx.cuh"

namespace hq {

constexpr int kFlatWarp = 32 * kSegment * kSegments;  // elements
constexpr int kFlatBlock = kThreads / 32 * kFlatWarp;

// The scales of a warp's elements, `count` of them.
__device__ __forceinline__ void store_flat_scales(const uint8_t* staged, uint8_t* to, int64_t count) {
  constexpr int whole = kFlatWarp / 32;
  if (count >= whole && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    if (lane_of_warp() < whole / 16)
      reinterpret_cast<uint4*>(to)[lane_of_warp()] = reinterpret_cast<const uint4*>(staged)[lane_of_warp()];
    return;
  }
  for (int i = lane_of_warp(); i < whole && i < count; i += 32) to[i] = staged[i];
}

// A warp's elements, from `first` of `size`.
template <bool kWide, bool kExact>
__device__ __forceinline__ void encode_mx_flat(const Direction& to, const ElementFacts& facts, const uint16_t* x,
                                               int64_t first, int64_t size, uint4* units, uint8_t* staged) {
  const int lane = lane_of_warp();
  const auto place = [](int unit) { return unit ^ (unit >> 3 & 1); };  // so that no two lanes meet in a bank
#pragma unroll
  for (int i = 0; i < kFlatWarp / 8 / 32; ++i) {
    const int unit = i * 32 + lane;
    const int64_t at = first + unit * 8;
    const bool inside = at < size;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(units + place(unit)))),
                 "l"(x + (inside ? at : 0)), "r"(inside ? 16 : 0));
  }
  wait_tile();
#pragma unroll 1
  for (int h = 0; h < kSegments; ++h) {
    const int segment = h * 32 + lane;
    const uint4 front = units[place(2 * segment)], back = units[place(2 * segment + 1)];
    const uint32_t words[kWords<Bf16>] = {front.x, front.y, front.z, front.w, back.x, back.y, back.z, back.w};
    bool nan = false;
    const int64_t element = first + segment * kSegment;
    const bool inside = element < size;
    const MxScales scales = scales_of_row<kWide>(to, words, facts, inside, nan);
    if (lane % 2 == 0) staged[segment / 2] = static_cast<uint8_t>(scales.codes);
    uint32_t codes[4];
    codes_of_row<kWide>(words, scales.encode, codes);
    if ((!kExact || to.codes) && inside) store_words<4>(to.codes + element, codes);
    if (kExact && to.exact) {
      uint32_t pairs[kSegment / 2];
      exact_pairs(codes, kWide, low_half(scales.exact), nan, pairs);
      store_sectors<RowOrder::kNext>(static_cast<uint16_t*>(to.exact) + element, pairs, inside);
    }
  }
  __syncwarp();
  if (kExact && !to.scales) return;
  store_flat_scales(staged, static_cast<uint8_t*>(to.scales) + first / 32, (size - first) / 32);
}

template <bool kExact>
__global__ void __launch_bounds__(kThreads, kMxBlocks<kExact, false>)
    quantize_mx_flat(const __grid_constant__ QuantizeJob job) {
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ uint4 staged[kThreads / 32][kFlatWarp / 32 / 16];
  const Source& x = job.source;
  const int64_t size = x.rows * x.cols;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kFlatBlock + warp_of_block() * kFlatWarp;
  if (first >= size) return;
  uint4* units = shared + warp_of_block() * (kFlatWarp / 8);
  uint8_t* scales = reinterpret_cast<uint8_t*>(staged[warp_of_block()]);
  const uint16_t* data = static_cast<const uint16_t*>(x.data);
  job.row_facts.e5m2 ? encode_mx_flat<true, kExact>(job.row, job.row_facts, data, first, size, units, scales)
                     : encode_mx_flat<false, kExact>(job.row, job.row_facts, data, first, size, units, scales);
}

}  // namespace hq
