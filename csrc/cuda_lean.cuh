// The same direction with nothing but what training needs: a whole tile of bf16 words, aligned outputs of less than 2^31
// elements in 128 rows, no 4over6, no amax per row, MX scales rounded up. The kind of the format is compiled in, addresses
// are worked out once, and the loop over a thread's four segments stays a loop, because the code of two directions must
// fit the instruction cache (benchmarks/NOTES.md). The bytes are those of cuda_direction.cuh.
#pragma once
#include <cuda_runtime.h>

#include "cuda_direction.cuh"

namespace hq {

enum class Kind { current, block, mx_eight, mx_four, nvfp4, nvfp4_stochastic };

template <Kind kKind>
constexpr bool kFourBits = kKind == Kind::mx_four || kKind == Kind::nvfp4 || kKind == Kind::nvfp4_stochastic;
template <Kind kKind>
constexpr bool kNvfp4 = kKind == Kind::nvfp4 || kKind == Kind::nvfp4_stochastic;

// A thread's words in shared memory: one segment of a row (two units of 16 bytes) for each of four groups, or 16 rows of
// a word for each of two groups. Groups lie 4 rows apart, or 64: the swaps of word_offset repeat.
template <class Order>
struct LeanWords {
  uint32_t* first;
  uint32_t* second;

  __device__ __forceinline__ explicit LeanWords(uint32_t* tile) {
    if constexpr (std::is_same_v<Order, RowOrder>) {
      first = tile + word_offset<Bf16>(RowOrder::row(0), RowOrder::col(0) / 2);
      second = tile + word_offset<Bf16>(RowOrder::row(0), RowOrder::col(0) / 2 + 4);
    } else {
      first = second = tile + word_offset<Bf16>(ColumnOrder::col(0), ColumnOrder::row(0) / 2);
    }
  }
  __device__ __forceinline__ void get(int h, uint32_t words[kGroupWords<Order, Bf16>]) const {
    if constexpr (std::is_same_v<Order, RowOrder>) {
      const int step = h * 4 * kRowWords<Bf16>;
      const uint4 front = *reinterpret_cast<const uint4*>(first + step);
      const uint4 back = *reinterpret_cast<const uint4*>(second + step);
      words[0] = front.x, words[1] = front.y, words[2] = front.z, words[3] = front.w;
      words[4] = back.x, words[5] = back.y, words[6] = back.z, words[7] = back.w;
    } else {
#pragma unroll
      for (int i = 0; i < kSegment; ++i) words[i] = first[(h * 64 + i) * kRowWords<Bf16>];
    }
  }
};

// A whole tile to shared memory; each thread puts the segments of rows that it will get.
__device__ __forceinline__ void load_lean_tile(const Source& source, int64_t r0, int64_t c0, uint32_t* tile) {
  const LeanWords<RowOrder> words(tile);
  const int64_t pitch = source.row_stride * 2;  // bytes
  const char* from = static_cast<const char*>(source.data) + (r0 + RowOrder::row(0)) * pitch + (c0 + RowOrder::col(0)) * 2;
  uint4 units[kSegments][2];
#pragma unroll
  for (int q = 0; q < kSegments; ++q) {
    const uint4* segment = reinterpret_cast<const uint4*>(from + q * 4 * pitch);
    units[q][0] = __ldg(segment), units[q][1] = __ldg(segment + 1);
  }
#pragma unroll
  for (int q = 0; q < kSegments; ++q) {
    *reinterpret_cast<uint4*>(words.first + q * 4 * kRowWords<Bf16>) = units[q][0];
    *reinterpret_cast<uint4*>(words.second + q * 4 * kRowWords<Bf16>) = units[q][1];
  }
}

// Segment k of a group as fp32; k of a column is known only at run time.
template <class Order>
__device__ __forceinline__ void lean_values(const uint32_t words[kGroupWords<Order, Bf16>], int k, float x[kSegment]) {
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
__device__ __forceinline__ BlockScale lean_scale(const Spec& spec, const Frame& frame, const ElementFacts& facts,
                                                 const GlobalScale& global, const BlockScale& whole, float amax) {
  if constexpr (kNvfp4<kKind>) return nvfp4_scale(amax, global, spec);
  if constexpr (kKind == Kind::current) return whole;
  if constexpr (kKind == Kind::block) return block_scale(amax, facts, spec, frame.input_max);
  return mx_scale_up(amax, facts);
}

// exact, or replace (rows only): what decoded values are for.
template <class Order, bool kFour>
__device__ __forceinline__ void use_values(const Direction& to, const ElementFacts& facts, int64_t offset, int q,
                                           const uint32_t codes[kCodeWords<kFour>], const BlockScale& scale, bool nan,
                                           uint32_t* tile, bool replace) {
  float v[kSegment], scaled[kSegment];
  if constexpr (kFour)
    decode_four(codes, v);
  else
    decode_eight(codes, to.spec.element, facts, v);
  if (to.exact) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scale.exact);
    uint32_t pairs[kSegment / 2];
    round_segment<Bf16>(scaled, nan, pairs);
    store_words<kSegment / 2>(static_cast<uint16_t*>(to.exact) + offset, pairs);
  }
  if (std::is_same_v<Order, RowOrder> && replace) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scale.value);
    put_values<Bf16>(tile, q, scaled, nan, Dtype::bf16);
  }
}

