// CUDA quantization: both directions of a tile of 128 x 128 elements from one read of it, for every format. A thread
// block loads its tile once; rows are encoded from registers, columns through shared memory, to which the row encoder
// puts decoded values where the column is made from those. The arithmetic is numerics.h, so the bytes are the CPU's.
// Everything is enqueued on the caller's stream; global amaxes that are not given are found in passes before.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda_amax.cuh"
#include "cuda_direction.cuh"
#include "cuda_lean.cuh"
#include "cuda_tile.cuh"
#include "quantize.h"

namespace hq {
namespace {

struct Job {
  Source source;
  Direction row, column;
  bool has_row, has_column;    // take part in this launch
  bool find_row, find_column;  // only their amaxes
  ElementFacts row_facts, column_facts;
  bool dequantized;
  bool vector_in;                  // X's rows are contiguous and 16-byte aligned
  bool vector_row, vector_column;  // the same of the outputs
  bool backwards;  // last tiles first: what a pass before has just read is still in the L2 cache
};

__device__ __forceinline__ Frame frame_of(const Job& job, const Direction& to, bool columns, int64_t r0, int64_t c0,
                                          int64_t tile) {
  const Source& x = job.source;
  const float half_max = x.dtype == Dtype::bf16 ? Bf16::kMax : Fp16::kMax;
  return {columns ? x.cols : x.rows, columns ? x.rows : x.cols, columns ? c0 : r0, columns ? r0 : c0,
          columns ? job.vector_column : job.vector_row, x.dtype == Dtype::fp32 ? Fp32::kMax : half_max, to.amax, tile};
}

// The tile whose number in X, along its rows of tiles, a thread block has.
struct Corner {
  int64_t index, r0, c0;
};

__device__ __forceinline__ Corner corner_of(const Job& job) {
  const int64_t index = job.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t across = static_cast<uint32_t>((job.source.cols + kTile - 1) / kTile);
  const uint32_t down = static_cast<uint32_t>(index) / across;
  return {index, static_cast<int64_t>(down) * kTile, static_cast<int64_t>(static_cast<uint32_t>(index) - down * across) * kTile};
}

// W: words of the tile, Bf16 for bf16 sources and Fp32 for the others.
template <class W, bool kSums>
__global__ void __launch_bounds__(kThreads, W::kPack == 1 ? 3 : (kSums ? 3 : 4))
    quantize_tiles(const __grid_constant__ Job job) {
  extern __shared__ uint4 shared[];
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  const Corner at = corner_of(job);
  load_tile<W>(job.source, at.r0, at.c0, job.vector_in, tile);
  const Dtype dtype = job.source.dtype;
  const bool replace = job.has_column && job.dequantized;
  // A thread takes segments of rows that it has put there itself, and replaces them; columns need everybody's.
  if (job.has_row)
    run_direction<RowOrder, W, kSums>(job.row, job.find_row, frame_of(job, job.row, false, at.r0, at.c0, at.index), tile, replace,
                                      dtype);
  if (!job.has_column) return;
  __syncthreads();
  run_direction<ColumnOrder, W, kSums>(job.column, job.find_column, frame_of(job, job.column, true, at.r0, at.c0, at.index), tile,
                                       false, dtype);
}

__device__ __forceinline__ bool tiled(const Direction& to) { return to.spec.tile_rows > 1; }
__device__ __forceinline__ bool nvfp4(const Direction& to) { return to.spec.family == Family::nvfp4; }

// Whole tiles of bf16 in the formats and with the outputs of cuda_lean.cuh.
template <bool kSums>
__global__ void __launch_bounds__(kThreads, kSums ? 3 : 4) quantize_lean(const __grid_constant__ Job job) {
  extern __shared__ uint4 shared[];
  __shared__ Nvfp4Scales scales[2];
  __shared__ float strips[8][8];
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  const uint32_t x = job.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t y = job.backwards ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
  const uint32_t r0 = y * kTile, c0 = x * kTile;
  const auto rows = static_cast<uint32_t>(job.source.rows), cols = static_cast<uint32_t>(job.source.cols);
  const bool replace = job.has_column && job.dequantized;
  const bool row_tiled = job.has_row && tiled(job.row), column_tiled = job.has_column && tiled(job.column);
  const bool row_scales = job.has_row && nvfp4(job.row), column_scales = job.has_column && nvfp4(job.column);
  load_tile_async(job.source, r0, c0, tile);
  if (threadIdx.x < 128) {
    if (row_scales) fill_scales(job.row, scales[0], threadIdx.x);
  } else {
    if (column_scales) fill_scales(job.column, scales[1], threadIdx.x - 128);
  }
  wait_tile();
  bool nan = false;
  if (row_tiled || (column_tiled && !replace))
    nan = find_strips(tile, strips);
  else if (row_scales)
    __syncthreads();
  LeanSide side{job.row, job.row_facts, r0, c0, cols, scales[0], strips, nan, replace};
  if constexpr (kSums) {
    __shared__ TallySpace space[2];
    const bool shares = job.has_row && !replace && !job.row.spec.rht && !job.column.spec.rht;
    if (job.has_row) {
      Tally tally(space[0], true);
      run_lean<RowOrder>(side, tile, tally);
      tally.leave();
    }
    __syncthreads();
    if (job.has_column) {
      if (column_tiled && replace) nan = find_strips(tile, strips);
      Tally tally(space[1], !shares);
      run_lean<ColumnOrder>({job.column, job.column_facts, c0, r0, rows, scales[1], strips, nan, false}, tile, tally);
      tally.leave();
      __syncthreads();
    }
    const int64_t index = static_cast<int64_t>(r0 / kTile) * (cols / kTile) + c0 / kTile;
    if (threadIdx.x < kTile) {
      if (job.has_row) finish_tally(space[0], space[0], job.row, index, r0, c0, cols, threadIdx.x);
    } else if (job.has_column) {
      finish_tally(space[1], space[shares ? 0 : 1], job.column, index, c0, r0, rows, threadIdx.x - kTile);
    }
  } else {
    NoTally none;
    if (job.has_row) run_lean<RowOrder>(side, tile, none);
    if (!job.has_column) return;
    __syncthreads();
    if (column_tiled && replace) nan = find_strips(tile, strips);
    run_lean<ColumnOrder>({job.column, job.column_facts, c0, r0, rows, scales[1], strips, nan, false}, tile, none);
  }
}

// Current scaling stores what multiplies codes back.
__global__ void store_scale_inv(const __grid_constant__ Spec spec, const float* amax, float* scale_inv) {
  const float most = facts_of(spec.element).max;
  *scale_inv = 1.0f / fp8_scale(*amax, most, spec.amax_epsilon, spec.pow2, kFloatMax);
}

// ---- launches ------------------------------------------------------------------------------------------------------

void check(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("hqsweep._C.quantize_cuda: ") + cudaGetErrorString(status));
}

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

template <bool kSums>
void launch_lean(const Job& job, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(job.source.cols / kTile), static_cast<unsigned>(job.source.rows / kTile));
  quantize_lean<kSums><<<grid, kThreads, kTileBytes<Bf16>, stream>>>(job);
  check(cudaGetLastError());
}

