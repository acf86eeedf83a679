// Cross entropy over a vocabulary that ranks share out: of each row its part, 2 bytes a logit; then, when all ranks have
// the parts of all, the losses and the gradient, 4 bytes a logit. Or both in one kernel, 4 bytes a logit in all: its rows
// wait in shared memory for the parts of the other ranks, which come over NVLink, while an SM has other rows.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "cuda/check.cuh"
#include "cuda/loss_row.cuh"
#include "loss.h"

namespace hq {
namespace {

// The row of this thread, at most `rows`.
__device__ int64_t own_row() { return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }

__global__ void __launch_bounds__(kMostThreads) loss_parts(const __grid_constant__ LossParts call) {
  const int64_t r = own_row();
  if (r >= call.rows) return;  // a warp of a block whose warps do not wait for each other
  const __nv_bfloat16* logits = static_cast<const __nv_bfloat16*>(call.logits) + r * call.vocabulary;
  const int64_t target = call.targets[r] - call.first;
  const bool has = target >= 0 && target < call.vocabulary;
  const int units = static_cast<int>(call.vocabulary / kLogitsOfLoad);
  const Partial own = of_row(read_row(reinterpret_cast<const uint4*>(logits), units, nullptr));
  if (threadIdx.x == 0)
    call.parts[r] = {own.largest, own.sum, has ? __bfloat162float(logits[target]) : 0.0f, has ? 1.0f : 0.0f};
}

// A row of all ranks.
struct Whole {
  Partial sums;
  float of_target;
};

// part_of(rank) -> LossPart
template <class PartOf>
__device__ Whole whole_row(int64_t ranks, const PartOf& part_of) {
  Whole whole{{-kInfinity, 0.0f}, __uint_as_float(0x7FC00000u)};
#pragma unroll 1
  for (int64_t w = 0; w < ranks; ++w) {
    const LossPart part = part_of(w);
    whole.sums.largest = fmaxf(whole.sums.largest, part.largest);
    if (part.has_target != 0.0f) whole.of_target = part.of_target;
  }
#pragma unroll 1
  for (int64_t w = 0; w < ranks; ++w) {
    const LossPart part = part_of(w);
    whole.sums.sum += rescaled({part.largest, part.sum}, whole.sums.largest);
  }
  return whole;
}

__device__ float loss_of(const Whole& whole, bool counted) {
  return counted ? logf(whole.sums.sum) + (whole.sums.largest - whole.of_target) : 0.0f;
}

// The gradient of a row, from its logits.
struct Gradients {
  float base, factor;
  int64_t target_unit;
  int target_place;
  __nv_bfloat16 at_target;

  // target: within this rank's entries, or outside of them.
  __device__ Gradients(const Whole& whole, bool counted, int64_t target, int64_t vocabulary, float scale)
      : base(base_of(whole.sums.largest)),
        factor(factor_of(scale / whole.sums.sum, counted, whole.of_target)),
        target_unit(target >= 0 && target < vocabulary ? target / kLogitsOfLoad : -1),
        target_place(static_cast<int>(target % kLogitsOfLoad)),
        at_target(__float2bfloat16_rn((exp_of(whole.of_target, base) / whole.sums.sum - 1.0f) * scale)) {}

  __device__ uint4 of(const uint4& logits, int unit) const {
    const uint4 gradient = softmax_of(logits, base, factor);
    return unit == target_unit ? replaced(gradient, target_place, at_target) : gradient;
  }
};

__global__ void __launch_bounds__(kMostThreads) shared_cross_entropy(const __grid_constant__ SharedCrossEntropy call) {
  const int64_t r = own_row();
  if (r >= call.rows) return;
  const Whole whole = whole_row(call.ranks, [&](int64_t w) { return call.parts[w * call.rows + r]; });
  const bool counted = call.targets[r] != kIgnored;
  if (threadIdx.x == 0) call.losses[r] = loss_of(whole, counted);
  if (!call.gradient) return;
  uint4* row = reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(call.logits) + r * call.vocabulary);
  const Gradients gradients(whole, counted, call.targets[r] - call.first, call.vocabulary, *call.scale);
  const int units = static_cast<int>(call.vocabulary / kLogitsOfLoad), step = blockDim.x;
  for (int begin = threadIdx.x; begin < units; begin += kTogether * step) {
    uint4 loaded[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (begin + i * step < units) loaded[i] = row[begin + i * step];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int u = begin + i * step;
      if (u < units) row[u] = gradients.of(loaded[i], u);
    }
  }
}

// The two words of a part, which travel one by one. No part has a word of ones alone: `largest` is no NaN, has_target 0
// or 1.
constexpr unsigned long long kNoWord = ~0ull;

__device__ unsigned long long word_of(float low, float high) {
  return static_cast<unsigned long long>(__float_as_uint(high)) << 32 | __float_as_uint(low);
}

__device__ void tell(LossPart* to, const LossPart& part) {
  auto* words = reinterpret_cast<unsigned long long*>(to);
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(words), "l"(word_of(part.largest, part.sum)) : "memory");
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(words + 1), "l"(word_of(part.of_target, part.has_target))
               : "memory");
}

// The word that another rank writes there, once it has; its place is then free again.
__device__ unsigned long long heard(unsigned long long* word) {
  unsigned long long value;
  do {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  } while (value == kNoWord);
  *word = kNoWord;
  return value;
}

