// A segment of 16 values to codes and back, in few instructions and without an array whose address is taken (it would
// live in memory). The codes are those of encode<E> in numerics.h; a test compares every bf16 value in every scale.
#pragma once
#include <type_traits>

#include "cuda/words.cuh"
#include "numerics.h"
#include "quantize.h"

namespace hq {

// The loops are compiled for 4-bit codes and for codes of a byte; which element it is, is known at run time.
template <bool kFour>
constexpr int kCodeWords = kFour ? 2 : 4;  // of a segment

struct ElementFacts {
  float max, inverse_max;
  bool e5m2;       // E5M2 and E3M2 are made by the conversion to E5M2, the others by that to E4M3
  bool six;        // E2M3 is E4M3 shifted: the same steps, 2^6 smaller. So is E3M2 to E5M2, 2^12 smaller
  float shift;
};

__host__ __device__ inline ElementFacts facts_of(Element element) {
  switch (element) {
    case Element::e4m3: return {448.0f, 1.0f / 448.0f, false, false, 1.0f};
    case Element::e5m2: return {57344.0f, 1.0f / 57344.0f, true, false, 1.0f};
    case Element::e2m3: return {7.5f, 1.0f / 7.5f, false, true, 0x1p-6f};
    case Element::e3m2: return {28.0f, 1.0f / 28.0f, true, true, 0x1p-12f};
    case Element::e1m2: return {3.5f, 1.0f / 3.5f, false, false, 1.0f};
    case Element::int8: return {127.0f, 1.0f / 127.0f, false, false, 1.0f};
    case Element::e2m1: break;
  }
  return {6.0f, 1.0f / 6.0f, false, false, 1.0f};
}

__device__ inline uint32_t encode_one(Element element, float value) {
  switch (element) {
    case Element::e4m3: return encode<E4M3>(value);
    case Element::e5m2: return encode<E5M2>(value);
    case Element::e2m3: return encode<E2M3>(value);
    case Element::e3m2: return encode<E3M2>(value);
    case Element::e1m2: return encode<E1M2>(value);
    case Element::int8: return encode<INT8>(value);
    case Element::e2m1: break;
  }
  return encode<E2M1>(value);
}

// ---- 8 and 6 bits: the FP8 conversions of sm_89 and later ----------------------------------------------------------

#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint32_t e5m2_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
// Two fp16 values.
__device__ __forceinline__ uint32_t e4m3_values(uint32_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return halves;
}
__device__ __forceinline__ uint32_t e5m2_values(uint32_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return halves;
}
#endif

// 8-bit codes of the wider element, sign on bit 7, to 6-bit codes with the sign on bit 5, four at a time; and back.
__device__ __forceinline__ uint32_t narrow_codes(uint32_t codes) {
  return (codes & 0x1F1F1F1Fu) | ((codes >> 2) & 0x20202020u);
}
__device__ __forceinline__ uint32_t widen_codes(uint32_t codes) {
  return (codes & 0x1F1F1F1Fu) | ((codes & 0x20202020u) << 2);
}

// ---- 4 bits --------------------------------------------------------------------------------------------------------

constexpr float kMagic = 0x1p23f;  // its ulp is 1: adding it rounds to an integer
constexpr uint32_t kMagicBits = 0x4B000000u;

// The E2M1 magnitude of a >= 0 is the smallest of RNE(2a), RNE(a + 2), RNE(a / 2 + 4) and 7: the lines through its codes
// below 2, below 4 and from 4 on. Each is one rounded sum (an exact product and kMagic), whose ties go to even codes.
__device__ __forceinline__ uint32_t e2m1_magnitude(float a) {
  const float first = __fmaf_rn(a, 2.0f, kMagic);
  const float second = __fadd_rn(a, kMagic + 2.0f);
  const float third = __fadd_rn(__saturatef(__fmaf_rn(a, 0.5f, -2.0f)), kMagic + 6.0f);
  return static_cast<uint32_t>(__vimin3_s32(__float_as_int(first), __float_as_int(second), __float_as_int(third)));
}

// The magnitude of a + random / 256 of its step, rounded down: stochastic rounding as in encode_e2m1_stochastic. Each of
// the lines has its own step, so that the smallest of them is that of a's, and is rounded where the sum is: in units of
// the step. byte: kByteMagic with the random byte in its lowest bits.
constexpr float kByteMagic = 0x1p15f;  // its ulp is 2^-8
constexpr uint32_t kByteMagicBits = 0x47000000u;

__device__ __forceinline__ uint32_t e2m1_stochastic_magnitude(float a, float byte) {
  const float part = __fadd_rn(byte, -kByteMagic), less = __fadd_rn(byte, -kByteMagic - 2.0f);
  const float first = __fadd_rd(__fmaf_rn(a, 2.0f, part), kMagic);
  const float second = __fadd_rd(__fadd_rn(a, part), kMagic + 2.0f);
  const float third = __fadd_rd(__saturatef(__fmaf_rn(a, 0.5f, less)), kMagic + 6.0f);
  return static_cast<uint32_t>(__vimin3_s32(__float_as_int(first), __float_as_int(second), __float_as_int(third)));
}

// Signs of 8 values on the sign bits of 8 nibbles.
__device__ __forceinline__ uint32_t nibble_signs(const float* x) {
  uint32_t bytes[2];  // of the even values, of the odd ones
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t front = permute(to_bits(x[k]), to_bits(x[k + 2]), 0x0073);
    const uint32_t back = permute(to_bits(x[k + 4]), to_bits(x[k + 6]), 0x7300);
    bytes[k] = permute(front, back, 0x7610);
  }
  return ((bytes[0] >> 4) & 0x08080808u) | (bytes[1] & 0x80808080u);
}

