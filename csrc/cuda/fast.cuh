// The fast encoder: a direction with what training needs and nothing else. A whole tile of bf16 words, aligned outputs,
// no NVFP4 with an amax per row, MX scales rounded up. The kind of the format is compiled in, and the loop over a thread's
// four segments stays a loop, because the code of two directions must fit the instruction cache (benchmarks/NOTES.md).
// The bytes are those of direction.cuh.
#pragma once
#include <cuda_runtime.h>

#include "cuda/direction.cuh"
#include "cuda/bf16_tile.cuh"
#include "cuda/ragged.cuh"
#include "cuda/tally.cuh"

namespace hq {

enum class Kind { current, row, block, mx_eight, mx_four, nvfp4, nvfp4_stochastic, nvfp4_four_over_six };

// matrix: a tile of a matrix that has only whole tiles. whole: a whole tile of other rows, where the last blocks of
// columns may be parts, and exact columns may be stored by rows. ragged: a tile that ends early, or whose columns begin
// at any byte.
enum class Part { matrix, whole, ragged };

// current: one scale. row: one of each row. Both come from amaxes that are known, and no tile stores them.
template <Kind kKind>
constexpr bool kCurrent = kKind == Kind::current || kKind == Kind::row;
template <Kind kKind>
constexpr bool kNvfp4 = kKind == Kind::nvfp4 || kKind == Kind::nvfp4_stochastic || kKind == Kind::nvfp4_four_over_six;
template <Kind kKind>
constexpr bool kFourBits = kKind == Kind::mx_four || kNvfp4<kKind>;
template <Kind kKind>
constexpr int kBlock = kNvfp4<kKind> ? 16 : (kKind == Kind::block ? kTile : 32);

// NVFP4: the factor of elements for each code of a block scale, so that no division is left in the loops.
struct Nvfp4Scales {
  float encode[128];
  GlobalScale global;
};

__device__ __forceinline__ void fill_scales(const float* amax, const Spec& spec, Nvfp4Scales& scales, int code) {
  const GlobalScale global = nvfp4_global(*amax, spec);
  scales.encode[code] = nvfp4_encode_scale(e4m3_value(code), global.decode);
  if (code == 0) scales.global = global;
}

// One direction of a launch as a thread block sees it. cols: of the operand, whose tile begins at (row0, col0).
struct FastSide {
  const Direction& to;
  const ElementFacts& facts;
  uint32_t row0, col0, cols;
  const Nvfp4Scales& scales;
  const float (*strips)[8];  // amaxes of 16 x 16 elements of the tile of X, for scale tiles of several rows
  bool tile_nan;             // with strips: the tile has a NaN
  bool replace;              // decoded rows take the place of the elements they came from
  const float* amax;         // global
  uint32_t row_end, col_end;    // of the operand's part that the tile may reach into
  Key key;
  uint64_t first, first_scale;  // where its part of a group's outputs begins
};

// ---- scale tiles of several rows -----------------------------------------------------------------------------------

// Amaxes of the strips of 16 x 16 elements in the rows that a thread has put; whether the tile has a NaN. All threads.
__device__ __forceinline__ bool find_strips(uint32_t* tile, float strips[8][8]) {
  const FastWords<RowOrder> source(tile);
  uint32_t words[kSegments * kWords<Bf16>];
#pragma unroll
  for (int h = 0; h < kSegments; ++h) source.get(h, words + h * kWords<Bf16>);
  const Largest found = largest<Bf16>(words, kSegments * kWords<Bf16>);
  float most = fmaxf(found.of[0], found.of[1]);
  for (int distance = 16; distance >= 8; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
  if (lane_of_warp() < 8) strips[warp_of_block()][lane_of_warp()] = most;
  return __syncthreads_or(found.nan);
}

// Amax of the scale tile of `size` rows and columns in which a thread's segments lie: all of them in the same.
template <class Order>
__device__ __forceinline__ float tile_amax(const float strips[8][8], int size) {
  constexpr bool along_rows = std::is_same_v<Order, RowOrder>;
  const int r = along_rows ? warp_of_block() : Order::col(0) / kSegment;
  const int c = along_rows ? Order::col(0) / kSegment : warp_of_block();
  if (size == 16) return strips[r][c];
  if (size == 32)
    return fmaxf(fmaxf(strips[r][c], strips[r ^ 1][c]), fmaxf(strips[r][c ^ 1], strips[r ^ 1][c ^ 1]));
  const int lane = lane_of_warp();
  float most = fmaxf(strips[lane / 8][lane % 8], strips[lane / 8 + 4][lane % 8]);
  for (int distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
  return most;
}

// ---- segments ------------------------------------------------------------------------------------------------------

// Segment k of a group as fp32; k of a column is known only at run time.
template <class Order>
__device__ __forceinline__ void fast_values(const uint32_t words[kGroupWords<Order, Bf16>], int k, float x[kSegment]) {
  const uint32_t half = k ? 0x3244 : 0x1044;
#pragma unroll
  for (int i = 0; i < kSegment; ++i) {
    if constexpr (std::is_same_v<Order, RowOrder>)
      x[i] = widen<Bf16>(words[i / 2], i % 2);
    else
      x[i] = to_float(permute(words[i], 0, half));
  }
}

template <Kind kKind>
__device__ __forceinline__ BlockScale fast_scale(const FastSide& side, const BlockScale& whole, float amax) {
  if constexpr (kNvfp4<kKind>) {
    const uint32_t code = nvfp4_scale_code(amax, side.scales.global);
    return nvfp4_scale_of(code, side.scales.encode[code], side.scales.global, side.to.spec);
  }
  if constexpr (kCurrent<kKind>) return whole;
  if constexpr (kKind == Kind::block) return block_scale(amax, side.facts, side.to.spec, Bf16::kMax);
  return mx_scale_up(amax, side.facts);
}

// ---- 4over6 --------------------------------------------------------------------------------------------------------

// fl(x / divisor) for the divisors 6, 1536 and 2688, in fp64; and (near) where x is 0 or |x| is from 2^-100 on and finite,
// in fp32: the quotient by the reciprocal, and one correction. Both are the rounded quotients, for every x, and leave out
// the call that a division has where it must not be made (tests/csrc/test_numerics.py).
__device__ __forceinline__ float divided(float x, double reciprocal) {
  return static_cast<float>(static_cast<double>(x) * reciprocal);
}
__device__ __forceinline__ float divided_near(float x, float divisor, float reciprocal) {
  const float quotient = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(-quotient, divisor, x), reciprocal, quotient);
}

// Codes of a segment under the scale of that code, and the sum of their errors in the order of the elements.
__device__ __forceinline__ float encode_candidate(const FastSide& side, const float x[kSegment], uint32_t code,
                                                  uint32_t codes[2]) {
  const Spec& spec = side.to.spec;
  const bool square = spec.four_over_six == FourOverSix::mse, large = spec.e4m3_max == 448.0f;
  const float divisor = large ? 2688.0f : 1536.0f, reciprocal = large ? 1.0f / 2688.0f : 1.0f / 1536.0f;
  const float amax = side.scales.global.amax, scale = e4m3_value(code);
  const bool far = !(amax > 0x1p-80f && amax < 0x1p100f);  // of a segment's values: from 2^-10 to 2688 times that
  float v[kSegment], sum = 0.0f;
  encode_four(x, side.scales.encode[code], nullptr, codes);
  decode_four(codes, v);
  const auto add = [&](float value, float element) {
    const float d = value - element;
    sum += square ? d * d : fabsf(d);
  };
  if (far) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) add(divided(v[i] * scale * amax, large ? 1.0 / 2688.0 : 1.0 / 1536.0), x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) add(divided_near(v[i] * scale * amax, divisor, reciprocal), x[i]);
  }
  return sum;
}

