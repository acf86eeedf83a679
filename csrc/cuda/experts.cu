// Tokens on their way to the experts of a mixture and back, each in one pass; a warp has one token.
//
// Floor, for an element of the width of the model and k choices of a token: dispatch reads 4 (fp32) and writes 2 k bytes,
// its way back reads 2 k and writes 4; combine reads 2 k and writes 4, its way back reads 4 + 2 k and writes 2 k.
// Sums have one order, whatever the launch: those over choices the choice's, those over a row the lanes'.
#include <cuda_runtime.h>

#include "cuda/check.cuh"
#include "cuda/words.cuh"
#include "experts.h"

namespace hq {
namespace {

constexpr int kWarps = 8;  // of a block
constexpr int kUnit = 8;   // elements that a thread has at once

struct Unit {
  float of[kUnit];
};

template <class T>
__device__ __forceinline__ Unit load_unit(const void* row, int64_t unit);
template <>
__device__ __forceinline__ Unit load_unit<Bf16>(const void* row, int64_t unit) {
  const uint4 words = static_cast<const uint4*>(row)[unit];
  return {widen<Bf16>(words.x, 0), widen<Bf16>(words.x, 1), widen<Bf16>(words.y, 0), widen<Bf16>(words.y, 1),
          widen<Bf16>(words.z, 0), widen<Bf16>(words.z, 1), widen<Bf16>(words.w, 0), widen<Bf16>(words.w, 1)};
}
template <>
__device__ __forceinline__ Unit load_unit<Fp32>(const void* row, int64_t unit) {
  const float4* parts = static_cast<const float4*>(row) + 2 * unit;
  const float4 low = parts[0], high = parts[1];
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

__device__ __forceinline__ uint4 rounded(const Unit& x) {
  return make_uint4(round_pair<Bf16>(x.of[0], x.of[1]), round_pair<Bf16>(x.of[2], x.of[3]),
                    round_pair<Bf16>(x.of[4], x.of[5]), round_pair<Bf16>(x.of[6], x.of[7]));
}

__device__ __forceinline__ void store_bf16(void* row, int64_t unit, uint4 words) {
  static_cast<uint4*>(row)[unit] = words;
}
__device__ __forceinline__ void store_fp32(void* row, int64_t unit, const Unit& x) {
  float4* parts = static_cast<float4*>(row) + 2 * unit;
  parts[0] = make_float4(x.of[0], x.of[1], x.of[2], x.of[3]);
  parts[1] = make_float4(x.of[4], x.of[5], x.of[6], x.of[7]);
}

template <class T>
constexpr int kBytes = T::kPack == 1 ? 4 : 2;

// The row with this index of a tensor [.., dim].
template <class T>
__device__ __forceinline__ const char* row_of(const void* x, int64_t index, int64_t dim) {
  return static_cast<const char*>(x) + index * dim * kBytes<T>;
}
template <class T>
__device__ __forceinline__ char* row_of(void* x, int64_t index, int64_t dim) {
  return static_cast<char*>(x) + index * dim * kBytes<T>;
}

__device__ __forceinline__ int64_t token_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}
__device__ __forceinline__ int lane_of() { return threadIdx.x % 32; }

// Zeros into the rows that fill up an expert, by the thread blocks behind those of the tokens: one for each expert.
__device__ __forceinline__ void fill_up(const Choices& call, void* rows) {
  const int64_t expert = blockIdx.x - (call.tokens + kWarps - 1) / kWarps, units = call.dim / kUnit;
  if (expert < 0 || expert >= call.experts) return;
  const int64_t *base = call.starts + expert, *filled = base + call.experts + 1;
  const int64_t first = filled[0] + (base[1] - base[0]);
  uint4* to = static_cast<uint4*>(rows) + first * units;
  for (int64_t i = threadIdx.x; i < (filled[1] - first) * units; i += 32 * kWarps) to[i] = make_uint4(0, 0, 0, 0);
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps) dispatch_rows(const __grid_constant__ Choices call, const void* x,
                                                             void* rows) {
  const int64_t token = token_of_warp(), units = call.dim / kUnit;
  if (token >= call.tokens) return fill_up(call, rows);
  const int64_t* places = call.places + token * call.choices;
  for (int64_t unit = lane_of(); unit < units; unit += 32) {
    const uint4 words = rounded(load_unit<T>(row_of<T>(x, token, call.dim), unit));
    for (int r = 0; r < call.choices; ++r) store_bf16(row_of<Bf16>(rows, places[r], call.dim), unit, words);
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps) sum_rows(const __grid_constant__ Choices call, const void* rows,
                                                        void* out) {
  const int64_t token = token_of_warp(), units = call.dim / kUnit;
  if (token >= call.tokens) return;
  const int64_t* places = call.places + token * call.choices;
  for (int64_t unit = lane_of(); unit < units; unit += 32) {
    Unit sum = {};
    for (int r = 0; r < call.choices; ++r) {
      const Unit row = load_unit<Bf16>(row_of<Bf16>(rows, places[r], call.dim), unit);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum.of[i] = __fadd_rn(sum.of[i], row.of[i]);
    }
    const uint4 words = rounded(sum);
    char* to = row_of<T>(out, token, call.dim);
    if constexpr (T::kPack == 2) store_bf16(to, unit, words);
    else store_fp32(to, unit, load_unit<Bf16>(&words, 0));
  }
}

__global__ void __launch_bounds__(32 * kWarps) combine_rows(const __grid_constant__ Combined call, float* y) {
  const Choices& choices = call.choices;
  const int64_t token = token_of_warp(), units = choices.dim / kUnit;
  if (token >= choices.tokens) return;
  const int64_t* places = choices.places + token * choices.choices;
  const float* weights = call.weights + token * choices.choices;
  for (int64_t unit = lane_of(); unit < units; unit += 32) {
    Unit sum = {};
    for (int r = 0; r < choices.choices; ++r) {
      const Unit row = load_unit<Bf16>(row_of<Bf16>(call.rows, places[r], choices.dim), unit);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum.of[i] = __fadd_rn(sum.of[i], __fmul_rn(row.of[i], weights[r]));
    }
    if (call.added) {
      const Unit added = load_unit<Bf16>(row_of<Bf16>(call.added, token, choices.dim), unit);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum.of[i] = __fadd_rn(sum.of[i], added.of[i]);
    }
    store_fp32(row_of<Fp32>(static_cast<void*>(y), token, choices.dim), unit, sum);
  }
}

__global__ void __launch_bounds__(32 * kWarps) combine_rows_back(const __grid_constant__ Combined call, const float* dy,
                                                                 void* drows, float* dweights, void* dadded) {
  const Choices& choices = call.choices;
  const int64_t token = token_of_warp(), units = choices.dim / kUnit;
  if (token >= choices.tokens) return fill_up(choices, drows);
  const char* of_token = row_of<Fp32>(static_cast<const void*>(dy), token, choices.dim);
  for (int r = 0; r < choices.choices; ++r) {
    const int64_t choice = token * choices.choices + r, place = choices.places[choice];
    const float weight = call.weights[choice];
    float dot = 0.0f;
    for (int64_t unit = lane_of(); unit < units; unit += 32) {
      const Unit gradient = load_unit<Fp32>(of_token, unit);
      const Unit row = load_unit<Bf16>(row_of<Bf16>(call.rows, place, choices.dim), unit);
      Unit scaled;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        scaled.of[i] = __fmul_rn(gradient.of[i], weight);
        dot = __fadd_rn(dot, __fmul_rn(gradient.of[i], row.of[i]));
      }
      store_bf16(row_of<Bf16>(drows, place, choices.dim), unit, rounded(scaled));
      if (dadded && r == 0) store_bf16(row_of<Bf16>(dadded, token, choices.dim), unit, rounded(gradient));
    }
    for (int distance = 16; distance > 0; distance /= 2) dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, distance));
    if (lane_of() == 0) dweights[choice] = dot;
  }
}

