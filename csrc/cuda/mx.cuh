// The encoder of MXFP8: E4M3 or E5M2 in blocks of 32 with scales rounded up, in few instructions. Two bf16 elements at a
// time until the conversion, scales of two blocks at a time in integers, and no code for other formats. It takes two
// thirds of the instructions of fast.cuh (benchmarks/NOTES.md) and gives the same bytes.
#pragma once
#include <cuda_runtime.h>

#include "cuda/choose.cuh"
#include "cuda/fast_body.cuh"
#include "cuda/job.cuh"

namespace hq {

// Thread blocks that fit an SM at a time, as far as registers go.
template <bool kExact, bool kRagged>
constexpr int kMxBlocks = kExact ? 4 : (kRagged ? 5 : 6);

// One direction of a launch as a thread block sees it, as in FastSide.
struct MxSide {
  const Direction& to;
  uint32_t row0, col0, cols, row_end, col_end;  // where the tile begins, and where its part of the operand ends
  uint64_t first, first_scale;

  __device__ __forceinline__ uint32_t scale_cols() const { return (cols + 31) / 32; }
};

// Scales of two blocks, in the halves of words: what multiplies elements and what multiplies codes back, in bf16; E8M0
// codes.
struct MxScales {
  uint32_t encode, exact, codes;
};

__host__ __device__ constexpr uint32_t both(uint32_t half) { return half * 0x10001u; }

// The power of two over amax / 448 is 2^8 (E5M2: 2^15) below that over the amax, where a mantissa of up to 1.75 belongs
// to the power below. In bf16 words: (amax + 0x1F) without mantissa, less 8 in the exponent; this equals mx_scale_up for
// every amax whose scale and reciprocal are normal numbers. False if a half is none of those.
template <bool kWide>
__device__ __forceinline__ bool near_scales(uint32_t amax, MxScales& scales) {
  constexpr uint32_t under = kWide ? both(15) : both(8), most = (253u << 7) - (under << 7 & 0xFFFFu);
  const uint32_t power = (amax + both(0x1F)) & both(0x7F80);
  scales.exact = power - (under << 7);
  scales.encode = both(254 << 7) - scales.exact;
  scales.codes = scales.exact >> 7;
  const uint32_t over = scales.exact - both(1 << 7);
  return (over & 0xFFFFu) <= most && over >> 16 <= most;
}

// The scales of any amaxes. NaN counts as 0.
__device__ __forceinline__ MxScales far_scales(float low, float high, const ElementFacts& facts) {
  const BlockScale a = mx_scale_up(low, facts), b = mx_scale_up(high, facts);
  return {permute(to_bits(a.encode), to_bits(b.encode), 0x7632), permute(to_bits(a.exact), to_bits(b.exact), 0x7632),
          a.code | b.code << 16};
}

// word * scale, element by element: exact, or too small for the element. A product of -0 stays one.
__device__ __forceinline__ uint32_t times(uint32_t word, uint32_t scale) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(scale), "r"(0x80008000u));
  return result;
}

__device__ __forceinline__ float low_half(uint32_t word) { return widen<Bf16>(word, 0); }
__device__ __forceinline__ float high_half(uint32_t word) { return widen<Bf16>(word, 1); }

// Codes times the scale of their block, as bf16 pairs.
__device__ __forceinline__ void exact_pairs(const uint32_t codes[4], bool wide, float scale, bool nan,
                                            uint32_t pairs[kSegment / 2]) {
  float v[kSegment];
  eight_values(wide, codes, v);
#pragma unroll
  for (int i = 0; i < kSegment; ++i) v[i] = __fmul_rn(v[i], scale);
  round_segment<Bf16>(v, nan, pairs);
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// The scales of a segment's block, whose other half the next or the previous lane has. nan: set if the block has one.
// inside: the segment is the operand's.
template <bool kWide>
__device__ __forceinline__ MxScales scales_of_row(const Direction& to, const uint32_t words[kWords<Bf16>],
                                                  const ElementFacts& facts, bool inside, bool& nan) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kWords<Bf16>; ++i) most = larger_or_nan<Bf16>(most, words[i]);
  most = larger_or_nan<Bf16>(most, __shfl_xor_sync(~0u, most, 1));
  most = larger_or_nan<Bf16>(most, permute(most, 0, 0x1032)) & both(0x7FFF);
  MxScales scales;
  if (__any_sync(~0u, !near_scales<kWide>(most, scales))) {
    const Largest found = largest<Bf16>(words, kWords<Bf16>);
    const float amax = RowOrder::join_near(fmaxf(found.of[0], found.of[1]), 32, Larger());
    scales = far_scales(amax, amax, facts);
    nan = found.nan;
    if (inside) note_seen(to, nan, amax);
  }
  return scales;
}

