// Stores of a thread: 16 codes, 16 multiplied values, a scale, sums of errors.
#pragma once
#include <cuda_runtime.h>

#include "cuda/scales.cuh"
#include "cuda/tile.cuh"
#include "cuda/words.cuh"
#include "quantize.h"

namespace hq {

// A segment in its operand: first element, and how many elements lie inside the matrix.
struct Place {
  int64_t row, col;
  int count;
};

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 16-byte stores of whole words, which the compiler may not take apart.
template <int kCount>
__device__ __forceinline__ void store_words(void* to, const uint32_t words[kCount]) {
  if constexpr (kCount == 2) {
    *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    const size_t at = __cvta_generic_to_global(to);
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at + 4 * i), "r"(words[i]), "r"(words[i + 1]),
                   "r"(words[i + 2]), "r"(words[i + 3]));
  }
}

// 32 bytes of a lane, which the lane kNext above or below goes on with or begins: they trade halves, so that each store of
// the warp is of whole sectors and not of one half of each. All lanes of the warp.
template <int kNext>
__device__ __forceinline__ void store_sectors(uint16_t* to, uint32_t pairs[kSegment / 2], bool inside) {
  const bool second = lane_of_warp() / kNext % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, second ? pairs[i] : pairs[4 + i], kNext);
    (second ? pairs[i] : pairs[4 + i]) = other;
  }
  if (!inside) return;
  to -= second ? kSegment / 2 : 0;
  store_words<4>(to, pairs);
  store_words<4>(to + kSegment, pairs + 4);
}

// The first `count` of the words' units of T, one by one.
template <class T, int kCount>
__device__ __forceinline__ void store_units(T* to, const uint32_t words[kCount], int count) {
  constexpr int per_word = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kCount * per_word; ++i)
    if (i < count) to[i] = static_cast<T>(words[i / per_word] >> (8 * sizeof(T) * (i % per_word)));
}

// vector: all segments are whole and aligned.
template <bool kFour>
__device__ __forceinline__ void store_codes(uint8_t* codes, const Place& place, int64_t cols, bool vector,
                                            const uint32_t words[kCodeWords<kFour>]) {
  constexpr int per_byte = kFour ? 2 : 1;
  codes += (place.row * cols + place.col) / per_byte;
  if (vector)
    store_words<kCodeWords<kFour>>(codes, words);
  else
    store_units<uint8_t, kCodeWords<kFour>>(codes, words, place.count / per_byte);
}

// NaN as the host's arithmetic leaves it: quiet and positive.
__device__ __forceinline__ float clean(float value) { return value != value ? to_float(0x7FC00000u) : value; }

// Notes what is not finite. Of threads that see something all write the same; none waits. most: a magnitude, NaN aside.
__device__ __forceinline__ void note_seen(const Direction& to, bool nan, float most) {
  if (!to.seen) return;
  if (nan) to.seen[0] = 1;
  if (most > kFloatMax) to.seen[1] = 1;
}

// 16 values to words of T. nan: there may be one among them, which the conversion instruction would leave in its own way.
template <class T>
__device__ __forceinline__ void round_segment(const float v[kSegment], bool nan, uint32_t words[kWords<T>]) {
#pragma unroll
  for (int i = 0; i < kWords<T>; ++i) {
    if constexpr (T::kPack == 1) {
      words[i] = to_bits(nan ? clean(v[i]) : v[i]);
    } else {
      words[i] = round_pair<T>(v[2 * i], v[2 * i + 1]);
      if (nan) {
        constexpr uint32_t quiet = std::is_same_v<T, Bf16> ? 0x7FC0u : 0x7E00u;
        if (v[2 * i] != v[2 * i]) words[i] = (words[i] & 0xFFFF0000u) | quiet;
        if (v[2 * i + 1] != v[2 * i + 1]) words[i] = (words[i] & 0xFFFFu) | quiet << 16;
      }
    }
  }
}

