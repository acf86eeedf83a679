// What a thread block does with its tile, in launches for one matrix and for the experts of a group: both directions of
// 128 x 128 elements from one read of them. Rows are encoded from registers, columns through shared memory, to which the
// row encoder puts decoded values where the column is made from those.
#pragma once
#include <cuda_runtime.h>

#include "cuda_direction.cuh"
#include "cuda_lean.cuh"
#include "cuda_tile.cuh"
#include "group.h"
#include "quantize.h"

namespace hq {

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

// Rows of X that are one matrix, and the tile of it that a thread block has.
struct Corner {
  int64_t begin, rows;    // of X; their number
  int64_t r0, c0, index;  // from `begin`; the tile's number along rows of tiles
};

__device__ __forceinline__ Frame frame_of(const Job& job, bool columns, const Corner& at, bool vector, const Key& key,
                                          const Starts& starts) {
  const Source& x = job.source;
  const float half_max = x.dtype == Dtype::bf16 ? Bf16::kMax : Fp16::kMax;
  return {columns ? x.cols : at.rows,
          columns ? at.rows : x.cols,
          columns ? at.c0 : at.r0,
          columns ? at.r0 : at.c0,
          vector,
          x.dtype == Dtype::fp32 ? Fp32::kMax : half_max,
          (columns ? job.column : job.row).amax + starts.amax,
          at.index,
          key,
          starts};
}

// Any format, dtype, shape and strides. W: words of the tile, Bf16 for bf16 sources and Fp32 for the others.
template <class W, bool kSums>
__device__ __forceinline__ void run_tile(const Job& job, const Corner& at, const Frame& row, const Frame& column,
                                         uint32_t* tile) {
  Source x = job.source;
  x.rows = at.begin + at.rows;
  load_tile<W>(x, at.begin + at.r0, at.c0, job.vector_in, tile);
  const bool replace = job.has_column && job.dequantized;
  // A thread takes segments of rows that it has put there itself, and replaces them; columns need everybody's.
  if (job.has_row) run_direction<RowOrder, W, kSums>(job.row, job.find_row, row, tile, replace, x.dtype);
  if (!job.has_column) return;
  __syncthreads();
  run_direction<ColumnOrder, W, kSums>(job.column, job.find_column, column, tile, false, x.dtype);
}

__device__ __forceinline__ bool tiled(const Direction& to) { return to.spec.tile_rows > 1; }
// No output of the columns stands in lines of its own.
__device__ __forceinline__ bool only_turned(const Direction& to) { return to.exact && to.exact_turned && !to.codes; }
__device__ __forceinline__ bool nvfp4(const Direction& to) { return to.spec.family == Family::nvfp4; }

// What differs between the experts of a launch; of one matrix, what the directions say.
struct LeanOutputs {
  const float* amax;
  Key key;
  uint64_t first_scale;
};

struct LeanCorner {
  uint32_t begin, rows, r0, c0;
  uint64_t first;  // elements of X before `begin`
};

// Where a thread block is.
struct LeanTile {
  LeanCorner at;
  LeanOutputs row, column;
};

struct LeanSpace {
  Nvfp4Scales scales[2];
  float strips[8][8];
};

// One for all that a kernel may do with a tile.
static __device__ __forceinline__ LeanSpace& lean_space() {
  __shared__ LeanSpace space;
  return space;
}

// Exact columns, which threads have put into the tile, at the places of X's own elements.
__device__ __forceinline__ void store_turned(const Job& job, const LeanCorner& at, const uint32_t* tile) {
  const uint64_t cols = job.source.cols;
  __syncthreads();
  store_tile(tile, static_cast<uint16_t*>(job.column.exact) + at.first + at.r0 * cols + at.c0, cols, at.rows - at.r0);
}

// A tile of bf16, on its way to shared memory, in the formats and with the outputs of cuda_lean.cuh.
template <bool kSums, Part kPart>
__device__ __forceinline__ void run_lean_tile(const Job& job, const LeanTile& here, uint32_t* tile) {
  Nvfp4Scales(&scales)[2] = lean_space().scales;
  float(&strips)[8][8] = lean_space().strips;
  const LeanCorner& at = here.at;
  const uint32_t cols = static_cast<uint32_t>(job.source.cols);
  const bool replace = job.has_column && job.dequantized;
  const bool row_tiled = job.has_row && tiled(job.row), column_tiled = job.has_column && tiled(job.column);
  const bool row_scales = job.has_row && nvfp4(job.row), column_scales = job.has_column && nvfp4(job.column);
  if (threadIdx.x < 128) {
    if (row_scales) fill_scales(here.row.amax, job.row.spec, scales[0], threadIdx.x);
  } else {
    if (column_scales) fill_scales(here.column.amax, job.column.spec, scales[1], threadIdx.x - 128);
  }
  wait_tile();
  bool nan = false;
  if (row_tiled || (column_tiled && !replace))
    nan = find_strips(tile, strips);
  else if (row_scales)
    __syncthreads();
  const LeanSide row{job.row, job.row_facts, at.r0, at.c0, cols, scales[0], strips, nan, replace, here.row.amax,
                     at.rows, here.row.key, at.first, here.row.first_scale};
  // With what is known once the rows are done.
  const auto column = [&] {
    return LeanSide{job.column, job.column_facts, at.c0, at.r0, at.rows, scales[1], strips, nan, false,
                    here.column.amax, cols, here.column.key, at.first, here.column.first_scale};
  };
  if constexpr (kSums) {
    __shared__ TallySpace space[2];
    const bool shares = job.has_row && !replace && !job.row.spec.rht && !job.column.spec.rht;
    if (job.has_row) {
      Tally tally(space[0], true);
      run_lean<RowOrder, kPart>(row, tile, tally);
      tally.leave();
    }
    __syncthreads();
    if (job.has_column) {
      if (column_tiled && replace) nan = find_strips(tile, strips);
      Tally tally(space[1], !shares);
      run_lean<ColumnOrder, kPart>(column(), tile, tally);
      tally.leave();
      __syncthreads();
    }
    const int64_t index = static_cast<int64_t>(at.r0 / kTile) * (cols / kTile) + at.c0 / kTile;
    if (threadIdx.x < kTile) {
      if (job.has_row) finish_tally(space[0], space[0], job.row, index, at.r0, at.c0, cols, threadIdx.x);
    } else if (job.has_column) {
      finish_tally(space[1], space[shares ? 0 : 1], job.column, index, at.c0, at.r0, at.rows, threadIdx.x - kTile);
    }
  } else {
    NoTally none;
    if (job.has_row) run_lean<RowOrder, kPart>(row, tile, none);
    if (!job.has_column) return;
    __syncthreads();
    if (column_tiled && replace) nan = find_strips(tile, strips);
    run_lean<ColumnOrder, kPart>(column(), tile, none);
    if constexpr (kPart != Part::matrix) {
      if (job.column.exact && job.column.exact_turned) store_turned(job, at, tile);
    }
  }
}

// Rows are lines of the columnwise operand, which are aligned or not.
__device__ __forceinline__ bool whole_tile(const Job& job, const LeanCorner& at) {
  const bool aligned = !job.has_column || at.rows % kSegment == 0 || only_turned(job.column);
  return aligned && at.r0 + kTile <= at.rows;
}

// A tile of rows that need not be whole tiles.
__device__ __forceinline__ void run_any_tile(const Job& job, const LeanTile& here, uint32_t* tile) {
  if (whole_tile(job, here.at))
    run_lean_tile<false, Part::whole>(job, here, tile);
  else
    run_lean_tile<false, Part::ragged>(job, here, tile);
}

}  // namespace hq
