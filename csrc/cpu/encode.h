// The last stages of a tile: codes, decoded values, sums of errors, and what is written of them. Part of quantize.cpp.
#pragma once
#include <cstring>

#include "numerics.h"
#include "quantize.h"
#include "cpu/scales.h"
#include "cpu/tile.h"

namespace hq {
namespace HQ_ISA {
namespace {

// 128 random bits per block of 16 elements; block n of the matrix has counter (n, step).
void draw_random(const Work& work, Tile& tile, int64_t row) {
  const Key& key = work.to.key;
  const uint64_t across = key.across ? key.across : static_cast<uint64_t>(work.cols) / 16;
  const uint64_t first = key.first + static_cast<uint64_t>(row) * across + static_cast<uint64_t>(tile.col0) / 16;
  const uint64_t step = step_of(key);
  const uint32_t step0 = static_cast<uint32_t>(step), step1 = static_cast<uint32_t>(step >> 32);
  for (int b = 0; b < kBlocks; ++b) {
    const uint64_t block = first + static_cast<uint64_t>(b);
    uint32_t counter[4] = {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), step0, step1};
    philox(key.key0, key.key1, counter);
    for (int w = 0; w < 4; ++w) tile.random[b][w] = counter[w];
  }
}

// MS-EDEN: row r's scales, corrected group by group and rounded stochastically. Elements keep their encode scales.
void eden_scales(const Work& work, Tile& tile, int r) {
  const int per_group = work.to.spec.rht / 16;
  float own[kBlocks] = {}, with_codes[kBlocks] = {};
  for (int b = 0; b < kBlocks; ++b) {
    const float* __restrict x = tile.x + r * kWidth + b * 16;
    for (int i = 0; i < 16; ++i) {
      const float t = x[i] * tile.encode_scale[r][b], q = decode<E2M1>(encode<E2M1>(t));
      own[b] += t * t, with_codes[b] += t * q;
    }
    const float scale = tile.decode_scale[r][b], weight = scale * scale;
    own[b] = scale == 0.0f ? 0.0f : weight * own[b];
    with_codes[b] = scale == 0.0f ? 0.0f : weight * with_codes[b];
  }
  draw_random(work, tile, tile.row0 + r);
  for (int first = 0; first < kBlocks; first += per_group) {
    for (int distance = 1; distance < per_group; distance *= 2)
      for (int b = first; b < first + per_group; b += 2 * distance)
        own[b] += own[b + distance], with_codes[b] += with_codes[b + distance];
    const float factor = eden_factor(own[first], with_codes[first]);
    for (int b = first; b < first + per_group; ++b) {
      const uint32_t code = encode_e4m3_stochastic(tile.decode_scale[r][b] * factor, tile.random[b][0]);
      tile.scale_codes[r][b] = static_cast<uint8_t>(code);
      tile.decode_scale[r][b] = decode<E4M3>(code);
    }
  }
}

template <class E, int kBlock>
void encode_row(const Work& work, Tile& tile, int r) {
  const Spec& spec = work.to.spec;
  const int t = scale_line(spec, r);
  if (spec.sr) draw_random(work, tile, tile.row0 + r);
  for (int b = 0; b < tile.blocks; ++b) {
    const float* __restrict x = tile.x + r * kWidth + b * kBlock;
    uint32_t* __restrict codes = tile.codes + b * kBlock;
    const float scale = tile.encode_scale[t][b];
    if (E::kWidth == 4 && spec.sr) {
      const uint8_t* __restrict random = reinterpret_cast<const uint8_t*>(tile.random) + b * kBlock;
      if (spec.element == Element::e1m2)
        for (int i = 0; i < kBlock; ++i) codes[i] = encode_e1m2_stochastic(x[i] * scale, random[i]);
      else
        for (int i = 0; i < kBlock; ++i) codes[i] = encode_e2m1_stochastic(x[i] * scale, random[i]);
    } else {
      for (int i = 0; i < kBlock; ++i) codes[i] = encode<E>(x[i] * scale);
    }
  }
}

// Element values of the row's codes in tile.values.
template <class E, int kBlock>
void decode_row(Tile& tile) {
  for (int i = 0; i < tile.blocks * kBlock; ++i) tile.values[i] = decode<E>(tile.codes[i]);
}

// tile.scaled = tile.values times a scale per block.
template <int kBlock>
void scale_row(Tile& tile, const float* scales) {
  for (int b = 0; b < tile.blocks; ++b)
    for (int i = 0; i < kBlock; ++i) tile.scaled[b * kBlock + i] = tile.values[b * kBlock + i] * scales[b];
}

// Codes of a row, one byte each, as two a byte.
void pack_nibbles(const uint8_t* bytes, uint8_t* packed) {
  uint16_t pairs[kWidth / 2];
  memcpy(pairs, bytes, sizeof(pairs));
  for (int i = 0; i < kWidth / 2; ++i) packed[i] = static_cast<uint8_t>(pairs[i] | (pairs[i] >> 4));
}

void write_codes(const Work& work, const Tile& tile, int r) {
  if (!work.to.codes) return;
  const int64_t start = (tile.row0 + r) * work.cols + tile.col0;
  uint8_t bytes[kWidth];
  for (int i = 0; i < kWidth; ++i) bytes[i] = static_cast<uint8_t>(tile.codes[i]);
  if (!is_four(work.to.spec.element)) {
    if (tile.cols == kWidth)
      memcpy(work.to.codes + start, bytes, kWidth);
    else
      memcpy(work.to.codes + start, bytes, static_cast<size_t>(tile.cols));
    return;
  }
  uint8_t packed[kWidth / 2];
  pack_nibbles(bytes, packed);
  if (tile.cols == kWidth)
    memcpy(work.to.codes + start / 2, packed, kWidth / 2);
  else
    memcpy(work.to.codes + start / 2, packed, static_cast<size_t>(tile.cols / 2));
}

// Row r of the tile, or (turned) a column of what is stored.
template <class T>
void write_row(const Work& work, const Tile& tile, int r, const T* values) {
  T* to = static_cast<T*>(work.to.exact);
  if (!work.to.exact_turned) {
    to += (tile.row0 + r) * work.cols + tile.col0;
    memcpy(to, values, sizeof(T) * static_cast<size_t>(tile.cols));
    return;
  }
  to += tile.col0 * work.rows + tile.row0 + r;
  for (int i = 0; i < tile.cols; ++i) to[i * work.rows] = values[i];
}

void write_exact(const Work& work, const Tile& tile, int r) {
  if (work.to.exact_dtype == Dtype::fp32) return write_row(work, tile, r, tile.scaled);
  uint16_t halves[kWidth];
  for (int i = 0; i < kWidth; ++i) halves[i] = static_cast<uint16_t>(to_bits(round_to_bf16(tile.scaled[i])) >> 16);
  write_row(work, tile, r, halves);
}

// What multiplies a block's element values back: TransformerEngine's order, global factor included.
void value_scales(const Work& work, const Tile& tile, int t, float* out) {
  const Spec& spec = work.to.spec;
  if (spec.family == Family::current) {
    for (int b = 0; b < kBlocks; ++b) out[b] = 1.0f / tile.encode_scale[t][0];
  } else if (spec.family == Family::nvfp4) {
    const float amax = global_amax(work, tile, t), inverse = spec.inverse_range;
    for (int b = 0; b < kBlocks; ++b) out[b] = tile.decode_scale[t][b] * amax * inverse;
  } else {
    memcpy(out, tile.decode_scale[t], sizeof(tile.decode_scale[t]));
  }
}

// Values rounded to X's dtype take the place of the row they came from.
void replace_row(Tile& tile, int r, Dtype dtype) {
  float* x = tile.x + r * kWidth;
  if (dtype == Dtype::fp32)
    memcpy(x, tile.scaled, sizeof(float) * static_cast<size_t>(tile.cols));
  else if (dtype == Dtype::bf16)
    for (int i = 0; i < tile.cols; ++i) x[i] = round_to_bf16(tile.scaled[i]);
  else
    for (int i = 0; i < tile.cols; ++i) x[i] = half_to_float(float_to_half(tile.scaled[i]));
}

// Adds one row to the tile's sums; `limits` is the largest magnitude per block that does not count as saturated.
float sum_row(const Tile& tile, int r, int block, const float* limits, TileSums& sums) {
  const float* x = tile.x + r * kWidth;
  float error2 = 0.0f, x2 = 0.0f, q2 = 0.0f, lost2 = 0.0f, amax = 0.0f;
  int nonzero = 0, lost = 0, saturated = 0;
  for (int i = 0; i < tile.cols; ++i) {
    const float d = x[i] - tile.scaled[i], magnitude = to_float(to_bits(x[i]) & kAbsMask);
    error2 += d * d, x2 += x[i] * x[i], q2 += tile.scaled[i] * tile.scaled[i];
    amax = magnitude > amax ? magnitude : amax;
    nonzero += x[i] != 0.0f;
    lost += x[i] != 0.0f && tile.scaled[i] == 0.0f;
    lost2 += tile.scaled[i] == 0.0f ? x[i] * x[i] : 0.0f;
    saturated += magnitude > limits[i / block];
  }
  sums.x2 += x2, sums.error2 += error2, sums.q2 += q2, sums.lost2 += lost2;
  sums.amax = amax > sums.amax ? amax : sums.amax;
  sums.nonzero += static_cast<float>(nonzero);
  sums.lost += static_cast<float>(lost);
  sums.saturated += static_cast<float>(saturated);
  return error2;
}

// dtype: where decoded values take the place of x, the dtype they are rounded to; or null. index: of X's tile.
template <class E, int kBlock>
void quantize_tile_as(const Work& work, Tile& tile, int64_t index, const Dtype* dtype) {
  const Spec& spec = work.to.spec;
  if (spec.family == Family::current) {
    for (int t = 0; t == 0 || (spec.row_scaled && t < tile.rows); ++t) {
      const float scale = spec.row_scaled ? current_scale(work, tile.row0 + t) : work.whole_scale;
      for (int b = 0; b < kWidth / kBlock; ++b) tile.encode_scale[t][b] = scale, tile.decode_scale[t][b] = 1.0f;
    }
  } else {
    block_amax<kBlock>(work, tile);
    const int64_t per_row = (work.cols + kBlock - 1) / kBlock;
    const int64_t first = tile.row0 / spec.tile_rows * per_row + tile.col0 / kBlock;
    for (int t = 0; t * spec.tile_rows < tile.rows; ++t) {
      if (spec.four_over_six == FourOverSix::none)
        block_scales<E, kBlock>(work, tile, t);
      else
        four_over_six_scales(work, tile, t);
      if (spec.eden) eden_scales(work, tile, t);
      write_scales<kBlock>(work, tile, t, first, per_row);
    }
  }
  const bool sums = work.to.sums || work.to.row_errors, valued = sums || dtype;
  TileSums total{};
  constexpr int per_byte = E::kWidth == 4 ? 2 : 1;
  const uint8_t* target = work.to.codes ? work.to.codes + (tile.row0 * work.cols + tile.col0) / per_byte : nullptr;
  for (int r = 0; r < tile.rows; ++r) {
    if (target) fetch(target + (r + kAhead) * work.cols / per_byte, kWidth / per_byte, true);
    encode_row<E, kBlock>(work, tile, r);
    write_codes(work, tile, r);
    if (!work.to.exact && !valued) continue;
    const int t = scale_line(spec, r);
    decode_row<E, kBlock>(tile);
    if (work.to.exact) {
      scale_row<kBlock>(tile, tile.decode_scale[t]);
      write_exact(work, tile, r);
    }
    if (!valued) continue;
    float scales[kBlocks] = {}, limits[kBlocks];
    value_scales(work, tile, t, scales);
    scale_row<kBlock>(tile, scales);
    for (int b = 0; b < kWidth / kBlock; ++b) limits[b] = scales[b] * (work.element_max * (1.0f + 0x1p-8f));
    const float error2 = sums ? sum_row(tile, r, kBlock, limits, total) : 0.0f;
    if (work.to.row_errors)
      work.to.row_errors[(tile.row0 + r) * ((work.cols + kWidth - 1) / kWidth) + tile.col0 / kWidth] = error2;
    if (dtype) replace_row(tile, r, *dtype);
  }
  if (work.to.sums) work.to.sums[index] = total;
}

template <class E, int kBlockLength>
struct As {
  using Element = E;
  static constexpr int kBlock = kBlockLength;
};

// run(As<element, block length>{}) of the direction's format.
template <class Run>
void with_format(const Work& work, const Run& run) {
  const bool wide = work.block == kWidth;
  switch (work.to.spec.element) {
    case Element::e4m3: return wide ? run(As<E4M3, 128>{}) : run(As<E4M3, 32>{});
    case Element::e5m2: return wide ? run(As<E5M2, 128>{}) : run(As<E5M2, 32>{});
    case Element::e2m1: return work.block == 16 ? run(As<E2M1, 16>{}) : run(As<E2M1, 32>{});
    case Element::e1m2: return work.block == 16 ? run(As<E1M2, 16>{}) : run(As<E1M2, 32>{});
    case Element::int8: return run(As<INT8, 128>{});
    case Element::e2m3: return run(As<E2M3, 32>{});
    case Element::e3m2: return run(As<E3M2, 32>{});
  }
}

}  // namespace
}  // namespace HQ_ISA
}  // namespace hq
