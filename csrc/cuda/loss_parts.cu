// Cross entropy over a vocabulary that ranks share out: of each row its part, 2 bytes a logit; then, when all ranks have
// the parts of all, the losses and the gradient, 4 bytes a logit.
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

__device__ Whole whole_row(const SharedCrossEntropy& call, int64_t r) {
  Whole whole{{-kInfinity, 0.0f}, __uint_as_float(0x7FC00000u)};
  for (int64_t w = 0; w < call.ranks; ++w) {
    const LossPart part = call.parts[w * call.rows + r];
    whole.sums.largest = fmaxf(whole.sums.largest, part.largest);
    if (part.has_target != 0.0f) whole.of_target = part.of_target;
  }
  for (int64_t w = 0; w < call.ranks; ++w) {
    const LossPart part = call.parts[w * call.rows + r];
    whole.sums.sum += rescaled({part.largest, part.sum}, whole.sums.largest);
  }
  return whole;
}

__global__ void __launch_bounds__(kMostThreads) shared_cross_entropy(const __grid_constant__ SharedCrossEntropy call) {
  const int64_t r = own_row();
  if (r >= call.rows) return;
  const Whole whole = whole_row(call, r);
  if (threadIdx.x == 0) call.losses[r] = logf(whole.sums.sum) + (whole.sums.largest - whole.of_target);
  if (!call.gradient) return;
  uint4* row = reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(call.logits) + r * call.vocabulary);
  const int64_t target = call.targets[r] - call.first;
  const int64_t target_unit = target >= 0 && target < call.vocabulary ? target / kLogitsOfLoad : -1;
  const float base = base_of(whole.sums.largest), factor = call.scale / whole.sums.sum;
  const float at_target = (exp_of(whole.of_target, base) / whole.sums.sum - 1.0f) * call.scale;
  const int units = static_cast<int>(call.vocabulary / kLogitsOfLoad), step = blockDim.x;
  for (int begin = threadIdx.x; begin < units; begin += kTogether * step) {
    uint4 loaded[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (begin + i * step < units) loaded[i] = row[begin + i * step];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int u = begin + i * step;
      if (u >= units) continue;
      uint4 gradient = softmax_of(loaded[i], base, factor);
      if (u == target_unit)
        gradient = replaced(gradient, static_cast<int>(target % kLogitsOfLoad), __float2bfloat16_rn(at_target));
      row[u] = gradient;
    }
  }
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

}  // namespace hq
