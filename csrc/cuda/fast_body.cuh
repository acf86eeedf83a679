// What a thread block does with a tile of bf16 in the fast encoder (fast.cuh): both directions from shared memory, in
// launches for one matrix and for the experts of a group.
#pragma once
#include <cuda_runtime.h>

#include "cuda/choose.cuh"
#include "cuda/fast.cuh"
#include "cuda/job.cuh"

namespace hq {

struct FastSpace {
  Nvfp4Scales scales[2];
  float strips[8][8];
};

// One shared allocation for all code that a kernel may run on a tile.
static __device__ __forceinline__ FastSpace& fast_space() {
  __shared__ FastSpace space;
  return space;
}

// Exact columns, which threads have put into the tile, at the places of X's own elements.
__device__ __forceinline__ void store_turned(const QuantizeJob& job, const FastCorner& at, const uint32_t* tile) {
  const uint64_t cols = job.source.cols;
  __syncthreads();
  store_tile(tile, static_cast<uint16_t*>(job.column.exact) + at.first + at.r0 * cols + at.c0, cols, at.rows - at.r0,
             at.end - at.c0);
}

// A tile of bf16, on its way to shared memory, in the formats and with the outputs of fast.cuh.
template <bool kSums, Part kPart, bool kChooses = false>
__device__ __forceinline__ void run_fast_tile(const QuantizeJob& job, const FastTile& here, uint32_t* tile) {
  Nvfp4Scales(&scales)[2] = fast_space().scales;
  float(&strips)[8][8] = fast_space().strips;
  const FastCorner& at = here.at;
  const uint32_t cols = static_cast<uint32_t>(job.source.cols);
  const bool replace = job.has_column && job.dequantized;
  const bool row_tiled = job.has_row && has_tall_scale_tiles(job.row), column_tiled = job.has_column && has_tall_scale_tiles(job.column);
  const bool row_scales = job.has_row && is_nvfp4(job.row), column_scales = job.has_column && is_nvfp4(job.column);
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
  const FastSide row{job.row, job.row_facts, at.r0, at.c0, cols, scales[0], strips, nan, replace, here.row.amax,
                     at.rows, at.end, here.row.key, at.first, here.row.first_scale};
  // Made after the rows, which may change strips and nan.
  const auto column = [&] {
    return FastSide{job.column, job.column_facts, at.c0, at.r0, at.rows, scales[1], strips, nan, false,
                    here.column.amax, at.end, at.rows, here.column.key, at.first, here.column.first_scale};
  };
  if constexpr (kSums) {
    __shared__ TallySpace space[2];
    const bool shares = job.has_row && !replace && !job.row.spec.rht && !job.column.spec.rht;
    if (job.has_row) {
      Tally tally(space[0], true);
      run_fast<RowOrder, kPart, kChooses>(row, tile, tally);
      tally.leave();
    }
    __syncthreads();
    if (job.has_column) {
      if (column_tiled && replace) nan = find_strips(tile, strips);
      Tally tally(space[1], !shares);
      run_fast<ColumnOrder, kPart, kChooses>(column(), tile, tally);
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
    if (job.has_row) run_fast<RowOrder, kPart, kChooses>(row, tile, none);
    if (!job.has_column) return;
    __syncthreads();
    if (column_tiled && replace) nan = find_strips(tile, strips);
    run_fast<ColumnOrder, kPart, kChooses>(column(), tile, none);
    if constexpr (kPart != Part::matrix) {
      if (job.column.exact && job.column.exact_turned) store_turned(job, at, tile);
    }
  }
}

// A tile of a matrix, or of an expert, which may end within it.
template <bool kChooses = false>
__device__ __forceinline__ void run_any_tile(const QuantizeJob& job, const FastTile& here, uint32_t* tile) {
  if (is_whole_tile(job, here.at))
    run_fast_tile<false, Part::whole, kChooses>(job, here, tile);
  else
    run_fast_tile<false, Part::ragged, kChooses>(job, here, tile);
}

}  // namespace hq
