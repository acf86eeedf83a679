// CUDA quantization of one matrix: both directions of a tile of 128 x 128 elements from one read of it (body.cuh),
// for every format. The arithmetic is numerics.h, so the bytes are the CPU's. Everything is enqueued on the caller's
// stream; passes before it find the global amaxes that are not given.
#include <cuda_runtime.h>

#include <utility>

#include "cuda/amax.cuh"
#include "cuda/body.cuh"
#include "cuda/choose.cuh"
#include "cuda/fast_body.cuh"
#include "cuda/launch.cuh"
#include "cuda/mx.cuh"
#include "cuda/mx_flat.cuh"
#include "quantize.h"

namespace hq {
namespace {

__device__ __forceinline__ Corner corner_of(const QuantizeJob& job) {
  const int64_t index = job.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t across = static_cast<uint32_t>((job.source.cols + kTile - 1) / kTile);
  const uint32_t down = static_cast<uint32_t>(index) / across;
  return {0, job.source.rows, static_cast<int64_t>(down) * kTile,
          static_cast<int64_t>(static_cast<uint32_t>(index) - down * across) * kTile, index};
}

template <class W, bool kSums>
__global__ void __launch_bounds__(kThreads, W::kPack == 1 ? 3 : (kSums ? 3 : 4))
    quantize_tiles(const __grid_constant__ QuantizeJob job) {
  extern __shared__ __align__(128) uint4 shared[];
  const Corner at = corner_of(job);
  const Frame row = frame_of(job, false, at, job.vector_row, job.row.key, Starts{});
  const Frame column = frame_of(job, true, at, job.vector_column, job.column.key, Starts{});
  run_tile<W, kSums, true>(job, at, row, column, reinterpret_cast<uint32_t*>(shared));
}

__device__ __forceinline__ FastTile fast_tile_of(const QuantizeJob& job) {
  const uint32_t x = job.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t y = job.backwards ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
  return {{0, static_cast<uint32_t>(job.source.rows), y * kTile, x * kTile, 0, static_cast<uint32_t>(job.source.cols)},
          {job.row.amax, job.row.key, 0},
          {job.column.amax, job.column.key, 0}};
}

template <bool kRagged>
__device__ __forceinline__ void load_matrix_tile(const Source& source, const FastCorner& at, uint32_t* tile) {
  if constexpr (kRagged)
    load_rest_async(source, at.r0, at.c0, at.rows - at.r0, tile);
  else
    load_tile_async<false>(source, at.r0, at.c0, kTile, kTile, tile);
}

// kRagged: the last rows or columns are no whole tiles, or columns no whole segments.
template <bool kExact, bool kRagged>
__global__ void __launch_bounds__(kThreads, kMxBlocks<kExact, kRagged>) quantize_mx(const __grid_constant__ QuantizeJob job) {
  extern __shared__ __align__(128) uint4 shared[];
  const FastTile here = fast_tile_of(job);
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  load_matrix_tile<kRagged>(job.source, here.at, tile);
  if constexpr (kRagged)
    run_any_mx_tile<kExact>(job, here, tile);
  else
    run_mx_tile<kExact, Part::matrix>(job, here, tile);
}

template <bool kSums, bool kRagged>
__global__ void __launch_bounds__(kThreads, kSums ? 3 : 4) quantize_fast(const __grid_constant__ QuantizeJob job) {
  extern __shared__ __align__(128) uint4 shared[];
  const FastTile here = fast_tile_of(job);
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  load_matrix_tile<kRagged>(job.source, here.at, tile);
  if constexpr (kRagged)
    run_any_tile(job, here, tile);
  else
    run_fast_tile<kSums, Part::matrix>(job, here, tile);
}

// The same with 4over6, for rows of any number.
__global__ void __launch_bounds__(kThreads, 3) quantize_four_over_six(const __grid_constant__ QuantizeJob job) {
  extern __shared__ __align__(128) uint4 shared[];
  const FastTile here = fast_tile_of(job);
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  load_matrix_tile<true>(job.source, here.at, tile);
  run_any_tile<true>(job, here, tile);
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class W, bool kSums>
void launch_tiles(const QuantizeJob& job, cudaStream_t stream) {
  const int64_t blocks = ceil_div(job.source.rows, kTile) * ceil_div(job.source.cols, kTile);
  if (blocks == 0) return;
  const unsigned grid = grid_of(blocks, "quantize_cuda", kMatrixTooLarge);
  const int shared = kTileBytes<W>;
  if (shared > 48 * 1024)
    check(cudaFuncSetAttribute(quantize_tiles<W, kSums>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  quantize_tiles<W, kSums><<<grid, kThreads, shared, stream>>>(job);
  check(cudaGetLastError());
}

template <class Kernel>
void launch_fast(Kernel kernel, const QuantizeJob& job, cudaStream_t stream) {
  const Source& x = job.source;
  const dim3 grid(static_cast<unsigned>(ceil_div(x.cols, kTile)), static_cast<unsigned>(ceil_div(x.rows, kTile)));
  kernel<<<grid, kThreads, kTileBytes<Bf16>, stream>>>(job);
  check(cudaGetLastError());
}

void launch_mx_flat(const QuantizeJob& job, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(job.source.rows * job.source.cols, kFlatBlock));
  const auto kernel = decodes_codes(job) ? quantize_mx_flat<true> : quantize_mx_flat<false>;
  kernel<<<blocks, kThreads, kFlatBlock * 2, stream>>>(job);
  check(cudaGetLastError());
}

struct MatrixLaunch {
  cudaStream_t stream;
  static constexpr int64_t matrices = 1;

  void encode(const QuantizeJob& job) const {
    const bool sums = wants_statistics(job), ragged = !has_whole_tiles(job.source);
    const auto fast = [&](auto any, auto whole) { ragged ? launch_fast(any, job, stream) : launch_fast(whole, job, stream); };
    switch (encoder_of_matrix(job)) {
      case Encoder::mx_flat: return launch_mx_flat(job, stream);
      case Encoder::mx: return fast(quantize_mx<false, true>, quantize_mx<false, false>);
      case Encoder::mx_exact: return fast(quantize_mx<true, true>, quantize_mx<true, false>);
      case Encoder::fast:
        if (sums) return launch_fast(quantize_fast<true, false>, job, stream);
        return fast(quantize_fast<false, true>, quantize_fast<false, false>);
      case Encoder::four_over_six: return launch_fast(quantize_four_over_six, job, stream);
      case Encoder::general: break;
    }
    if (job.source.dtype == Dtype::bf16)
      return sums ? launch_tiles<Bf16, true>(job, stream) : launch_tiles<Bf16, false>(job, stream);
    sums ? launch_tiles<Fp32, true>(job, stream) : launch_tiles<Fp32, false>(job, stream);
  }

  bool find_dense(const QuantizeJob& job, const Direction& to) const {
    const Source& x = job.source;
    const int64_t count = x.rows * x.cols;
    if (count == 0) return true;
    if (!find_flat_takes(x)) return false;
    const int64_t units = count * (x.dtype == Dtype::fp32 ? 4 : 2) / 16;
    const int64_t blocks = ceil_div(units, kAmaxThreads * kAmaxUnits);
    const unsigned grid = static_cast<unsigned>(blocks < 65536 ? blocks : 65536);
    const uint4* data = static_cast<const uint4*>(x.data);
    switch (x.dtype) {
      case Dtype::fp32: find_flat<Fp32><<<grid, kAmaxThreads, 0, stream>>>(data, units, to.found, to.seen); break;
      case Dtype::bf16: find_flat<Bf16><<<grid, kAmaxThreads, 0, stream>>>(data, units, to.found, to.seen); break;
      case Dtype::fp16: find_flat<Fp16><<<grid, kAmaxThreads, 0, stream>>>(data, units, to.found, to.seen); break;
    }
    check(cudaGetLastError());
    return true;
  }

  bool find_columns(const QuantizeJob& job, float* own) const {
    const Source& x = job.source;
    if (!find_transformed_takes(job)) return false;
    const int64_t units = x.rows / kSegment * (x.cols / 4), blocks = ceil_div(units, kTransformThreads);
    const unsigned grid = static_cast<unsigned>(blocks < 65536 ? blocks : 65536);
    find_transformed<<<grid, kTransformThreads, 0, stream>>>(
        static_cast<const uint2*>(x.data), static_cast<uint32_t>(units), static_cast<uint32_t>(x.cols / 4),
        x.row_stride / 4, job.column.spec.rht_sign, own, job.column.found);
    check(cudaGetLastError());
    return true;
  }

  bool stores_scale_inv(const QuantizeJob& job) const { return encoder_stores_scale_inv(job); }
};

// The call with X's contiguous axis along its rows: for column-major X the directions change places.
QuantizeJob arrange(const Call& call) {
  const Direction *row = call.row, *column = call.column;
  Source x = call.source;
  const bool turn = x.row_stride == 1 && x.col_stride != 1 && !call.dequantized && !wants_statistics(row) &&
                    !wants_statistics(column);
  if (turn) {
    x = {x.data, x.dtype, x.cols, x.rows, x.col_stride, x.row_stride};
    std::swap(row, column);
  }
  return job_of(x, row, column, call.dequantized);
}

}  // namespace

void quantize_cuda(const Call& call, uintptr_t stream) {
  quantize(arrange(call), MatrixLaunch{reinterpret_cast<cudaStream_t>(stream)});
}

void find_amax_cuda(const Call& call, uintptr_t stream) {
  find_amaxes(arrange(call), MatrixLaunch{reinterpret_cast<cudaStream_t>(stream)});
}

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace hq
