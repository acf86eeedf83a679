// The arithmetic of activations: float32 inside, each output rounded once to bf16. All kernels take it from here, so that
// fused ones have the bits of the others.
//   sigmoid(x) = 1 / (1 + 2^(-x log2 e)), by the instructions ex2.approx and rcp.approx: relative error below 2^-20 for
//   |x| < 32, where bf16 has 2^-8; 0 below -87.
//   swiglu: h = (g * s) * u, s = sigmoid(g).  dg = ((dh * u) * s) * (1 + g * (1 - s)), du = dh * (g * s).
//   gelu, the tanh approximation 0.5 z (1 + tanh(t)), t = sqrt(2 / pi) (z + 0.044715 z^3), as z * s, s = sigmoid(2 t).
//   dz = dh * (s + ((z * s) * (1 - s)) * 2 dt/dz).
#pragma once
#include <cuda_runtime.h>

#include "activation.h"
#include "cuda/words.cuh"

namespace hq {

__device__ __forceinline__ float sigmoid(float x) {
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(x, -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(__fadd_rn(1.0f, power)));
  return result;
}

constexpr float kGeluOuter = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kGeluInner = 0.044715f;

// The sigmoid in gelu.
__device__ __forceinline__ float gelu_gate(float z) {
  return sigmoid(kGeluOuter * (z + kGeluInner * ((z * z) * z)));
}

// h of one element; b is z's second input, if there is one.
template <Activation kKind>
__device__ __forceinline__ float activated(float a, float b) {
  if constexpr (kKind == Activation::gelu) return a * gelu_gate(a);
  return (a * sigmoid(a)) * b;
}

// The gradients of z's inputs.
template <Activation kKind>
__device__ __forceinline__ float first_gradient(float dh, float a, float b) {
  if constexpr (kKind == Activation::gelu) {
    const float s = gelu_gate(a), slope = kGeluOuter * (1.0f + (3.0f * kGeluInner) * (a * a));
    return dh * (s + ((a * s) * (1.0f - s)) * slope);
  }
  const float s = sigmoid(a);
  return ((dh * b) * s) * (1.0f + a * (1.0f - s));
}

__device__ __forceinline__ float second_gradient(float dh, float a) { return dh * (a * sigmoid(a)); }

// Words of two neighbouring elements. b is not read without a second input.
template <Activation kKind>
__device__ __forceinline__ uint32_t activated_word(uint32_t a, uint32_t b) {
  return round_pair<Bf16>(activated<kKind>(widen<Bf16>(a, 0), widen<Bf16>(b, 0)),
                          activated<kKind>(widen<Bf16>(a, 1), widen<Bf16>(b, 1)));
}

template <Activation kKind>
__device__ __forceinline__ uint32_t first_gradient_word(uint32_t dh, uint32_t a, uint32_t b) {
  return round_pair<Bf16>(first_gradient<kKind>(widen<Bf16>(dh, 0), widen<Bf16>(a, 0), widen<Bf16>(b, 0)),
                          first_gradient<kKind>(widen<Bf16>(dh, 1), widen<Bf16>(a, 1), widen<Bf16>(b, 1)));
}

__device__ __forceinline__ uint32_t second_gradient_word(uint32_t dh, uint32_t a) {
  return round_pair<Bf16>(second_gradient(widen<Bf16>(dh, 0), widen<Bf16>(a, 0)),
                          second_gradient(widen<Bf16>(dh, 1), widen<Bf16>(a, 1)));
}

// Units of eight.
template <Activation kKind>
__device__ __forceinline__ void activate_words(const uint32_t a[4], const uint32_t b[4], uint32_t h[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) h[i] = activated_word<kKind>(a[i], b[i]);
}

template <Activation kKind>
__device__ __forceinline__ void first_gradient_words(const uint32_t dh[4], const uint32_t a[4], const uint32_t b[4],
                                                     uint32_t da[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) da[i] = first_gradient_word<kKind>(dh[i], a[i], b[i]);
}

__device__ __forceinline__ void second_gradient_words(const uint32_t dh[4], const uint32_t a[4], uint32_t db[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) db[i] = second_gradient_word(dh[i], a[i]);
}

__device__ __forceinline__ void load_unit(const uint4* from, uint32_t words[4]) {
  const uint4 unit = __ldg(from);
  words[0] = unit.x, words[1] = unit.y, words[2] = unit.z, words[3] = unit.w;
}

__device__ __forceinline__ void store_unit(uint4* to, const uint32_t words[4]) {
  *to = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace hq
