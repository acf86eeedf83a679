// One direction of a tile: from words in registers to codes, scales, multiplied values and sums. The order in which
// threads hold the segments (rows of X, or rows of X.T) is a template argument; the rest is the same.
#pragma once
#include <cuda_runtime.h>

#include "cuda/elements.cuh"
#include "cuda/scales.cuh"
#include "cuda/store.cuh"
#include "cuda/tile.cuh"
#include "cuda/words.cuh"
#include "group.h"
#include "quantize.h"

namespace hq {

// A direction as a thread block sees it. In a grouped launch it is an expert's, whose part of the outputs begins at
// `starts`; for one matrix these are 0.
struct Frame {
  int64_t rows, cols;       // of the operand
  int64_t row0, col0;       // of the tile
  bool vector;              // outputs take whole, aligned segments
  float input_max;          // largest finite value of X's dtype
  const float* amax;        // global amax, or one per row
  int64_t tile_index;       // of X's tiles, for the sums
  Key key;
  Starts starts;
};

template <class Order>
__device__ __forceinline__ Place place_of(const Frame& frame, int q) {
  Place place{frame.row0 + Order::row(q), frame.col0 + Order::col(q), kSegment};
  if (place.row >= frame.rows || place.col >= frame.cols)
    place.count = 0;
  else if (frame.cols - place.col < kSegment)
    place.count = static_cast<int>(frame.cols - place.col);
  return place;
}

// Random Hadamard transform of a group's words, rounded to bf16, in place.
template <class Order, class W>
__device__ __forceinline__ void transform_group(const Spec& spec, uint32_t words[kGroupWords<Order, W>]) {
  float x[kGroupSegments<Order, W>][kSegment];
#pragma unroll
  for (int k = 0; k < kGroupSegments<Order, W>; ++k) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i)
      x[k][i] = __fmul_rn(value_of<Order, W>(words, k, i),
                          spec.rht_sign && ((kRhtSignMask >> i) & 1u) ? -0.25f : 0.25f);
    butterfly16(x[k]);
  }
#pragma unroll
  for (int i = 0; i < kGroupWords<Order, W>; ++i) {
    if constexpr (W::kPack == 1)
      words[i] = to_bits(round_to_bf16(x[0][i]));
    else if constexpr (std::is_same_v<Order, RowOrder>)
      words[i] = round_pair<Bf16>(x[0][2 * i], x[0][2 * i + 1]);
    else
      words[i] = round_pair<Bf16>(x[0][i], x[kGroupSegments<Order, W> - 1][i]);
  }
}

template <class Order, class W>
struct GroupWords {
  uint32_t words[kGroupWords<Order, W>];
};

// The same over up to 128 elements: lanes that hold neighbouring segments of a line trade their sums. All lanes of the
// warp. Not inlined: few formats need it.
// mask: see signs_of.
template <class Order, class W>
__device__ __noinline__ GroupWords<Order, W> transform_wide(GroupWords<Order, W> group, int size, uint32_t mask) {
  const int first = Order::col(0) & (size - 1);
  const float factor = rht_scale(size);
  float x[kGroupSegments<Order, W>][kSegment];
#pragma unroll
  for (int k = 0; k < kGroupSegments<Order, W>; ++k) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i)
      x[k][i] = __fmul_rn(value_of<Order, W>(group.words, k, i), (mask >> i) & 1u ? -factor : factor);
    butterfly16(x[k]);
    for (int distance = kSegment; distance < size; distance *= 2) {
      const bool upper = first & distance;
#pragma unroll
      for (int i = 0; i < kSegment; ++i) {
        const float other = __shfl_xor_sync(~0u, x[k][i], distance / kSegment * Order::kNext);
        x[k][i] = upper ? other - x[k][i] : x[k][i] + other;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kGroupWords<Order, W>; ++i) {
    if constexpr (W::kPack == 1)
      group.words[i] = to_bits(round_to_bf16(x[0][i]));
    else if constexpr (std::is_same_v<Order, RowOrder>)
      group.words[i] = round_pair<Bf16>(x[0][2 * i], x[0][2 * i + 1]);
    else
      group.words[i] = round_pair<Bf16>(x[0][i], x[kGroupSegments<Order, W> - 1][i]);
  }
  return group;
}

// The key with its step, which is read where it stands: once for all that a thread draws.
__device__ __forceinline__ Key with_step(Key key) {
  if (key.step_at) key.step = __ldg(reinterpret_cast<const unsigned long long*>(key.step_at));
  return key;
}

