// Statistics of whole tiles of bf16, gathered beside the encoding in few instructions: a thread counts, and the thread
// block joins the counts in a fixed order.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "cuda/elements.cuh"
#include "cuda/scales.cuh"
#include "cuda/tile.cuh"
#include "quantize.h"

namespace hq {

// No statistics.
struct NoTally {
  static constexpr bool kWanted = false;
  template <int kCount>
  __device__ __forceinline__ void count_words(const uint32_t*) {}
  template <class Order, bool kFour>
  __device__ __forceinline__ void add(const float*, const float*, const uint32_t*, const BlockScale&, float,
                                      const ElementFacts&, int) {}
};

// Shared memory of a thread block for the statistics of one direction.
struct TallySpace {
  float errors[kTile][8];          // of the segments of each row: (x - q)^2
  TileSums warps[kThreads / 32];
};

// How many of the 16 codes are not 0.
template <bool kFour>
__device__ __forceinline__ uint32_t nonzero_codes(const uint32_t codes[kCodeWords<kFour>], uint32_t magnitude) {
  if constexpr (kFour) {
    uint32_t lowest = 0;  // bit 0 of each nibble: whether a magnitude bit is set
#pragma unroll
    for (int i = 0; i < 2; ++i) lowest |= ((codes[i] | codes[i] >> 1 | codes[i] >> 2) & 0x11111111u) << i;
    return __popc(lowest);
  } else {
    uint32_t highest = 0;  // bit 7 of each byte: adding 0x7F carries into it
#pragma unroll
    for (int i = 0; i < 4; ++i) highest |= (((codes[i] & magnitude) + 0x7F7F7F7Fu) & 0x80808080u) >> i;
    return __popc(highest);
  }
}

struct Tally {
  static constexpr bool kWanted = true;
  TallySpace& space;
  bool own;  // x2, nonzero and amax are to be found here; otherwise those of the rows serve
  float x2 = 0.0f, error2 = 0.0f, q2 = 0.0f, lost2 = 0.0f, amax = 0.0f;
  uint32_t nonzero = 0, kept = 0, saturated = 0;  // kept: codes that are not 0

  __device__ __forceinline__ Tally(TallySpace& space, bool own) : space(space), own(own) {}

  // Elements of the words of a group that are not 0.
  template <int kCount>
  __device__ __forceinline__ void count_words(const uint32_t* words) {
    if (!own) return;
    __nv_bfloat162 count = __float2bfloat162_rn(0.0f);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t word = words[i];
      count = __hadd2(count, __hneu2(reinterpret_cast<const __nv_bfloat162&>(word), __float2bfloat162_rn(0.0f)));
    }
    nonzero += static_cast<uint32_t>(__low2float(count) + __high2float(count));
  }

  // Segment q: its elements x, their decoded values v without scale, and the codes. most: at least the segment's amax,
  // and not beyond the tile's.
  template <class Order, bool kFour>
  __device__ __forceinline__ void add(const float x[kSegment], const float v[kSegment],
                                      const uint32_t codes[kCodeWords<kFour>], const BlockScale& scale, float most,
                                      const ElementFacts& facts, int q) {
    float errors = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kSegment; ++i) {
      const float d = __fmaf_rn(-v[i], scale.value, x[i]);
      errors = __fmaf_rn(d, d, errors);
      squares = __fmaf_rn(v[i], v[i], squares);
      lost2 = __fmaf_rn(v[i] == 0.0f ? x[i] : 0.0f, x[i], lost2);
    }
    error2 += errors;
    q2 = __fmaf_rn(squares * scale.value, scale.value, q2);
    kept += nonzero_codes<kFour>(codes, facts.six ? 0x1F1F1F1Fu : 0x7F7F7F7Fu);
    const float limit = scale.value * (facts.max * (1.0f + 0x1p-8f));
    if (most > limit) {
#pragma unroll
      for (int i = 0; i < kSegment; ++i) saturated += fabsf(x[i]) > limit;
    }
    if (own) {
      amax = fmaxf(amax, most);
#pragma unroll
      for (int i = 0; i < kSegment; ++i) x2 = __fmaf_rn(x[i], x[i], x2);
    }
    space.errors[Order::row(q)][Order::col(q) / kSegment] = errors;
  }

  // The warp's share, where finish() finds it.
  __device__ __forceinline__ void leave() const {
    float sums[4] = {x2, error2, q2, lost2};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      for (int distance = 16; distance > 0; distance /= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], distance);
    uint32_t counts[3] = {nonzero, kept, saturated};
#pragma unroll
    for (int i = 0; i < 3; ++i) counts[i] = __reduce_add_sync(~0u, counts[i]);
    const float most = to_float(__reduce_max_sync(~0u, to_bits(amax)));
    if (lane_of_warp() == 0)
      space.warps[warp_of_block()] = {sums[0], sums[1], sums[2], most, static_cast<float>(counts[0]),
                                      static_cast<float>(counts[1]), static_cast<float>(counts[2]), sums[3]};
  }
};

// Sums of a direction from what all warps have left (a barrier lies between), by one half of the thread block: thread t
// adds the errors of row t. rows: where the row direction's shares are, for what the tally did not own.
__device__ __forceinline__ void finish_tally(const TallySpace& mine, const TallySpace& owner, const Direction& to,
                                             int64_t tile, uint32_t row0, uint32_t col0, uint32_t cols, int t) {
  if (to.row_errors) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += mine.errors[t][i];
    to.row_errors[static_cast<uint64_t>(row0 + t) * (cols / kTile) + col0 / kTile] = sum;
  }
  if (!to.sums || t != 0) return;
  TileSums total{};
  for (int w = 0; w < kThreads / 32; ++w) {
    const TileSums &part = mine.warps[w], &source = owner.warps[w];
    total.x2 += source.x2, total.nonzero += source.nonzero, total.amax = fmaxf(total.amax, source.amax);
    total.error2 += part.error2, total.q2 += part.q2, total.saturated += part.saturated;
    total.lost2 += part.lost2;
    total.lost += source.nonzero - part.lost;  // a warp left the count of nonzero codes there
  }
  to.sums[tile] = total;
}

}  // namespace hq
