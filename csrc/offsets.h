// Where the parts of a packed array begin: out[r][i] = strides[r] * sum over j < i of ceil(splits[j] / divisors[r]), for
// i = 0 to n. Divisor 0 counts 1 for every split, divisor 1 the split itself; splits may be negative.
#pragma once
#include <cstdint>

#include "numerics.h"

namespace hq {

constexpr int kMostRules = 8;

struct Splits {
  const void* data;  // int32 or int64
  bool wide;         // int64
  int64_t count;
};

// One row of offsets each.
struct Rules {
  int count;
  int64_t divisors[kMostRules], strides[kMostRules];
};

HQ_HD int64_t units_of_split(int64_t split, int64_t divisor) {
  if (divisor <= 1) return divisor ? split : 1;
  return split / divisor + (split % divisor > 0 ? 1 : 0);
}

HQ_HD int64_t split_at(const Splits& splits, int64_t i) {
  return splits.wide ? static_cast<const int64_t*>(splits.data)[i] : static_cast<const int32_t*>(splits.data)[i];
}

// out: int64 [rules, count + 1]. std::overflow_error where an offset does not fit in 64 bits.
void offsets_cpu(const Splits& splits, const Rules& rules, int64_t* out);

#if defined(HQ_HAVE_CUDA)
// One launch. Offsets that do not fit are wrapped; `overflow` (or null), one int on the device, is then set to 1.
void offsets_cuda(const Splits& splits, const Rules& rules, int64_t* out, int* overflow, uintptr_t stream);
#endif

}  // namespace hq
