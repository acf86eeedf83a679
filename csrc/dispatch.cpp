// Chooses, once, among the copies of quantize.cpp compiled per instruction set. All give the same bytes.
#include <cstring>
#include <vector>

#include "quantize.h"

namespace hq {

using Quantize = void(const Spec&, const Source&, const Output&, int);
namespace base { Quantize quantize; }
#if defined(HQ_HAVE_AVX2)
namespace avx2 { Quantize quantize; }
#endif

const char* best_isa() {
#if defined(HQ_HAVE_AVX2)
  static const bool avx2_present = __builtin_cpu_supports("avx2");
  if (avx2_present) return "avx2";
#endif
  return "base";
}

void quantize_cpu(const Spec& spec, const Source& source, const Output& wanted, int threads, const char* isa) {
  // A thread costs about as much as this many elements; fewer elements are done on the calling thread.
  constexpr int64_t kGrain = 16384;
  const int64_t useful = 1 + source.rows * source.cols / kGrain;
  threads = static_cast<int>(useful < threads ? useful : threads);
  Output output = wanted;
  std::vector<float> global(wanted.global ? 0 : (spec.row_scaled ? static_cast<size_t>(source.rows) : 1));
  if (!wanted.global) output.global = global.data();
  const char* chosen = isa[0] == '\0' ? best_isa() : isa;
#if defined(HQ_HAVE_AVX2)
  if (std::strcmp(chosen, "avx2") == 0) return avx2::quantize(spec, source, output, threads);
#endif
  base::quantize(spec, source, output, threads);
}

}  // namespace hq