// first: where the operand [rows, cols] begins in the packed output.
__device__ __forceinline__ void store_exact(const Direction& to, int64_t first, const Place& place, int64_t rows,
                                            int64_t cols, bool vector, const float v[kSegment], bool nan) {
  const int64_t start = first + place.row * cols + place.col;
  uint32_t words[kSegment];
  if (to.exact_turned) {
    const int64_t turned = first + place.col * rows + place.row;
    round_segment<Fp32>(v, nan, words);
#pragma unroll
    for (int i = 0; i < kSegment; ++i) {
      if (i >= place.count) break;
      if (to.exact_dtype == Dtype::fp32)
        static_cast<uint32_t*>(to.exact)[turned + i * rows] = words[i];
      else
        static_cast<uint16_t*>(to.exact)[turned + i * rows] = static_cast<uint16_t>(
            to_bits(round_to_bf16(to_float(words[i]))) >> 16);
    }
    return;
  }
  if (to.exact_dtype == Dtype::fp32) {
    round_segment<Fp32>(v, nan, words);
    uint32_t* target = static_cast<uint32_t*>(to.exact) + start;
    vector ? store_words<kSegment>(target, words) : store_units<uint32_t, kSegment>(target, words, place.count);
  } else {
    round_segment<Bf16>(v, nan, words);
    uint16_t* target = static_cast<uint16_t*>(to.exact) + start;
    vector ? store_words<kSegment / 2>(target, words) : store_units<uint16_t, kSegment / 2>(target, words, place.count);
  }
}

// One thread of each scale tile writes its scale. first: where the operand's scales begin in the packed output.
__device__ __forceinline__ void store_scale(const Direction& to, int64_t first, const Place& place, int64_t cols,
                                            const BlockScale& scale) {
  const Spec& spec = to.spec;
  if (!to.scales || place.count == 0 || (place.col & (spec.tile_cols - 1)) || (place.row & (spec.tile_rows - 1))) return;
  const int across = __ffs(spec.tile_cols) - 1, down = __ffs(spec.tile_rows) - 1;  // all are powers of two
  const int64_t offset = first + (place.row >> down) * ((cols + spec.tile_cols - 1) >> across) + (place.col >> across);
  if (spec.family == Family::block)
    static_cast<float*>(to.scales)[offset] = scale.value;
  else
    static_cast<uint8_t*>(to.scales)[offset] = static_cast<uint8_t>(scale.code);
}

// ---- statistics ----------------------------------------------------------------------------------------------------

// A thread's share of TileSums.
struct Sums {
  TileSums of = {};

  __device__ __forceinline__ float add(const float x[kSegment], const float v[kSegment], int count, float limit) {
    float error2 = 0.0f;
#pragma unroll
    for (int i = 0; i < kSegment; ++i) {
      if (i >= count) break;
      const float d = x[i] - v[i];
      error2 = __fmaf_rn(d, d, error2);
      of.x2 = __fmaf_rn(x[i], x[i], of.x2);
      of.q2 = __fmaf_rn(v[i], v[i], of.q2);
      of.amax = fmaxf(of.amax, fabsf(x[i]));
      of.nonzero += x[i] != 0.0f ? 1.0f : 0.0f;
      of.lost += x[i] != 0.0f && v[i] == 0.0f ? 1.0f : 0.0f;
      of.lost2 = __fmaf_rn(v[i] == 0.0f ? x[i] : 0.0f, x[i], of.lost2);
      of.saturated += fabsf(x[i]) > limit ? 1.0f : 0.0f;
    }
    of.error2 += error2;
    return error2;
  }
};

// Sums of the whole thread block, in a fixed order, to `to`.
__device__ inline void store_sums(const TileSums& mine, TileSums* to) {
  __shared__ float warps[kThreads / 32][8];
  const float values[8] = {mine.x2,   mine.error2,    mine.q2,   mine.nonzero,
                           mine.lost, mine.saturated, mine.amax, mine.lost2};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float value = values[k];
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(~0u, value, distance);
      value = k == 6 ? fmaxf(value, other) : value + other;
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32][k] = value;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float total[8] = {};
    for (int w = 0; w < kThreads / 32; ++w)
      for (int k = 0; k < 8; ++k) total[k] = k == 6 ? fmaxf(total[k], warps[w][k]) : total[k] + warps[w][k];
    *to = {total[0], total[1], total[2], total[6], total[3], total[4], total[5], total[7]};
  }
  __syncthreads();
}

}  // namespace hq
