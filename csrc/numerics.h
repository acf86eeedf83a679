// Scalar numerics of every format: encode, decode, round and scale ONE value, on the host and on the device.
// Needs neither torch nor a CUDA header. Everything is IEEE fp32 with round-half-to-even and kept subnormals, and
// integer work on the bits; no exp2f, log2f or frexp, whose GPU forms are approximate. The loops are elsewhere.
// Formulas follow TransformerEngine 2.20 (common/util/ptx.cuh, recipe/recipe_common.cuh, cast/nvfp4/core_nvfp4.cuh).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define HQ_HD static __host__ __device__ __forceinline__
#define HQ_UNROLL _Pragma("unroll")
#else
// static: quantize.cpp is compiled once per instruction set, and the linker must not merge the copies.
#define HQ_HD static inline __attribute__((always_inline))
#define HQ_UNROLL _Pragma("GCC unroll 16")
#endif

namespace hq {

enum class Element { e4m3, e5m2, e2m1, e2m3, e3m2, e1m2, int8 };
enum class ScaleRounding { up, floor, even, ceil };  // how a block's amax becomes a power of two (MX)

HQ_HD uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

HQ_HD float to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// condition ? a : b; on the host as arithmetic, so that loops over it become vector code instead of branches.
HQ_HD uint32_t select(bool condition, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return condition ? a : b;
#else
  return b ^ ((a ^ b) & (0u - static_cast<uint32_t>(condition)));
#endif
}

constexpr uint32_t kAbsMask = 0x7FFFFFFFu;
constexpr uint32_t kInfBits = 0x7F800000u;
constexpr float kFloatMax = 0x1.FFFFFEp127f;

// |value| as ordered bits, 0 for NaN: the largest of these is the amax of a block, in any order of reduction.
HQ_HD int32_t amax_bits(float value) {
  const uint32_t magnitude = to_bits(value) & kAbsMask;
  return magnitude > kInfBits ? 0 : static_cast<int32_t>(magnitude);
}

// ---- element formats -----------------------------------------------------------------------------------------------

// A sign bit, EXP exponent bits with bias BIAS, MAN mantissa bits. MAX_CODE is the largest finite magnitude, NAN_CODE
// what a NaN becomes (its sign is dropped); magnitudes from FIRST_SPECIAL up decode to inf (if even) or NaN.
template <int EXP, int MAN, int BIAS, uint32_t MAX_CODE, uint32_t NAN_CODE, uint32_t FIRST_SPECIAL>
struct Minifloat {
  static constexpr int kMan = MAN;
  static constexpr int kWidth = 1 + EXP + MAN;
  static constexpr uint32_t kMagnitude = (1u << (EXP + MAN)) - 1;
  static constexpr uint32_t kNanCode = NAN_CODE;
  static constexpr uint32_t kFirstSpecial = FIRST_SPECIAL;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - BIAS) << 23;
  static constexpr uint32_t kMaxBits = (MAX_CODE << (23 - MAN)) + kRebias;
  static constexpr uint32_t kMinNormalBits = static_cast<uint32_t>(128 - BIAS) << 23;
  static constexpr uint32_t kStepBits = static_cast<uint32_t>(128 - BIAS - MAN) << 23;   // smallest subnormal
  static constexpr uint32_t kMagicBits = static_cast<uint32_t>(151 - BIAS - MAN) << 23;  // its ulp is that step
};

