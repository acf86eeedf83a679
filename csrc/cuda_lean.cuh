// The same direction with nothing but what training needs: a whole tile of bf16 words, aligned outputs of less than 2^31
// elements in 128 rows, no 4over6, no amax per row, MX scales rounded up. A thread takes its four segments in two pairs,
// side by side, and addresses are a base and a 32-bit offset: less than half the instructions of the general form in
// cuda_direction.cuh, and the same bytes. The pairs are a loop, not unrolled, because two directions of unrolled code
// do not fit the instruction cache (benchmarks/NOTES.md).
#pragma once
#include <cuda_runtime.h>

#include "cuda_direction.cuh"

namespace hq {

enum class Lean { eight, four, stochastic };  // codes of 8 or 6 bits, E2M1, E2M1 with stochastic rounding

constexpr int kPair = 2;  // segments 2p and 2p + 1

template <class Order>
__device__ __forceinline__ void get_pair(const uint32_t* tile, const Spec& spec, int p, uint32_t words[kSegment]) {
  if constexpr (std::is_same_v<Order, RowOrder>) {
#pragma unroll
    for (int k = 0; k < kPair; ++k) {
      uint32_t* segment = words + k * kWords<Bf16>;
      get_segment<Bf16>(tile, RowOrder::row(kPair * p + k), RowOrder::col(0), segment);
      if (spec.rht) transform_group<RowOrder, Bf16>(spec, segment);
    }
  } else {
    get_group<ColumnOrder, Bf16>(tile, p, words);
    if (spec.rht) transform_group<ColumnOrder, Bf16>(spec, words);
  }
}

template <class Order>
__device__ __forceinline__ bool pair_amax(const uint32_t words[kSegment], float amax[kPair]) {
  if constexpr (std::is_same_v<Order, RowOrder>) {
    const bool first = group_amax<RowOrder, Bf16>(words, amax);
    return group_amax<RowOrder, Bf16>(words + kWords<Bf16>, amax + 1) || first;
  } else {
    return group_amax<ColumnOrder, Bf16>(words, amax);
  }
}

template <class Order>
__device__ __forceinline__ float pair_value(const uint32_t words[kSegment], int k, int i) {
  if constexpr (std::is_same_v<Order, RowOrder>) return widen<Bf16>(words[k * kWords<Bf16> + i / 2], i % 2);
  return widen<Bf16>(words[i], k);
}

// What all scales of a direction share, and where its tile's results begin.
struct LeanFrame {
  ElementFacts facts;
  GlobalScale global;
  BlockScale whole;  // current scaling
  uint32_t cols, per_row;
  int64_t base, scale_base;
  int across, down;
};

template <bool kFour>
__device__ __forceinline__ LeanFrame lean_frame(const Direction& to, const Frame& frame) {
  const Spec& spec = to.spec;
  LeanFrame lean{};
  lean.facts = facts_of(spec.element);
  if (kFour && spec.family == Family::nvfp4) lean.global = nvfp4_global(*frame.amax, spec);
  if (!kFour && spec.family == Family::current) lean.whole = current_scale(*frame.amax, lean.facts, spec);
  lean.cols = static_cast<uint32_t>(frame.cols);
  lean.base = frame.row0 * frame.cols + frame.col0;
  lean.across = __ffs(spec.tile_cols) - 1, lean.down = __ffs(spec.tile_rows) - 1;
  if (spec.family == Family::current) return lean;
  lean.per_row = static_cast<uint32_t>(frame.cols >> lean.across);
  lean.scale_base = (frame.row0 >> lean.down) * lean.per_row + (frame.col0 >> lean.across);
  return lean;
}

template <bool kFour>
__device__ __forceinline__ BlockScale lean_scale(const Spec& spec, const Frame& frame, const LeanFrame& lean, float amax) {
  if constexpr (kFour) {
    if (spec.family == Family::nvfp4) return nvfp4_scale(amax, lean.global, spec);
  } else {
    if (spec.family == Family::current) return lean.whole;
    if (spec.family == Family::block) return block_scale(amax, lean.facts, spec, frame.input_max);
  }
  return mx_scale_up(amax, lean.facts);
}

template <class Order>
__device__ __forceinline__ void store_lean_scale(const Direction& to, const LeanFrame& lean, int row, int col,
                                                 const BlockScale& scale) {
  const Spec& spec = to.spec;
  if (!to.scales || spec.family == Family::current) return;
  if ((col & (spec.tile_cols - 1)) | (row & (spec.tile_rows - 1))) return;
  const uint32_t offset = static_cast<uint32_t>(row >> lean.down) * lean.per_row + (col >> lean.across);
  if (spec.family == Family::block)
    (static_cast<float*>(to.scales) + lean.scale_base)[offset] = scale.value;
  else
    (static_cast<uint8_t*>(to.scales) + lean.scale_base)[offset] = static_cast<uint8_t>(scale.code);
}

// exact, or replace (rows only): what decoded values are for.
template <class Order, bool kFour>
__device__ __forceinline__ void use_values(const Direction& to, const LeanFrame& lean, uint32_t offset, int q,
                                           const uint32_t codes[kCodeWords<kFour>], const BlockScale& scale, bool nan,
                                           uint32_t* tile, bool replace) {
  float v[kSegment], scaled[kSegment];
  if constexpr (kFour)
    decode_four(codes, v);
  else
    decode_eight(codes, to.spec.element, lean.facts, v);
  if (to.exact) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scale.exact);
    uint32_t pairs[kSegment / 2];
    round_segment<Bf16>(scaled, nan, pairs);
    store_words<kSegment / 2>(static_cast<uint16_t*>(to.exact) + lean.base + offset, pairs);
  }
  if (std::is_same_v<Order, RowOrder> && replace) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scale.value);
    put_values<Bf16>(tile, q, scaled, nan, Dtype::bf16);
  }
}

