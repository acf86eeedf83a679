// Rotary positions of q and k, and the way back of their gradients, which ends in the joined gradient of q, k and v.
//
// Floor: forward reads and writes q and k, 8 bytes for each element of the model's width and token; backward reads and
// writes three tensors, 12 bytes. No table is read: a warp has one token, forms cos and sin of each pair once in shared
// memory, and uses them for all heads of q and k. Angles come from the frequencies alone, an argument of the kernel, so
// that nothing on the device has to outlive a call or be there before a CUDA graph.
#include <cuda_runtime.h>

#include "cuda/check.cuh"
#include "cuda/words.cuh"
#include "rope.h"

namespace hq {
namespace {

constexpr int kWarps = 8;  // of a block; a warp has one token
constexpr int kAhead = 4;  // chunks that a thread loads before it stores the first
constexpr int kChunk = 8;  // elements of 16 bytes

// cos and sin of the pairs of one position; back: sin has the other sign.
__device__ __forceinline__ void form_turns(const Rope& rope, int64_t position, bool back, int lane, float2* turns) {
  for (int i = lane; i < rope.pairs; i += 32) {
    float sine, cosine;
    sincosf(__fmul_rn(static_cast<float>(position), rope.frequency[i]), &sine, &cosine);
    turns[i] = make_float2(cosine, back ? -sine : sine);
  }
}

__device__ __forceinline__ uint32_t turn_pair(uint32_t pair, float cosine, float sine) {
  const float a = widen<Bf16>(pair, 0), b = widen<Bf16>(pair, 1);
  return round_pair<Bf16>(__fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine)),
                          __fadd_rn(__fmul_rn(a, sine), __fmul_rn(b, cosine)));
}

// Elements 8 * chunk to 8 * chunk + 7 of a head.
__device__ __forceinline__ uint4 turn_chunk(uint4 words, const float2* turns, int chunk) {
  const float4* of_pairs = reinterpret_cast<const float4*>(turns) + 2 * chunk;
  const float4 first = of_pairs[0], second = of_pairs[1];
  return make_uint4(turn_pair(words.x, first.x, first.y), turn_pair(words.y, first.z, first.w),
                    turn_pair(words.z, second.x, second.y), turn_pair(words.w, second.z, second.w));
}

// Where a head of the call begins, counted over the heads of q, then of k, then of v.
__device__ __forceinline__ char* head_of(const Heads (&parts)[3], char* const (&tokens)[3], int head, int heads) {
  const int part = head < heads ? 0 : head < 2 * heads ? 1 : 2;
  const int64_t stride = part == 0 ? parts[0].head : part == 1 ? parts[1].head : parts[2].head;
  return (part == 0 ? tokens[0] : part == 1 ? tokens[1] : tokens[2]) + 2 * (head - part * heads) * stride;
}

__global__ void __launch_bounds__(32 * kWarps) move_heads(const __grid_constant__ RopeCall call,
                                                          const __grid_constant__ Rope rope) {
  extern __shared__ float4 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (token >= call.sequences * call.positions) return;
  const int64_t sequence = token / call.positions, position = token - sequence * call.positions;
  float2* turns = reinterpret_cast<float2*>(shared) + warp * rope.pairs;
  form_turns(rope, position, call.back, lane, turns);
  __syncwarp();

  char *from[3], *to[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    from[i] = static_cast<char*>(call.from[i].data) + 2 * (sequence * call.from[i].sequence + position * call.from[i].position);
    to[i] = static_cast<char*>(call.to[i].data) + 2 * (sequence * call.to[i].sequence + position * call.to[i].position);
  }
  const int chunks = call.width / kChunk, turned = rope.pairs ? 2 * call.heads : 0, all = call.parts * call.heads;
  int head = lane / chunks, chunk = lane % chunks;
  const int heads_ahead = 32 / chunks, chunks_ahead = 32 % chunks;
  while (head < all) {
    uint4 words[kAhead];
    int heads[kAhead], places[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      heads[i] = head, places[i] = chunk;
      if (head < all) words[i] = reinterpret_cast<const uint4*>(head_of(call.from, from, head, call.heads))[chunk];
      head += heads_ahead, chunk += chunks_ahead;
      if (chunk >= chunks) chunk -= chunks, ++head;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (heads[i] >= all) break;
      const uint4 result = heads[i] < turned ? turn_chunk(words[i], turns, places[i]) : words[i];
      reinterpret_cast<uint4*>(head_of(call.to, to, heads[i], call.heads))[places[i]] = result;
    }
  }
}

}  // namespace

void rope_cuda(const RopeCall& call, const Rope& rope, uintptr_t stream) {
  const int64_t tokens = call.sequences * call.positions;
  if (tokens == 0 || call.heads == 0) return;
  const unsigned grid = grid_of((tokens + kWarps - 1) / kWarps, "rope_cuda", "too many tokens for one launch");
  const size_t bytes = sizeof(float2) * kWarps * static_cast<size_t>(rope.pairs);
  move_heads<<<grid, 32 * kWarps, bytes, reinterpret_cast<cudaStream_t>(stream)>>>(call, rope);
  check(cudaGetLastError(), "rope_cuda");
}

}  // namespace hq
