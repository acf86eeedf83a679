// The router of a mixture: softmax, the k largest, their weights and the balance, and the way back. A warp has one token
// at a time and a lane every 32nd expert. Logits are small (32 bytes a token of 8 experts): what counts are launches, of
// which torch's operators need about 35. Sums have one order: a lane's experts, then the lanes by halves; tokens of a
// warp, warps of a block, blocks.
#include <cuda_runtime.h>

#include "cuda/check.cuh"
#include "experts.h"

namespace hq {
namespace {

constexpr int kWarps = 8;
constexpr int kOwn = kMostExperts / 32;  // experts of a lane
static_assert(kTokensOfBlock % kWarps == 0);

__device__ __forceinline__ int lane_of() { return threadIdx.x % 32; }

__device__ __forceinline__ float sum_of_warp(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// NaN counts as larger than all else, so that it reaches every probability of its token.
__device__ __forceinline__ float most_of_warp(float x) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(~0u, x, distance);
    x = x != x || x >= other ? x : other;
  }
  return x;
}

__device__ __forceinline__ uint64_t most_of_warp(uint64_t x) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, static_cast<unsigned long long>(x), distance);
    x = x > other ? x : other;
  }
  return x;
}

// The lane's entries of a row, expert lane + 32 i at i; `beyond` where there is no expert.
__device__ __forceinline__ void load_row(const float* row, int experts, float beyond, float (&own)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = lane_of() + 32 * i;
    own[i] = expert < experts ? row[expert] : beyond;
  }
}

__device__ __forceinline__ void softmax(int experts, float (&own)[kOwn]) {
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) most = most != most || most >= own[i] ? most : own[i];
  most = most_of_warp(most);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    own[i] = lane_of() + 32 * i < experts ? expf(__fsub_rn(own[i], most)) : 0.0f;
    sum = __fadd_rn(sum, own[i]);
  }
  sum = sum_of_warp(sum);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = __fdiv_rn(own[i], sum);
}

// Orders by the value, whose sign is +, NaN last, then by the lower expert; never 0.
__device__ __forceinline__ uint64_t rank_of(float probability, int expert) {
  return static_cast<uint64_t>(__float_as_uint(probability)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(expert));
}

// chosen and weights of a token from its probabilities.
__device__ __forceinline__ void choose(const Routed& call, int64_t token, const float (&own)[kOwn]) {
  unsigned taken = 0;  // bit i: own[i] is chosen
  float top = 0.0f, sum = 0.0f;
  int expert = 0;
  for (int r = 0; r < call.choices; ++r) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int candidate = lane_of() + 32 * i;
      const uint64_t rank = candidate < call.experts && !(taken >> i & 1) ? rank_of(own[i], candidate) : 0;
      best = rank > best ? rank : best;
    }
    best = most_of_warp(best);
    const int found = static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(best));
    const float probability = __uint_as_float(static_cast<uint32_t>(best >> 32));
    if (found % 32 == lane_of()) taken |= 1u << (found / 32);
    if (r == lane_of()) top = probability, expert = found;
    sum = __fadd_rn(sum, probability);
  }
  if (lane_of() >= call.choices) return;
  call.chosen[token * call.choices + lane_of()] = expert;
  call.weights[token * call.choices + lane_of()] = __fdiv_rn(top, sum);
}

__global__ void __launch_bounds__(32 * kWarps) route(const __grid_constant__ Routed call) {
  __shared__ float of_warps[kWarps][kMostExperts];
  const int warp = threadIdx.x / 32;
  float sums[kOwn] = {};
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokensOfBlock;
  for (int64_t token = first + warp; token < first + kTokensOfBlock && token < call.tokens; token += kWarps) {
    float own[kOwn];
    load_row(call.logits + token * call.experts, call.experts, -INFINITY, own);
    softmax(call.experts, own);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int expert = lane_of() + 32 * i;
      if (expert < call.experts) call.probabilities[token * call.experts + expert] = own[i];
      sums[i] = __fadd_rn(sums[i], own[i]);
    }
    choose(call, token, own);
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) of_warps[warp][lane_of() + 32 * i] = sums[i];
  __syncthreads();
  for (int expert = threadIdx.x; expert < call.experts; expert += 32 * kWarps) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum = __fadd_rn(sum, of_warps[w][expert]);
    call.sums[blockIdx.x * static_cast<int64_t>(call.experts) + expert] = sum;
  }
}

