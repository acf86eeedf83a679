// The usual request, codes and scales without stochastic rounding, less the stages that everything else needs: a tile is
// read in bands of rows, the scales of a band are found and its elements encoded while it is in the L1 cache.
// The column direction works down the rows with the columns side by side, and only its codes are transposed. Part of
// quantize.cpp.
#pragma once
#include <cstring>

#include "cpu/encode.h"
#include "cpu/lanes.h"
#include "numerics.h"
#include "quantize.h"
#include "cpu/scales.h"
#include "cpu/tile.h"

namespace hq {
namespace HQ_ISA {
namespace {

// Whether a direction asks for codes and scales only, without statistics, transform, stochastic rounding or 4over6.
bool fast_takes(const Direction& to) {
  return to.codes && !to.exact && !to.sums && !to.row_errors && !to.spec.row_scaled && !to.spec.rht && !to.spec.sr &&
         to.spec.four_over_six == FourOverSix::none;
}

// Scales of the blocks of one band.
struct Band {
  static constexpr int kMost = 256;
  alignas(64) float amax[kMost], encode_scale[kMost], decode_scale[kMost];
  alignas(64) uint8_t codes[kMost] = {};
};

template <class E>
void find_scales(const Work& work, int count, Band& band) {
  const float global = work.amax ? *work.amax : 0.0f;
  if (work.to.spec.family == Family::current)
    for (int i = 0; i < count; ++i) band.encode_scale[i] = work.whole_scale;
  else
    scales_of<E>(work, global, count, band.amax, band.encode_scale, band.decode_scale, band.codes);
}

// Where the scales of an operand's tile go: the first one, and how many there are in a row of scales.
struct ScalesAt {
  int64_t first, per_row;
};

// From row `row` of the tile on.
template <int kBlock>
ScalesAt scales_at(const Work& work, const Tile& tile, int row) {
  if (work.to.spec.family == Family::current) return {};
  const int64_t per_row = (work.cols + kBlock - 1) / kBlock;
  return {(tile.row0 + row) / work.to.spec.tile_rows * per_row + tile.col0 / kBlock, per_row};
}

// A block's scale, or the codes of the scales of a whole row of blocks.
template <int kPerRow>
void store_scales(const Work& work, const uint8_t* codes, float scale, int blocks, int64_t at) {
  if (work.to.spec.family == Family::block)
    static_cast<float*>(work.to.scales)[at] = scale;
  else if (blocks == kPerRow)
    memcpy(static_cast<uint8_t*>(work.to.scales) + at, codes, kPerRow);
  else
    memcpy(static_cast<uint8_t*>(work.to.scales) + at, codes, static_cast<size_t>(blocks));
}

// Gives each group of `group` lines, `line` values long, the largest values of the group.
void share_over_lines(float* amax, int lines, int line, int group) {
  for (int first = 0; first < lines * line; first += group * line)
    for (int b = 0; b < line; ++b) {
      float most = 0.0f;
      for (int i = 0; i < group; ++i) {
        const float value = amax[first + i * line + b];
        most = value > most ? value : most;
      }
      for (int i = 0; i < group; ++i) amax[first + i * line + b] = most;
    }
}

// ---- blocks along the rows -----------------------------------------------------------------------------------------

// Codes of a row, one byte each.
template <class E, int kBlock>
void encode_line(const float* x, const float* scales, uint8_t* bytes) {
#pragma GCC unroll 8
  for (int c = 0; c < kWidth; c += kVector) {
    Words codes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      codes[i] = encode<E>(floats_at(x + c + i * kLanes) * scales[(c + i * kLanes) / kBlock]);
    const Bytes ordered = in_order(pack<8>(codes));
    memcpy(bytes + c, &ordered, sizeof(ordered));
  }
}

// x: rows [first, first + count) of the tile; count is kWidth or a multiple of 32.
template <class E, int kBlock>
void fast_rows(const Work& work, const Tile& tile, const float* x, int first, int count) {
  constexpr int kPerRow = kWidth / kBlock, kPerByte = E::kWidth == 4 ? 2 : 1;
  const Spec& spec = work.to.spec;
  const int lines = spec.tile_rows == kWidth ? kWidth : 32, end = at_most(tile.rows, first + count);
  ScalesAt at = scales_at<kBlock>(work, tile, first);
  for (; first < end; first += lines, x += lines * kWidth) {
    Band band;
    if (spec.family != Family::current)
      for (int r = 0; r < lines; ++r) {
        const Eight amax = row_amax<kBlock>(x + r * kWidth);
        memcpy(band.amax + r * kPerRow, &amax, sizeof(float) * kPerRow);
      }
    if (spec.tile_rows > 1) share_over_lines(band.amax, lines, kPerRow, spec.tile_rows);
    find_scales<E>(work, lines * kPerRow, band);
    if (work.to.scales && spec.family != Family::current)
      for (int r = 0; r < lines && first + r < end; r += spec.tile_rows, at.first += at.per_row)
        store_scales<kPerRow>(work, band.codes + r * kPerRow, band.decode_scale[r * kPerRow], tile.blocks, at.first);
    uint8_t* to = work.to.codes + ((tile.row0 + first) * work.cols + tile.col0) / kPerByte;
    for (int r = 0; r < lines && first + r < end; ++r, to += work.cols / kPerByte) {
      fetch(to + kAhead * work.cols / kPerByte, kWidth / kPerByte, true);
      alignas(64) uint8_t bytes[kWidth], packed[kWidth];
      encode_line<E, kBlock>(x + r * kWidth, band.encode_scale + r * kPerRow, bytes);
      if (kPerByte == 2) pack_nibbles(bytes, packed);
      const uint8_t* line = kPerByte == 2 ? packed : bytes;
      if (tile.cols == kWidth)
        memcpy(to, line, kWidth / kPerByte);
      else
        memcpy(to, line, static_cast<size_t>(tile.cols / kPerByte));
    }
  }
}

// ---- blocks along the columns --------------------------------------------------------------------------------------

template <int kBlock>
void column_amax(const float* x, float* amax) {
  constexpr int kBeside = 4;
  for (int c = 0; c < kWidth; c += kBeside * kLanes) {
    Floats largest[kBeside] = {};
    for (int r = 0; r < kBlock; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kBeside; ++i)
        largest[i] = larger_magnitude(floats_at(x + r * kWidth + c + i * kLanes), largest[i]);
    memcpy(amax + c, largest, sizeof(largest));
  }
}

// words[w][c]: codes of as many rows as there are in a word, of column c.
template <class E, int kBlock>
void encode_columns(const float* x, const float* scales, uint32_t* words) {
  constexpr int kBits = E::kWidth == 4 ? 4 : 8, kRows = 32 / kBits;
  for (int r = 0; r < kBlock; r += kRows)
    for (int c = 0; c < kWidth; c += kLanes) {
      const Floats scale = floats_at(scales + c);
      Words codes[kRows];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) codes[i] = encode<E>(floats_at(x + (r + i) * kWidth + c) * scale);
      const Words packed = pack<kBits>(codes);
      memcpy(words + r / kRows * kWidth + c, &packed, sizeof(packed));
    }
}

// The columns of words[kWords][kWidth] as rows of codes; row c at to + c * stride.
template <int kWords>
void store_columns(const uint32_t* words, int columns, size_t bytes, int64_t stride, uint8_t* to) {
  for (int c = 0; c < columns; c += 4) {
    alignas(64) uint32_t lines[4][kWords];
    for (int i = 0; i < 4; ++i) fetch(to + (c + kAhead + i) * stride, sizeof(lines[0]), true);
#pragma GCC unroll 8
    for (int w = 0; w < kWords; w += 4) {
      Four square[4];
      for (int i = 0; i < 4; ++i) memcpy(&square[i], words + (w + i) * kWidth + c, sizeof(Four));
      turn(square);
      for (int i = 0; i < 4; ++i) memcpy(lines[i] + w, &square[i], sizeof(Four));
    }
    for (int i = 0; i < 4 && c + i < columns; ++i) {
      if (bytes == sizeof(lines[0]))
        memcpy(to + (c + i) * stride, lines[i], sizeof(lines[0]));
      else
        memcpy(to + (c + i) * stride, lines[i], bytes);
    }
  }
}

// What is found of a tile's columns, until all of it is written at once.
struct Columns {
  alignas(64) uint32_t words[kWidth / 4 * kWidth];
  alignas(64) uint64_t scale_codes[kWidth];  // of a column, the first block's in the lowest byte
  alignas(64) float scales[kWidth];          // of its last block
};

// x: rows [first, first + count) of X's tile; `tile` says where its transpose lies in the operand.
template <class E, int kBlock>
void fast_columns(const Work& work, const Tile& tile, const float* x, int first, int count, Columns& out) {
  constexpr int kRows = E::kWidth == 4 ? 8 : 4;  // in a word
  const Spec& spec = work.to.spec;
  if (first == 0) memset(out.scale_codes, 0, sizeof(out.scale_codes));
  for (int r = first; r < at_most(tile.cols, first + count); r += kBlock, x += kBlock * kWidth) {
    Band band;
    if (spec.family != Family::current) column_amax<kBlock>(x, band.amax);
    if (spec.tile_rows > 1) share_over_lines(band.amax, kWidth, 1, spec.tile_rows);
    find_scales<E>(work, kWidth, band);
    for (int c = 0; c < kWidth; ++c) out.scale_codes[c] |= static_cast<uint64_t>(band.codes[c]) << (r / kBlock * 8);
    memcpy(out.scales, band.decode_scale, sizeof(out.scales));
    encode_columns<E, kBlock>(x, band.encode_scale, out.words + r / kRows * kWidth);
  }
}

template <class E, int kBlock>
void write_columns(const Work& work, const Tile& tile, const Columns& columns) {
  constexpr int kPerByte = E::kWidth == 4 ? 2 : 1;
  const Spec& spec = work.to.spec;
  ScalesAt at = scales_at<kBlock>(work, tile, 0);
  if (work.to.scales && spec.family != Family::current)
    for (int c = 0; c < tile.rows; c += spec.tile_rows, at.first += at.per_row) {
      uint8_t codes[sizeof(uint64_t)];
      memcpy(codes, &columns.scale_codes[c], sizeof(codes));
      store_scales<kWidth / kBlock>(work, codes, columns.scales[c], tile.blocks, at.first);
    }
  store_columns<kWidth / kPerByte / 4>(columns.words, tile.rows, static_cast<size_t>(tile.cols / kPerByte),
                                       work.cols / kPerByte,
                                       work.to.codes + (tile.row0 * work.cols + tile.col0) / kPerByte);
}

}  // namespace
}  // namespace HQ_ISA
}  // namespace hq