static __device__ __noinline__ uint32_t drawn_mask(Key key, int first) {
  uint32_t words[4];
  drawn_signs(key.key0, with_step(key).step, words);
  const uint32_t two = first < 32 ? words[0] : (first < 64 ? words[1] : (first < 96 ? words[2] : words[3]));
  return (two >> (first % 32)) & 0xFFFFu;
}

// Bit i: element i of the thread's segments, which stand at one place of their groups, is negated by transform_wide.
template <class Order>
__device__ __forceinline__ uint32_t signs_of(const Spec& spec, const Key& key) {
  const int first = Order::col(0) & (spec.rht - 1);
  if (spec.eden) return drawn_mask(key, first);
  return spec.rht > kSegment && spec.rht_sign ? rht_signs(first) : 0;
}

// The group's words in the basis that the format approximates.
template <class Order, class W>
__device__ __forceinline__ void get_basis(const uint32_t* tile, const Spec& spec, const Key& key, int h,
                                          uint32_t words[kGroupWords<Order, W>]) {
  get_group<Order, W>(tile, h, words);
  if (spec.rht == kSegment && !spec.eden) transform_group<Order, W>(spec, words);
  if (spec.rht > kSegment || spec.eden) {
    GroupWords<Order, W> group;
#pragma unroll
    for (int i = 0; i < kGroupWords<Order, W>; ++i) group.words[i] = words[i];
    group = transform_wide<Order, W>(group, spec.rht, signs_of<Order>(spec, key));
#pragma unroll
    for (int i = 0; i < kGroupWords<Order, W>; ++i) words[i] = group.words[i];
  }
}

// amax of each segment of a group, and whether one holds a NaN.
template <class Order, class W>
__device__ __forceinline__ bool group_amax(const uint32_t words[kGroupWords<Order, W>],
                                           float amax[kGroupSegments<Order, W>]) {
  const Largest found = largest<W>(words, kGroupWords<Order, W>);
  if constexpr (kGroupSegments<Order, W> == 2)
    amax[0] = found.of[0], amax[1] = found.of[1];
  else
    amax[0] = fmaxf(found.of[0], found.of[1]);
  return found.nan;
}

// amax of every segment of the thread, joined over `cols` elements of a row.
template <class Order, class W>
__device__ __forceinline__ void all_amax(const uint32_t* tile, const Spec& spec, const Key& key, int cols,
                                         float amax[kSegments]) {
#pragma unroll
  for (int h = 0; h < kGroups<Order, W>; ++h) {
    constexpr int per_group = kGroupSegments<Order, W>;
    uint32_t words[kGroupWords<Order, W>];
    get_basis<Order, W>(tile, spec, key, h, words);
    group_amax<Order, W>(words, amax + h * per_group);
#pragma unroll
    for (int k = 0; k < per_group; ++k)
      amax[h * per_group + k] = Order::join_near(amax[h * per_group + k], cols, Larger());
  }
}

// amax of each segment -> amax of its scale tile of several rows. Every thread of the block takes part.
template <class Order>
__device__ __forceinline__ void join_tile(const Spec& spec, float amax[kSegments]) {
  Order::join_rows(amax, Larger());
  if (spec.tile_rows == 16) return;
  __shared__ float strips[kThreads / 32][4];  // of 16 rows x 32 columns, or all 128 columns in the first entry
#pragma unroll
  for (int q = 0; q < kSegments; ++q)
    if (Order::row(q) % 16 == 0 && Order::col(q) % spec.tile_cols == 0)
      strips[warp_of_block()][Order::col(q) / 32] = amax[q];
  __syncthreads();
#pragma unroll
  for (int q = 0; q < kSegments; ++q) {
    const int column = Order::col(q) / spec.tile_cols;
    if (spec.tile_rows == 32)
      amax[q] = fmaxf(strips[warp_of_block()][column], strips[warp_of_block() ^ 1][column]);
    else
      for (int w = 0; w < kThreads / 32; ++w) amax[q] = fmaxf(amax[q], strips[w][0]);
  }
  __syncthreads();
}

// values[q] without an address, which would put the array in memory.
__device__ __forceinline__ float pick(const float values[kSegments], int q) {
  return q < 2 ? (q ? values[1] : values[0]) : (q == 2 ? values[2] : values[3]);
}

