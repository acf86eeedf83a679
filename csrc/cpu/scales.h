// The middle stages of a tile: amax per block, scale per scale tile, and the choice of NVFP4 "four over six". Part of
// quantize.cpp.
#pragma once
#include <cstring>

#include "numerics.h"
#include "quantize.h"
#include "cpu/tile.h"

namespace hq {
namespace HQ_ISA {
namespace {

// ---- scales --------------------------------------------------------------------------------------------------------

Eight magnitudes(const float* x) {
  typedef uint32_t EightBits __attribute__((vector_size(32)));
  EightBits bits;
  memcpy(&bits, x, sizeof(bits));
  return reinterpret_cast<Eight>(bits & kAbsMask);
}

// Keeps `largest` where `value` is NaN, and so never holds a NaN itself.
Eight larger(Eight value, Eight largest) {
#if defined(__AVX__)
  return __builtin_ia32_maxps256(value, largest);  // the compiler makes a comparison and a blend of the line below
#else
  return value > largest ? value : largest;
#endif
}

// Neighbouring lanes combined, within the halves of a vector: a0a1 a2a3 b0b1 b2b3 | a4a5 a6a7 b4b5 b6b7.
Eight fold(Eight a, Eight b) {
  return larger(__builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14),
                __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15));
}

// amax of each block of one row, in order; unused entries are 0.
template <int kBlock>
Eight row_amax(const float* x) {
  Eight lanes[8] = {};
#pragma GCC unroll 8
  for (int b = 0; b < kWidth / kBlock; ++b)
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; i += 8) lanes[b] = larger(magnitudes(x + b * kBlock + i), lanes[b]);
  const Eight first = fold(fold(lanes[0], lanes[1]), fold(lanes[2], lanes[3]));
  const Eight last = fold(fold(lanes[4], lanes[5]), fold(lanes[6], lanes[7]));
  return larger(__builtin_shufflevector(first, last, 0, 1, 2, 3, 8, 9, 10, 11),
                __builtin_shufflevector(first, last, 4, 5, 6, 7, 12, 13, 14, 15));
}

// amax of every scale tile, in tile.amax[t][b].
template <int kBlock>
void block_amax(const Work& work, Tile& tile) {
  const int tile_rows = work.to.spec.tile_rows;
  for (int first = 0, t = 0; first < tile.rows; first += tile_rows, ++t) {
    Eight amax = {};
    for (int r = first; r < first + tile_rows && r < tile.rows; ++r)
      amax = larger(row_amax<kBlock>(tile.x + r * kWidth), amax);
    memcpy(tile.amax[t], &amax, sizeof(amax));
  }
}

float global_amax(const Work& work, const Tile& tile, int t) {
  return work.amax[work.to.spec.row_scaled ? tile.row0 + t : 0];
}

// Current scaling: the encode scale under the amax of that row, or under the only one.
float current_scale(const Work& work, int64_t row) {
  const Spec& spec = work.to.spec;
  return fp8_scale(work.amax[row], work.element_max, spec.amax_epsilon, spec.pow2, kFloatMax);
}

// Which line of a tile's scales a row of the tile has.
int scale_line(const Spec& spec, int r) {
  if (spec.tile_rows) return r / spec.tile_rows;
  return spec.row_scaled ? r : 0;
}

// Scales of `count` blocks, each a plain loop over all of them.
template <class E>
inline __attribute__((always_inline)) void scales_of(const Work& work, float global_amax, int count,
                                                     const float* __restrict amax, float* __restrict encode_scale,
                                                     float* __restrict decode_scale, uint8_t* __restrict codes) {
  const Spec& spec = work.to.spec;
  if (spec.family == Family::block) {
    for (int b = 0; b < count; ++b) {
      encode_scale[b] = fp8_scale(amax[b], work.element_max, spec.amax_epsilon, spec.pow2, work.input_max);
      decode_scale[b] = 1.0f / encode_scale[b];
    }
  } else if (spec.family == Family::mx) {
    if (spec.scale_rounding == ScaleRounding::up)
      for (int b = 0; b < count; ++b) codes[b] = static_cast<uint8_t>(e8m0_scale<E>(ScaleRounding::up, amax[b]));
    else
      for (int b = 0; b < count; ++b) codes[b] = static_cast<uint8_t>(e8m0_scale<E>(spec.scale_rounding, amax[b]));
    for (int b = 0; b < count; ++b) {
      encode_scale[b] = e8m0_reciprocal(codes[b]);
      decode_scale[b] = e8m0_decode(codes[b]);
    }
  } else if (spec.family == Family::ue5m3) {
    for (int b = 0; b < count; ++b) {
      const uint32_t code = ue5m3_block_scale(amax[b], spec.inverse_max);
      codes[b] = static_cast<uint8_t>(code);
      decode_scale[b] = decode<UE5M3>(code);
      encode_scale[b] = nvfp4_encode_scale(decode_scale[b], 1.0f);
    }
  } else {
    const float global_encode = nvfp4_global_scale(global_amax, spec.full_range);
    const float sixth = global_encode * spec.inverse_max, global_decode = 1.0f / global_encode;
    for (int b = 0; b < count; ++b) {
      const uint32_t code = nvfp4_block_scale(amax[b], sixth);
      codes[b] = static_cast<uint8_t>(code);
      decode_scale[b] = decode<E4M3>(code);
      encode_scale[b] = nvfp4_encode_scale(decode_scale[b], global_decode);
    }
  }
}

