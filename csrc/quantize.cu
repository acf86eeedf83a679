// CUDA quantization of one matrix: both directions of a tile of 128 x 128 elements from one read of it (cuda_body.cuh),
// for every format. The arithmetic is numerics.h, so the bytes are the CPU's. Everything is enqueued on the caller's
// stream; global amaxes that are not given are found in passes before.
#include <cuda_runtime.h>

#include <stdexcept>
#include <utility>

#include "cuda_amax.cuh"
#include "cuda_body.cuh"
#include "cuda_launch.cuh"
#include "cuda_mx_flat.cuh"
#include "quantize.h"

namespace hq {
namespace {

__device__ __forceinline__ Corner corner_of(const Job& job) {
  const int64_t index = job.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t across = static_cast<uint32_t>((job.source.cols + kTile - 1) / kTile);
  const uint32_t down = static_cast<uint32_t>(index) / across;
  return {0, job.source.rows, static_cast<int64_t>(down) * kTile,
          static_cast<int64_t>(static_cast<uint32_t>(index) - down * across) * kTile, index};
}

template <class W, bool kSums>
__global__ void __launch_bounds__(kThreads, W::kPack == 1 ? 3 : (kSums ? 3 : 4))
    quantize_tiles(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) uint4 shared[];
  const Corner at = corner_of(job);
  const Frame row = frame_of(job, false, at, job.vector_row, job.row.key, Starts{});
  const Frame column = frame_of(job, true, at, job.vector_column, job.column.key, Starts{});
  run_tile<W, kSums>(job, at, row, column, reinterpret_cast<uint32_t*>(shared));
}

__device__ __forceinline__ LeanTile lean_tile_of(const Job& job) {
  const uint32_t x = job.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t y = job.backwards ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
  return {{0, static_cast<uint32_t>(job.source.rows), y * kTile, x * kTile, 0},
          {job.row.amax, job.row.key, 0},
          {job.column.amax, job.column.key, 0}};
}

template <bool kRagged>
__device__ __forceinline__ void load_matrix_tile(const Source& source, const LeanCorner& at, uint32_t* tile) {
  if constexpr (kRagged)
    load_rows_async(source, at.r0, at.c0, at.rows - at.r0, tile);
  else
    load_tile_async<false>(source, at.r0, at.c0, kTile, tile);
}

// kRagged: the last rows are no whole tiles, or columns no whole segments.
template <bool kExact, bool kRagged>
__global__ void __launch_bounds__(kThreads, kMxBlocks<kExact, kRagged>) quantize_mx(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) uint4 shared[];
  const LeanTile here = lean_tile_of(job);
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  load_matrix_tile<kRagged>(job.source, here.at, tile);
  if constexpr (kRagged)
    run_any_mx_tile<kExact>(job, here, tile);
  else
    run_mx_tile<kExact, Part::matrix>(job, here, tile);
}