template <bool kWide>
__device__ __forceinline__ void codes_of_row(const uint32_t words[kWords<Bf16>], uint32_t encode, uint32_t codes[4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t a = times(words[2 * w], encode), b = times(words[2 * w + 1], encode);
    codes[w] = eight_codes(kWide, low_half(a), high_half(a), low_half(b), high_half(b));
  }
}

// replace: decoded values take the place of the elements they came from.
template <bool kWide, bool kExact, Part kPart>
__device__ __forceinline__ void encode_mx_rows(const MxSide& side, const ElementFacts& facts, bool replace,
                                               uint32_t* tile) {
  constexpr bool ragged = kPart == Part::ragged;
  using Order = RowOrder;
  if (ragged && side.row0 + warp_of_block() * 16 >= side.row_end) return;
  const Direction& to = side.to;
  const FastWords<Order> source(tile);
  const uint32_t row0 = side.row0 + Order::row(0), col = side.col0 + Order::col(0);
  uint64_t element = side.first + static_cast<uint64_t>(row0) * side.cols + col;
  uint8_t* scale_at = static_cast<uint8_t*>(to.scales);
  const bool leads = lane_of_warp() % 2 == 0 && (!kExact || scale_at);
  scale_at += side.first_scale + static_cast<uint64_t>(row0) * side.scale_cols() + col / 32;
#pragma unroll 1
  for (int h = 0; h < kSegments; ++h) {
    if (!kExact) wait_rows(h);
    uint32_t words[kWords<Bf16>];
    source.get(h, words);
    bool nan = false;
    const bool inside = !ragged || (row0 + 4 * h < side.row_end && col < side.col_end);
    const MxScales scales = scales_of_row<kWide>(to, words, facts, inside, nan);
    if (leads && inside) *scale_at = static_cast<uint8_t>(scales.codes);
    uint32_t codes[4];
    codes_of_row<kWide>(words, scales.encode, codes);
    if ((!kExact || to.codes) && inside) store_words<4>(to.codes + element, codes);
    if (kExact && (replace || to.exact)) {
      uint32_t pairs[kSegment / 2];
      exact_pairs(codes, kWide, low_half(scales.exact), nan, pairs);
      if (replace) put_segment<Bf16>(tile, Order::row(h), Order::col(h), pairs);
      if (to.exact) store_sectors<Order::kNext>(static_cast<uint16_t*>(to.exact) + element, pairs, inside);
    }
    element += 4 * static_cast<uint64_t>(side.cols);
    scale_at += 4 * side.scale_cols();
  }
}

// ---- columns -------------------------------------------------------------------------------------------------------

// A segment of a column; ragged ones from all lanes.
template <Part kPart, int kCount>
__device__ __forceinline__ void store_column(void* to, const uint32_t words[kCount], const MxSide& side) {
  if constexpr (kPart == Part::ragged) {
    const int left = static_cast<int>(side.cols - side.col0) - ColumnOrder::col(0);
    const bool more = lane_of_warp() < 28 && left > kSegment;
    store_ragged<kCount>(static_cast<uint8_t*>(to), words, min(max(left, 0), kSegment) * kCount / 4, more);
  } else {
    store_words<kCount>(to, words);
  }
}

template <Part kPart>
__device__ __forceinline__ void store_values(uint16_t* to, uint32_t pairs[kSegment / 2], const MxSide& side) {
  if constexpr (kPart == Part::ragged)
    store_column<kPart, kSegment / 2>(to, pairs, side);
  else
    store_sectors<ColumnOrder::kNext>(to, pairs, true);
}