template <class Order, Kind kKind>
__device__ __forceinline__ void encode_lean(const Direction& to, const Frame& frame, uint32_t* tile, bool replace) {
  constexpr bool four = kFourBits<kKind>;
  constexpr int per_group = kGroupSegments<Order, Bf16>, groups = kGroups<Order, Bf16>;
  constexpr int row_step = std::is_same_v<Order, RowOrder> ? 4 : 0, col_step = std::is_same_v<Order, RowOrder> ? 0 : 64;
  const Spec& spec = to.spec;
  const ElementFacts facts = facts_of(spec.element);
  const LeanWords<Order> source(tile);
  GlobalScale global{};
  BlockScale whole{};
  if constexpr (kNvfp4<kKind>) global = nvfp4_global(*frame.amax, spec);
  if constexpr (kKind == Kind::current) whole = current_scale(*frame.amax, facts, spec);
  const int block = four ? (kNvfp4<kKind> ? 16 : 32) : (kKind == Kind::block ? 128 : 32);
  const bool tiled = kKind != Kind::current && spec.tile_rows > 1;
  const bool ahead = tiled || (kKind == Kind::block && std::is_same_v<Order, ColumnOrder>);
  float tile_amax[kSegments] = {};
  if (ahead) {
#pragma unroll
    for (int h = 0; h < groups; ++h) {
      uint32_t words[kGroupWords<Order, Bf16>];
      source.get(h, words);
      group_amax<Order, Bf16>(words, tile_amax + h * per_group);
    }
    Order::join_all(tile_amax, block);
    if (tiled) join_tile<Order>(spec, tile_amax);
  }
  // The thread's first element in the operand, and the first of its scales.
  const int64_t start = (frame.row0 + Order::row(0)) * frame.cols + frame.col0 + Order::col(0);
  const int64_t across = frame.cols / block;
  const int down = tiled ? __ffs(spec.tile_rows) - 1 : 0;
  const int64_t scale_start = (tiled ? 0 : (frame.row0 + Order::row(0)) * across) + (frame.col0 + Order::col(0)) / block;
  const bool leads = Order::col(0) % block == 0 && to.scales;
#pragma unroll 1
  for (int h = 0; h < groups; ++h) {
    uint32_t words[kGroupWords<Order, Bf16>];
    source.get(h, words);
    if (kNvfp4<kKind> && spec.rht) transform_group<Order, Bf16>(spec, words);
    float amax[per_group] = {};
    bool nan = false;
    // Current scaling has its amax; only decoding minds a NaN there.
    if (kKind != Kind::current || to.exact || replace) nan = group_amax<Order, Bf16>(words, amax);
#pragma unroll 1
    for (int k = 0; k < per_group; ++k) {
      const int q = h * per_group + k;
      float most = k ? amax[per_group - 1] : amax[0];
      if (ahead) most = pick(tile_amax, q);
      else if (block > 16 && kKind != Kind::current) most = Order::join_near(most, block, Larger());
      const BlockScale scale = lean_scale<kKind>(spec, frame, facts, global, whole, most);
      const int row = h * row_step + k, col = h * col_step;  // from the first segment
      if (kKind != Kind::current && leads && !(tiled && ((Order::row(0) + row) & (spec.tile_rows - 1)))) {
        const int64_t offset =
            tiled ? ((frame.row0 + Order::row(0) + row) >> down) * across + scale_start + col / block
                  : scale_start + static_cast<uint32_t>(row) * static_cast<uint32_t>(across) + col / block;
        if constexpr (kKind == Kind::block)
          static_cast<float*>(to.scales)[offset] = scale.value;
        else
          static_cast<uint8_t*>(to.scales)[offset] = static_cast<uint8_t>(scale.code);
      }
      float x[kSegment];
      lean_values<Order>(words, k, x);
      const int64_t offset = start + static_cast<uint32_t>(row) * static_cast<uint32_t>(frame.cols) + col;
      uint32_t codes[kCodeWords<four>];
      if constexpr (four) {
        uint32_t random[4];
        constexpr bool draws = kKind == Kind::nvfp4_stochastic;
        if (draws) draw(to.key, static_cast<uint64_t>(offset) / kSegment, random);
        encode_four(x, scale.encode, draws ? random : nullptr, codes);
        if (nan) mark_nan(x, codes);
      } else {
        encode_eight(x, scale.encode, spec.element, facts, codes);
      }
      if (to.codes) store_words<kCodeWords<four>>(to.codes + (four ? offset / 2 : offset), codes);
      if (to.exact || replace) use_values<Order, four>(to, facts, offset, q, codes, scale, nan, tile, replace);
    }
  }
}

template <class Order>
__device__ __forceinline__ void run_lean(const Direction& to, const Frame& frame, uint32_t* tile, bool replace) {
  const Spec& spec = to.spec;
  switch (spec.family) {
    case Family::current: return encode_lean<Order, Kind::current>(to, frame, tile, replace);
    case Family::block: return encode_lean<Order, Kind::block>(to, frame, tile, replace);
    case Family::mx:
      if (spec.element == Element::e2m1) return encode_lean<Order, Kind::mx_four>(to, frame, tile, replace);
      return encode_lean<Order, Kind::mx_eight>(to, frame, tile, replace);
    case Family::nvfp4: break;
  }
  if (spec.sr) return encode_lean<Order, Kind::nvfp4_stochastic>(to, frame, tile, replace);
  encode_lean<Order, Kind::nvfp4>(to, frame, tile, replace);
}

// Whether a direction is of this kind, given that X is bf16.
inline bool lean(const Direction& to, int64_t rows, int64_t cols, bool vector) {
  const Spec& spec = to.spec;
  return vector && rows % kTile == 0 && cols % kTile == 0 && cols < (1 << 24) && rows < (1 << 22) && !spec.row_scaled &&
         spec.four_over_six == FourOverSix::none && spec.scale_rounding == ScaleRounding::up && !(spec.rht && spec.tile_rows > 1) && !to.sums &&
         !to.row_errors && (!to.exact || to.exact_dtype == Dtype::bf16);
}

}  // namespace hq