// Choices of an expert among those of the threads before this one in its warp, and in the warp. A thread without a choice
// has expert -1, and so has a choice of an expert that there is not: nothing is written outside.
struct Rank {
  int before, all;
};
__device__ __forceinline__ Rank rank_in_warp(int expert) {
  const unsigned same = __match_any_sync(~0u, expert);
  return {__popc(same & ((1u << lane_of()) - 1)), __popc(same)};
}

__device__ __forceinline__ int expert_of(const Placing& call, int64_t choice) {
  const int64_t expert = choice < call.choices ? call.chosen[choice] : -1;
  return expert >= 0 && expert < call.experts ? static_cast<int>(expert) : -1;
}

// counts[e, b]: choices of expert e in block b.
__global__ void __launch_bounds__(kChoicesOfBlock) count_choices(const __grid_constant__ Placing call) {
  __shared__ int found[kMostExperts];
  for (int e = threadIdx.x; e < call.experts; e += kChoicesOfBlock) found[e] = 0;
  __syncthreads();
  const int expert = expert_of(call, static_cast<int64_t>(blockIdx.x) * kChoicesOfBlock + threadIdx.x);
  const Rank rank = rank_in_warp(expert);
  if (expert >= 0 && rank.before == 0) atomicAdd(&found[expert], rank.all);
  __syncthreads();
  for (int e = threadIdx.x; e < call.experts; e += kChoicesOfBlock) call.counts[e * gridDim.x + blockIdx.x] = found[e];
}

