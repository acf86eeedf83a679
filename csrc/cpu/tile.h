// The first stages of a tile: what it holds, loading it from any dtype and strides, the random Hadamard transform, and
// the scans for a global amax. Part of quantize.cpp.
#pragma once
#include <cstring>

#include "numerics.h"
#include "quantize.h"

namespace hq {
namespace HQ_ISA {
namespace {

constexpr int kWidth = kTile;  // a multiple of every block length
constexpr int kBlocks = kWidth / 16;

// One direction of a call, with what follows from its spec.
struct Work {
  const Direction& to;
  int64_t rows, cols;  // of the operand
  int block;           // elements along a row that share a scale
  float element_max;   // largest value of the element format
  float input_max;     // largest finite value of X's dtype
  float whole_scale;   // current: the encode scale, but of rows
  const float* amax;   // nvfp4: the global amax, or one per row
  uint32_t signs[4];   // of the transform: bit i % 32 of word i / 32 negates element i of each group
};

// 128 x 128 elements of an operand, zero outside the matrix, and what is found for them.
struct Tile {
  int64_t row0, col0;
  int rows, cols;  // valid part
  int blocks;      // per row, the last one padded with zeros
  alignas(64) float x[kWidth * kWidth];
  // Per row of scale tiles and block:
  alignas(64) float amax[kWidth][kBlocks];
  alignas(64) float encode_scale[kWidth][kBlocks];
  alignas(64) float decode_scale[kWidth][kBlocks];
  alignas(64) uint8_t scale_codes[kWidth][kBlocks];
  // Of one row:
  alignas(64) uint32_t codes[kWidth];
  alignas(64) float values[kWidth];
  alignas(64) float scaled[kWidth];
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

// The same for up to 128 elements.
template <class V>
void hadamard_wide(float* base, int stride, int size, const float* factors) {
  V v[kWidth];
  for (int i = 0; i < size; ++i) {
    memcpy(&v[i], base + i * stride, sizeof(V));
    v[i] *= factors[i];
  }
  for (int distance = 1; distance < size; distance *= 2)
    for (int first = 0; first < size; first += 2 * distance)
      for (int i = first; i < first + distance; ++i) {
        const V a = v[i], b = v[i + distance];
        v[i] = a + b;
        v[i + distance] = a - b;
      }
  for (int i = 0; i < size; ++i) {
    float group[sizeof(V) / sizeof(float)];
    memcpy(group, &v[i], sizeof(V));
    for (float& value : group) value = round_to_bf16(value);
    memcpy(base + i * stride, group, sizeof(V));
  }
}

// A square of four by four, turned.
inline void turn(Four line[4]) {
  const Four low0 = __builtin_shufflevector(line[0], line[1], 0, 4, 1, 5);
  const Four high0 = __builtin_shufflevector(line[0], line[1], 2, 6, 3, 7);
  const Four low1 = __builtin_shufflevector(line[2], line[3], 0, 4, 1, 5);
  const Four high1 = __builtin_shufflevector(line[2], line[3], 2, 6, 3, 7);
  line[0] = __builtin_shufflevector(low0, low1, 0, 1, 4, 5), line[1] = __builtin_shufflevector(low0, low1, 2, 3, 6, 7);
  line[2] = __builtin_shufflevector(high0, high1, 0, 1, 4, 5);
  line[3] = __builtin_shufflevector(high0, high1, 2, 3, 6, 7);
}

// out[r][c] = in[c][r], in 4 x 4 blocks held in vector registers; lines of out, 16 elements, are finished one after the
// other, because the rows of a tile share few sets of the L1 cache.
void transpose(const float* in, float* out) {
  for (int line = 0; line < kWidth; line += 16)
    for (int r = 0; r < kWidth; r += 4)
#pragma GCC unroll 4
    for (int c = line; c < line + 16; c += 4) {
      Four square[4];
      for (int i = 0; i < 4; ++i) memcpy(&square[i], in + (c + i) * kWidth + r, sizeof(Four));
      turn(square);
      for (int i = 0; i < 4; ++i) memcpy(out + (r + i) * kWidth + c, &square[i], sizeof(Four));
    }
}

// Rows of a tile lie far apart in memory, where no prefetcher foresees them: their lines are asked for this many rows
// ahead. Beyond the matrix that asks for nothing.
constexpr int kAhead = 8;

inline void fetch(const void* line, int bytes, bool to_write) {
  for (int i = 0; i < bytes; i += 64) {
    if (to_write)
      __builtin_prefetch(static_cast<const char*>(line) + i, 1);
    else
      __builtin_prefetch(static_cast<const char*>(line) + i, 0);
  }
}

bool rows_contiguous(const Source& source) { return source.row_stride == 1 && source.col_stride != 1; }

int at_most(int64_t left, int limit) { return left < limit ? static_cast<int>(left) : limit; }

// Lines [first, first + count) of a tile, by lines of memory, to [count][kWidth] of X, or of X.T where X's rows are the
// contiguous axis.
template <class T>
void load_lines(const Source& source, const Tile& tile, int first, int count, float* out) {
  const bool down = rows_contiguous(source);
  const int lines = at_most((down ? tile.cols : tile.rows) - first, count), length = down ? tile.rows : tile.cols;
  const int64_t line_stride = down ? source.col_stride : source.row_stride;
  const int64_t stride = down ? source.row_stride : source.col_stride;
  const T* from = static_cast<const T*>(source.data) + tile.row0 * source.row_stride + tile.col0 * source.col_stride +
                  first * line_stride;
  for (int line = 0; line < lines; ++line) {
    if (stride == 1) fetch(from + (line + kAhead) * line_stride, kWidth * sizeof(T), false);
    widen_line(from + line * line_stride, stride, length, kWidth, out + line * kWidth);
  }
  if (lines < count) memset(out + lines * kWidth, 0, sizeof(float) * static_cast<size_t>(kWidth * (count - lines)));
}

void load_lines(const Source& source, const Tile& tile, int first, int count, float* out) {
  switch (source.dtype) {
    case Dtype::fp32: return load_lines<Fp32>(source, tile, first, count, out);
    case Dtype::bf16: return load_lines<Bf16>(source, tile, first, count, out);
    case Dtype::fp16: return load_lines<Fp16>(source, tile, first, count, out);
  }
}

// Where tile `index` of X lies, counted along its rows of tiles.
void locate(const Source& source, int64_t index, Tile& tile) {
  const int64_t across = (source.cols + kWidth - 1) / kWidth;
  tile.row0 = index / across * kWidth;
  tile.col0 = index % across * kWidth;
  tile.rows = at_most(source.rows - tile.row0, kWidth);
  tile.cols = at_most(source.cols - tile.col0, kWidth);
}

void load(const Source& source, float* scratch, Tile& tile) {
  float* lines = rows_contiguous(source) ? scratch : tile.x;
  load_lines(source, tile, 0, kWidth, lines);
  if (lines == scratch) transpose(scratch, tile.x);
}

uint64_t step_of(const Key& key) { return key.step_at ? *key.step_at : key.step; }

void signs_of(const Spec& spec, const Key& key, uint32_t signs[4]) {
  if (!spec.rht) return;
  if (spec.eden) return drawn_signs(key.key0, step_of(key), signs);
  for (int i = 0; i < 4; ++i) signs[i] = spec.rht_sign ? rht_signs(32 * i) | rht_signs(32 * i + 16) << 16 : 0;
}

// Random Hadamard transform of spec.rht elements along rows, or (down) along columns, of a [kWidth][kWidth] array.
void transform(const Work& work, bool down, float* x) {
  const int size = work.to.spec.rht;
  if (!size) return;
  float factors[kWidth];
  const float scale = rht_scale(size);
  for (int i = 0; i < size; ++i) factors[i] = (work.signs[i / 32] >> (i % 32)) & 1u ? -scale : scale;
  if (size == 16 && down)
    for (int r = 0; r < kWidth; r += 16)
      for (int c = 0; c < kWidth; c += 8) hadamard16<Eight>(x + r * kWidth + c, kWidth, factors);
  else if (size == 16)
    for (int i = 0; i < kWidth * kWidth; i += 16) hadamard16<float>(x + i, 1, factors);
  else if (down)
    for (int r = 0; r < kWidth; r += size)
      for (int c = 0; c < kWidth; c += 8) hadamard_wide<Eight>(x + r * kWidth + c, kWidth, size, factors);
  else
    for (int i = 0; i < kWidth * kWidth; i += size) hadamard_wide<float>(x + i, 1, size, factors);
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

}  // namespace
}  // namespace HQ_ISA
}  // namespace hq
