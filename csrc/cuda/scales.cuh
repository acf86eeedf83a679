// Scale of one scale tile from its amax, with all that does not depend on the tile worked out beforehand.
#pragma once
#include <cuda_runtime.h>

#include "cuda/elements.cuh"
#include "numerics.h"
#include "quantize.h"

namespace hq {

// x * encode is rounded to an element; the element times `exact` is what a GEMM multiplies, times `value` the value.
struct BlockScale {
  float encode, exact, value;
  uint32_t code;  // E8M0 (mx) or E4M3 (nvfp4)
};

// All that follows from one global amax of NVFP4, or from the amax of current scaling.
struct GlobalScale {
  float amax;
  float encode, decode, sixth;  // nvfp4
};

__device__ __forceinline__ GlobalScale nvfp4_global(float amax, const Spec& spec) {
  GlobalScale global{amax, nvfp4_global_scale(amax, spec.full_range), 0.0f, 0.0f};
  global.decode = 1.0f / global.encode;
  global.sixth = global.encode * spec.inverse_max;
  return global;
}

__device__ __forceinline__ float e4m3_value(uint32_t code) {
#if __CUDA_ARCH__ >= 890
  return widen<Fp16>(e4m3_values(code), 0);
#else
  return decode<E4M3>(code);
#endif
}

// encode: the factor of elements under that code.
__device__ __forceinline__ BlockScale nvfp4_scale_of(uint32_t code, float encode, const GlobalScale& global,
                                                     const Spec& spec) {
  const float exact = e4m3_value(code);
  return {encode, exact, exact * global.amax * spec.inverse_range, code};
}

__device__ __forceinline__ BlockScale ue5m3_scale(float amax, const Spec& spec) {
  const uint32_t code = ue5m3_block_scale(amax, spec.inverse_max);
  const float value = decode<UE5M3>(code);
  return {nvfp4_encode_scale(value, 1.0f), value, value, code};
}

__device__ __forceinline__ BlockScale nvfp4_scale_of(uint32_t code, const GlobalScale& global, const Spec& spec) {
  return nvfp4_scale_of(code, nvfp4_encode_scale(e4m3_value(code), global.decode), global, spec);
}

__device__ __forceinline__ uint32_t nvfp4_scale_code(float amax, const GlobalScale& global) {
#if __CUDA_ARCH__ >= 890
  return e4m3_pair(amax * global.sixth, 0.0f);
#else
  return encode<E4M3>(amax * global.sixth);
#endif
}

// 1 / x; for powers of two far from the ends of the range by the exponent alone.
__device__ __forceinline__ float reciprocal(float x) {
  const uint32_t bits = to_bits(x);
  if ((bits & 0x7FFFFFu) == 0 && bits - (1u << 23) < (252u << 23)) return to_float((254u << 23) - bits);
  return 1.0f / x;
}

// The power of two of fp8_scale is 2^8 (E4M3) or 2^15 (E5M2) over that of the amax, one less where the amax's mantissa is
// beyond that of the largest element, 1.75. Far from the ends of the range: there, and for other scales and INT8, the
// general form.
__device__ __forceinline__ BlockScale block_scale(float amax, const ElementFacts& facts, const Spec& spec,
                                                  float input_max) {
  const uint32_t bits = to_bits(fmaxf(amax, spec.amax_epsilon));
  if (spec.pow2 && spec.element != Element::int8 && bits - (32u << 23) < (192u << 23)) {
    const uint32_t power = ((facts.e5m2 ? 269u : 262u) << 23) - ((bits + 0x1FFFFFu) & kInfBits);
    const float decode = to_float((254u << 23) - power);
    return {to_float(power), decode, decode, 0};
  }
  const float encode = fp8_scale(amax, facts.max, spec.amax_epsilon, spec.pow2, input_max);
  const float decode = reciprocal(encode);
  return {encode, decode, decode, 0};
}

__device__ __forceinline__ BlockScale current_scale(float amax, const ElementFacts& facts, const Spec& spec) {
  const float encode = fp8_scale(amax, facts.max, spec.amax_epsilon, spec.pow2, kFloatMax);
  return {encode, 1.0f, 1.0f / encode, 0};
}

__device__ __forceinline__ BlockScale mx_scale_up(float amax, const ElementFacts& facts) {
  const float needed = amax * facts.inverse_max;
  const uint32_t bits = to_bits(needed);
  if (bits - (1u << 23) < (252u << 23)) {  // the next power of two is a normal number, and so is its reciprocal
    const uint32_t power = (bits + 0x7FFFFFu) & kInfBits;
    return {to_float((254u << 23) - power), to_float(power), to_float(power), power >> 23};
  }
  const uint32_t code = e8m0_up(needed);
  const float decode = e8m0_decode(code);
  return {e8m0_reciprocal(code), decode, decode, code};
}

__device__ __forceinline__ BlockScale mx_scale(float amax, const ElementFacts& facts, const Spec& spec) {
  if (spec.scale_rounding == ScaleRounding::up) return mx_scale_up(amax, facts);
  const uint32_t code = e8m0_scale_of(spec.element, spec.scale_rounding, amax);
  const float decode = e8m0_decode(code);
  return {e8m0_reciprocal(code), decode, decode, code};
}

// 4over6: the scale that maps the amax to 4, or to 6.
__device__ __forceinline__ BlockScale candidate(float amax, const GlobalScale& global, const Spec& spec, bool four) {
  return nvfp4_scale_of(nvfp4_candidate_scale(amax, global.encode, four ? 1.5f : 1.0f), global, spec);
}

__device__ __forceinline__ float quad_error(float sum, const float4& quad, const BlockScale& scale,
                                            const GlobalScale& global, const Spec& spec) {
  const float x[4] = {quad.x, quad.y, quad.z, quad.w};
  const float full = 6.0f * spec.e4m3_max;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float product = decode<E2M1>(encode<E2M1>(x[i] * scale.encode)) * scale.exact;
    const float d = spec.fast_error ? product - x[i] * global.encode : product * global.amax / full - x[i];
    sum += spec.four_over_six == FourOverSix::mse ? d * d : fabsf(d);
  }
  return sum;
}

// Errors of a segment with both scales, each summed over its elements in order. Not inlined: few formats need it.
static __device__ __noinline__ float2 candidate_errors(float4 a, float4 b, float4 c, float4 d, float amax,
                                                       float global_amax, const Spec& spec) {
  const GlobalScale global = nvfp4_global(global_amax, spec);
  const float4 quads[4] = {a, b, c, d};
  const BlockScale four = candidate(amax, global, spec, true), six = candidate(amax, global, spec, false);
  float2 sums = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums.x = quad_error(sums.x, quads[i], four, global, spec);
    sums.y = quad_error(sums.y, quads[i], six, global, spec);
  }
  return sums;
}

}  // namespace hq