// Scales of one row of scale tiles, from tile.amax. All of a full row's blocks are computed, whatever the padding
// holds, so that the loops have a constant length.
template <class E, int kBlock>
void block_scales(const Work& work, Tile& tile, int t) {
  const float global = work.to.spec.family == Family::nvfp4 ? global_amax(work, tile, t) : 0.0f;
  scales_of<E>(work, global, kWidth / kBlock, tile.amax[t], tile.encode_scale[t], tile.decode_scale[t],
               tile.scale_codes[t]);
}

// first: number of the tile's first scale; per_row: scales in a row of the operand.
template <int kBlock>
void write_scales(const Work& work, const Tile& tile, int t, int64_t first, int64_t per_row) {
  if (!work.to.scales) return;
  const int64_t offset = first + t * per_row;
  if (work.to.spec.family == Family::block)
    static_cast<float*>(work.to.scales)[offset] = tile.decode_scale[t][0];
  else if (tile.blocks == kWidth / kBlock)
    memcpy(static_cast<uint8_t*>(work.to.scales) + offset, tile.scale_codes[t], kWidth / kBlock);
  else
    memcpy(static_cast<uint8_t*>(work.to.scales) + offset, tile.scale_codes[t], static_cast<size_t>(tile.blocks));
}

// ---- NVFP4 four over six -------------------------------------------------------------------------------------------

// The eight blocks of a row, each with one of its two candidate scales.
struct Candidates {
  float decode_scale[kBlocks], encode_scale[kBlocks], error[kBlocks];
  uint32_t codes[kBlocks];
};

struct Range {
  float amax, encode, full;  // global amax, its encode scale, 6 times the largest block scale
};

void candidate_scales(const float* __restrict amax, const Range& range, float stretch, Candidates& out) {
  const float global_decode = 1.0f / range.encode;
  for (int b = 0; b < kBlocks; ++b) {
    out.codes[b] = nvfp4_candidate_scale(amax[b], range.encode, stretch);
    out.decode_scale[b] = decode<E4M3>(out.codes[b]);
    out.encode_scale[b] = nvfp4_encode_scale(out.decode_scale[b], global_decode);
  }
}

// Error of each block of one row, summed over its 16 elements in order. x[i] holds element i of the eight blocks.
void row_errors(const Spec& spec, const float x[16][kBlocks], const Candidates& candidates, const Range& range,
                float* __restrict sums) {
  const bool squared = spec.four_over_six == FourOverSix::mse;
  for (int b = 0; b < kBlocks; ++b) sums[b] = 0.0f;
  for (int i = 0; i < 16; ++i) {
    float d[kBlocks];
    for (int b = 0; b < kBlocks; ++b)
      d[b] = decode<E2M1>(encode<E2M1>(x[i][b] * candidates.encode_scale[b])) * candidates.decode_scale[b];
    if (spec.fast_error)
      for (int b = 0; b < kBlocks; ++b) d[b] = d[b] - x[i][b] * range.encode;
    else
      for (int b = 0; b < kBlocks; ++b) d[b] = d[b] * range.amax / range.full - x[i][b];
    for (int b = 0; b < kBlocks; ++b)
      sums[b] += to_float(select(squared, to_bits(d[b] * d[b]), to_bits(d[b]) & kAbsMask));
  }
}

// Errors of the scale tiles of one row of tiles. Those of a 16 x 16 tile are added as a tree over its rows, in the
// order of a warp's shuffles.
void candidate_errors(const Work& work, const Tile& tile, int first, const Range& range, Candidates* candidates) {
  const int tile_rows = work.to.spec.tile_rows;
  float errors[2][16][kBlocks] = {};
  for (int r = 0; r < tile_rows && first + r < tile.rows; ++r) {
    float x[16][kBlocks];
    for (int b = 0; b < kBlocks; ++b)
      for (int i = 0; i < 16; ++i) x[i][b] = tile.x[(first + r) * kWidth + b * 16 + i];
    for (int k = 0; k < 2; ++k) row_errors(work.to.spec, x, candidates[k], range, errors[k][r]);
  }
  for (int k = 0; k < 2; ++k) {
    for (int offset = tile_rows / 2; offset > 0; offset /= 2)
      for (int r = 0; r < offset; ++r)
        for (int b = 0; b < kBlocks; ++b) errors[k][r][b] += errors[k][r + offset][b];
    memcpy(candidates[k].error, errors[k][0], sizeof(candidates[k].error));
  }
}

// Per block the scale that maps the amax to 6, or the one that maps it to 4 where that has strictly less error.
void four_over_six_scales(const Work& work, Tile& tile, int t) {
  const float full = work.to.spec.full_range, amax = global_amax(work, tile, t);
  const Range range{amax, nvfp4_global_scale(amax, full), full};
  Candidates candidates[2];
  candidate_scales(tile.amax[t], range, 1.0f, candidates[0]);
  candidate_scales(tile.amax[t], range, 1.5f, candidates[1]);
  candidate_errors(work, tile, t * work.to.spec.tile_rows, range, candidates);
  for (int b = 0; b < kBlocks; ++b) {
    const Candidates& best = candidates[candidates[1].error[b] < candidates[0].error[b] ? 1 : 0];
    tile.decode_scale[t][b] = best.decode_scale[b];
    tile.encode_scale[t][b] = best.encode_scale[b];
    tile.scale_codes[t][b] = static_cast<uint8_t>(best.codes[b]);
  }
}

}  // namespace
}  // namespace HQ_ISA
}  // namespace hq
