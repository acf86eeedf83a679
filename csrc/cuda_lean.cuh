// The same direction with nothing but what training needs: a whole tile of bf16 words in registers, aligned outputs of
// less than 2^31 elements in 128 rows, no 4over6, no amax per row, MX scales rounded up. All segments of a thread are
// unrolled side by side, and addresses are a base and a 32-bit offset: less than half the instructions of the general
// form in cuda_direction.cuh, and the same bytes.
#pragma once
#include <cuda_runtime.h>

#include "cuda_direction.cuh"

namespace hq {

enum class Lean { eight, four, stochastic };  // codes of 8 or 6 bits, E2M1, E2M1 with stochastic rounding

template <class Order>
using LeanWords = uint32_t[kGroups<Order, Bf16>][kGroupWords<Order, Bf16>];

// Random Hadamard transform of the words, in place.
template <class Order>
__device__ __forceinline__ void transform_words(const Spec& spec, LeanWords<Order>& words) {
#pragma unroll
  for (int h = 0; h < kGroups<Order, Bf16>; ++h) transform_group<Order, Bf16>(spec, words[h]);
}

template <class Order, Lean kLean>
__device__ __forceinline__ void lean_scales(const Direction& to, const Frame& frame, float amax[kSegments],
                                            BlockScale scales[kSegments]) {
  const Spec& spec = to.spec;
  if (spec.family != Family::current) {
    Order::join_all(amax, spec.tile_cols);
    if (spec.tile_rows > 1) join_tile<Order>(spec, amax);
  }
  if constexpr (kLean == Lean::eight) {
    const ElementFacts facts = facts_of(spec.element);
    if (spec.family == Family::mx) {
#pragma unroll
      for (int q = 0; q < kSegments; ++q) scales[q] = mx_scale_up(amax[q], facts);
    } else if (spec.family == Family::block) {
#pragma unroll
      for (int q = 0; q < kSegments; ++q) scales[q] = block_scale(amax[q], facts, spec, frame.input_max);
    } else {
      scales[0] = current_scale(*frame.amax, facts, spec);
#pragma unroll
      for (int q = 1; q < kSegments; ++q) scales[q] = scales[0];
    }
  } else if (spec.family == Family::nvfp4) {
    const GlobalScale global = nvfp4_global(*frame.amax, spec);
#pragma unroll
    for (int q = 0; q < kSegments; ++q) scales[q] = nvfp4_scale(amax[q], global, spec);
  } else {
    const ElementFacts facts = facts_of(Element::e2m1);
#pragma unroll
    for (int q = 0; q < kSegments; ++q) scales[q] = mx_scale_up(amax[q], facts);
  }
}

// Scales of the segments that lead their scale tiles.
template <class Order>
__device__ __forceinline__ void store_lean_scales(const Direction& to, const Frame& frame,
                                                  const BlockScale scales[kSegments]) {
  const Spec& spec = to.spec;
  if (!to.scales || spec.family == Family::current) return;
  const int across = __ffs(spec.tile_cols) - 1, down = __ffs(spec.tile_rows) - 1;
  const uint32_t per_row = static_cast<uint32_t>((frame.cols + spec.tile_cols - 1) >> across);
  const int64_t base = (frame.row0 >> down) * per_row + (frame.col0 >> across);
#pragma unroll
  for (int q = 0; q < kSegments; ++q) {
    const int row = Order::row(q), col = Order::col(q);
    if ((col & (spec.tile_cols - 1)) | (row & (spec.tile_rows - 1))) continue;
    const uint32_t offset = static_cast<uint32_t>(row >> down) * per_row + (col >> across);
    if (spec.family == Family::block)
      (static_cast<float*>(to.scales) + base)[offset] = scales[q].value;
    else
      (static_cast<uint8_t*>(to.scales) + base)[offset] = static_cast<uint8_t>(scales[q].code);
  }
}

template <class Order, Lean kLean>
__device__ __forceinline__ void encode_lean(const Direction& to, const Frame& frame, LeanWords<Order>& words,
                                            uint32_t* tile, bool replace) {
  constexpr bool four = kLean != Lean::eight;
  constexpr int per_group = kGroupSegments<Order, Bf16>;
  if (four && to.spec.rht) transform_words<Order>(to.spec, words);
  float amax[kSegments];
  bool nan = false;
#pragma unroll
  for (int h = 0; h < kGroups<Order, Bf16>; ++h) nan |= group_amax<Order, Bf16>(words[h], amax + h * per_group);
  BlockScale scales[kSegments];
  lean_scales<Order, kLean>(to, frame, amax, scales);
  store_lean_scales<Order>(to, frame, scales);
  const ElementFacts facts = facts_of(to.spec.element);
  const uint32_t cols = static_cast<uint32_t>(frame.cols);
  const int64_t base = frame.row0 * frame.cols + frame.col0;
#pragma unroll
  for (int q = 0; q < kSegments; ++q) {
    const uint32_t offset = static_cast<uint32_t>(Order::row(q)) * cols + Order::col(q);
    float x[kSegment];
#pragma unroll
    for (int i = 0; i < kSegment; ++i) x[i] = value_of<Order, Bf16>(words[q / per_group], q % per_group, i);
    uint32_t codes[kCodeWords<four>];
    if constexpr (four) {
      if constexpr (kLean == Lean::stochastic) {
        uint32_t random[4];
        draw(to.key, static_cast<uint64_t>(base + offset) / kSegment, random);
        encode_four(x, scales[q].encode, random, codes);
      } else {
        encode_four(x, scales[q].encode, nullptr, codes);
      }
      if (nan) mark_nan(x, codes);
    } else {
      encode_eight(x, scales[q].encode, to.spec.element, facts, codes);
    }
    if (to.codes) {
      uint8_t* first = to.codes + base / (four ? 2 : 1);
      store_words<kCodeWords<four>>(first + offset / (four ? 2 : 1), codes);
    }
    if (!to.exact && !replace) continue;
    float v[kSegment], scaled[kSegment];
    if constexpr (four)
      decode_four(codes, v);
    else
      decode_eight(codes, to.spec.element, facts, v);
    if (to.exact) {
#pragma unroll
      for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scales[q].exact);
      uint32_t pairs[kSegment / 2];
      round_segment<Bf16>(scaled, nan, pairs);
      store_words<kSegment / 2>(static_cast<uint16_t*>(to.exact) + base + offset, pairs);
    }
    if constexpr (std::is_same_v<Order, RowOrder>) {
      if (!replace) continue;
#pragma unroll
      for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scales[q].value);
      put_values<Bf16>(tile, q, scaled, nan, Dtype::bf16);
    }
  }
}

template <class Order>
__device__ __forceinline__ void run_lean(const Direction& to, const Frame& frame, LeanWords<Order>& words,
                                         uint32_t* tile, bool replace) {
  if (to.spec.element != Element::e2m1) return encode_lean<Order, Lean::eight>(to, frame, words, tile, replace);
  if (to.spec.sr) return encode_lean<Order, Lean::stochastic>(to, frame, words, tile, replace);
  encode_lean<Order, Lean::four>(to, frame, words, tile, replace);
}

// Whether a direction is of this kind, given that X is bf16.
inline bool lean(const Direction& to, int64_t rows, int64_t cols, bool vector) {
  const Spec& spec = to.spec;
  return vector && rows % kTile == 0 && cols % kTile == 0 && cols < (1 << 24) && !spec.row_scaled &&
         spec.four_over_six == FourOverSix::none && spec.scale_rounding == ScaleRounding::up && !to.sums &&
         !to.row_errors && (!to.exact || to.exact_dtype == Dtype::bf16);
}

}  // namespace hq