// counts, in its order, becomes the sums of all entries before each; one thread block of 1024.
__global__ void __launch_bounds__(1024) scan_counts(const __grid_constant__ Placing call, int64_t blocks) {
  __shared__ int of_warps[32];
  const int64_t entries = call.experts * blocks;
  int before = 0;  // all entries of earlier rounds
  for (int64_t round = 0; round < entries; round += 1024) {
    const int64_t entry = round + threadIdx.x;
    const int own = entry < entries ? call.counts[entry] : 0;
    int sum = own;  // of this thread and those before it in the warp
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, sum, distance);
      if (lane_of() >= distance) sum += other;
    }
    if (lane_of() == 31) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    int of_earlier = 0, all = 0;
    for (int w = 0; w < 32; ++w) {
      if (w < static_cast<int>(threadIdx.x / 32)) of_earlier += of_warps[w];
      all += of_warps[w];
    }
    if (entry < entries) call.counts[entry] = before + of_earlier + sum - own;
    before += all;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kChoicesOfBlock) place_choices(const __grid_constant__ Placing call) {
  __shared__ int of_warps[kChoicesOfBlock / 32][kMostExperts];
  for (int e = threadIdx.x; e < call.experts; e += kChoicesOfBlock)
    for (int w = 0; w < kChoicesOfBlock / 32; ++w) of_warps[w][e] = 0;
  __syncthreads();
  const int64_t choice = static_cast<int64_t>(blockIdx.x) * kChoicesOfBlock + threadIdx.x;
  const int expert = expert_of(call, choice), warp = threadIdx.x / 32;
  const Rank rank = rank_in_warp(expert);
  if (expert >= 0 && rank.before == 0) of_warps[warp][expert] = rank.all;
  __syncthreads();
  if (expert >= 0) {
    int64_t place = call.counts[expert * gridDim.x + blockIdx.x] + rank.before;
    for (int w = 0; w < warp; ++w) place += of_warps[w][expert];
    call.places[choice] = place;
    call.order[place] = choice;
  }
  if (blockIdx.x != 0) return;
  for (int e = threadIdx.x; e < call.experts; e += kChoicesOfBlock) {
    const int64_t end = e + 1 < call.experts ? call.counts[(e + 1) * gridDim.x] : call.choices;
    call.tokens[e] = end - call.counts[e * gridDim.x];
  }
}

cudaStream_t queue_of(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// fills: whether rows of zeros are written, too.
unsigned grid_of_tokens(const Choices& call, bool fills, const char* binding) {
  const int64_t blocks = (call.tokens + kWarps - 1) / kWarps + (fills ? call.experts : 0);
  return grid_of(blocks, binding, "too many tokens for one launch");
}

bool is_empty(const Choices& call) { return call.tokens == 0 || call.choices == 0 || call.dim == 0; }

}  // namespace

void dispatch_rows_cuda(const Choices& call, const void* x, Dtype dtype, void* rows, uintptr_t stream) {
  if (is_empty(call)) return;
  const auto kernel = dtype == Dtype::fp32 ? dispatch_rows<Fp32> : dispatch_rows<Bf16>;
  kernel<<<grid_of_tokens(call, true, "dispatch_rows_cuda"), 32 * kWarps, 0, queue_of(stream)>>>(call, x, rows);
  check(cudaGetLastError(), "dispatch_rows_cuda");
}

void sum_rows_cuda(const Choices& call, const void* rows, void* out, Dtype dtype, uintptr_t stream) {
  if (is_empty(call)) return;
  const auto kernel = dtype == Dtype::fp32 ? sum_rows<Fp32> : sum_rows<Bf16>;
  kernel<<<grid_of_tokens(call, false, "sum_rows_cuda"), 32 * kWarps, 0, queue_of(stream)>>>(call, rows, out);
  check(cudaGetLastError(), "sum_rows_cuda");
}

void combine_rows_cuda(const Combined& call, float* y, uintptr_t stream) {
  if (is_empty(call.choices)) return;
  const unsigned grid = grid_of_tokens(call.choices, false, "combine_rows_cuda");
  combine_rows<<<grid, 32 * kWarps, 0, queue_of(stream)>>>(call, y);
  check(cudaGetLastError(), "combine_rows_cuda");
}

void combine_rows_back_cuda(const Combined& call, const float* dy, void* drows, float* dweights, void* dadded,
                            uintptr_t stream) {
  if (is_empty(call.choices)) return;
  const unsigned grid = grid_of_tokens(call.choices, true, "combine_rows_back_cuda");
  combine_rows_back<<<grid, 32 * kWarps, 0, queue_of(stream)>>>(call, dy, drows, dweights, dadded);
  check(cudaGetLastError(), "combine_rows_back_cuda");
}

void place_choices_cuda(const Placing& call, uintptr_t stream) {
  const int64_t blocks = (call.choices + kChoicesOfBlock - 1) / kChoicesOfBlock;
  const cudaStream_t queue = queue_of(stream);
  if (blocks == 0) {
    check(cudaMemsetAsync(call.tokens, 0, sizeof(int64_t) * static_cast<size_t>(call.experts), queue),
          "place_choices_cuda");
    return;
  }
  const unsigned grid = grid_of(blocks, "place_choices_cuda", "too many choices for one launch");
  count_choices<<<grid, kChoicesOfBlock, 0, queue>>>(call);
  scan_counts<<<1, 1024, 0, queue>>>(call, blocks);
  place_choices<<<grid, kChoicesOfBlock, 0, queue>>>(call);
  check(cudaGetLastError(), "place_choices_cuda");
}

}  // namespace hq