// Decoded values of segment q of a row, rounded to X's dtype, in place of the elements they came from.
template <class W>
__device__ __forceinline__ void put_values(uint32_t* tile, int q, const float v[kSegment], bool nan, Dtype dtype) {
  uint32_t words[kWords<W>];
  if (W::kPack == 1 && dtype == Dtype::fp16) {
#pragma unroll
    for (int i = 0; i < kWords<W>; ++i) words[i] = to_bits(clean(widen<Fp16>(round_pair<Fp16>(v[i], 0.0f), 0)));
  } else {
    round_segment<W>(v, nan, words);
  }
  put_segment<W>(tile, RowOrder::row(q), RowOrder::col(q), words);
}

// Sum of squared errors of a row of the tile, from the share of each of its threads.
template <class Order>
__device__ __forceinline__ void store_row_error(const Direction& to, const Frame& frame, const Place& place, int q,
                                                float error2) {
  if (!to.row_errors) return;
  const float sum = Order::join_near(error2, kTile, Sum());
  float* target = to.row_errors + frame.starts.row_errors + place.row * ceil_div(frame.cols, kTile) + frame.col0 / kTile;
  if (Order::col(q) == 0 && place.row < frame.rows) *target = sum;
}

// ---- find ----------------------------------------------------------------------------------------------------------

// found = max(found, amax). Magnitudes order like their bits; the value there is read first, which saves most atomics.
__device__ __forceinline__ void raise(float* found, float amax, int32_t* seen = nullptr) {
  if (amax > __ldcg(found)) atomicMax(reinterpret_cast<int*>(found), __float_as_int(amax));
  if (seen && amax > kFloatMax) seen[2] = 1;
}

template <class Order, class W>
__device__ __forceinline__ void find_direction(const Direction& to, const Frame& frame, const uint32_t* tile) {
  float amax[kSegments];
  float* found = to.found + frame.starts.amax;
  all_amax<Order, W>(tile, to.spec, frame.key, kTile, amax);
  if (to.spec.row_scaled) {
#pragma unroll
    for (int q = 0; q < kSegments; ++q) {
      const Place place = place_of<Order>(frame, q);
      if (Order::col(q) == 0 && place.count > 0) raise(found + place.row, amax[q], to.seen);
    }
    return;
  }
  Order::join_rows(amax, Larger());
  if (lane_of_warp() == 0) raise(found, amax[0], to.seen);
}

// ---- encode --------------------------------------------------------------------------------------------------------

template <bool kFour>
__device__ __forceinline__ BlockScale find_scale(const Spec& spec, const ElementFacts& facts, const Frame& frame,
                                                 float amax, const GlobalScale& global) {
  if (spec.family == Family::current) return current_scale(global.amax, facts, spec);
  if constexpr (kFour) {
    if (spec.family == Family::nvfp4) return nvfp4_scale_of(nvfp4_scale_code(amax, global), global, spec);
    if (spec.family == Family::ue5m3) return ue5m3_scale(amax, spec);
  } else {
    if (spec.family == Family::block) return block_scale(amax, facts, spec, frame.input_max);
  }
  return mx_scale(amax, facts, spec);
}

// 4over6: errors of segment k of a group with the scale that maps the amax to 4, and with the one that maps it to 6.
template <class Order, class W>
__device__ __forceinline__ float2 errors_of(const uint32_t words[kGroupWords<Order, W>], int k, float amax,
                                            float global_amax, const Spec& spec) {
  float4 x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = {value_of<Order, W>(words, k, 4 * i), value_of<Order, W>(words, k, 4 * i + 1),
            value_of<Order, W>(words, k, 4 * i + 2), value_of<Order, W>(words, k, 4 * i + 3)};
  return candidate_errors(x[0], x[1], x[2], x[3], amax, global_amax, spec);
}

// The amax from which the scales of a segment follow: the direction's, or that of the segment's row.
__device__ __forceinline__ GlobalScale global_of(const Spec& spec, const Frame& frame, const Place& place) {
  const float amax = spec.row_scaled ? (place.count > 0 ? frame.amax[place.row] : 1.0f) : *frame.amax;
  if (spec.family == Family::current) return {amax, 0.0f, 0.0f, 0.0f};
  return nvfp4_global(amax, spec);
}

