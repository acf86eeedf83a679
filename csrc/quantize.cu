// CUDA quantization of every format: which kernels run for a call, and the one kernel that they all share. A thread
// takes 16 consecutive elements of a row through load (cuda_tile.cuh), scale (cuda_scales.cuh), encode (segment.h) and
// store (cuda_store.cuh). The arithmetic is numerics.h, so the bytes are those of the CPU. Everything is enqueued on the
// caller's stream; a global amax that is not given is found first (cuda_amax.cuh), in memory that the outputs own.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda_amax.cuh"
#include "cuda_scales.cuh"
#include "cuda_store.cuh"
#include "cuda_tile.cuh"
#include "numerics.h"
#include "quantize.h"
#include "segment.h"

namespace hq {
namespace {

// What the kernel is compiled for: the families, and 4over6 apart because it needs many more registers.
enum class Scaling { current, block, mx, nvfp4, four_over_six };

constexpr int kRows = 32;       // of a thread block's tile
constexpr int kHighRows = 128;  // the same for scale tiles of 128 x 128

struct Job {
  Spec spec;
  Source source;
  Output output;
  const float* amax;  // current, nvfp4: the global amax, or one per row
  float input_max;    // largest finite value of the source dtype
  Path path;
};

template <class E, Scaling kScaling, int kRows>
__device__ BlockScale find_scale(const Job& job, const Place& place, const float x[kSegment]) {
  const Spec& spec = job.spec;
  if constexpr (kScaling == Scaling::current) {
    return {fp8_scale(*job.amax, max_of<E>(), spec.amax_epsilon, spec.pow2, kFloatMax), 1.0f, 0};
  } else {
    const float amax = tile_amax<kRows>(spec, place, segment_amax(x));
    if constexpr (kScaling == Scaling::block) return block_fp8_scale(amax, max_of<E>(), job.input_max, spec);
    if constexpr (kScaling == Scaling::mx) return mx_scale(amax, max_of<E>());
    if constexpr (kScaling == Scaling::nvfp4 || kScaling == Scaling::four_over_six) {
      const bool row_scaled = spec.row_scaled && place.count > 0;
      const float global_amax = job.amax[row_scaled ? place.row : 0];
      if constexpr (kScaling == Scaling::nvfp4) return nvfp4_scale(amax, global_amax, spec);
      return four_over_six_scale<kRows>(spec, place, x, amax, global_amax);
    }
  }
}

template <class E, Scaling kScaling, int kRows>
__global__ void __launch_bounds__(kRows * kLanes) quantize_segments(const __grid_constant__ Job job) {
  const Place place = locate<kRows>(job.source, job.path);
  float x[kSegment];
  load<kRows>(job.spec, job.source, job.path, place, x);
  const BlockScale scale = find_scale<E, kScaling, kRows>(job, place, x);
  if (kScaling != Scaling::current) write_scale(job.spec, job.source, place, scale, job.output.scales);
  if (place.count == 0) return;
  uint32_t codes[kSegment];
  if (kScaling == Scaling::nvfp4 && job.spec.sr) {
    const uint64_t segment = static_cast<uint64_t>(place.row * job.source.cols + place.col) / kSegment;
    encode_segment_stochastic(x, scale.encode, job.spec, segment, codes);
  } else {
    encode_segment<E>(x, scale.encode, codes);
  }
  if (job.output.codes) store_codes<E::kWidth == 4 ? 4 : 8>(job.source, place, codes, job.output.codes);
  if (job.output.exact) store_exact<E>(job.source, place, codes, scale.decode, job.output);
}

// ---- launches ------------------------------------------------------------------------------------------------------

void check(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("hqsweep._C.quantize_cuda: ") + cudaGetErrorString(status));
}

Path choose_path(const Source& source, int tile_rows) {
  if (source.row_stride == 1 && source.col_stride != 1) return Path::staged;
  return tile_rows <= 1 && source.cols % kWidth == 0 ? Path::flat : Path::tiled;
}

// Thread blocks for a matrix that is not empty. A tile count covers the flat path too, whose rows are whole tiles wide.
unsigned grid_of(const Source& source, int rows) {
  const int64_t grid = ceil_div(source.rows, rows) * ceil_div(source.cols, kWidth);
  if (grid > 0x7FFFFFFF) throw std::runtime_error("hqsweep._C.quantize_cuda: the matrix is too large for one launch");
  return static_cast<unsigned>(grid);
}

template <class E, Scaling kScaling, int kRows>
void launch(const Job& job, cudaStream_t stream) {
  const auto kernel = quantize_segments<E, kScaling, kRows>;
  const size_t shared = job.path == Path::staged ? staged_bytes<kRows>() : 0;
  if (shared > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  kernel<<<grid_of(job.source, kRows), kRows * kLanes, shared, stream>>>(job);
  check(cudaGetLastError());
}

template <class E>
void launch_fp8(const Job& job, cudaStream_t stream) {
  switch (job.spec.family) {
    case Family::current: return launch<E, Scaling::current, kRows>(job, stream);
    case Family::block:
      return job.spec.tile_rows == 1 ? launch<E, Scaling::block, kRows>(job, stream)
                                     : launch<E, Scaling::block, kHighRows>(job, stream);
    default: return launch<E, Scaling::mx, kRows>(job, stream);
  }
}

void launch_e2m1(const Job& job, cudaStream_t stream) {
  if (job.spec.family == Family::mx) return launch<E2M1, Scaling::mx, kRows>(job, stream);
  if (job.spec.four_over_six == FourOverSix::none) return launch<E2M1, Scaling::nvfp4, kRows>(job, stream);
  launch<E2M1, Scaling::four_over_six, kRows>(job, stream);
}

void launch_element(const Job& job, cudaStream_t stream) {
  switch (job.spec.element) {
    case Element::e4m3: return launch_fp8<E4M3>(job, stream);
    case Element::e5m2: return launch_fp8<E5M2>(job, stream);
    case Element::e2m1: return launch_e2m1(job, stream);
    case Element::e2m3: return launch<E2M3, Scaling::mx, kRows>(job, stream);
    case Element::e3m2: return launch<E3M2, Scaling::mx, kRows>(job, stream);
  }
}

// Where the global amax of a call stands once the work enqueued here has run; null for families without one.
const float* prepare_amax(const Spec& spec, Source source, const Output& output, cudaStream_t stream) {
  if (spec.family != Family::current && spec.family != Family::nvfp4) return nullptr;
  const size_t bytes = sizeof(float) * (spec.row_scaled ? static_cast<size_t>(source.rows) : 1);
  if (output.amax) {
    if (spec.family == Family::nvfp4 && output.global)
      check(cudaMemcpyAsync(output.global, output.amax, bytes, cudaMemcpyDeviceToDevice, stream));
    return output.amax;
  }
  float* found = spec.family == Family::current ? static_cast<float*>(output.scales) : output.global;
  check(cudaMemsetAsync(found, 0, bytes, stream));
  if (source.rows == 0 || source.cols == 0) return found;
  if (!spec.rht && !spec.row_scaled && source.row_stride == 1)  // a maximum does not care which axis is which
    source = {source.data, source.dtype, source.cols, source.rows, source.col_stride, source.row_stride};
  const Path path = choose_path(source, 1);
  const size_t shared = path == Path::staged ? staged_bytes<kAmaxRows>() : 0;
  const unsigned grid = grid_of(source, kAmaxRows);
  find_amax<<<grid, kAmaxRows * kLanes, shared, stream>>>(spec, source, path, reinterpret_cast<int32_t*>(found));
  check(cudaGetLastError());
  return found;
}

}  // namespace

void quantize_cuda(const Spec& spec, const Source& source, const Output& output, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  const float half_max = source.dtype == Dtype::bf16 ? 0x1.FEp127f : 65504.0f;
  const float input_max = source.dtype == Dtype::fp32 ? kFloatMax : half_max;
  const float* amax = prepare_amax(spec, source, output, queue);
  if (source.rows > 0 && source.cols > 0)
    launch_element({spec, source, output, amax, input_max, choose_path(source, spec.tile_rows)}, queue);
  if (spec.family != Family::current || !output.scales) return;
  const float element_max = spec.element == Element::e4m3 ? max_of<E4M3>() : max_of<E5M2>();
  finish_current<<<1, 1, 0, queue>>>(spec, element_max, amax, static_cast<float*>(output.scales));
  check(cudaGetLastError());
}

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace hq
