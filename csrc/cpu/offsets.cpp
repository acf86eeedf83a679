// Offsets on the CPU: one pass over the splits for each rule.
#include "offsets.h"

#include <stdexcept>
#include <string>

namespace hq {

void offsets_cpu(const Splits& splits, const Rules& rules, int64_t* out) {
  for (int r = 0; r < rules.count; ++r, out += splits.count + 1) {
    int64_t sum = 0;
    out[0] = 0;
    for (int64_t i = 0; i < splits.count; ++i) {
      const bool too_large = __builtin_add_overflow(sum, units_of_split(split_at(splits, i), rules.divisors[r]), &sum) ||
                             __builtin_mul_overflow(sum, rules.strides[r], &out[i + 1]);
      if (too_large)
        throw std::overflow_error("hqsweep._C: the offset after split " + std::to_string(i) + ", with stride " +
                                  std::to_string(rules.strides[r]) + ", does not fit in 64 bits");
    }
  }
}

}  // namespace hq