__device__ LossPart heard(LossPart* from) {
  auto* words = reinterpret_cast<unsigned long long*>(from);
  const unsigned long long first = heard(words), second = heard(words + 1);
  const auto low = [](unsigned long long word) { return __uint_as_float(static_cast<unsigned>(word)); };
  const auto high = [](unsigned long long word) { return __uint_as_float(static_cast<unsigned>(word >> 32)); };
  return {low(first), high(first), low(second), high(second)};
}

__device__ void wait_for_row() {
  if (blockDim.x == kWarp)
    __syncwarp();
  else
    __syncthreads();
}

// Blocks take rows in the order in which they begin, so that the first rows that are not done are in blocks of all ranks.
// state: the next block, the number of those done, and the half of the boxes.
__global__ void __launch_bounds__(kMostThreads, 3) joint_cross_entropy(const __grid_constant__ JointCrossEntropy call) {
  extern __shared__ uint4 staged[];
  __shared__ LossPart parts[kRowsOfBlock][kMostRanks];
  __shared__ unsigned place, half;
  const bool leads = threadIdx.x == 0 && threadIdx.y == 0;
  if (leads) {
    place = atomicInc(call.state, gridDim.x - 1);
    half = *static_cast<volatile unsigned*>(call.state + 2);
  }
  __syncthreads();
  const int64_t r = static_cast<int64_t>(place) * blockDim.y + threadIdx.y;
  if (r < call.rows) {
    const int units = static_cast<int>(call.vocabulary / kLogitsOfLoad), ranks = call.ranks;
    __nv_bfloat16* logits = static_cast<__nv_bfloat16*>(call.logits) + r * call.vocabulary;
    uint4 *row = reinterpret_cast<uint4*>(logits), *kept = staged + threadIdx.y * units;
    const int64_t target = call.targets[r] - call.first;
    const bool has = target >= 0 && target < call.vocabulary;
    const float of_target = has ? __bfloat162float(logits[target]) : 0.0f;
    const Partial sums = of_row(read_row(row, units, kept));
    const LossPart own{sums.largest, sums.sum, of_target, has ? 1.0f : 0.0f};
    for (int w = static_cast<int>(threadIdx.x); w < ranks; w += blockDim.x) {
      const auto box = [&](int of, int from) { return call.boxes[of] + (half * ranks + from) * call.room + r; };
      if (w != call.rank) tell(box(w, call.rank), own);
      parts[threadIdx.y][w] = w == call.rank ? own : heard(box(call.rank, w));
    }
    wait_for_row();
    const Whole whole = whole_row(ranks, [&](int64_t w) { return parts[threadIdx.y][w]; });
    const bool counted = call.targets[r] != kIgnored;
    if (threadIdx.x == 0) call.losses[r] = loss_of(whole, counted);
    const Gradients gradients(whole, counted, target, call.vocabulary, *call.scale);
#pragma unroll 1
    for (int u = threadIdx.x; u < units; u += blockDim.x) row[u] = gradients.of(kept[u], u);
  }
  __syncthreads();
  if (!leads) return;
  __threadfence();  // every block reads the half before it is done
  if (atomicInc(call.state + 1, gridDim.x - 1) == gridDim.x - 1) call.state[2] = half ^ 1;
}

// Thread blocks of a launch for so many rows, and their shape.
struct Launch {
  unsigned blocks;
  dim3 threads;
};

Launch launch_of(int64_t rows, int64_t vocabulary, const char* binding) {
  const unsigned threads = threads_for(vocabulary / kLogitsOfLoad), together = rows_of_block(threads);
  return {grid_of((rows + together - 1) / together, binding, "there are too many rows for one launch"),
          dim3(threads, together)};
}

}  // namespace

void loss_parts_cuda(const LossParts& call, uintptr_t stream) {
  if (call.rows == 0) return;
  const Launch launch = launch_of(call.rows, call.vocabulary, "loss_parts_cuda");
  loss_parts<<<launch.blocks, launch.threads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(call);
  check(cudaGetLastError(), "loss_parts_cuda");
}

void shared_cross_entropy_cuda(const SharedCrossEntropy& call, uintptr_t stream) {
  if (call.rows == 0) return;
  const Launch launch = launch_of(call.rows, call.vocabulary, "shared_cross_entropy_cuda");
  shared_cross_entropy<<<launch.blocks, launch.threads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(call);
  check(cudaGetLastError(), "shared_cross_entropy_cuda");
}

bool joint_cross_entropy_cuda(const JointCrossEntropy& call, uintptr_t stream) {
  if (call.rows == 0) return true;
  const Launch launch = launch_of(call.rows, call.vocabulary, "joint_cross_entropy_cuda");
  const int64_t bytes = launch.threads.y * (call.vocabulary / kLogitsOfLoad) * static_cast<int64_t>(sizeof(uint4));
  if (!has_shared(joint_cross_entropy, bytes, "joint_cross_entropy_cuda")) return false;
  joint_cross_entropy<<<launch.blocks, launch.threads, static_cast<size_t>(bytes),
                        reinterpret_cast<cudaStream_t>(stream)>>>(call);
  check(cudaGetLastError(), "joint_cross_entropy_cuda");
  return true;
}

}  // namespace hq
