// Chooses, once, among the copies of quantize.cpp compiled per instruction set. All give the same bytes.
#include <cstring>

#include "cpu/members.h"
#include "quantize.h"

namespace hq {

#define HQ_DECLARE(ISA)                                                                              \
  namespace ISA {                                                                                   \
  void quantize(const Call* calls, int64_t count, int threads);                                      \
  void find_amax(const Call& call, int threads);                                                     \
  void dequantize(const Encoded& encoded, Decoding decoding, void* out, Dtype dtype, int threads);   \
  }
HQ_DECLARE(base)
#if defined(HQ_HAVE_AVX2)
HQ_DECLARE(avx2)
HQ_DECLARE(avx512)
#define HQ_CHOOSE(isa, call)                                   \
  if (std::strcmp(isa, "avx512") == 0) return avx512::call;     \
  if (std::strcmp(isa, "avx2") == 0) return avx2::call;         \
  return base::call
#else
#define HQ_CHOOSE(isa, call) \
  (void)isa;                 \
  return base::call
#endif

namespace {

// A thread costs about as much as this many elements; fewer elements are done on the calling thread.
int useful_threads(int64_t elements, int threads) {
  constexpr int64_t kGrain = 16384, kMostThreads = 1024;  // an OpenMP that cannot start a thread ends the process
  const int64_t useful = 1 + elements / kGrain < kMostThreads ? 1 + elements / kGrain : kMostThreads;
  return static_cast<int>(useful < threads ? useful : threads);
}

const char* named(const char* isa) { return isa[0] == '\0' ? best_isa() : isa; }

}  // namespace

const char* best_isa() {
#if defined(HQ_HAVE_AVX2)
  static const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return "avx512";
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return "avx2";
#endif
  return "base";
}

void quantize_cpu(const Call& call, int threads, const char* isa) {
  threads = useful_threads(call.source.rows * call.source.cols, threads);
  HQ_CHOOSE(named(isa), quantize(&call, 1, threads));
}

void quantize_grouped_cpu(const Call& call, const Group& group, int threads, const char* isa) {
  const Members members(call, group);
  threads = useful_threads(call.source.rows * call.source.cols, threads);
  HQ_CHOOSE(named(isa), quantize(members.calls(), members.count(), threads));
}

void find_amax_cpu(const Call& call, int threads, const char* isa) {
  threads = useful_threads(call.source.rows * call.source.cols, threads);
  HQ_CHOOSE(named(isa), find_amax(call, threads));
}

void find_amax_grouped_cpu(const Call& call, const Group& group, int threads, const char* isa) {
  const Members members(call, group);
  for (int64_t e = 0; e < members.count(); ++e) find_amax_cpu(members.calls()[e], threads, isa);
}

void dequantize_cpu(const Encoded& encoded, Decoding decoding, void* out, Dtype out_dtype, int threads) {
  threads = useful_threads(encoded.rows * encoded.cols, threads);
  HQ_CHOOSE(best_isa(), dequantize(encoded, decoding, out, out_dtype, threads));
}

void dequantize_grouped_cpu(const EncodedGroup& encoded, Decoding decoding, void* out, Dtype out_dtype, int threads) {
  each_member(encoded, [&](const Encoded& member, int64_t first) {
    const int64_t bytes = first * (out_dtype == Dtype::fp32 ? 4 : 2);
    dequantize_cpu(member, decoding, static_cast<char*>(out) + bytes, out_dtype, threads);
  });
}

}  // namespace hq