__device__ __forceinline__ float share_of(const Routed& call, const int64_t* counts, int expert) {
  return __fdiv_rn(static_cast<float>(counts[expert]), static_cast<float>(call.tokens * call.choices));
}

// One thread block: a warp adds up the blocks of an expert, thread 0 the experts.
__global__ void __launch_bounds__(1024) store_balance(const __grid_constant__ Routed call, int64_t blocks,
                                                      const int64_t* counts, float* balance) {
  __shared__ float parts[kMostExperts];
  for (int expert = threadIdx.x / 32; expert < call.experts; expert += 32) {
    float sum = 0.0f;
    for (int64_t block = lane_of(); block < blocks; block += 32)
      sum = __fadd_rn(sum, call.sums[block * call.experts + expert]);
    sum = sum_of_warp(sum);
    if (lane_of() == 0)
      parts[expert] = __fmul_rn(share_of(call, counts, expert), __fdiv_rn(sum, static_cast<float>(call.tokens)));
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int expert = 0; expert < call.experts; ++expert) sum = __fadd_rn(sum, parts[expert]);
  *balance = __fmul_rn(static_cast<float>(call.experts), sum);
}

// With t the chosen probabilities and s their sum: dt = (dw - sum of dw w) / s; dp = dt where chosen, plus dbalance *
// experts * share / tokens; dlogit = p * (dp - sum of dp p).
__global__ void __launch_bounds__(32 * kWarps) route_back(const __grid_constant__ Routed call, const int64_t* counts,
                                                          const float* dweights, const float* dbalance,
                                                          float* dlogits) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= call.tokens) return;
  float p[kOwn], dp[kOwn];
  load_row(call.probabilities + token * call.experts, call.experts, 0.0f, p);
  const float scale = dbalance ? __fdiv_rn(__fmul_rn(*dbalance, static_cast<float>(call.experts)),
                                           static_cast<float>(call.tokens)) : 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = lane_of() + 32 * i;
    dp[i] = dbalance && expert < call.experts ? __fmul_rn(scale, share_of(call, counts, expert)) : 0.0f;
  }
  if (dweights) {
    const int64_t first = token * call.choices;
    float sum = 0.0f, dot = 0.0f;
    for (int r = 0; r < call.choices; ++r) {
      sum = __fadd_rn(sum, call.probabilities[token * call.experts + call.chosen[first + r]]);
      dot = __fadd_rn(dot, __fmul_rn(dweights[first + r], call.weights[first + r]));
    }
    for (int r = 0; r < call.choices; ++r) {
      const int64_t chosen = call.chosen[first + r];
      const float gradient = __fdiv_rn(__fsub_rn(dweights[first + r], dot), sum);
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (chosen == lane_of() + 32 * i) dp[i] = __fadd_rn(dp[i], gradient);
    }
  }
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) dot = __fadd_rn(dot, __fmul_rn(dp[i], p[i]));
  dot = sum_of_warp(dot);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = lane_of() + 32 * i;
    if (expert < call.experts) dlogits[token * call.experts + expert] = __fmul_rn(p[i], __fsub_rn(dp[i], dot));
  }
}

cudaStream_t queue_of(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

void route_cuda(const Routed& call, uintptr_t stream) {
  if (call.tokens == 0) return;
  const unsigned grid = grid_of(blocks_of_tokens(call.tokens), "route_cuda", "too many tokens for one launch");
  route<<<grid, 32 * kWarps, 0, queue_of(stream)>>>(call);
  check(cudaGetLastError(), "route_cuda");
}

void balance_cuda(const Routed& call, const int64_t* counts, float* balance, uintptr_t stream) {
  store_balance<<<1, 1024, 0, queue_of(stream)>>>(call, blocks_of_tokens(call.tokens), counts, balance);
  check(cudaGetLastError(), "balance_cuda");
}

void route_back_cuda(const Routed& call, const int64_t* counts, const float* dweights, const float* dbalance,
                     float* dlogits, uintptr_t stream) {
  if (call.tokens == 0) return;
  const unsigned grid = grid_of((call.tokens + kWarps - 1) / kWarps, "route_back_cuda", "too many tokens for one launch");
  route_back<<<grid, 32 * kWarps, 0, queue_of(stream)>>>(call, counts, dweights, dbalance, dlogits);
  check(cudaGetLastError(), "route_back_cuda");
}

}  // namespace hq
