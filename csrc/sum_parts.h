// The sum over ranks of what they have computed of the same tokens.
#pragma once
#include <cstdint>

#include "quantize.h"

namespace hq {

constexpr int kBytesOfSummand = 16;  // of one load

// total[l, i] = the sum over ranks, in their order, in float32, rounded once: this rank's summand is parts[l, rank, i],
// and received has those of the others in their order. count * bytes of a value: a multiple of kBytesOfSummand.
struct SumOfParts {
  const void* parts;     // [lead, ranks, count]
  const void* received;  // [ranks - 1, lead, count]
  void* total;           // [lead, count]
  Dtype dtype;
  int64_t lead, ranks, count, rank;
};

#if defined(HQ_HAVE_CUDA)
// Raises std::runtime_error with CUDA's own message. Work is only enqueued.
void sum_parts_cuda(const SumOfParts& call, uintptr_t stream);
#endif

}  // namespace hq