// The codes of the block scales that map the amax to 6 and to 4.
struct Candidates {
  uint32_t six, four;
};

__device__ __forceinline__ Candidates candidates_of(const FastSide& side, float amax) {
  const float six = divided(amax, 1.0 / 6.0) * side.scales.global.encode;
#if __CUDA_ARCH__ >= 890
  return {e4m3_pair(six, 0.0f), e4m3_pair(six * 1.5f, 0.0f)};
#else
  return {encode<E4M3>(six), encode<E4M3>(six * 1.5f)};
#endif
}

// The better code of a block scale, and the codes of the elements under it: that of 4 where its error is less.
__device__ __forceinline__ uint32_t encode_better(const FastSide& side, const float x[kSegment], float amax,
                                                  uint32_t codes[2]) {
  const Candidates candidates = candidates_of(side, amax);
  uint32_t best = 0;
  float least = 0.0f;
#pragma unroll 1
  for (int c = 0; c < 2; ++c) {
    uint32_t code = c ? candidates.four : candidates.six, own[2];
    const float error = encode_candidate(side, x, code, own);
    if (c == 0 || error < least) best = code, least = error, codes[0] = own[0], codes[1] = own[1];
  }
  return best;
}

// The better code for the scale tile of 16 rows in which all of a thread's segments lie. inside(q): segment q is the
// operand's. Every thread of the warp takes part.
template <class Order, class Inside>
__device__ __forceinline__ uint32_t better_of_tile(const FastSide& side, uint32_t* tile, float amax, Inside inside) {
  constexpr int per_group = kGroupSegments<Order, Bf16>;
  const FastWords<Order> source(tile);
  const Candidates candidates = candidates_of(side, amax);
  float errors[2][kSegments] = {};
#pragma unroll 1
  for (int q = 0; q < kSegments; ++q) {
    uint32_t words[kGroupWords<Order, Bf16>];
    source.get(q / per_group, words);
    float x[kSegment];
    fast_values<Order>(words, q % per_group, x);
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
      uint32_t codes[2];
      const float error = encode_candidate(side, x, c ? candidates.four : candidates.six, codes);
#pragma unroll
      for (int i = 0; i < 2 * kSegments; ++i)
        if (i == c * kSegments + q && inside(q)) errors[i / kSegments][i % kSegments] = error;
    }
  }
  Order::join_rows(errors[0], Sum());
  Order::join_rows(errors[1], Sum());
  return errors[1][0] < errors[0][0] ? candidates.four : candidates.six;
}

