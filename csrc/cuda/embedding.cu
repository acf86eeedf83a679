// Rows of a table, and its gradient. Each row is read once and written once, in words of 16 bytes: rows for other ranks
// over NVLink, into memory of their GPUs, and only those that they lack. Of the gradient most entries have no token, or
// few: a block has one entry; entries of many rows have blocks of their own.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/check.cuh"
#include "cuda/words.cuh"
#include "embedding.h"

namespace hq {
namespace {

constexpr int kWarp = 32, kRowsOfBlock = 8;  // a warp has a row
constexpr int kFewRows = 32;                 // of an entry, which a block adds up one after the other
constexpr int kTurns = 4;                    // sums of an entry of more rows
constexpr int kMostThreads = 256;            // of a row
constexpr const char* kTooMany = "there are too many rows for one launch";

__device__ void copy_row(const uint4* from, uint4* to, int64_t words) {
  for (int64_t w = threadIdx.x; w < words; w += kWarp) to[w] = from[w];
}

// The rank of a token's entry; -1 where none has it.
__device__ int64_t owner_of(int64_t token, int64_t entries, int64_t ranks) {
  return token < 0 || token >= entries * ranks ? -1 : token / entries;
}

// The number of a rank among the others.
__device__ int64_t among_others(int64_t rank, int64_t own) { return rank < own ? rank : rank - 1; }

__global__ void __launch_bounds__(kWarp* kRowsOfBlock) embed(const __grid_constant__ Embedding call) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.y, words = call.bytes / kBytesOfRowWord;
  if (t >= call.rows) return;
  const int64_t token = call.tokens[t], owner = owner_of(token, call.entries, call.ranks);
  uint4* out = static_cast<uint4*>(call.out) + t * words;
  if (owner == call.rank) {
    copy_row(static_cast<const uint4*>(call.table) + (token - owner * call.entries) * words, out, words);
  } else if (owner < 0) {
    for (int64_t w = threadIdx.x; w < words; w += kWarp) out[w] = {~0u, ~0u, ~0u, ~0u};
  } else if (call.received) {
    const int64_t place = among_others(owner, call.rank) * call.rows + t;
    copy_row(static_cast<const uint4*>(call.received) + place * words, out, words);
  }
}

__global__ void __launch_bounds__(kWarp* kRowsOfBlock) rows_of_rank(const __grid_constant__ RowsOfRank call) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.y, words = call.bytes / kBytesOfRowWord;
  if (t >= call.rows || owner_of(call.tokens[t], call.entries, call.rank + 1) != call.rank) return;
  copy_row(static_cast<const uint4*>(call.from) + t * words, static_cast<uint4*>(call.out) + t * words, words);
}

// The four values of a row from a unit of 4 on.
__device__ float4 values(const float* row, int unit) { return reinterpret_cast<const float4*>(row)[unit]; }
__device__ float4 values(const uint16_t* row, int unit) {
  const uint2 two = reinterpret_cast<const uint2*>(row)[unit];
  return {__uint_as_float(two.x << 16), __uint_as_float(two.x & 0xFFFF0000u), __uint_as_float(two.y << 16),
          __uint_as_float(two.y & 0xFFFF0000u)};
}

__device__ void add(float4& sum, const float4& value) {
  sum.x = __fadd_rn(sum.x, value.x), sum.y = __fadd_rn(sum.y, value.y);
  sum.z = __fadd_rn(sum.z, value.z), sum.w = __fadd_rn(sum.w, value.w);
}

template <class Value>
__device__ const Value* row_of(const EmbeddingGradient& call, int64_t position) {
  const int64_t rank = position / call.rows, row = position - rank * call.rows;
  const auto* own = static_cast<const Value*>(call.own);
  const auto* received = static_cast<const Value*>(call.received);
  return rank == call.rank ? own + row * call.width
                           : received + (among_others(rank, call.rank) * call.rows + row) * call.width;
}

// The sum of every `step`-th row of order[begin, end), of one unit.
template <class Value>
__device__ float4 sum_of(const EmbeddingGradient& call, int64_t begin, int64_t end, int step, int unit) {
  float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
  for (int64_t i = begin; i < end; i += step) add(sum, values(row_of<Value>(call, call.order[i]), unit));
  return sum;
}

