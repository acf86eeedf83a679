// The first stages of a tile: what it holds, loading it from any dtype and strides, the random Hadamard transform, and
// the scans for a global amax. Part of quantize.cpp.
#pragma once
#include <cstring>

#include "numerics.h"
#include "quantize.h"

namespace hq {
namespace HQ_ISA {
namespace {

constexpr int kWidth = 128;  // columns of a tile, a multiple of every block length
constexpr int kMaxHeight = 128;
constexpr int kBlocks = kWidth / 16;

struct Job {
  const Spec& spec;
  const Source& source;
  const Output& output;
  int height;         // rows of a tile, a multiple of tile_rows
  int block;          // elements along a row that share a scale
  float element_max;  // largest value of the element format
  float input_max;    // largest finite value of the source dtype
  float whole_scale;  // current: the one encode scale
};

struct Tile {
  int64_t row0, col0;
  int rows, cols;  // valid part
  int lanes;       // rows, padded with zeros to a multiple of 8
  int blocks;      // per row, the last one padded with zeros
  alignas(64) float columns[kMaxHeight * kWidth];  // [kWidth][height]: as in memory when rows are contiguous
  alignas(64) float x[kMaxHeight * kWidth];        // [height][kWidth]
  // Per row of scale tiles and block:
  alignas(64) float amax[kMaxHeight][kBlocks];
  alignas(64) float encode_scale[kMaxHeight][kBlocks];
  alignas(64) float decode_scale[kMaxHeight][kBlocks];
  alignas(64) uint8_t scale_codes[kMaxHeight][kBlocks];
  // Of one row:
  alignas(64) uint32_t codes[kWidth];
  alignas(64) float exact[kWidth];
  alignas(64) uint32_t random[kBlocks][4];
};

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));

// ---- load ----------------------------------------------------------------------------------------------------------

struct Fp32 {
  float value;
  float widen() const { return value; }
};
struct Bf16 {
  uint16_t bits;
  float widen() const { return bf16_to_float(bits); }
};
struct Fp16 {
  uint16_t bits;
  float widen() const { return half_to_float(bits); }
};

template <class T>
void widen_line(const T* line, int64_t stride, int count, int padded, float* out) {
  if (stride == 1)
    for (int i = 0; i < count; ++i) out[i] = line[i].widen();
  else
    for (int i = 0; i < count; ++i) out[i] = line[i * stride].widen();
  for (int i = count; i < padded; ++i) out[i] = 0.0f;
}

// Random Hadamard transform of 16 elements, `stride` apart: multiply by factors (+-1/4), butterflies, round to bf16. V
// is float, or a vector of floats for as many groups side by side.
template <class V>
void hadamard16(float* base, int stride, const float factors[16]) {
  V v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    memcpy(&v[i], base + i * stride, sizeof(V));
    v[i] *= factors[i];
  }
  butterfly16(v);
  float rounded[16][sizeof(V) / sizeof(float)];
  memcpy(rounded, v, sizeof(v));
  for (auto& group : rounded)
    for (float& value : group) value = round_to_bf16(value);
  for (int i = 0; i < 16; ++i) memcpy(base + i * stride, rounded[i], sizeof(V));
}

// x[r][c] = columns[c][r], in 4 x 4 blocks held in vector registers.
void transpose(const float* columns, int height, int rows, int cols, float* x) {
  for (int c = 0; c < cols; c += 4)
    for (int r = 0; r < rows; r += 4) {
      Four in[4];
      for (int i = 0; i < 4; ++i) memcpy(&in[i], columns + (c + i) * height + r, sizeof(Four));
      const Four low0 = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
      const Four high0 = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
      const Four low1 = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
      const Four high1 = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
      const Four out[4] = {
          __builtin_shufflevector(low0, low1, 0, 1, 4, 5), __builtin_shufflevector(low0, low1, 2, 3, 6, 7),
          __builtin_shufflevector(high0, high1, 0, 1, 4, 5), __builtin_shufflevector(high0, high1, 2, 3, 6, 7)};
      for (int i = 0; i < 4; ++i) memcpy(x + (r + i) * kWidth + c, &out[i], sizeof(Four));
    }
}

bool rows_contiguous(const Source& source) { return source.row_stride == 1 && source.col_stride != 1; }

// Loads into tile.columns when rows are the contiguous axis, else into tile.x; transforms if asked to.
template <class T>
void load_as(const Job& job, Tile& tile) {
  const Source& source = job.source;
  const T* first = static_cast<const T*>(source.data) + tile.row0 * source.row_stride + tile.col0 * source.col_stride;
  const int padded = tile.blocks * job.block;
  float factors[16];
  for (int i = 0; i < 16; ++i) factors[i] = rht_factor(i, job.spec.rht_sign);
  if (rows_contiguous(source)) {
    for (int c = 0; c < padded; ++c)
      widen_line(first + c * source.col_stride, 1, c < tile.cols ? tile.rows : 0, tile.lanes,
                 tile.columns + c * job.height);
    for (int c = 0; job.spec.rht && c < padded; c += 16)
      for (int r = 0; r < tile.lanes; r += 8)
        hadamard16<Eight>(tile.columns + c * job.height + r, job.height, factors);
    return;
  }
  for (int r = 0; r < tile.rows; ++r) {
    widen_line(first + r * source.row_stride, source.col_stride, tile.cols, padded, tile.x + r * kWidth);
    for (int c = 0; job.spec.rht && c < padded; c += 16)
      hadamard16<float>(tile.x + r * kWidth + c, 1, factors);
  }
}

