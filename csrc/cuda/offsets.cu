// Offsets on a GPU, in one launch: a thread block for each rule, which carries its sum from one piece of the splits to the
// next. Checked sums have 128 bits, so that every offset that does not fit is seen.
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/check.cuh"
#include "offsets.h"

namespace hq {
namespace {

constexpr int kPerThread = 4;
constexpr int kMostThreads = 1024;

template <bool kChecked>
using Total = std::conditional_t<kChecked, __int128, int64_t>;

__device__ __forceinline__ int64_t from_below(int64_t value, int distance) {
  return __shfl_up_sync(~0u, static_cast<long long>(value), distance);
}
__device__ __forceinline__ __int128 from_below(__int128 value, int distance) {
  const auto low = static_cast<uint64_t>(from_below(static_cast<int64_t>(value), distance));
  return (static_cast<__int128>(from_below(static_cast<int64_t>(value >> 64), distance)) << 64) | low;
}

// Sum of the values of this lane and those below.
template <class T>
__device__ __forceinline__ T scan_warp(T value) {
  const int lane = threadIdx.x % 32;
  for (int distance = 1; distance < 32; distance *= 2) {
    const T below = from_below(value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

__device__ __forceinline__ void store_offset(int64_t sum, int64_t stride, int64_t* to, int*) {
  *to = static_cast<int64_t>(static_cast<uint64_t>(sum) * static_cast<uint64_t>(stride));
}
__device__ __forceinline__ void store_offset(__int128 sum, int64_t stride, int64_t* to, int* overflow) {
  const auto low = static_cast<int64_t>(sum);
  const __int128 product = static_cast<__int128>(low) * stride;
  if (low != sum || static_cast<int64_t>(product) != product) *overflow = 1;
  *to = static_cast<int64_t>(product);
}

template <bool kChecked>
__global__ void __launch_bounds__(kMostThreads)
    write_offsets(const __grid_constant__ Splits splits, const __grid_constant__ Rules rules, int64_t* out, int* overflow) {
  using Sum = Total<kChecked>;
  __shared__ Sum warps[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = blockDim.x / 32;
  const int64_t divisor = rules.divisors[blockIdx.x], stride = rules.strides[blockIdx.x];
  out += blockIdx.x * (splits.count + 1);
  if (threadIdx.x == 0) *out = 0;
  Sum carry = 0;
  for (int64_t first = 0; first < splits.count; first += static_cast<int64_t>(blockDim.x) * kPerThread) {
    const int64_t mine = first + threadIdx.x * kPerThread;
    Sum sums[kPerThread], sum = 0;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (mine + k < splits.count) sum += units_of_split(split_at(splits, mine + k), divisor);
      sums[k] = sum;
    }
    const Sum of_warp = scan_warp(sum);
    if (lane == 31) warps[warp] = of_warp;
    __syncthreads();
    if (warp == 0) {
      const Sum all = scan_warp(lane < count ? warps[lane] : Sum(0));
      warps[lane] = all;
    }
    __syncthreads();
    const Sum before = carry + (warp ? warps[warp - 1] : Sum(0)) + of_warp - sum;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k)
      if (mine + k < splits.count) store_offset(before + sums[k], stride, out + mine + k + 1, overflow);
    carry += warps[31];
    __syncthreads();  // the next piece writes over the sums of the warps
  }
}

}  // namespace

void offsets_cuda(const Splits& splits, const Rules& rules, int64_t* out, int* overflow, uintptr_t stream) {
  if (rules.count == 0) return;
  const int64_t wanted = (splits.count + kPerThread - 1) / kPerThread, warps = wanted / 32 + 1;
  const unsigned threads = warps < kMostThreads / 32 ? static_cast<unsigned>(warps) * 32 : kMostThreads;
  const auto queue = reinterpret_cast<cudaStream_t>(stream);
  if (overflow)
    write_offsets<true><<<rules.count, threads, 0, queue>>>(splits, rules, out, overflow);
  else
    write_offsets<false><<<rules.count, threads, 0, queue>>>(splits, rules, out, overflow);
  check(cudaGetLastError(), "offsets_cuda");
}

}  // namespace hq
