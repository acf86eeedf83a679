// Cross entropy over a vocabulary. A row of threads, threadIdx.y of a block, has one row of logits, which it reads once
// and, for the gradient, writes once: 2 or 4 bytes a logit. The row waits in shared memory between the two passes over
// it (50,304 logits take 98 KiB, so that an SM of sm_90 has two rows); a row that does not fit is read a second time.
//
// Bits: the sums of a thread are in the order of its logits, those of a warp in that of a butterfly, those of warps in
// that of the warps; the number of threads of a row depends on the vocabulary alone.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/check.cuh"
#include "loss.h"

namespace hq {
namespace {

constexpr int kWarp = 32;
constexpr int kMostThreads = 512;
constexpr unsigned kRowsOfBlock = 8;  // where a warp has a row
constexpr int kTogether = 4;  // loads of a thread that are on their way at once
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kInfinity = __builtin_huge_valf();

// 2^x to 2 units in the last place; results below 2^-126 are 0. NaN gives NaN.
__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The two logits of a word.
__device__ float low_of(uint32_t word) { return __uint_as_float(word << 16); }
__device__ float high_of(uint32_t word) { return __uint_as_float(word & 0xFFFF0000u); }

// The largest logit of those seen, and the sum of exp(x - largest). A NaN is in the sum, and never the largest.
struct Partial {
  float largest, sum;
};

// What is subtracted from logits: 0 where all of them are -inf, for -inf - -inf is NaN.
__device__ float base_of(float largest) { return largest == -kInfinity ? 0.0f : largest; }

// exp(x - base), whose difference is exact where it matters.
__device__ float exp_of(float x, float base) { return exp2_of((x - base) * kLog2E); }

// The sum of a part, under another largest logit.
__device__ float rescaled(Partial part, float largest) {
  return part.largest == largest ? part.sum : part.sum * exp_of(part.largest, largest);
}

__device__ float largest_of(const uint4& unit) {
  const float a = fmaxf(fmaxf(low_of(unit.x), high_of(unit.x)), fmaxf(low_of(unit.y), high_of(unit.y)));
  const float b = fmaxf(fmaxf(low_of(unit.z), high_of(unit.z)), fmaxf(low_of(unit.w), high_of(unit.w)));
  return fmaxf(a, b);
}

__device__ float sum_of(uint32_t word, float base) {
  return exp_of(low_of(word), base) + exp_of(high_of(word), base);
}

__device__ float sum_of(const uint4& unit, float base) {
  return (sum_of(unit.x, base) + sum_of(unit.y, base)) + (sum_of(unit.z, base) + sum_of(unit.w, base));
}

// The row's logits of one thread, units threadIdx.x, threadIdx.x + blockDim.x and so on; kept in `kept`, unless it is
// null.
__device__ Partial read_row(const uint4* row, int units, uint4* kept) {
  Partial part{-kInfinity, 0.0f};
  const int step = blockDim.x;
  for (int first = threadIdx.x; first < units; first += kTogether * step) {
    uint4 loaded[kTogether];
    float largest = part.largest;
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (first + i * step < units) loaded[i] = row[first + i * step];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (first + i * step < units) largest = fmaxf(largest, largest_of(loaded[i]));
    part = {largest, rescaled(part, largest)};
    const float base = base_of(largest);
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (first + i * step < units) {
        part.sum += sum_of(loaded[i], base);
        if (kept) kept[first + i * step] = loaded[i];
      }
  }
  return part;
}

// The parts of a row's threads together; each of them gets the same one, after all have come here. They are a warp, or
// a number of whole warps that are all of the block.
__device__ Partial of_row(Partial part) {
  __shared__ Partial of_warps[kMostThreads / kWarp];
  float largest = part.largest;
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lane));
  float sum = rescaled(part, largest);
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lane);
  if (blockDim.x == kWarp) {
    __syncwarp();
    return {largest, sum};
  }
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = {largest, sum};
  __syncthreads();
  const int warps = blockDim.x / kWarp;
  for (int w = 0; w < warps; ++w) largest = fmaxf(largest, of_warps[w].largest);
  sum = 0.0f;
  for (int w = 0; w < warps; ++w) sum += rescaled(of_warps[w], largest);
  return {largest, sum};
}