void load_as_in_memory(const Job& job, int64_t panel, int64_t column, Tile& tile) {
  const Source& source = job.source;
  tile.row0 = panel * job.height;
  tile.col0 = column * kWidth;
  const int64_t rows = source.rows - tile.row0, cols = source.cols - tile.col0;
  tile.rows = static_cast<int>(rows < job.height ? rows : job.height);
  tile.lanes = (tile.rows + 7) / 8 * 8;
  tile.cols = static_cast<int>(cols < kWidth ? cols : kWidth);
  tile.blocks = (tile.cols + job.block - 1) / job.block;
  switch (source.dtype) {
    case Dtype::fp32: return load_as<Fp32>(job, tile);
    case Dtype::bf16: return load_as<Bf16>(job, tile);
    case Dtype::fp16: return load_as<Fp16>(job, tile);
  }
}

void load(const Job& job, int64_t panel, int64_t column, Tile& tile) {
  load_as_in_memory(job, panel, column, tile);
  if (rows_contiguous(job.source))
    transpose(tile.columns, job.height, tile.lanes, tile.blocks * job.block, tile.x);
}

// ---- amax ----------------------------------------------------------------------------------------------------------

int32_t amax_of(const float* x, int count) {
  int32_t result = 0;
  for (int i = 0; i < count; ++i) {
    const int32_t bits = amax_bits(x[i]);
    result = bits > result ? bits : result;
  }
  return result;
}

// 16-bit floats order like their magnitude bits, so the line is scanned without widening.
int16_t amax_line_16(const uint16_t* line, int64_t stride, int64_t count, int16_t infinity) {
  int16_t result = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int16_t bits = static_cast<int16_t>(line[i * stride] & 0x7FFF);
    const int16_t finite = bits <= infinity ? bits : static_cast<int16_t>(0);
    result = finite > result ? finite : result;
  }
  return result;
}

int32_t amax_line(const Source& source, int64_t offset, int64_t stride, int64_t count) {
  const uint16_t* halves = static_cast<const uint16_t*>(source.data) + offset;
  const float* floats = static_cast<const float*>(source.data) + offset;
  int32_t result = 0;
  switch (source.dtype) {
    case Dtype::bf16:
      return static_cast<int32_t>(amax_line_16(halves, stride, count, 0x7F80)) << 16;
    case Dtype::fp16:
      return amax_bits(half_to_float(static_cast<uint16_t>(amax_line_16(halves, stride, count, 0x7C00))));
    case Dtype::fp32:
      for (int64_t i = 0; i < count; ++i) {
        const int32_t bits = amax_bits(floats[i * stride]);
        result = bits > result ? bits : result;
      }
  }
  return result;
}

// Largest magnitude of the whole source, whichever way it lies in memory.
float scan_whole(const Source& source, int threads) {
  const bool swap = rows_contiguous(source);
  const int64_t lines = swap ? source.cols : source.rows, count = swap ? source.rows : source.cols;
  const int64_t line_stride = swap ? source.col_stride : source.row_stride;
  const int64_t stride = swap ? source.row_stride : source.col_stride;
  int32_t result = 0;
#pragma omp parallel for schedule(static) reduction(max : result) num_threads(threads)
  for (int64_t line = 0; line < lines; ++line) {
    const int32_t bits = amax_line(source, line * line_stride, stride, count);
    result = bits > result ? bits : result;
  }
  return to_float(static_cast<uint32_t>(result));
}

// Largest magnitude of everything after the Hadamard transform; needs no transposition.
float scan_transformed(const Job& job, int64_t panels, int64_t columns, int threads) {
  int32_t result = 0;
#pragma omp parallel for schedule(static) reduction(max : result) num_threads(threads)
  for (int64_t index = 0; index < panels * columns; ++index) {
    Tile tile;
    load_as_in_memory(job, index / columns, index % columns, tile);
    const bool by_column = rows_contiguous(job.source);
    const int lines = by_column ? tile.cols : tile.rows;
    for (int line = 0; line < lines; ++line) {
      const int32_t bits = by_column ? amax_of(tile.columns + line * job.height, tile.lanes)
                                     : amax_of(tile.x + line * kWidth, tile.cols);
      result = bits > result ? bits : result;
    }
  }
  return to_float(static_cast<uint32_t>(result));
}

// Largest magnitude of every row.
void scan_rows(const Job& job, int64_t panels, int64_t columns, int threads, float* amax) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t panel = 0; panel < panels; ++panel) {
    Tile tile;
    int32_t rows[kMaxHeight] = {};
    for (int64_t column = 0; column < columns; ++column) {
      load(job, panel, column, tile);
      for (int r = 0; r < tile.rows; ++r) {
        const int32_t bits = amax_of(tile.x + r * kWidth, tile.cols);
        rows[r] = bits > rows[r] ? bits : rows[r];
      }
    }
    for (int64_t r = panel * job.height; r < job.source.rows && r < (panel + 1) * job.height; ++r)
      amax[r] = to_float(static_cast<uint32_t>(rows[r - panel * job.height]));
  }
}

}  // namespace
}  // namespace HQ_ISA
}  // namespace hq