// 4over6 over tiles of 16 rows: whether each segment's tile maps its amax to 4.
template <class Order, class W>
__device__ __forceinline__ void choose_in_tiles(const Spec& spec, const Frame& frame, const uint32_t* tile,
                                                const float amax[kSegments], float errors[2][kSegments]) {
#pragma unroll
  for (int q = 0; q < kSegments; ++q) {
    uint32_t words[kGroupWords<Order, W>];
    get_basis<Order, W>(tile, spec, frame.key, q / kGroupSegments<Order, W>, words);
    const Place place = place_of<Order>(frame, q);
    // Rows outside the matrix add 0, also when the global amax is infinite.
    const float2 found = errors_of<Order, W>(words, q % kGroupSegments<Order, W>, amax[q],
                                             global_of(spec, frame, place).amax, spec);
    errors[0][q] = place.count > 0 ? found.x : 0.0f;
    errors[1][q] = place.count > 0 ? found.y : 0.0f;
  }
  for (int k = 0; k < 2; ++k) Order::join_rows(errors[k], Sum());
}

// The key of an operand of so many columns, with the number of its first segment and of those between rows; in the fast
// encoders the first is that of the segments' own column.
__device__ __forceinline__ Key with_segments(Key key, uint64_t cols, uint32_t col = 0) {
  if (!key.across) key.across = cols / kSegment;
  key.first += col / kSegment;
  return key;
}

// key: one that with_step() has given.
__device__ __forceinline__ void draw(const Key& key, uint64_t segment, uint32_t random[4]) {
  random[0] = static_cast<uint32_t>(segment), random[1] = static_cast<uint32_t>(segment >> 32);
  random[2] = static_cast<uint32_t>(key.step), random[3] = static_cast<uint32_t>(key.step >> 32);
  philox(key.key0, key.key1, random);
}

// MS-EDEN: the scale of a segment, corrected with those of its group and rounded stochastically. Elements are rounded
// under scale.encode as it is. All lanes of the warp. Not inlined: one format needs it.
template <class Order>
__device__ __noinline__ BlockScale eden_scale(float4 a, float4 b, float4 c, float4 d, BlockScale scale, int size,
                                              Key key, Place place, int64_t cols, float amax, float inverse_range) {
  const float x[kSegment] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w};
  float own = 0.0f, with_codes = 0.0f;
#pragma unroll
  for (int i = 0; i < kSegment; ++i) {
    const float t = x[i] * scale.encode, q = decode<E2M1>(encode<E2M1>(t));
    own += t * t, with_codes += t * q;
  }
  const float weight = scale.exact * scale.exact;
  own = scale.exact == 0.0f ? 0.0f : weight * own;
  with_codes = scale.exact == 0.0f ? 0.0f : weight * with_codes;
  own = Order::join_near(own, size, Sum()), with_codes = Order::join_near(with_codes, size, Sum());
  uint32_t random[4];
  key = with_segments(with_step(key), static_cast<uint64_t>(cols));
  draw(key, key.first + static_cast<uint64_t>(place.row) * key.across + static_cast<uint64_t>(place.col) / kSegment, random);
  scale.code = encode_e4m3_stochastic(scale.exact * eden_factor(own, with_codes), random[0]);
  scale.exact = e4m3_value(scale.code), scale.value = scale.exact * amax * inverse_range;
  return scale;
}