bool lean(const Job& job) {
  const Source& x = job.source;
  return x.dtype == Dtype::bf16 && job.vector_in && x.rows > 0 && x.cols > 0 && !job.find_row && !job.find_column &&
         (!job.has_row || lean(job.row, x.rows, x.cols, job.vector_row)) &&
         (!job.has_column || lean(job.column, x.cols, x.rows, job.vector_column));
}

void launch(const Job& job, cudaStream_t stream) {
  const bool sums = (job.has_row && (job.row.sums || job.row.row_errors)) ||
                    (job.has_column && (job.column.sums || job.column.row_errors));
  if (lean(job)) return sums ? launch_lean<true>(job, stream) : launch_lean<false>(job, stream);
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

bool aligned(const Direction& to, int64_t cols) {
  const uintptr_t together = reinterpret_cast<uintptr_t>(to.codes) | reinterpret_cast<uintptr_t>(to.exact);
  return cols % 16 == 0 && together % 16 == 0;
}

// The call with X's contiguous axis along its rows: for column-major X the directions change places.
Job arrange(const Call& call) {
  Job job{};
  job.source = call.source;
  const Direction *row = call.row, *column = call.column;
  Source& x = job.source;
  const bool turn = x.row_stride == 1 && x.col_stride != 1 && !call.dequantized && !(row && (row->sums || row->row_errors)) &&
                    !(column && (column->sums || column->row_errors));
  if (turn) {
    x = {x.data, x.dtype, x.cols, x.rows, x.col_stride, x.row_stride};
    std::swap(row, column);
  }
  if (row) job.row = *row, job.row_facts = facts_of(row->spec.element);
  if (column) job.column = *column, job.column_facts = facts_of(column->spec.element);
  job.has_row = row != nullptr;
  job.has_column = column != nullptr;
  job.dequantized = call.dequantized;
  const int64_t row_bytes = x.row_stride * (x.dtype == Dtype::fp32 ? 4 : 2);
  job.vector_in = x.col_stride == 1 && row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  job.vector_row = row && aligned(*row, x.cols);
  job.vector_column = column && aligned(*column, x.rows);
  return job;
}

bool global_family(const Spec& spec) { return spec.family == Family::current || spec.family == Family::nvfp4; }
bool plain(const Spec& spec) { return !spec.rht && !spec.row_scaled; }

// found = max(found, amax) for the row or the column of a job.
void find(Job job, bool column, cudaStream_t stream) {
  const Direction& to = column ? job.column : job.row;
  const bool from_row = column && job.dequantized;
  if (!from_row && plain(to.spec) && find_in_one_piece(job.source, to.found, stream)) return;
  job.find_row = !column, job.find_column = column;
  job.has_row = from_row || !column;
  job.has_column = column;
  if (from_row) {
    job.row.codes = nullptr, job.row.exact = nullptr, job.row.scales = nullptr;
    job.row.sums = nullptr, job.row.row_errors = nullptr;
  }
  launch(job, stream);
}

// A direction's global amax: where it stands once the work enqueued so far has run.
void prepare(Job& job, bool column, cudaStream_t stream) {
  Direction& to = column ? job.column : job.row;
  if (!(column ? job.has_column : job.has_row) || !global_family(to.spec)) return;
  const int64_t rows = column ? job.source.cols : job.source.rows;
  const size_t bytes = sizeof(float) * (to.spec.row_scaled ? static_cast<size_t>(rows) : 1);
  if (!to.amax) {
    const Direction& row = job.row;
    const bool shared = column && job.has_row && !job.dequantized && global_family(row.spec) && plain(row.spec) &&
                        plain(to.spec) && row.amax == row.found;
    if (shared) {
      to.amax = row.amax;
    } else {
      check(cudaMemsetAsync(to.found, 0, bytes, stream));
      find(job, column, stream);
      to.amax = to.found;
      job.backwards = true;
    }
  }
  if (to.global && to.global != to.amax)
    check(cudaMemcpyAsync(to.global, to.amax, bytes, cudaMemcpyDeviceToDevice, stream));
}

void finish(const Direction& to, cudaStream_t stream) {
  if (to.spec.family != Family::current || !to.scales) return;
  store_scale_inv<<<1, 1, 0, stream>>>(to.spec, to.amax, static_cast<float*>(to.scales));
  check(cudaGetLastError());
}

}  // namespace

void quantize_cuda(const Call& call, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  Job job = arrange(call);
  prepare(job, false, queue);
  prepare(job, true, queue);
  launch(job, queue);
  if (lean(job)) return;  // it has stored the scales of current scaling itself
  if (job.has_row) finish(job.row, queue);
  if (job.has_column) finish(job.column, queue);
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