// The scale of a segment at `row` of the operand, whose first element is number `element`.
template <class Order, Kind kKind, Part kPart>
__device__ __forceinline__ void store_fast_scale(const FastSide& side, uint32_t row, uint64_t element,
                                                 const BlockScale& scale) {
  const uint32_t rows = side.to.spec.tile_rows, col = side.col0 + Order::col(0);
  uint32_t line = row;
  if (rows > 1) {
    if (row & (rows - 1)) return;
    line = row >> (__ffs(rows) - 1);
    element = static_cast<uint64_t>(line) * side.cols + col;
  }
  uint64_t at = element / kBlock<kKind>;
  if constexpr (kPart != Part::matrix)  // its columns need not be whole blocks
    at = side.first_scale + static_cast<uint64_t>(line) * ((side.cols + kBlock<kKind> - 1) / kBlock<kKind>) +
         col / kBlock<kKind>;
  if constexpr (kKind == Kind::block)
    static_cast<float*>(side.to.scales)[at] = scale.value;
  else
    static_cast<uint8_t*>(side.to.scales)[at] = static_cast<uint8_t>(scale.code);
}

// How many elements of a thread's segment of a column are inside of the operand.
template <class Order>
__device__ __forceinline__ int count_of(const FastSide& side) {
  return min(max(static_cast<int>(side.cols - side.col0) - Order::col(0), 0), kSegment);
}

// A segment's words; ragged ones of a column from all lanes, also those with nothing inside.
template <class Order, Part kPart, int kCount>
__device__ __forceinline__ void store_fast(void* to, const uint32_t words[kCount], const FastSide& side) {
  if constexpr (kPart == Part::ragged && std::is_same_v<Order, ColumnOrder>) {
    const int count = count_of<Order>(side);
    const bool more = lane_of_warp() < 28 && side.col0 + Order::col(0) + kSegment < side.cols;
    store_ragged<kCount>(static_cast<uint8_t*>(to), words, count * kCount / 4, more);
  } else {
    store_words<kCount>(to, words);
  }
}

// Stores exact values, as pairs of bf16. Columns that are stored by rows of X go into the tile, which is stored when it
// has all of them.
template <class Order, Kind kKind, Part kPart>
__device__ __forceinline__ void store_exact_pairs(const FastSide& side, uint32_t pairs[kSegment / 2],
                                                  uint64_t element, int q, uint32_t* tile) {
  constexpr bool may_turn = kPart != Part::matrix && std::is_same_v<Order, ColumnOrder>;
  uint16_t* to = static_cast<uint16_t*>(side.to.exact) + element;
  if (may_turn && side.to.exact_turned)
    FastWords<Order>(tile).put(q / 2, q % 2, pairs);
  else if constexpr (kPart == Part::ragged || !kCurrent<kKind>)  // instructions are what limits the others
    store_fast<Order, kPart, kSegment / 2>(to, pairs, side);
  else
    store_sectors<Order::kNext>(to, pairs, true);
}