__device__ uint32_t rounded(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ uint32_t scaled_softmax(uint32_t word, float base, float factor) {
  return rounded(exp_of(low_of(word), base) * factor, exp_of(high_of(word), base) * factor);
}

// The unit with its logit `at` (0 to 7) replaced.
__device__ uint4 replaced(uint4 unit, int at, __nv_bfloat16 by) {
  const uint32_t bits = __bfloat16_as_ushort(by);
  const auto in = [&](uint32_t word) { return at % 2 ? (word & 0xFFFFu) | bits << 16 : (word & 0xFFFF0000u) | bits; };
  return {at / 2 == 0 ? in(unit.x) : unit.x, at / 2 == 1 ? in(unit.y) : unit.y, at / 2 == 2 ? in(unit.z) : unit.z,
          at / 2 == 3 ? in(unit.w) : unit.w};
}

__device__ __nv_bfloat162 magnitudes(uint32_t word) { return __habs2(*reinterpret_cast<const __nv_bfloat162*>(&word)); }

// The largest magnitudes of both halves of words, NaN aside.
__device__ __nv_bfloat162 most_of(__nv_bfloat162 most, const uint4& unit) {
  most = __hmax2(__hmax2(most, magnitudes(unit.x)), magnitudes(unit.y));
  return __hmax2(__hmax2(most, magnitudes(unit.z)), magnitudes(unit.w));
}

// amax = max(amax, those of a warp). Most calls change nothing and only look.
__device__ void raise(float* amax, __nv_bfloat162 most) {
  float value = fmaxf(__low2float(most), __high2float(most));
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, lane));
  if (threadIdx.x % kWarp == 0 && value > *static_cast<volatile float*>(amax))
    atomicMax(reinterpret_cast<int*>(amax), __float_as_int(value));
}

template <bool kStaged>
__global__ void __launch_bounds__(kMostThreads, 2) cross_entropy(const __grid_constant__ CrossEntropy call) {
  extern __shared__ uint4 staged[];
  const int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (r >= call.rows) return;  // a warp of a block whose warps do not wait for each other
  const int64_t target = call.targets[r];
  const int units = static_cast<int>(call.vocabulary / kLogitsOfLoad);
  __nv_bfloat16* logits = static_cast<__nv_bfloat16*>(call.logits) + r * call.vocabulary;
  uint4* row = reinterpret_cast<uint4*>(logits);
  uint4* kept = kStaged ? staged + threadIdx.y * units : row;
  const bool known = target >= 0 && target < call.vocabulary;
  // Before of_row, behind which the row is overwritten.
  const float of_target = known ? __bfloat162float(logits[target]) : __uint_as_float(0x7FC00000u);

  const Partial whole = of_row(read_row(row, units, kStaged ? kept : nullptr));
  if (threadIdx.x == 0) call.losses[r] = logf(whole.sum) + (whole.largest - of_target);
  if (!call.gradient) return;
  const float base = base_of(whole.largest), factor = call.scale / whole.sum;
  const float at_target = (exp_of(of_target, base) / whole.sum - 1.0f) * call.scale;
  const int64_t target_unit = known ? target / kLogitsOfLoad : -1;
  __nv_bfloat162 most = __float2bfloat162_rn(0.0f);
  for (int u = threadIdx.x; u < units; u += blockDim.x) {
    const uint4 unit = kept[u];
    uint4 gradient{scaled_softmax(unit.x, base, factor), scaled_softmax(unit.y, base, factor),
                   scaled_softmax(unit.z, base, factor), scaled_softmax(unit.w, base, factor)};
    if (u == target_unit)
      gradient = replaced(gradient, static_cast<int>(target % kLogitsOfLoad), __float2bfloat16_rn(at_target));
    row[u] = gradient;
    if (call.amax) most = most_of(most, gradient);
  }
  if (call.amax) raise(call.amax, most);
}

