// Codes to values and values to memory, for the kernels that decode one operand or those of a group.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "numerics.h"
#include "quantize.h"

namespace hq {

struct OutFp32 {
  using Word = float;
};
struct OutBf16 {
  using Word = uint16_t;
};
struct OutFp16 {
  using Word = uint16_t;
};

template <class Out>
constexpr int kPiece = 16 / static_cast<int>(sizeof(typename Out::Word));

// `count` of kCount codes, the first one in the lowest bits. kBits per code in memory: 8, or 4.
template <int kBits, int kCount>
__device__ __forceinline__ uint64_t load_codes(const uint8_t* from, int count) {
  constexpr int kBytes = kCount * kBits / 8;
  using Word = std::conditional_t<kBytes == 8, uint64_t, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>;
  if (count == kCount && reinterpret_cast<uintptr_t>(from) % kBytes == 0)
    return *reinterpret_cast<const Word*>(from);
  uint64_t codes = 0;
#pragma unroll 1
  for (int i = 0; i < count * kBits / 8; ++i) codes |= static_cast<uint64_t>(from[i]) << (8 * i);
  return codes;
}

// Two 8-bit codes by the conversion instruction of sm_89: exact in fp16, and so are its infinities and NaNs.
template <class E>
__device__ __forceinline__ void decode_pair(uint32_t codes, float& low, float& high) {
#if __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<E, E4M3> || std::is_same_v<E, E5M2>) {
    const uint16_t pair = static_cast<uint16_t>(codes);
    uint32_t halves;
    if constexpr (std::is_same_v<E, E4M3>)
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    else
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
    const float2 values = __half22float2(__halves2half2(__ushort_as_half(static_cast<uint16_t>(halves)),
                                                        __ushort_as_half(static_cast<uint16_t>(halves >> 16))));
    low = values.x;
    high = values.y;
    return;
  }
#endif
  constexpr int kBits = E::kWidth == 4 ? 4 : 8;
  low = decode<E>(codes & ((1u << kBits) - 1));
  high = decode<E>((codes >> kBits) & ((1u << kBits) - 1));
}

// fp32 to the output, the NaNs as the host leaves them: quiet and positive. The conversion instruction has its own NaN,
// which `nan` (there is one in this piece) replaces.
template <class Out>
__device__ __forceinline__ uint32_t round_pair(float low, float high, bool nan) {
  uint32_t word;
  if constexpr (std::is_same_v<Out, OutBf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  if (nan) {
    constexpr uint32_t quiet = std::is_same_v<Out, OutBf16> ? 0x7FC0u : 0x7E00u;
    if (low != low) word = (word & 0xFFFF0000u) | quiet;
    if (high != high) word = (word & 0x0000FFFFu) | quiet << 16;
  }
  return word;
}

// The first `count` values of a piece to `to`. nan: there may be one among them.
template <class Out>
__device__ __forceinline__ void store_piece(typename Out::Word* to, const float v[kPiece<Out>], int count, bool nan) {
  using Word = typename Out::Word;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Out, OutFp32>)
      words[i] = nan && v[i] != v[i] ? 0x7FC00000u : to_bits(v[i]);
    else
      words[i] = round_pair<Out>(v[2 * i], v[2 * i + 1], nan);
  }
  if (count == kPiece<Out> && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece<Out>; ++i) {
    if (i >= count) break;
    if constexpr (std::is_same_v<Out, OutFp32>)
      to[i] = to_float(words[i]);
    else
      to[i] = static_cast<Word>(words[i / 2] >> (16 * (i % 2)));
  }
}

inline int log2_of(int side) {  // tile sides are powers of two
  int shift = 0;
  while ((1 << shift) < side) ++shift;
  return shift;
}

// call(element, out) with the types of these.
template <class Call>
void with_types(Element element, Dtype out, const Call& call) {
  const auto with_out = [&](auto type) {
    switch (out) {
      case Dtype::fp32: return call(type, OutFp32());
      case Dtype::bf16: return call(type, OutBf16());
      case Dtype::fp16: return call(type, OutFp16());
    }
  };
  switch (element) {
    case Element::e4m3: return with_out(E4M3());
    case Element::e5m2: return with_out(E5M2());
    case Element::e2m1: return with_out(E2M1());
    case Element::e2m3: return with_out(E2M3());
    case Element::e3m2: return with_out(E3M2());
    case Element::e1m2: return with_out(E1M2());
    case Element::int8: return with_out(INT8());
  }
}

}  // namespace hq