// Writes decoded values v: to `exact`, or (replace, rows only) over the elements that they came from.
template <class Order, Kind kKind, Part kPart>
__device__ __forceinline__ void use_values(const FastSide& side, const float v[kSegment], uint64_t element, int q,
                                           const BlockScale& scale, bool nan, uint32_t* tile) {
  float scaled[kSegment];
  if (side.to.exact) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scale.exact);
    uint32_t pairs[kSegment / 2];
    round_segment<Bf16>(scaled, nan, pairs);
    store_exact_pairs<Order, kKind, kPart>(side, pairs, element, q, tile);
  }
  if (std::is_same_v<Order, RowOrder> && side.replace) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scale.value);
    put_values<Bf16>(tile, q, scaled, nan, Dtype::bf16);
  }
}

// tally: a thread's share of the statistics, or nothing.
template <class Order, Kind kKind, Part kPart, class Tally>
__device__ __forceinline__ void encode_fast(const FastSide& side, uint32_t* tile, Tally& tally) {
  constexpr bool four = kFourBits<kKind>, rows_of_x = std::is_same_v<Order, RowOrder>, ragged = kPart == Part::ragged;
  constexpr bool chooses = kKind == Kind::nvfp4_four_over_six;
  constexpr int per_group = kGroupSegments<Order, Bf16>, groups = kGroups<Order, Bf16>;
  const Direction& to = side.to;
  const Spec& spec = to.spec;
  const FastWords<Order> source(tile);
  BlockScale whole{};
  if constexpr (kKind == Kind::current) {
    whole = current_scale(*side.amax, side.facts, spec);
    if (kPart == Part::matrix && to.scales && side.row0 == 0 && side.col0 == 0 && threadIdx.x == 0)
      *static_cast<float*>(to.scales) = whole.value;
    if (threadIdx.x == 0) note_seen(to, false, *side.amax);
  }
  const bool tiled = !kCurrent<kKind> && spec.tile_rows > 1;
  const float amax_of_tile = tiled ? tile_amax<Order>(side.strips, spec.tile_rows) : 0.0f;
  // All of a warp's rows may lie outside, or some (of X alone: its columns end with whole warps), and some segments of rows.
  if (ragged && side.row0 + warp_of_block() * 16 >= side.row_end) return;
  const bool in_cols = !ragged || side.col0 + Order::col(0) < side.col_end;
  const uint32_t row_end = in_cols ? side.row_end : 0;  // of the rows that the thread stores
  uint32_t better = 0;
  if constexpr (chooses) {
    if (tiled)
      better = better_of_tile<Order>(side, tile, amax_of_tile, [&](int q) {
        return side.row0 + Order::row(q) < row_end;
      });
  }
  const bool leads = !kCurrent<kKind> && Order::col(0) % kBlock<kKind> == 0 && to.scales;
  const bool decodes = Tally::kWanted || to.exact || side.replace;
  constexpr bool draws = kKind == Kind::nvfp4_stochastic;
  const Key key = draws ? with_segments(with_step(side.key), side.cols, side.col0 + Order::col(0)) : side.key;
  uint32_t row = side.row0 + Order::row(0);
  uint64_t element = side.first + static_cast<uint64_t>(row) * side.cols + side.col0 + Order::col(0);
#pragma unroll 1
  for (int h = 0; h < groups; ++h) {
    uint32_t words[kGroupWords<Order, Bf16>];
    source.get(h, words);
    if (kNvfp4<kKind> && spec.rht) transform_group<Order, Bf16>(spec, words);
    float amax[per_group] = {};
    bool nan = side.tile_nan;
    // A tile has its amax, current scaling too; only decoding minds a NaN there.
    if (kKind == Kind::current ? decodes : !tiled) nan = group_amax<Order, Bf16>(words, amax);
    tally.template count_words<kGroupWords<Order, Bf16>>(words);
#pragma unroll 1
    for (int k = 0; k < per_group; ++k) {
      float most = k ? amax[per_group - 1] : amax[0];
      if (tiled)
        most = amax_of_tile;
      else if (!kCurrent<kKind> && kBlock<kKind> > kSegment)
        most = Order::join_near(most, kBlock<kKind>, Larger());
      const bool inside = !ragged || (rows_of_x ? row < row_end : in_cols);
      const bool stores = inside || (ragged && !rows_of_x);
      if constexpr (kKind == Kind::row) whole = current_scale(inside ? __ldg(side.amax + row) : 1.0f, side.facts, spec);
      float x[kSegment];
      uint32_t codes[kCodeWords<four>];
      BlockScale scale;
      if constexpr (chooses) {
        fast_values<Order>(words, k, x);
        uint32_t code = better;
        if (tiled)
          encode_four(x, side.scales.encode[code], nullptr, codes);
        else
          code = encode_better(side, x, most, codes);
        scale = nvfp4_scale_of(code, side.scales.encode[code], side.scales.global, spec);
      } else {
        scale = fast_scale<kKind>(side, whole, most);
      }
      if ((nan || most > kFloatMax) && inside) note_seen(to, nan, most);
      if (leads && inside) store_fast_scale<Order, kKind, kPart>(side, row, element, scale);
      if constexpr (!chooses) fast_values<Order>(words, k, x);
      if constexpr (four && !chooses) {
        uint32_t random[4];
        if (draws) draw(key, key.first + static_cast<uint64_t>(row) * static_cast<uint32_t>(key.across), random);
        encode_four(x, scale.encode, draws ? random : nullptr, codes);
      } else if constexpr (!four) {
        encode_eight(x, scale.encode, spec.element, side.facts, codes);
      }
      if constexpr (four) {
        if (nan) mark_nan(x, codes);
      }
      if (to.codes && stores)
        store_fast<Order, kPart, kCodeWords<four>>(to.codes + (four ? element / 2 : element), codes, side);
      const int q = h * per_group + k;
      if (kNvfp4<kKind> && !Tally::kWanted && !side.replace) {
        if (to.exact && stores) {
          uint32_t pairs[kSegment / 2];
          scaled_four(codes, scale.exact, pairs);
          store_exact_pairs<Order, kKind, kPart>(side, pairs, element, q, tile);
        }
      } else if (decodes) {
        float v[kSegment];
        if constexpr (four)
          decode_four(codes, v);
        else
          decode_eight(codes, spec.element, side.facts, v);
        if ((to.exact || side.replace) && stores) use_values<Order, kKind, kPart>(side, v, element, q, scale, nan, tile);
        tally.template add<Order, four>(x, v, codes, scale, most, side.facts, q);
      }
      const uint32_t step = rows_of_x ? 4 : (k ? 7 : 1);  // to the row of the next segment
      row += step;
      element += static_cast<uint64_t>(step) * side.cols;
    }
  }
}