//                          EXP MAN BIAS MAX   NAN   special
struct E4M3 : Minifloat<4, 3, 7, 0x7E, 0x7F, 0x7F> {};    // max 448, no inf
struct E5M2 : Minifloat<5, 2, 15, 0x7B, 0x7F, 0x7C> {};   // max 57344
struct E2M1 : Minifloat<2, 1, 1, 0x7, 0x7, 0x8> {};       // max 6; no inf, no NaN from here on
struct E2M3 : Minifloat<2, 3, 1, 0x1F, 0x1F, 0x20> {};    // max 7.5
struct E3M2 : Minifloat<3, 2, 3, 0x1F, 0x1F, 0x20> {};    // max 28
// Uniform grids: two binades of equal steps. Codes are sign and magnitude.
struct E1M2 : Minifloat<1, 2, 0, 0x7, 0x7, 0x8> {};       // max 3.5, in steps of 0.5: INT4 from -7 to 7, halved
struct INT8 : Minifloat<1, 6, -5, 0x7F, 0x7F, 0x80> {};   // -127 to 127
// A scale without sign: encode() of numbers >= 0 gives a byte.
struct UE5M3 : Minifloat<5, 3, 15, 0xFE, 0xFF, 0xFF> {};  // max 114688, no inf

HQ_HD bool is_four(Element element) { return element == Element::e2m1 || element == Element::e1m2; }

// Code of `value`: round half to even, saturate to the largest finite value (infinities too), keep the sign of
// zero; NaN becomes kNanCode. Branch-free.
template <class E>
HQ_HD uint32_t encode(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t magnitude = bits & kAbsMask;
  const uint32_t sign = (bits >> 31) << (E::kWidth - 1);
  // Signed comparisons: the magnitudes are below 2^31 and SSE2 has no unsigned ones.
  const int32_t a = static_cast<int32_t>(magnitude);
  const uint32_t clamped = select(a < static_cast<int32_t>(E::kMaxBits), magnitude, E::kMaxBits);
  constexpr int shift = 23 - E::kMan;
  const uint32_t normal = (clamped + ((clamped >> shift) & 1u) + ((1u << (shift - 1)) - 1) - E::kRebias) >> shift;
  // Adding 2^23 steps lets the fp32 addition round a value below the smallest normal to whole steps.
  const uint32_t subnormal = to_bits(to_float(clamped) + to_float(E::kMagicBits)) - E::kMagicBits;
  const uint32_t code = select(a < static_cast<int32_t>(E::kMinNormalBits), subnormal, normal) | sign;
  return select(a > static_cast<int32_t>(kInfBits), E::kNanCode, code);
}

// Value of a code; bits above the format's width are ignored.
template <class E>
HQ_HD float decode(uint32_t code) {
  const uint32_t magnitude = code & E::kMagnitude;
  const uint32_t normal = (magnitude << (23 - E::kMan)) + E::kRebias;
  const uint32_t subnormal = to_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * to_float(E::kStepBits));
  uint32_t bits = select(static_cast<int32_t>(magnitude) < (1 << E::kMan), subnormal, normal);
  if (E::kFirstSpecial <= E::kMagnitude) {
    const bool infinite = magnitude == E::kFirstSpecial && (E::kFirstSpecial & 1u) == 0;
    const uint32_t special = select(infinite, kInfBits, 0x7FC00000u);
    bits = select(static_cast<int32_t>(magnitude) < static_cast<int32_t>(E::kFirstSpecial), bits, special);
  }
  return to_float(bits | ((code >> (E::kWidth - 1)) << 31));
}

// ---- 16-bit inputs -------------------------------------------------------------------------------------------------

HQ_HD float bf16_to_float(uint16_t bits) { return to_float(static_cast<uint32_t>(bits) << 16); }