template <bool kWide, bool kExact, Part kPart>
__device__ __forceinline__ void encode_mx_columns(const MxSide& side, const ElementFacts& facts, uint32_t* tile) {
  using Order = ColumnOrder;
  const Direction& to = side.to;
  const FastWords<Order> source(tile);
  const uint32_t row0 = side.row0 + Order::row(0), col = side.col0 + Order::col(0), scale_cols = side.scale_cols();
  if (kPart == Part::ragged && side.row0 + warp_of_block() * 16 >= side.row_end) return;
  const bool inside = kPart != Part::ragged || col < side.col_end;
  uint64_t element = side.first + static_cast<uint64_t>(row0) * side.cols + col;
  uint8_t* scale_at = static_cast<uint8_t*>(to.scales);
  const bool leads = lane_of_warp() % 8 < 4 && (!kExact || scale_at) && inside;
  scale_at += side.first_scale + static_cast<uint64_t>(row0) * scale_cols + col / 32;
#pragma unroll 1
  for (int h = 0; h < kGroups<Order, Bf16>; ++h) {
    uint32_t words[kSegment], most = 0;  // of two columns of X
    source.get(h, words);
#pragma unroll
    for (int i = 0; i < kSegment; ++i) most = larger_or_nan<Bf16>(most, words[i]);
    most = larger_or_nan<Bf16>(most, __shfl_xor_sync(~0u, most, 4)) & both(0x7FFF);
    MxScales scales;
    bool nan = false;
    const bool far = !near_scales<kWide>(most, scales);  // computed for lanes outside, too, which read `scales` below
    if (__any_sync(~0u, inside && far)) {
      const Largest found = largest<Bf16>(words, kSegment);
      const float low = Order::join_near(found.of[0], 32, Larger()), high = Order::join_near(found.of[1], 32, Larger());
      scales = far_scales(low, high, facts);
      nan = found.nan;
      if (inside) note_seen(to, nan, fmaxf(low, high));
    }
    if (leads) {
      scale_at[0] = static_cast<uint8_t>(scales.codes);
      scale_at[scale_cols] = static_cast<uint8_t>(scales.codes >> 16);
    }
    uint32_t low[4], high[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = times(words[4 * w + i], scales.encode);
      low[w] = eight_codes(kWide, low_half(y[0]), low_half(y[1]), low_half(y[2]), low_half(y[3]));
      high[w] = eight_codes(kWide, high_half(y[0]), high_half(y[1]), high_half(y[2]), high_half(y[3]));
    }
    if (!kExact || to.codes) {
      store_column<kPart, 4>(to.codes + element, low, side);
      store_column<kPart, 4>(to.codes + element + side.cols, high, side);
    }
    if (kExact && to.exact) {
      uint32_t a[kSegment / 2], b[kSegment / 2];
      exact_pairs(low, kWide, low_half(scales.exact), nan, a);
      exact_pairs(high, kWide, high_half(scales.exact), nan, b);
      if (kPart != Part::matrix && to.exact_turned) {
        source.put_pairs(h, a, b);
      } else {
        uint16_t* at = static_cast<uint16_t*>(to.exact) + element;
        store_values<kPart>(at, a, side);
        store_values<kPart>(at + side.cols, b, side);
      }
    }
    element += 8 * static_cast<uint64_t>(side.cols);
    scale_at += 8 * scale_cols;
  }
}

// ---- tiles ---------------------------------------------------------------------------------------------------------

// A tile of bf16, on its way to shared memory, in MXFP8. Rows are encoded as they arrive, four of a warp at a time.
// kExact: anything may be wanted that is decoded.
template <bool kExact, Part kPart>
__device__ __forceinline__ void run_mx_tile(const QuantizeJob& job, const FastTile& here, uint32_t* tile) {
  const FastCorner& at = here.at;
  const uint32_t cols = static_cast<uint32_t>(job.source.cols);
  if (kExact) wait_tile();
  if (job.has_row) {
    const MxSide row{job.row, at.r0, at.c0, cols, at.rows, at.end, at.first, here.row.first_scale};
    const bool replace = job.has_column && job.dequantized;
    job.row_facts.e5m2 ? encode_mx_rows<true, kExact, kPart>(row, job.row_facts, replace, tile)
                       : encode_mx_rows<false, kExact, kPart>(row, job.row_facts, replace, tile);
  }
  if (!job.has_column) return;
  wait_tile();
  __syncthreads();
  const MxSide column{job.column, at.c0, at.r0, at.rows, at.end, at.rows, at.first, here.column.first_scale};
  job.column_facts.e5m2 ? encode_mx_columns<true, kExact, kPart>(column, job.column_facts, tile)
                        : encode_mx_columns<false, kExact, kPart>(column, job.column_facts, tile);
  if constexpr (kExact && kPart != Part::matrix) {
    if (job.column.exact && job.column.exact_turned) store_turned(job, at, tile);
  }
}

// run_any_tile for MXFP8.
template <bool kExact>
__device__ __forceinline__ void run_any_mx_tile(const QuantizeJob& job, const FastTile& here, uint32_t* tile) {
  if (is_whole_tile(job, here.at))
    run_mx_tile<kExact, Part::whole>(job, here, tile);
  else
    run_mx_tile<kExact, Part::ragged>(job, here, tile);
}

}  // namespace hq