// kChooses: 4over6 may be asked for. Kernels that leave it out have room for more thread blocks.
template <class Order, Part kPart, bool kChooses, class Tally>
__device__ __forceinline__ void run_fast(const FastSide& side, uint32_t* tile, Tally& tally) {
  const Spec& spec = side.to.spec;
  switch (spec.family) {
    case Family::current:
      if (spec.row_scaled) return encode_fast<Order, Kind::row, kPart>(side, tile, tally);
      return encode_fast<Order, Kind::current, kPart>(side, tile, tally);
    case Family::block: return encode_fast<Order, Kind::block, kPart>(side, tile, tally);
    case Family::mx:
      if (spec.element == Element::e2m1) return encode_fast<Order, Kind::mx_four, kPart>(side, tile, tally);
      return encode_fast<Order, Kind::mx_eight, kPart>(side, tile, tally);
    case Family::ue5m3:
    case Family::nvfp4: break;
  }
  if (spec.sr) return encode_fast<Order, Kind::nvfp4_stochastic, kPart>(side, tile, tally);
  if constexpr (kChooses) {
    if (spec.four_over_six != FourOverSix::none)
      return encode_fast<Order, Kind::nvfp4_four_over_six, kPart>(side, tile, tally);
  }
  encode_fast<Order, Kind::nvfp4, kPart>(side, tile, tally);
}

}  // namespace hq
