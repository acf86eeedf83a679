// Four-byte words of a source: two 16-bit elements or one fp32. Widening, and the largest magnitude of many words at the
// cost of one instruction a word.
#pragma once
#include <cuda_runtime.h>

#include "numerics.h"

namespace hq {

constexpr int kSegment = 16;  // consecutive elements of an operand's row that one thread holds

struct Fp32 {
  static constexpr int kPack = 1;  // elements in a word
  static constexpr uint32_t kHalfMagnitudes = kAbsMask;
  static constexpr float kMax = kFloatMax;
};
struct Bf16 {
  static constexpr int kPack = 2;
  static constexpr uint32_t kHalfMagnitudes = 0x7FFF7FFFu;
  static constexpr float kMax = 0x1.FEp127f;
};
struct Fp16 {
  static constexpr int kPack = 2;
  static constexpr uint32_t kHalfMagnitudes = 0x7FFF7FFFu;
  static constexpr float kMax = 65504.0f;
};

template <class T>
constexpr int kWords = kSegment / T::kPack;  // of a segment

__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

// Element k of a word.
template <class T>
__device__ __forceinline__ float widen(uint32_t word, int k) {
  if constexpr (std::is_same_v<T, Fp32>) return to_float(word);
  if constexpr (std::is_same_v<T, Bf16>) return to_float(k ? word & 0xFFFF0000u : word << 16);
  if constexpr (std::is_same_v<T, Fp16>) {
    float value;
    const uint16_t half = static_cast<uint16_t>(k ? word >> 16 : word);
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
  }
}

// Two values, rounded half to even, as a word of 16-bit elements. NaN does not keep its bits.
template <class T>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, Fp16>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Larger magnitudes of two words, element by element; the signs mean nothing. A NaN stays one.
template <class T>
__device__ __forceinline__ uint32_t larger_or_nan(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<T, Fp32>) return max(a & kAbsMask, b & kAbsMask);
#if __CUDA_ARCH__ >= 860
  uint32_t result;
  if constexpr (std::is_same_v<T, Bf16>)
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  else
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return __vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// Magnitudes per element of a word position, widened, and whether any element was NaN. NaN counts as 0.
struct Largest {
  float of[2];  // Fp32: both are the same
  bool nan;
};

template <class T>
__device__ __forceinline__ Largest largest(const uint32_t* words, int count) {
  uint32_t folded = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) folded = larger_or_nan<T>(folded, words[i]);
  folded &= T::kHalfMagnitudes;
  Largest result;
  result.of[0] = widen<T>(folded, 0);
  result.of[1] = widen<T>(folded, T::kPack - 1);
  result.nan = result.of[0] != result.of[0] || result.of[1] != result.of[1];
  if (result.nan) {
    result.of[0] = result.of[1] = 0.0f;
    for (int i = 0; i < count; ++i)  // fmaxf passes NaN over
#pragma unroll
      for (int k = 0; k < 2; ++k) result.of[k] = fmaxf(result.of[k], fabsf(widen<T>(words[i], k < T::kPack ? k : 0)));
  }
  return result;
}

}  // namespace hq
