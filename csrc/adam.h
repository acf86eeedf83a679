// AdamW on float32 masters, many tensors in one launch.
#pragma once
#include <cstdint>
#include <vector>

namespace hq {

// One parameter of an update: arrays of count values without gaps, and its steps, this one included.
struct AdamTensor {
  float* param;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  const float* step;  // [1], >= 1
  int64_t count;
};

// Of all parameters of an update:
//   g = grad * factor;  p = param * (1 - lr * weight_decay)
//   exp_avg = exp_avg + (1 - beta1) (g - exp_avg), or from g where 1 - beta1 >= 1/2;  exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2
//   param = p - lr / (1 - beta1^step) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
// What has no index is computed in double precision and rounded to float32 once; the rest as torch.optim.AdamW on a CPU
// does for one tensor after the other: both averages by a fused multiply and add, every other operation rounded.
struct AdamRule {
  const double* lr;     // [1]
  const float* factor;  // [1]; null is 1
  double beta1, beta2, eps, weight_decay;
};

#if defined(HQ_HAVE_CUDA)
// Raises std::runtime_error with CUDA's own message. Work is only enqueued.
void adamw_cuda(const std::vector<AdamTensor>& tensors, const AdamRule& rule, uintptr_t stream);
#endif

}  // namespace hq
