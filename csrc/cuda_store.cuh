// A thread's 16 codes and its 16 decoded values to global memory, in 16-byte stores where the address allows it.
#pragma once
#include <cuda_runtime.h>

#include "cuda_tile.cuh"
#include "numerics.h"
#include "quantize.h"
#include "segment.h"

namespace hq {

// Whole words, or the first `bytes` of them one by one.
template <int kWords>
__device__ void store_words(uint8_t* to, const uint32_t words[kWords], int bytes) {
  if (bytes == 4 * kWords && aligned16(to) && kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i + 4 <= kWords; i += 4)
      reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  } else if (bytes == 4 * kWords && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) reinterpret_cast<uint2*>(to)[i / 2] = make_uint2(words[i], words[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i)
      if (i < bytes) to[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
  }
}

// kBits per code in memory: 8, or 4 with the even element in the low nibble.
template <int kBits>
__device__ void store_codes(const Source& source, const Place& place, const uint32_t codes[kSegment], uint8_t* to) {
  constexpr int kPerWord = 32 / kBits, kWords = kSegment / kPerWord;
  uint32_t words[kWords] = {};
#pragma unroll
  for (int i = 0; i < kSegment; ++i) words[i / kPerWord] |= codes[i] << (kBits * (i % kPerWord));
  store_words<kWords>(to + (place.row * source.cols + place.col) / (8 / kBits), words, place.count / (8 / kBits));
}

// NaN as the host's arithmetic leaves it: quiet and positive.
__device__ inline uint32_t value_bits(float value) { return value != value ? 0x7FC00000u : to_bits(value); }

template <class E>
__device__ void store_exact(const Source& source, const Place& place, const uint32_t codes[kSegment], float scale,
                            const Output& output) {
  const int64_t start = place.row * source.cols + place.col;
  uint32_t words[kSegment];
#pragma unroll
  for (int i = 0; i < kSegment; ++i) words[i] = value_bits(decode<E>(codes[i]) * scale);
  if (output.exact_dtype == Dtype::fp32)
    return store_words<kSegment>(static_cast<uint8_t*>(output.exact) + start * 4, words, place.count * 4);
  uint32_t pairs[kSegment / 2];
#pragma unroll
  for (int i = 0; i < kSegment; i += 2)
    pairs[i / 2] = to_bits(round_to_bf16(to_float(words[i]))) >> 16 | to_bits(round_to_bf16(to_float(words[i + 1])));
  store_words<kSegment / 2>(static_cast<uint8_t*>(output.exact) + start * 2, pairs, place.count * 2);
}

}  // namespace hq