template <class Order, Lean kLean>
__device__ __forceinline__ void encode_lean(const Direction& to, const Frame& frame, uint32_t* tile, bool replace) {
  constexpr bool four = kLean != Lean::eight;
  const Spec& spec = to.spec;
  const LeanFrame lean = lean_frame<four>(to, frame);
  const bool ahead = spec.tile_rows > 1 || (spec.tile_cols == kTile && std::is_same_v<Order, ColumnOrder>);
  float tile_amax[kSegments] = {};
  if (ahead) {
#pragma unroll
    for (int p = 0; p < kSegments / kPair; ++p) {
      uint32_t words[kSegment];
      get_pair<Order>(tile, spec, p, words);
      pair_amax<Order>(words, tile_amax + kPair * p);
    }
    Order::join_all(tile_amax, spec.tile_cols);
    if (spec.tile_rows > 1) join_tile<Order>(spec, tile_amax);
  }
#pragma unroll 1
  for (int p = 0; p < kSegments / kPair; ++p) {
    uint32_t words[kSegment];
    get_pair<Order>(tile, spec, p, words);
    float amax[kPair];
    const bool nan = pair_amax<Order>(words, amax);
    if (ahead) {
#pragma unroll
      for (int k = 0; k < kPair; ++k) amax[k] = p ? tile_amax[kPair + k] : tile_amax[k];
    } else if (spec.tile_cols > kSegment) {
      Order::join_pair(amax, spec.tile_cols);
    }
#pragma unroll
    for (int k = 0; k < kPair; ++k) {
      const int q = kPair * p + k, row = Order::row(q), col = Order::col(q);
      const uint32_t offset = static_cast<uint32_t>(row) * lean.cols + col;
      const BlockScale scale = lean_scale<four>(spec, frame, lean, amax[k]);
      store_lean_scale<Order>(to, lean, row, col, scale);
      float x[kSegment];
#pragma unroll
      for (int i = 0; i < kSegment; ++i) x[i] = pair_value<Order>(words, k, i);
      uint32_t codes[kCodeWords<four>];
      if constexpr (four) {
        uint32_t random[4];
        if (kLean == Lean::stochastic) draw(to.key, static_cast<uint64_t>(lean.base + offset) / kSegment, random);
        encode_four(x, scale.encode, kLean == Lean::stochastic ? random : nullptr, codes);
        if (nan) mark_nan(x, codes);
      } else {
        encode_eight(x, scale.encode, spec.element, lean.facts, codes);
      }
      if (to.codes)
        store_words<kCodeWords<four>>(to.codes + lean.base / (four ? 2 : 1) + offset / (four ? 2 : 1), codes);
      if (to.exact || replace) use_values<Order, four>(to, lean, offset, q, codes, scale, nan, tile, replace);
    }
  }
}

template <class Order>
__device__ __forceinline__ void run_lean(const Direction& to, const Frame& frame, uint32_t* tile, bool replace) {
  if (to.spec.element != Element::e2m1) return encode_lean<Order, Lean::eight>(to, frame, tile, replace);
  if (to.spec.sr) return encode_lean<Order, Lean::stochastic>(to, frame, tile, replace);
  encode_lean<Order, Lean::four>(to, frame, tile, replace);
}

// Whether a direction is of this kind, given that X is bf16.
inline bool lean(const Direction& to, int64_t rows, int64_t cols, bool vector) {
  const Spec& spec = to.spec;
  return vector && rows % kTile == 0 && cols % kTile == 0 && cols < (1 << 24) && !spec.row_scaled &&
         spec.four_over_six == FourOverSix::none && spec.scale_rounding == ScaleRounding::up && !(spec.rht && spec.tile_rows > 1) && !to.sums &&
         !to.row_errors && (!to.exact || to.exact_dtype == Dtype::bf16);
}

}  // namespace hq
