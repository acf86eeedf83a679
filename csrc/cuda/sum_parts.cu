// The sum over ranks of what they have computed of the same tokens: (1 + 1 / ranks) reads and 1 / ranks writes of a
// rank's summand for two ranks, each once and in words of 16 bytes.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/check.cuh"
#include "cuda/words.cuh"
#include "sum_parts.h"

namespace hq {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kMostLeads = 65535;  // of a grid's second axis

// The values of four words, in float32.
template <class T>
struct Values {
  static constexpr int kCount = 4 * T::kPack;
  float of[kCount];

  __device__ explicit Values(const uint4& unit) {
    const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < kCount; ++i) of[i] = widen<T>(words[i / T::kPack], i % T::kPack);
  }

  __device__ void add(const uint4& unit) {
    const Values other(unit);
#pragma unroll
    for (int i = 0; i < kCount; ++i) of[i] += other.of[i];
  }

  __device__ uint32_t word(int w) const {
    if constexpr (T::kPack == 1)
      return __float_as_uint(of[w]);
    else
      return round_pair<T>(of[2 * w], of[2 * w + 1]);
  }
};

// units: of `count` values.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_parts(const __grid_constant__ SumOfParts call, int64_t units) {
  const int64_t u = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (u >= units) return;
  const uint4 *parts = static_cast<const uint4*>(call.parts), *received = static_cast<const uint4*>(call.received);
  for (int64_t l = blockIdx.y; l < call.lead; l += gridDim.y) {
    const uint4 own = parts[(l * call.ranks + call.rank) * units + u];
    const auto of_rank = [&](int64_t r) {
      return r == call.rank ? own : received[((r < call.rank ? r : r - 1) * call.lead + l) * units + u];
    };
    Values<T> total(of_rank(0));
    for (int64_t r = 1; r < call.ranks; ++r) total.add(of_rank(r));
    static_cast<uint4*>(call.total)[l * units + u] = {total.word(0), total.word(1), total.word(2), total.word(3)};
  }
}

template <class T>
void launch(const SumOfParts& call, cudaStream_t stream) {
  const int64_t units = call.count / (kBytesOfSummand / 4 * T::kPack);
  if (units == 0 || call.lead == 0) return;
  const unsigned blocks =
      grid_of((units + kThreads - 1) / kThreads, "sum_parts_cuda", "there are too many values for one launch");
  const dim3 grid(blocks, static_cast<unsigned>(std::min<int64_t>(call.lead, kMostLeads)));
  sum_parts<T><<<grid, kThreads, 0, stream>>>(call, units);
  check(cudaGetLastError(), "sum_parts_cuda");
}

}  // namespace

void sum_parts_cuda(const SumOfParts& call, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  if (call.dtype == Dtype::bf16) return launch<Bf16>(call, queue);
  if (call.dtype == Dtype::fp16) return launch<Fp16>(call, queue);
  launch<Fp32>(call, queue);
}

}  // namespace hq
