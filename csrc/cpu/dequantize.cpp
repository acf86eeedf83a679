// CPU decode of every format: code to element value, times the scale of its block. The arithmetic and its order are those
// of the CUDA loops in dequantize.cu. Compiled once per instruction set into namespace HQ_ISA, as quantize.cpp is.
#include <cstring>

#include "numerics.h"
#include "quantize.h"

namespace hq {
namespace HQ_ISA {
namespace {

constexpr int kWidth = kTile;

struct Line {
  float values[kWidth];
};

template <class E>
void decode_line(const uint8_t* codes, int count, float* __restrict out) {
  if (E::kWidth == 4) {
    for (int i = 0; i < count / 2; ++i) {
      out[2 * i] = decode<E>(codes[i] & 0xFu);
      out[2 * i + 1] = decode<E>(codes[i] >> 4);
    }
  } else {
    for (int i = 0; i < count; ++i) out[i] = decode<E>(codes[i] & ((1u << E::kWidth) - 1));
  }
}

void decode_line(Element element, const uint8_t* codes, int count, float* out) {
  switch (element) {
    case Element::e4m3: return decode_line<E4M3>(codes, count, out);
    case Element::e5m2: return decode_line<E5M2>(codes, count, out);
    case Element::e2m1: return decode_line<E2M1>(codes, count, out);
    case Element::e2m3: return decode_line<E2M3>(codes, count, out);
    case Element::e3m2: return decode_line<E3M2>(codes, count, out);
    case Element::e1m2: return decode_line<E1M2>(codes, count, out);
    case Element::int8: return decode_line<INT8>(codes, count, out);
  }
}

// Scale of the block that holds element (r, c).
float scale_at(const Encoded& in, Decoding decoding, int64_t r, int64_t c) {
  const Spec& spec = in.spec;
  if (spec.family == Family::current)
    return decoding == Decoding::exact ? 1.0f : static_cast<const float*>(in.scales)[spec.row_scaled ? r : 0];
  const int64_t across = (in.cols + spec.tile_cols - 1) / spec.tile_cols;
  const int64_t block = r / spec.tile_rows * across + c / spec.tile_cols;
  if (spec.family == Family::block) return static_cast<const float*>(in.scales)[block];
  const uint32_t code = static_cast<const uint8_t*>(in.scales)[block];
  if (spec.family == Family::mx) return e8m0_decode(code);
  if (spec.family == Family::ue5m3) return decode<UE5M3>(code);
  const float scale = decode<E4M3>(code);
  if (decoding == Decoding::exact) return scale;
  return scale * in.global[spec.row_scaled ? r : 0] * spec.inverse_range;
}

// To elements `step` apart, from number `offset`.
void write_line(const float* values, int count, Dtype dtype, void* out, int64_t offset, int64_t step) {
  if (dtype == Dtype::fp32) {
    float* to = static_cast<float*>(out) + offset;
    for (int i = 0; i < count; ++i) to[i * step] = values[i];
    return;
  }
  uint16_t* __restrict to = static_cast<uint16_t*>(out) + offset;
  if (dtype == Dtype::bf16)
    for (int i = 0; i < count; ++i) to[i * step] = static_cast<uint16_t>(to_bits(round_to_bf16(values[i])) >> 16);
  else
    for (int i = 0; i < count; ++i) to[i * step] = float_to_half(values[i]);
}

}  // namespace

void dequantize(const Encoded& in, Decoding decoding, void* out, Dtype dtype, int threads) {
  const int64_t across = (in.cols + kWidth - 1) / kWidth;
  const int block = in.spec.tile_cols ? in.spec.tile_cols : kWidth;
  const int per_byte = is_four(in.spec.element) ? 2 : 1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t index = 0; index < in.rows * across; ++index) {
    // Turned, neighbouring rows follow each other, whose values come to the same lines of memory.
    const int64_t r = in.turned ? index % in.rows : index / across;
    const int64_t c = (in.turned ? index / in.rows : index % across) * kWidth;
    const int count = static_cast<int>(in.cols - c < kWidth ? in.cols - c : kWidth);
    Line line;
    decode_line(in.spec.element, in.codes + (r * in.cols + c) / per_byte, count, line.values);
    for (int first = 0; first < count; first += block) {
      const float scale = scale_at(in, decoding, r, c + first);
      const int last = first + block < count ? first + block : count;
      for (int i = first; i < last; ++i) line.values[i] *= scale;
    }
    // One bit pattern for NaN on every device.
    for (int i = 0; i < count; ++i) {
      const uint32_t bits = to_bits(line.values[i]);
      const bool nan = static_cast<int32_t>(bits & kAbsMask) > static_cast<int32_t>(kInfBits);
      line.values[i] = to_float(select(nan, 0x7FC00000u, bits));
    }
    if (in.turned)
      write_line(line.values, count, dtype, out, c * in.rows + r, in.rows);
    else
      write_line(line.values, count, dtype, out, r * in.cols + c, 1);
  }
}

}  // namespace HQ_ISA
}  // namespace hq