// ---- segments ------------------------------------------------------------------------------------------------------

// random: bits of one segment for stochastic rounding; null: rounds half to even.
__device__ __forceinline__ void encode_four(const float x[kSegment], float scale, const uint32_t* random,
                                            uint32_t codes[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      const int n = 8 * half + i;
      const float a = fabsf(__fmul_rn(x[n], scale));
      const uint32_t magnitude =
          random ? e2m1_stochastic_magnitude(a, to_float(permute(random[n / 4], kByteMagicBits, 0x7550 + n % 4)))
                 : e2m1_magnitude(a);
      packed = packed * 16 + magnitude;
    }
    codes[half] = (packed - kMagicBits * 0x11111111u) | nibble_signs(x + 8 * half);
  }
}

// The same for E1M2, whose codes are all 0.5 apart. Not inlined: few formats need it.
static __device__ __noinline__ uint32_t uniform_codes(float4 low, float4 high, float scale, uint2 random, bool draws) {
  const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t byte = ((i < 4 ? random.x : random.y) >> (8 * (i % 4))) & 0xFFu;
    const float value = __fmul_rn(x[i], scale);
    packed |= (draws ? encode_e1m2_stochastic(value, byte) : encode<E1M2>(value)) << (4 * i);
  }
  return packed;
}

__device__ __forceinline__ void encode_uniform(const float x[kSegment], float scale, const uint32_t* random,
                                               uint32_t codes[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* from = x + 8 * half;
    const uint2 bits = random ? make_uint2(random[2 * half], random[2 * half + 1]) : make_uint2(0, 0);
    codes[half] = uniform_codes({from[0], from[1], from[2], from[3]}, {from[4], from[5], from[6], from[7]}, scale, bits,
                                random != nullptr);
  }
}

__device__ __forceinline__ void decode_uniform(const uint32_t codes[2], float v[kSegment]) {
#pragma unroll
  for (int i = 0; i < kSegment; ++i) v[i] = decode<E1M2>((codes[i / 8] >> (4 * (i % 8))) & 0xFu);
}

// Four codes of INT8. Not inlined, likewise.
static __device__ __noinline__ uint32_t integer_codes(float4 x, float scale) {
  return encode<INT8>(__fmul_rn(x.x, scale)) | encode<INT8>(__fmul_rn(x.y, scale)) << 8 |
         encode<INT8>(__fmul_rn(x.z, scale)) << 16 | encode<INT8>(__fmul_rn(x.w, scale)) << 24;
}

// Four codes of E5M2 (wide) or E4M3.
__device__ __forceinline__ uint32_t eight_codes(bool wide, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  return wide ? e5m2_pair(a, b) | e5m2_pair(c, d) << 16 : e4m3_pair(a, b) | e4m3_pair(c, d) << 16;
#else
  const Element element = wide ? Element::e5m2 : Element::e4m3;
  return encode_one(element, a) | encode_one(element, b) << 8 | encode_one(element, c) << 16 | encode_one(element, d) << 24;
#endif
}

__device__ __forceinline__ void encode_eight(const float x[kSegment], float scale, Element element,
                                             const ElementFacts& facts, uint32_t codes[4]) {
  if (element == Element::int8) {
#pragma unroll
    for (int w = 0; w < 4; ++w) codes[w] = integer_codes({x[4 * w], x[4 * w + 1], x[4 * w + 2], x[4 * w + 3]}, scale);
    return;
  }
#if __CUDA_ARCH__ >= 890
  float y[kSegment];
#pragma unroll
  for (int i = 0; i < kSegment; ++i) y[i] = __fmul_rn(x[i], scale);
  if (facts.six) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) y[i] = __fmul_rn(fmaxf(fminf(y[i], facts.max), -facts.max), facts.shift);
  }
  if (facts.e5m2) {
#pragma unroll
    for (int w = 0; w < 4; ++w) codes[w] = eight_codes(true, y[4 * w], y[4 * w + 1], y[4 * w + 2], y[4 * w + 3]);
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) codes[w] = eight_codes(false, y[4 * w], y[4 * w + 1], y[4 * w + 2], y[4 * w + 3]);
  }
  if (facts.six) {
#pragma unroll
    for (int w = 0; w < 4; ++w) codes[w] = narrow_codes(codes[w]);
  }