HQ_HD float half_to_float(uint16_t half) {
  const uint32_t magnitude = half & 0x7FFFu;
  // Shifted into place the exponent is 112 too small; the exact product repairs it for subnormals as well.
  const uint32_t finite = to_bits(to_float(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | kInfBits;
  return to_float(select(static_cast<int32_t>(magnitude) < 0x7C00, finite, special) |
                  (static_cast<uint32_t>(half & 0x8000u) << 16));
}

// fp32 rounded to half (half to even; too large becomes inf).
HQ_HD uint16_t float_to_half(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t magnitude = bits & kAbsMask;
  const int32_t a = static_cast<int32_t>(magnitude);
  const uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Below 2^-14 the fp32 addition rounds to whole steps of 2^-24.
  const uint32_t subnormal = to_bits(to_float(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t half = select(a < 0x38800000, subnormal, normal);
  half = select(a < 0x47800000, half, 0x7C00u);
  half = select(a > static_cast<int32_t>(kInfBits), 0x7E00u, half);
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// fp32 rounded to bf16 (half to even), still as fp32.
HQ_HD float round_to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
  const bool nan = static_cast<int32_t>(bits & kAbsMask) > static_cast<int32_t>(kInfBits);
  return to_float(select(nan, 0x7FC00000u, rounded));
}

// ---- scales --------------------------------------------------------------------------------------------------------

// E8M0 exponent rounded up, for value >= 0: the smallest e with 2^(e-127) >= value; inf gives 0xFE, NaN 0xFF.
HQ_HD uint32_t e8m0_up(float value) {
  const uint32_t bits = to_bits(value) & kAbsMask;
  const uint32_t exponent = bits >> 23;
  const int32_t mantissa = static_cast<int32_t>(bits & 0x7FFFFFu);
  // A subnormal is at most 2^-127 (code 0) or above it (code 1); beyond 2^127 the code stays 0xFE.
  const uint32_t limit = select(exponent == 0, 0x400000u, select(exponent == 0xFEu, 0x7FFFFFu, 0u));
  const uint32_t finite = exponent + static_cast<uint32_t>(mantissa > static_cast<int32_t>(limit));
  const uint32_t special = select(bits == kInfBits, 0xFEu, 0xFFu);
  return select(static_cast<int32_t>(bits) < static_cast<int32_t>(kInfBits), finite, special);
}

// E8M0 code of 2^(floor(log2(amax)) - emax), for amax >= 0; below the range it is 0, inf counts as 2^128, NaN gives
// 0xFF. `added`, in units of the last bit of the fp32 mantissa, comes first: it rounds up.
HQ_HD uint32_t e8m0_floor(float amax, uint32_t emax, uint32_t added) {
  const uint32_t bits = to_bits(amax) & kAbsMask;
  const uint32_t exponent = (bits + added) >> 23;
  const uint32_t code = select(static_cast<int32_t>(exponent) > static_cast<int32_t>(emax), exponent - emax, 0u);
  return select(static_cast<int32_t>(bits) > static_cast<int32_t>(kInfBits), 0xFFu, code);
}

// E8M0 scale of a block with elements E. up: the smallest power of two that saturates nothing (TransformerEngine);
// floor: OCP MX v1.0 section 6.3; even: torchao's EVEN, amax rounded to E's mantissa before the floor; ceil: torchao's
// CEIL, amax rounded up to a power of two before it.
template <class E>
HQ_HD uint32_t e8m0_scale(ScaleRounding rounding, float amax) {
  if (rounding == ScaleRounding::up) return e8m0_up(amax * (1.0f / to_float(E::kMaxBits)));
  constexpr uint32_t emax = (E::kMaxBits >> 23) - 127;
  const uint32_t added = select(rounding == ScaleRounding::ceil, 0x7FFFFFu, 0u);
  return e8m0_floor(amax, emax, select(rounding == ScaleRounding::even, 1u << (22 - E::kMan), added));
}

// The same for an element known at run time.
HQ_HD uint32_t e8m0_scale_of(Element element, ScaleRounding rounding, float amax) {
  switch (element) {
    case Element::e4m3: return e8m0_scale<E4M3>(rounding, amax);
    case Element::e5m2: return e8m0_scale<E5M2>(rounding, amax);
    case Element::e2m3: return e8m0_scale<E2M3>(rounding, amax);
    case Element::e3m2: return e8m0_scale<E3M2>(rounding, amax);
    case Element::e1m2: return e8m0_scale<E1M2>(rounding, amax);
    case Element::int8:
    case Element::e2m1: break;
  }
  return e8m0_scale<E2M1>(rounding, amax);
}

// 2^(e-127), and its reciprocal 2^(127-e); 255 is NaN.
HQ_HD float e8m0_decode(uint32_t e) {
  return to_float(select(e == 0, 0x00400000u, select(e == 255, 0x7FC00000u, e << 23)));
}

HQ_HD float e8m0_reciprocal(uint32_t e) {
  return to_float(select(e == 254, 0x00400000u, select(e == 255, 0x7FC00000u, (254u - e) << 23)));
}

// Encode scale of FP8 current and block scaling: fp8_max / amax, 1 for an amax of 0 or inf. inf_value replaces an
// overflowing quotient; pow2 rounds the scale down to a power of two.
HQ_HD float fp8_scale(float amax, float fp8_max, float epsilon, bool pow2, float inf_value) {
  const float floored = amax < epsilon ? epsilon : amax;
  if (floored == 0.0f || to_bits(floored) >= kInfBits) return 1.0f;
  const float quotient = fp8_max / floored;
  const float scale = to_bits(quotient) == kInfBits ? inf_value : quotient;
  return pow2 ? to_float(to_bits(scale) & kInfBits) : scale;
}

// NVFP4: global encode scale from the global amax; full_range is the largest element (6) times the largest E4M3 block
// scale (448 or 256).
HQ_HD float nvfp4_global_scale(float amax, float full_range) {
  const float quotient = full_range / amax;
  const float finite = quotient < kFloatMax ? quotient : kFloatMax;
  return amax == 0.0f || quotient == 0.0f ? 1.0f : finite;
}

// NVFP4: E4M3 code of the block scale, where sixth = fl(global_scale * fl(1/6)): the order of the two products matters.
// The limit to FLT_MAX before the cast is the cast's own saturation.
HQ_HD uint32_t nvfp4_block_scale(float block_amax, float sixth) { return encode<E4M3>(block_amax * sixth); }

// NVFP4: factor applied to elements; FLT_MAX when the block scale underflowed to 0.
HQ_HD float nvfp4_encode_scale(float block_scale, float global_decode_scale) {
  const uint32_t inverse = to_bits(1.0f / (block_scale * global_decode_scale));
  return to_float(select(inverse == kInfBits, kInfBits - 1, inverse));
}

// NVFP4 without a global amax: UE5M3 code of the block scale; inverse_max is fl(1 / largest element).
HQ_HD uint32_t ue5m3_block_scale(float block_amax, float inverse_max) { return encode<UE5M3>(block_amax * inverse_max); }

// NVFP4 4over6: E4M3 code of a candidate block scale, saturating at 448; stretch 1 maps the block amax to 6, 1.5 to 4.
HQ_HD uint32_t nvfp4_candidate_scale(float block_amax, float global_scale, float stretch) {
  return encode<E4M3>(block_amax / 6.0f * global_scale * stretch);
}

// ---- random Hadamard transform and random bits ---------------------------------------------------------------------

constexpr uint32_t kRhtSignMask = 0xD7E8u;  // bit i: input element i of each group of 16 is negated

// The same for groups of up to 128 elements, of which `first` is a multiple of 16: the signs of 16 from there.
HQ_HD uint32_t rht_signs(int first) {
  const uint32_t two = first < 32 ? 0x29DED7E8u : (first < 64 ? 0x7F92A9B8u : (first < 96 ? 0xCE45A98Du : 0x8F8FCAD6u));
  return (two >> (first % 32)) & 0xFFFFu;
}

// 1 / sqrt(size), for 16, 32, 64 and 128.
HQ_HD float rht_scale(int size) {
  return size == 16 ? 0.25f : (size == 32 ? 0x1.6a09e6p-3f : (size == 64 ? 0.125f : 0x1.6a09e6p-4f));
}

// Hadamard transform of 16 values as butterflies over distances 1, 2, 4, 8 in this order. V is float, or a vector of
// floats for as many transforms side by side.
template <class V>
HQ_HD void butterfly16(V v[16]) {
  HQ_UNROLL
  for (int distance = 1; distance < 16; distance *= 2)
    HQ_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (i & distance) continue;
      const V a = v[i], b = v[i + distance];
      v[i] = a + b;
      v[i + distance] = a - b;
    }
}

constexpr uint32_t kDrawnSigns = 0x29DE3891u;  // second word of the Philox key of drawn signs
constexpr float kEdenMost = 0x1.849d64p2f;     // MS-EDEN: what the amax of a block maps to, fl(6 / (0.93 * 17 / 16))

// Stochastic E2M1 code: |value| + byte/256 of its step, truncated. The sum is what one fma gives: byte/256 * step is
// exact.
HQ_HD uint32_t encode_e2m1_stochastic(float value, uint32_t byte) {
  const uint32_t bits = to_bits(value);
  const float magnitude = to_float(bits & kAbsMask);
  const float step = magnitude < 2.0f ? 0.5f : (magnitude < 4.0f ? 1.0f : 2.0f);
  const float sum = magnitude + static_cast<float>(static_cast<int32_t>(byte)) * 0x1p-8f * step;
  const int32_t clamped = static_cast<int32_t>(to_bits(sum < 6.0f ? sum : 6.0f));
  const uint32_t normal = (static_cast<uint32_t>(clamped) - E2M1::kRebias) >> 22;
  const uint32_t half = select(clamped < 0x3F000000, 0u, 1u);
  const uint32_t code = select(clamped < static_cast<int32_t>(E2M1::kMinNormalBits), half, normal);
  const bool nan = static_cast<int32_t>(bits & kAbsMask) > static_cast<int32_t>(kInfBits);
  return select(nan, E2M1::kNanCode, code | ((bits >> 31) << 3));
}

// The same for E1M2, whose steps are all 0.5.
HQ_HD uint32_t encode_e1m2_stochastic(float value, uint32_t byte) {
  const uint32_t bits = to_bits(value);
  const float sum = to_float(bits & kAbsMask) + static_cast<float>(static_cast<int32_t>(byte)) * 0x1p-9f;
  const uint32_t code = static_cast<uint32_t>(static_cast<int32_t>((sum < 3.5f ? sum : 3.5f) * 2.0f));
  const bool nan = static_cast<int32_t>(bits & kAbsMask) > static_cast<int32_t>(kInfBits);
  return select(nan, E1M2::kNanCode, code | ((bits >> 31) << 3));
}

// Philox4x32 with 10 rounds (Salmon et al., SC 2011): counter[4] is replaced by 128 random bits.
HQ_HD void philox(uint32_t key0, uint32_t key1, uint32_t counter[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    c0 = next0;
    c2 = next2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  counter[0] = c0, counter[1] = c1, counter[2] = c2, counter[3] = c3;
}

// Signs of a transform that draws them: bit i % 32 of word i / 32 negates element i of each group.
HQ_HD void drawn_signs(uint32_t key0, uint64_t step, uint32_t words[4]) {
  words[0] = 0, words[1] = 0, words[2] = static_cast<uint32_t>(step), words[3] = static_cast<uint32_t>(step >> 32);
  philox(key0, kDrawnSigns, words);
}

// MS-EDEN: <x, x> / <x, Q(x)> of a group from its sums, or 1 where that is no positive finite number.
HQ_HD float eden_factor(float own, float with_codes) {
  const float factor = own / with_codes;
  return factor > 0.0f && to_bits(factor) < kInfBits ? factor : 1.0f;
}

// Stochastic E4M3 code of value >= 0: the low 20 bits of `word` are added below the last kept bit.
HQ_HD uint32_t encode_e4m3_stochastic(float value, uint32_t word) {
  const uint32_t drawn = word & 0xFFFFFu;
  const uint32_t code = value < 0x1p-6f ? (static_cast<uint32_t>(static_cast<int32_t>(value * 0x1p29f)) + drawn) >> 20
                                        : ((to_bits(value) + drawn) >> 20) - (120u << 3);
  return code < 0x7Eu ? code : 0x7Eu;
}

}  // namespace hq
