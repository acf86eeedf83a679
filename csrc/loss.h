// The loss over a vocabulary: mean cross entropy of bfloat16 logits, whose gradient takes their place.
#pragma once
#include <cstdint>

#include "quantize.h"

namespace hq {

constexpr int kLogitsOfLoad = 8;  // 16 bytes
constexpr int64_t kIgnored = -100;  // the target of a row without a loss, as torch's cross_entropy has it

// loss[r] = log(sum_v exp(x[r, v])) - x[r, t], where t = targets[r]; then, if wanted, in the place of x
// (softmax(x[r])[v] - [v == t]) * scale[0], rounded to bfloat16. vocabulary: a multiple of kLogitsOfLoad; x begins at a
// multiple of 16 bytes. A row whose target is kIgnored has a loss and a gradient of 0. Any other target that is no index
// of the vocabulary gives a loss and a gradient of NaN.
struct CrossEntropy {
  void* logits;            // bfloat16 [rows, vocabulary]
  const int64_t* targets;  // [rows]
  float* losses;           // [rows]
  int64_t rows, vocabulary;
  const float* scale;
  bool gradient;
  float* amax;  // of the gradient, NaN aside: amax[0] = max(amax[0], its own); or null
};

// What is known of a row of logits whose vocabulary is shared out: of this rank's logits the largest and the sum of
// exp(x - largest), and the logit of the target, if the rank has it.
struct LossPart {
  float largest, sum, of_target, has_target;  // has_target: 1 or 0
};

// parts[r] of x[r, v], the logits of the entries [first, first + vocabulary). Shapes are those of CrossEntropy.
struct LossParts {
  const void* logits;      // bfloat16 [rows, vocabulary]
  const int64_t* targets;  // [rows], of the whole vocabulary
  LossPart* parts;         // [rows]
  int64_t rows, vocabulary, first;
};

// What CrossEntropy computes of the whole vocabulary, by parts of `ranks` ranks, whose sums are added in their order: the
// losses, and the gradient in the place of this rank's logits. A target that no rank has
// is as one that is no index of the vocabulary.
struct SharedCrossEntropy {
  void* logits;            // bfloat16 [rows, vocabulary]
  const int64_t* targets;  // [rows], of the whole vocabulary
  const LossPart* parts;   // [ranks, rows]
  float* losses;           // [rows]
  int64_t rows, vocabulary, first, ranks;
  const float* scale;
  bool gradient;
};

constexpr int kMostRanks = 16;  // of a joint cross entropy

// SharedCrossEntropy, with the gradient, in one pass over the logits: kernels of all ranks, each on a GPU of its own, run at
// the same time, and tell each other the parts of each row. A box is memory of a rank that the others write to: [2, ranks,
// room] parts, of which every byte is 0xFF before the first launch, and again when a launch has read them; launches of a
// group take both halves by turns. state: [3] of zeros before the first launch, of this rank alone.
struct JointCrossEntropy {
  void* logits;             // bfloat16 [rows, vocabulary]; a block has room for its rows in shared memory
  const int64_t* targets;   // [rows], of the whole vocabulary
  float* losses;            // [rows]
  LossPart* const* boxes;   // [ranks]
  unsigned* state;
  int64_t rows, vocabulary, first, room;  // rows <= room
  int ranks, rank;
  const float* scale;
};

// values[i] *= factor[0], rounded to dtype (fp32 or bf16); nothing is touched where the factor is 1.
struct Scaling {
  void* values;
  Dtype dtype;
  int64_t count;
  const float* factor;
};

#if defined(HQ_HAVE_CUDA)
// Raise std::runtime_error with CUDA's own message. Work is only enqueued.
void cross_entropy_cuda(const CrossEntropy& call, uintptr_t stream);
void loss_parts_cuda(const LossParts& call, uintptr_t stream);
void shared_cross_entropy_cuda(const SharedCrossEntropy& call, uintptr_t stream);
// False, and nothing is done, where the rows of a block do not fit into shared memory.
bool joint_cross_entropy_cuda(const JointCrossEntropy& call, uintptr_t stream);
void scale_values_cuda(const Scaling& call, uintptr_t stream);
#endif

}  // namespace hq
