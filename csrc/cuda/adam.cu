// AdamW (csrc/adam.h): 16 bytes a value are read and 12 written, and a thread has two words of each array on their way.
#include <algorithm>

#include "adam.h"
#include "cuda/check.cuh"

namespace hq {
namespace {

constexpr int kThreads = 256, kWordsOfThread = 2;
constexpr int kValuesOfWord = 4;
constexpr int64_t kValuesOfBlock = 16384;
constexpr int kTensorsOfLaunch = 72;

// What one launch is given, by value: 4 KiB at most.
struct Part {
  AdamRule rule;
  int count;
  unsigned first[kTensorsOfLaunch + 1];  // thread block of each tensor, and the number of all
  AdamTensor tensors[kTensorsOfLaunch];
};
static_assert(sizeof(Part) <= 4096);

// The numbers that all values of a tensor share.
struct Shared {
  float factor, decay, own, beta2, square, size, root, eps;
  bool from_average;
};

__device__ Shared shared_of(const AdamRule& rule, const float* step) {
  const double steps = *step, lr = *rule.lr;
  const float own = static_cast<float>(1.0 - rule.beta1);
  const bool from_average = own < 0.5f;
  return {rule.factor ? *rule.factor : 1.0f,
          static_cast<float>(1.0 - lr * rule.weight_decay),
          from_average ? own : own - 1.0f,
          static_cast<float>(rule.beta2),
          static_cast<float>(1.0 - rule.beta2),
          static_cast<float>(-(lr / (1.0 - pow(rule.beta1, steps)))),
          static_cast<float>(sqrt(1.0 - pow(rule.beta2, steps))),
          static_cast<float>(rule.eps),
          from_average};
}

__device__ void update(float& param, float grad, float& average, float& square, const Shared& all) {
  grad *= all.factor;
  average = fmaf(all.own, grad - average, all.from_average ? average : grad);
  square = fmaf(all.square * grad, grad, square * all.beta2);
  param = param * all.decay + all.size * average / (sqrtf(square) / all.root + all.eps);
}

struct Word {
  float4 param, grad, average, square;
};

__device__ void update(Word& word, const Shared& all) {
  update(word.param.x, word.grad.x, word.average.x, word.square.x, all);
  update(word.param.y, word.grad.y, word.average.y, word.square.y, all);
  update(word.param.z, word.grad.z, word.average.z, word.square.z, all);
  update(word.param.w, word.grad.w, word.average.w, word.square.w, all);
}

// The last tensor whose first thread block is not behind `block`.
__device__ int tensor_of(const Part& part, unsigned block) {
  int low = 0, high = part.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (part.first[middle] <= block ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kThreads, 4) adamw(const __grid_constant__ Part part) {
  const int index = tensor_of(part, blockIdx.x);
  const AdamTensor& of = part.tensors[index];
  __shared__ Shared all;
  if (threadIdx.x == 0) all = shared_of(part.rule, of.step);
  __syncthreads();
  const Shared mine = all;
  const int64_t begin = (blockIdx.x - part.first[index]) * kValuesOfBlock;
  const int64_t end = min(begin + kValuesOfBlock, of.count);
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(of.param) | reinterpret_cast<uintptr_t>(of.grad) |
                              reinterpret_cast<uintptr_t>(of.exp_avg) | reinterpret_cast<uintptr_t>(of.exp_avg_sq);
  const int64_t words_end = addresses % 16 == 0 ? end / kValuesOfWord : begin / kValuesOfWord;
  float4* params = reinterpret_cast<float4*>(of.param);
  const float4* grads = reinterpret_cast<const float4*>(of.grad);
  float4* averages = reinterpret_cast<float4*>(of.exp_avg);
  float4* squares = reinterpret_cast<float4*>(of.exp_avg_sq);
  for (int64_t w = begin / kValuesOfWord + threadIdx.x; w < words_end; w += kThreads * kWordsOfThread) {
    Word words[kWordsOfThread];
#pragma unroll
    for (int i = 0; i < kWordsOfThread; ++i) {
      const int64_t at = w + i * kThreads;
      if (at < words_end) words[i] = {params[at], __ldcs(grads + at), __ldcs(averages + at), __ldcs(squares + at)};
    }
#pragma unroll
    for (int i = 0; i < kWordsOfThread; ++i) {
      const int64_t at = w + i * kThreads;
      if (at >= words_end) break;
      update(words[i], mine);
      params[at] = words[i].param;
      __stcs(averages + at, words[i].average);
      __stcs(squares + at, words[i].square);
    }
  }
  for (int64_t i = words_end * kValuesOfWord + threadIdx.x; i < end; i += kThreads)
    update(of.param[i], of.grad[i], of.exp_avg[i], of.exp_avg_sq[i], mine);
}

}  // namespace

void adamw_cuda(const std::vector<AdamTensor>& tensors, const AdamRule& rule, uintptr_t stream) {
  Part part{rule, 0, {}, {}};
  const auto launch = [&] {
    const unsigned blocks = part.first[part.count];
    if (blocks) adamw<<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(part);
    check(cudaGetLastError(), "adamw_cuda");
    part.count = 0;
  };
  for (const AdamTensor& tensor : tensors) {
    if (tensor.count == 0) continue;
    const int64_t blocks = part.first[part.count] + (tensor.count + kValuesOfBlock - 1) / kValuesOfBlock;
    part.tensors[part.count++] = tensor;
    part.first[part.count] = grid_of(blocks, "adamw_cuda", "the parameters are too large for one launch");
    if (part.count == kTensorsOfLaunch) launch();
  }
  launch();
}

}  // namespace hq