// replace: where decoded values, rounded to `rounded`, take the place of the elements they came from; or null. kPlaced: the
// operand may be a part of a whole, which the members of a group are not.
template <class Order, class W, bool kFour, bool kSums, bool kPlaced>
__device__ __forceinline__ void encode_direction(const Direction& to, const Frame& frame, uint32_t* tile, bool replace,
                                                 Dtype rounded) {
  const Spec& spec = to.spec;
  const ElementFacts facts = facts_of(spec.element);
  constexpr int per_group = kGroupSegments<Order, W>;
  const bool ahead = spec.tile_rows > 1;  // a scale depends on segments that the thread does not hold at the same time
  const bool chooses = kFour && spec.four_over_six != FourOverSix::none;
  const bool uniform = kFour && spec.element == Element::e1m2;
  float amax_of_tile[kSegments] = {}, errors[2][kSegments] = {};
  if (ahead) {
    all_amax<Order, W>(tile, spec, frame.key, spec.tile_cols, amax_of_tile);
    join_tile<Order>(spec, amax_of_tile);
    if (chooses) choose_in_tiles<Order, W>(spec, frame, tile, amax_of_tile, errors);
  }
  GlobalScale global{};
  if (spec.family == Family::current || spec.family == Family::nvfp4)
    if (!spec.row_scaled) global = global_of(spec, frame, Place{});
  Key key = kFour && spec.sr ? with_step(frame.key) : frame.key;
  if (kFour && kPlaced && spec.sr) key = with_segments(key, static_cast<uint64_t>(frame.cols));
  Sums sums;
#pragma unroll 1
  for (int h = 0; h < kGroups<Order, W>; ++h) {
    uint32_t words[kGroupWords<Order, W>];
    get_basis<Order, W>(tile, spec, frame.key, h, words);
    float amax[per_group];
    const bool nan = group_amax<Order, W>(words, amax);
#pragma unroll
    for (int k = 0; k < per_group; ++k) {
      const int q = h * per_group + k;
      const Place place = place_of<Order>(frame, q);
      if (spec.row_scaled) global = global_of(spec, frame, place);
      const float most = ahead ? pick(amax_of_tile, q) : Order::join_near(amax[k], spec.tile_cols, Larger());
      if ((nan || amax[k] > kFloatMax) && place.count > 0) note_seen(to, nan, amax[k]);
      BlockScale scale;
      if (chooses) {
        float2 error = {pick(errors[0], q), pick(errors[1], q)};
        if (!ahead) error = errors_of<Order, W>(words, k, most, global.amax, spec);
        scale = candidate(most, global, spec, error.x < error.y);
      } else {
        scale = find_scale<kFour>(spec, facts, frame, most, global);
      }
      float x[kSegment];
#pragma unroll
      for (int i = 0; i < kSegment; ++i) x[i] = value_of<Order, W>(words, k, i);
      uint32_t codes[kCodeWords<kFour>];
      if constexpr (kFour) {
        if (spec.sr) {
          uint32_t random[4];
          uint64_t segment;
          if constexpr (kPlaced)
            segment = key.first + static_cast<uint64_t>(place.row) * key.across + static_cast<uint64_t>(place.col) / kSegment;
          else
            segment = static_cast<uint64_t>(place.row * frame.cols + place.col) / kSegment;
          draw(key, segment, random);
          uniform ? encode_uniform(x, scale.encode, random, codes) : encode_four(x, scale.encode, random, codes);
        } else {
          uniform ? encode_uniform(x, scale.encode, nullptr, codes) : encode_four(x, scale.encode, nullptr, codes);
        }
        if (nan) mark_nan(x, codes);
        if (spec.eden)
          scale = eden_scale<Order>({x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]}, {x[8], x[9], x[10], x[11]},
                                    {x[12], x[13], x[14], x[15]}, scale, spec.rht, frame.key, place, frame.cols,
                                    global.amax, spec.inverse_range);
      } else {
        encode_eight(x, scale.encode, spec.element, facts, codes);
      }
      if (spec.family != Family::current) store_scale(to, frame.starts.scales, place, frame.cols, scale);
      if (to.codes && place.count > 0)
        store_codes<kFour>(to.codes + frame.starts.codes, place, frame.cols, frame.vector, codes);
      if (!to.exact && !replace && !kSums) continue;
      float v[kSegment], scaled[kSegment];
      if constexpr (kFour)
        uniform ? decode_uniform(codes, v) : decode_four(codes, v);
      else
        decode_eight(codes, spec.element, facts, v);
      if (to.exact && place.count > 0) {
#pragma unroll
        for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scale.exact);
        store_exact(to, frame.starts.elements, place, frame.rows, frame.cols, frame.vector, scaled, nan);
      }
      if (!replace && !kSums) continue;
#pragma unroll
      for (int i = 0; i < kSegment; ++i) scaled[i] = __fmul_rn(v[i], scale.value);
      if constexpr (std::is_same_v<Order, RowOrder>)
        if (replace) put_values<W>(tile, q, scaled, nan, rounded);
      if constexpr (kSums)
        store_row_error<Order>(to, frame, place, q, sums.add(x, scaled, place.count,
                                                             scale.value * (facts.max * (1.0f + 0x1p-8f))));
    }
  }
  if constexpr (kSums)
    if (to.sums) store_sums(sums.of, to.sums + frame.starts.sums + frame.tile_index);
}

template <class Order, class W, bool kSums, bool kPlaced>
__device__ __forceinline__ void run_direction(const Direction& to, bool find, const Frame& frame, uint32_t* tile,
                                              bool replace, Dtype rounded) {
  if (find) return find_direction<Order, W>(to, frame, tile);
  if (is_four(to.spec.element))
    return encode_direction<Order, W, true, kSums, kPlaced>(to, frame, tile, replace, rounded);
  encode_direction<Order, W, false, kSums, kPlaced>(to, frame, tile, replace, rounded);
}

}  // namespace hq