// So many threads of a row that each has kTogether loads, up to the most.
unsigned threads_for(int64_t units) {
  const int64_t threads = std::max<int64_t>((units + kTogether - 1) / kTogether, 1);
  return static_cast<unsigned>(std::min<int64_t>((threads + kWarp - 1) / kWarp * kWarp, kMostThreads));
}

// Bytes that a thread block of the current device can have as dynamic shared memory beside what it has anyway.
int most_shared_bytes() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "cross_entropy_cuda");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cross_entropy_cuda");
  return bytes - static_cast<int>(sizeof(Partial)) * (kMostThreads / kWarp);
}

constexpr int kUnasked = 48 * 1024;  // bytes of shared memory that a kernel has without asking

// Ask for as much shared memory as there is, so that an SM has as many rows as fit.
void ask_for_shared(int bytes) {
  const auto kernel = cross_entropy<true>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cross_entropy_cuda");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cross_entropy_cuda");
}

__device__ void put(float value, float& out) { out = value; }
__device__ void put(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }
__device__ float get(float value) { return value; }
__device__ float get(__nv_bfloat16 value) { return __bfloat162float(value); }

constexpr int kScaleThreads = 256;
constexpr int kScaleBlocks = 2048;

// Whole words of 16 bytes first (there are `words`, and `count` values in all), then what is left of them.
template <class Value>
__global__ void __launch_bounds__(kScaleThreads) scale_values(Value* values, int64_t words, int64_t count,
                                                              const float* factor) {
  constexpr int kOfWord = 16 / static_cast<int>(sizeof(Value));
  const float by = *factor;
  if (by == 1.0f) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kScaleThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kScaleThreads;
  for (int64_t w = first; w < words; w += step) {
    alignas(16) Value word[kOfWord];
    *reinterpret_cast<uint4*>(word) = reinterpret_cast<const uint4*>(values)[w];
#pragma unroll
    for (int i = 0; i < kOfWord; ++i) put(get(word[i]) * by, word[i]);
    reinterpret_cast<uint4*>(values)[w] = *reinterpret_cast<const uint4*>(word);
  }
  for (int64_t i = words * kOfWord + first; i < count; i += step) put(get(values[i]) * by, values[i]);
}

template <class Value>
void launch_scale(const Scaling& call, cudaStream_t stream) {
  constexpr int64_t kOfWord = 16 / static_cast<int64_t>(sizeof(Value));
  Value* values = static_cast<Value*>(call.values);
  const int64_t words = reinterpret_cast<uintptr_t>(values) % 16 == 0 ? call.count / kOfWord : 0;
  const int64_t items = std::max(words, call.count - words * kOfWord);
  const int64_t blocks = std::min<int64_t>((items + kScaleThreads - 1) / kScaleThreads, kScaleBlocks);
  if (blocks == 0) return;
  scale_values<<<static_cast<unsigned>(blocks), kScaleThreads, 0, stream>>>(values, words, call.count, call.factor);
  check(cudaGetLastError(), "scale_values_cuda");
}

}  // namespace

void cross_entropy_cuda(const CrossEntropy& call, uintptr_t stream) {
  if (call.rows == 0) return;
  const int64_t units = call.vocabulary / kLogitsOfLoad;
  const unsigned threads = threads_for(units), rows = threads == kWarp ? kRowsOfBlock : 1;
  const int64_t bytes = rows * units * static_cast<int64_t>(sizeof(uint4));
  const unsigned grid =
      grid_of((call.rows + rows - 1) / rows, "cross_entropy_cuda", "there are too many rows for one launch");
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  const int most = call.gradient && bytes > kUnasked ? most_shared_bytes() : kUnasked;
  if (call.gradient && bytes <= most) {
    if (bytes > kUnasked) ask_for_shared(most);
    cross_entropy<true><<<grid, dim3(threads, rows), static_cast<size_t>(bytes), queue>>>(call);
  } else {
    cross_entropy<false><<<grid, dim3(threads, rows), 0, queue>>>(call);
  }
  check(cudaGetLastError(), "cross_entropy_cuda");
}

void scale_values_cuda(const Scaling& call, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  if (call.dtype == Dtype::bf16) return launch_scale<__nv_bfloat16>(call, queue);
  launch_scale<float>(call, queue);
}

}  // namespace hq