template <class Value>
__global__ void __launch_bounds__(kMostThreads) few_rows(const __grid_constant__ EmbeddingGradient call) {
  const int64_t v = blockIdx.x, begin = call.starts[v], end = call.starts[v + 1];
  if (end - begin > kFewRows) return;
  const int units = call.width / 4;
  float4* out = reinterpret_cast<float4*>(call.table + v * call.width);
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) out[unit] = sum_of<Value>(call, begin, end, 1, unit);
}

// An entry of many rows has a place in the order that kFewRows divides; the block of its first such place adds them up.
template <class Value>
__global__ void __launch_bounds__(kMostThreads* kTurns) many_rows(const __grid_constant__ EmbeddingGradient call) {
  __shared__ float4 sums[kTurns][kMostThreads];
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kFewRows;
  const int64_t v = call.tokens[call.order[place]] - call.rank * call.entries;
  if (v < 0 || v >= call.entries) return;
  const int64_t begin = call.starts[v], end = call.starts[v + 1];
  if (end - begin <= kFewRows || place - begin >= kFewRows) return;
  const int units = call.width / 4;
  float4* out = reinterpret_cast<float4*>(call.table + v * call.width);
  for (int first = 0; first < units; first += blockDim.x) {
    const int unit = first + threadIdx.x;
    if (unit < units) sums[threadIdx.y][threadIdx.x] = sum_of<Value>(call, begin + threadIdx.y, end, kTurns, unit);
    __syncthreads();
    if (unit < units && threadIdx.y == 0) {
      float4 sum = sums[0][threadIdx.x];
      for (int turn = 1; turn < kTurns; ++turn) add(sum, sums[turn][threadIdx.x]);
      out[unit] = sum;
    }
    __syncthreads();
  }
}

template <class Value>
void launch_gradient(const EmbeddingGradient& call, cudaStream_t stream) {
  const int64_t positions = call.rows * call.ranks;
  const unsigned threads = static_cast<unsigned>(std::min((call.width / 4 + kWarp - 1) / kWarp * kWarp, kMostThreads));
  const unsigned entries = grid_of(call.entries, "embedding_gradient_cuda", kTooMany);
  if (entries == 0) return;
  few_rows<Value><<<entries, threads, 0, stream>>>(call);
  check(cudaGetLastError(), "embedding_gradient_cuda");
  const unsigned places = grid_of((positions + kFewRows - 1) / kFewRows, "embedding_gradient_cuda", kTooMany);
  if (positions <= kFewRows) return;
  many_rows<Value><<<places, dim3(threads, kTurns), 0, stream>>>(call);
  check(cudaGetLastError(), "embedding_gradient_cuda");
}

unsigned blocks_of(int64_t rows, const char* binding) {
  return grid_of((rows + kRowsOfBlock - 1) / kRowsOfBlock, binding, kTooMany);
}

}  // namespace

void embed_cuda(const Embedding& call, uintptr_t stream) {
  if (call.rows == 0 || call.bytes == 0) return;
  embed<<<blocks_of(call.rows, "embed_cuda"), dim3(kWarp, kRowsOfBlock), 0, reinterpret_cast<cudaStream_t>(stream)>>>(call);
  check(cudaGetLastError(), "embed_cuda");
}

void rows_of_rank_cuda(const RowsOfRank& call, uintptr_t stream) {
  if (call.rows == 0 || call.bytes == 0) return;
  rows_of_rank<<<blocks_of(call.rows, "rows_of_rank_cuda"), dim3(kWarp, kRowsOfBlock), 0,
                 reinterpret_cast<cudaStream_t>(stream)>>>(call);
  check(cudaGetLastError(), "rows_of_rank_cuda");
}

void embedding_gradient_cuda(const EmbeddingGradient& call, uintptr_t stream) {
  if (call.width == 0) return;
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  if (call.dtype == Dtype::bf16) return launch_gradient<uint16_t>(call, queue);
  launch_gradient<float>(call, queue);
}

}  // namespace hq
