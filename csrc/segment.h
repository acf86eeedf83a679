// What one CUDA thread computes on its 16 consecutive elements of a row, all in registers. The loops of the CPU lie the
// other way round (across blocks, for vector units), in the same order per element and per sum. Compiles on the host.
#pragma once
#include <type_traits>

#include "numerics.h"
#include "quantize.h"

namespace hq {

constexpr int kSegment = 16;

// Scale of one scale tile: x * encode is rounded to an element, which times `decode` is the value.
struct BlockScale {
  float encode, decode;
  uint32_t code;  // E8M0 (mx) or E4M3 (nvfp4)
};

template <class E>
HQ_HD float max_of() { return to_float(E::kMaxBits); }

HQ_HD int32_t segment_amax(const float x[kSegment]) {
  int32_t result = 0;
  HQ_UNROLL
  for (int i = 0; i < kSegment; ++i) {
    const int32_t bits = amax_bits(x[i]);
    result = bits > result ? bits : result;
  }
  return result;
}

HQ_HD void transform_segment(float x[kSegment], bool with_signs) {
  HQ_UNROLL
  for (int i = 0; i < kSegment; ++i) x[i] *= rht_factor(i, with_signs);
  butterfly16(x);
  HQ_UNROLL
  for (int i = 0; i < kSegment; ++i) x[i] = round_to_bf16(x[i]);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// Two codes by the conversion instruction: those of encode<E>, NaN and saturation included, in a tenth of the work.
template <class E>
__device__ __forceinline__ uint32_t encode_pair(float low, float high) {
  uint16_t pair;
  if constexpr (std::is_same_v<E, E4M3>)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
template <class E>
constexpr bool kHasInstruction = std::is_same_v<E, E4M3> || std::is_same_v<E, E5M2>;
#endif

template <class E>
HQ_HD void encode_segment(const float x[kSegment], float scale, uint32_t codes[kSegment]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (kHasInstruction<E>) {
    HQ_UNROLL
    for (int i = 0; i < kSegment; i += 2) {
      const uint32_t pair = encode_pair<E>(x[i] * scale, x[i + 1] * scale);
      codes[i] = pair & 0xFFu;
      codes[i + 1] = pair >> 8;
    }
    return;
  }
#endif
  HQ_UNROLL
  for (int i = 0; i < kSegment; ++i) codes[i] = encode<E>(x[i] * scale);
}

// Segment n of the matrix, counted along rows, rounds with the 16 bytes of Philox counter (n, step).
HQ_HD void encode_segment_stochastic(const float x[kSegment], float scale, const Spec& spec, uint64_t n,
                                     uint32_t codes[kSegment]) {
  uint32_t random[4] = {static_cast<uint32_t>(n), static_cast<uint32_t>(n >> 32), static_cast<uint32_t>(spec.step),
                        static_cast<uint32_t>(spec.step >> 32)};
  philox(spec.key0, spec.key1, random);
  HQ_UNROLL
  for (int i = 0; i < kSegment; ++i)
    codes[i] = encode_e2m1_stochastic(x[i] * scale, (random[i / 4] >> (8 * (i % 4))) & 0xFFu);
}

HQ_HD BlockScale block_fp8_scale(float amax, float element_max, float input_max, const Spec& spec) {
  const float scale = fp8_scale(amax, element_max, spec.amax_epsilon, spec.pow2, input_max);
  return {scale, 1.0f / scale, 0};
}

HQ_HD BlockScale mx_scale(float amax, float element_max) {
  const uint32_t code = e8m0_up(amax * (1.0f / element_max));
  return {e8m0_reciprocal(code), e8m0_decode(code), code};
}

HQ_HD BlockScale nvfp4_scale_of(uint32_t code, float global_encode) {
  const float decode_scale = decode<E4M3>(code);
  return {nvfp4_encode_scale(decode_scale, 1.0f / global_encode), decode_scale, code};
}

HQ_HD BlockScale nvfp4_scale(float amax, float global_amax, const Spec& spec) {
  const float global_encode = nvfp4_global_scale(global_amax, 6.0f * spec.e4m3_max);
  return nvfp4_scale_of(nvfp4_block_scale(amax, global_encode * kSixth), global_encode);
}

// 4over6: error of a segment under a candidate scale, summed over its elements in order.
HQ_HD float segment_error(const float x[kSegment], const BlockScale& scale, float global_amax, float global_encode,
                          const Spec& spec) {
  const float full = 6.0f * spec.e4m3_max;
  float sum = 0.0f;
  HQ_UNROLL
  for (int i = 0; i < kSegment; ++i) {
    const float product = decode<E2M1>(encode<E2M1>(x[i] * scale.encode)) * scale.decode;
    const float d = spec.fast_error ? product - x[i] * global_encode : product * global_amax / full - x[i];
    sum += spec.four_over_six == FourOverSix::mse ? d * d : to_float(to_bits(d) & kAbsMask);
  }
  return sum;
}

// Sum of 16 row errors as a tree, in the order of a warp's shuffles. Overwrites them.
HQ_HD float sum_row_errors(float errors[16]) {
  HQ_UNROLL
  for (int offset = 8; offset > 0; offset /= 2)
    HQ_UNROLL
    for (int r = 0; r < offset; ++r) errors[r] += errors[r + offset];
  return errors[0];
}

}  // namespace hq
