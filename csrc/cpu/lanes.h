// Vectors of 32-bit lanes, as wide as the instruction set's registers, and what fast.h does with them:
// amax, codes, packing. Part of quantize.cpp.
#pragma once
#include <cstring>

#include "numerics.h"
#include "cpu/tile.h"

namespace hq {
namespace HQ_ISA {
namespace {

#if defined(__AVX512BW__)
constexpr int kVector = 64;
#elif defined(__AVX2__)
constexpr int kVector = 32;
#else
constexpr int kVector = 16;
#endif
constexpr int kLanes = kVector / 4;

typedef float Floats __attribute__((vector_size(kVector)));
typedef uint32_t Words __attribute__((vector_size(kVector)));
typedef int32_t Ints __attribute__((vector_size(kVector)));
typedef uint8_t Bytes __attribute__((vector_size(kVector)));

Floats floats_at(const float* x) {
  Floats result;
  memcpy(&result, x, sizeof(result));
  return result;
}

Words as_words(Floats value) { return reinterpret_cast<Words>(value); }
Floats as_floats(Words value) { return reinterpret_cast<Floats>(value); }

Words smaller(Words a, uint32_t b) {
  const Ints limit = Ints{} + static_cast<int32_t>(b), value = reinterpret_cast<Ints>(a);
  return reinterpret_cast<Words>(value < limit ? value : limit);
}

Words larger(Words a, uint32_t b) {
  const Ints limit = Ints{} + static_cast<int32_t>(b), value = reinterpret_cast<Ints>(a);
  return reinterpret_cast<Words>(value > limit ? value : limit);
}

// The larger of |value| and `largest`, lane by lane; `largest` where value is NaN.
Floats larger_magnitude(Floats value, Floats largest) {
  const Floats magnitude = as_floats(as_words(value) & kAbsMask);
#if defined(__AVX512BW__)
  return __builtin_ia32_maxps512_mask(magnitude, largest, largest, -1, 4);  // 4: rounding as it is
#elif defined(__AVX2__)
  return __builtin_ia32_maxps256(magnitude, largest);
#elif defined(__SSE__)
  return __builtin_ia32_maxps(magnitude, largest);  // the compiler makes a comparison and a blend of the line below
#else
  return magnitude > largest ? magnitude : largest;
#endif
}

// hq::encode of every lane, by one addition for normal and subnormal values alike: `magic` is 2^n with the ulp that the
// code has at this magnitude, so the sum is rounded to steps of the format and holds their number in its last bits.
// magic's last bits are an even number that cancels the code of the exponent's bias, modulo 2^8.
template <class E>
Words encode(Floats value) {
  constexpr int shift = 23 - E::kMan;
  constexpr uint32_t bias = ((E::kMinNormalBits >> 23) + shift) << E::kMan;
  constexpr uint32_t to_magic = (static_cast<uint32_t>(shift) << 23) + ((0u - bias) & 0xFF);
  const Words bits = as_words(value);
  const Words limited = smaller(bits & kAbsMask, E::kMaxBits);
  const Words magic = larger(limited & kInfBits, E::kMinNormalBits) + to_magic;
  const Words code = as_words(as_floats(limited) + as_floats(magic)) + (magic >> shift);
  const Words sign = bits >> (32 - E::kWidth);
  const Words with_sign = ((code ^ sign) & E::kMagnitude) ^ sign;
  return value != value ? Words{} + E::kNanCode : with_sign;
}

// Lane i holds lane i of each of the vectors, the first one in the lowest bits.
template <int kBits>
Words pack(const Words* codes) {
  Words result = codes[0];
#pragma GCC unroll 8
  for (int i = 1; i < 32 / kBits; ++i) result |= codes[i] << (i * kBits);
  return result;
}

// Bytes n to n + 15, or words, as the columns of a square of four by four.
#define HQ_TURN(n) \
  n, n + 4, n + 8, n + 12, n + 1, n + 5, n + 9, n + 13, n + 2, n + 6, n + 10, n + 14, n + 3, n + 7, n + 11, n + 15

// Four vectors of bytes that were packed, one after the other.
Bytes in_order(Words packed) {
  const Bytes bytes = reinterpret_cast<Bytes>(packed);
#if defined(__AVX512BW__)
  const Words turned = reinterpret_cast<Words>(
      __builtin_shufflevector(bytes, bytes, HQ_TURN(0), HQ_TURN(16), HQ_TURN(32), HQ_TURN(48)));
  return reinterpret_cast<Bytes>(__builtin_shufflevector(turned, turned, HQ_TURN(0)));
#elif defined(__AVX2__)
  const Words turned = reinterpret_cast<Words>(__builtin_shufflevector(bytes, bytes, HQ_TURN(0), HQ_TURN(16)));
  return reinterpret_cast<Bytes>(__builtin_shufflevector(turned, turned, 0, 4, 1, 5, 2, 6, 3, 7));
#else
  Bytes turned = bytes;  // interleaved twice with its upper half, for lack of a shuffle of bytes
  for (int i = 0; i < 2; ++i) {
    const Bytes upper = reinterpret_cast<Bytes>(
        __builtin_shufflevector(reinterpret_cast<Words>(turned), reinterpret_cast<Words>(turned), 2, 3, 2, 3));
    turned = __builtin_shufflevector(turned, upper, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  return turned;
#endif
}

#undef HQ_TURN

}  // namespace
}  // namespace HQ_ISA
}  // namespace hq