template <bool kSums, bool kRagged>
__global__ void __launch_bounds__(kThreads, kSums ? 3 : 4) quantize_lean(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) uint4 shared[];
  const LeanTile here = lean_tile_of(job);
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  load_matrix_tile<kRagged>(job.source, here.at, tile);
  if constexpr (kRagged)
    run_any_tile(job, here, tile);
  else
    run_lean_tile<kSums, Part::matrix>(job, here, tile);
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class W, bool kSums>
void launch_tiles(const Job& job, cudaStream_t stream) {
  const int64_t grid = ceil_div(job.source.rows, kTile) * ceil_div(job.source.cols, kTile);
  if (grid == 0) return;
  if (grid > 0x7FFFFFFF) throw std::runtime_error("hqsweep._C.quantize_cuda: the matrix is too large for one launch");
  const int shared = kTileBytes<W>;
  if (shared > 48 * 1024)
    check(cudaFuncSetAttribute(quantize_tiles<W, kSums>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  quantize_tiles<W, kSums><<<static_cast<unsigned>(grid), kThreads, shared, stream>>>(job);
  check(cudaGetLastError());
}

template <bool kRagged>
void launch_lean(const Job& job, cudaStream_t stream) {
  const Source& x = job.source;
  const dim3 grid(static_cast<unsigned>(x.cols / kTile), static_cast<unsigned>(ceil_div(x.rows, kTile)));
  const auto enqueue = [&](auto kernel) {
    kernel<<<grid, kThreads, kTileBytes<Bf16>, stream>>>(job);
    check(cudaGetLastError());
  };
  if constexpr (!kRagged)
    if (wants_sums(job)) return enqueue(quantize_lean<true, false>);
  if (!mx(job)) return enqueue(quantize_lean<false, kRagged>);
  decodes(job) ? enqueue(quantize_mx<true, kRagged>) : enqueue(quantize_mx<false, kRagged>);
}

// Statistics want whole tiles of rows, too, and one matrix has no exact columns by rows in this encoder.
bool lean_matrix(const Job& job) {
  const Source& x = job.source;
  constexpr int64_t most = 1 << 22;  // whose tiles fit gridDim.y
  return lean(job) && x.rows > 0 && x.cols > 0 && x.rows <= most && x.cols <= most && !job.column.exact_turned &&
         (x.rows % kTile == 0 || !wants_sums(job));
}

void launch(const Job& job, cudaStream_t stream) {
  if (mx_flat(job)) return launch_mx_flat(job, stream);
  if (lean_matrix(job))
    return job.source.rows % kTile ? launch_lean<true>(job, stream) : launch_lean<false>(job, stream);
  const bool sums = wants_sums(job);
  if (job.source.dtype == Dtype::bf16)
    return sums ? launch_tiles<Bf16, true>(job, stream) : launch_tiles<Bf16, false>(job, stream);
  sums ? launch_tiles<Fp32, true>(job, stream) : launch_tiles<Fp32, false>(job, stream);
}

// The amax of a matrix without gaps, which does not care in what order elements lie.
bool find_in_one_piece(const Source& x, float* found, cudaStream_t stream) {
  const int64_t count = x.rows * x.cols;
  const int64_t bytes = count * (x.dtype == Dtype::fp32 ? 4 : 2);
  const bool dense = (x.col_stride == 1 && x.row_stride == x.cols) || (x.row_stride == 1 && x.col_stride == x.rows);
  if (count == 0) return true;
  if (!dense || bytes % 16 || reinterpret_cast<uintptr_t>(x.data) % 16) return false;
  const int64_t units = bytes / 16, full = ceil_div(units, kAmaxThreads * kAmaxUnits);
  const unsigned grid = static_cast<unsigned>(full < 65536 ? full : 65536);
  const uint4* data = static_cast<const uint4*>(x.data);
  switch (x.dtype) {
    case Dtype::fp32: find_flat<Fp32><<<grid, kAmaxThreads, 0, stream>>>(data, units, found); break;
    case Dtype::bf16: find_flat<Bf16><<<grid, kAmaxThreads, 0, stream>>>(data, units, found); break;
    case Dtype::fp16: find_flat<Fp16><<<grid, kAmaxThreads, 0, stream>>>(data, units, found); break;
  }
  check(cudaGetLastError());
  return true;
}

// The call with X's contiguous axis along its rows: for column-major X the directions change places.
Job arrange(const Call& call) {
  const Direction *row = call.row, *column = call.column;
  Source x = call.source;
  const bool turn =
      x.row_stride == 1 && x.col_stride != 1 && !call.dequantized && !wants_sums(row) && !wants_sums(column);
  if (turn) {
    x = {x.data, x.dtype, x.cols, x.rows, x.col_stride, x.row_stride};
    std::swap(row, column);
  }
  return job_of(x, row, column, call.dequantized);
}

// found = max(found, amax) for the row or the column of a job.
void find(const Job& job, bool column, cudaStream_t stream) {
  const Direction& to = column ? job.column : job.row;
  const bool from_row = column && job.dequantized;
  if (!from_row && plain(to.spec) && find_in_one_piece(job.source, to.found, stream)) return;
  launch(finding(job, column), stream);
}

}  // namespace

void quantize_cuda(const Call& call, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  Job job = arrange(call);
  const auto search = [queue](const Job& job, bool column) { find(job, column, queue); };
  prepare(job, false, job.row.spec.row_scaled ? job.source.rows : 1, queue, search);
  prepare(job, true, job.column.spec.row_scaled ? job.source.cols : 1, queue, search);
  launch(job, queue);
  if (lean_matrix(job) && job.source.rows % kTile == 0) return;  // its first tile has stored the scales of current scaling
  if (job.has_row) finish(job.row, 1, queue);
  if (job.has_column) finish(job.column, 1, queue);
}

void find_amax_cuda(const Call& call, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  Job job = arrange(call);
  if (job.has_row && job.row.found) find(job, false, queue);
  if (!job.has_column || !job.column.found) return;
  if (job.dequantized && !job.row.amax) job.row.amax = job.row.found;
  find(job, true, queue);
}

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace hq