#else
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    codes[w] = 0;
    for (int i = 0; i < 4; ++i) codes[w] |= encode_one(element, x[4 * w + i] * scale) << (8 * i);
  }
#endif
}

// Values of the codes, without scale.
__device__ __forceinline__ void decode_four(const uint32_t codes[2], float v[kSegment]) {
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    const uint32_t nibbles = codes[quarter / 2] >> (16 * (quarter % 2));
    // Bytes of the bf16 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, looked up by the low three bits of each nibble.
    const uint32_t high = permute(0x3F3F3F00u, 0x40404040u, nibbles & 0x7777u);
    const uint32_t low = permute(0xC0800000u, 0xC0804000u, nibbles & 0x7777u);
    const uint32_t pairs[2] = {permute(low, high, 0x5140), permute(low, high, 0x7362)};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[4 * quarter + i] =
          to_float(to_bits(widen<Bf16>(pairs[i / 2], i % 2)) | ((nibbles << (28 - 4 * i)) & 0x80000000u));
  }
}

// The products of the values of the codes and a scale, as pairs of bf16 in which they are exact: an element has 2
// significant bits and the scale at most 6.
__device__ __forceinline__ void scaled_four(const uint32_t codes[2], float scale, uint32_t pairs[kSegment / 2]) {
  const uint32_t both = permute(to_bits(scale), 0, 0x3232);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t even = (codes[half] << 4) & 0x80808080u, odd = codes[half] & 0x80808080u;  // signs, a byte each
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      const uint32_t nibbles = (codes[half] >> (16 * quarter)) & 0x7777u;
      const uint32_t signs = permute(even, odd, quarter ? 0x7362 : 0x5140);
      const uint32_t high = permute(0x3F3F3F00u, 0x40404040u, nibbles) | signs;  // bytes of bf16, as in decode_four
      const uint32_t low = permute(0xC0800000u, 0xC0804000u, nibbles);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t values = permute(low, high, i ? 0x7362 : 0x5140);
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(pairs[4 * half + 2 * quarter + i])
            : "r"(values), "r"(both), "r"(0x80008000u));  // plus -0, which changes nothing
      }
    }
  }
}

// Values of E5M2 (wide) or E4M3 codes, without scale.
__device__ __forceinline__ void eight_values(bool wide, const uint32_t codes[4], float v[kSegment]) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves[8];
  if (wide) {
#pragma unroll
    for (int h = 0; h < 8; ++h) halves[h] = e5m2_values(codes[h / 2] >> (16 * (h % 2)));
  } else {
#pragma unroll
    for (int h = 0; h < 8; ++h) halves[h] = e4m3_values(codes[h / 2] >> (16 * (h % 2)));
  }
#pragma unroll
  for (int i = 0; i < kSegment; ++i) v[i] = widen<Fp16>(halves[i / 2], i % 2);
#else
#pragma unroll
  for (int i = 0; i < kSegment; ++i) {
    const uint32_t code = (codes[i / 4] >> (8 * (i % 4))) & 0xFFu;
    v[i] = wide ? decode<E5M2>(code) : decode<E4M3>(code);
  }
#endif
}

__device__ __forceinline__ void decode_eight(const uint32_t codes[4], Element element, const ElementFacts& facts,
                                             float v[kSegment]) {
  if (element == Element::int8) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) v[i] = decode<INT8>((codes[i / 4] >> (8 * (i % 4))) & 0xFFu);
    return;
  }
#if __CUDA_ARCH__ >= 890
  uint32_t wide[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) wide[w] = facts.six ? widen_codes(codes[w]) : codes[w];
  eight_values(facts.e5m2, wide, v);
  if (facts.six) {
    const float back = facts.e5m2 ? 0x1p12f : 0x1p6f;
#pragma unroll
    for (int i = 0; i < kSegment; ++i) v[i] = __fmul_rn(v[i], back);
  }
#else
  if (!facts.six) return eight_values(facts.e5m2, codes, v);
#pragma unroll
  for (int i = 0; i < kSegment; ++i) {
    const uint32_t code = (codes[i / 4] >> (8 * (i % 4))) & 0xFFu;
    v[i] = facts.e5m2 ? decode<E3M2>(code) : decode<E2M3>(code);
  }
#endif
}

// A NaN among the 16 is rare: its magnitude, 6 from the lines above, becomes 7 and its sign is dropped. (The conversions
// of encode_eight know NaN themselves.)
__device__ __forceinline__ void mark_nan(const float x[kSegment], uint32_t codes[2]) {
#pragma unroll
  for (int i = 0; i < kSegment; ++i)
    if (x[i] != x[i]) codes[i / 8] = (codes[i / 8] & ~(0xFu << (4 * (i % 8)))) | 7u << (4 * (i % 8));
}

}  // namespace hq
