// The general encoder: what a thread block does with its tile, for one matrix and for the experts of a group. Both
// directions of 128 x 128 elements come from one read of them: rows from registers, columns through shared memory, where
// the row encoder puts decoded values if the column is made from those.
#pragma once
#include <cuda_runtime.h>

#include "cuda/direction.cuh"
#include "cuda/job.cuh"
#include "cuda/tile.cuh"
#include "quantize.h"

namespace hq {

__device__ __forceinline__ Frame frame_of(const QuantizeJob& job, bool columns, const Corner& at, bool vector, const Key& key,
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
// kPlaced: see encode_direction.
template <class W, bool kSums, bool kPlaced>
__device__ __forceinline__ void run_tile(const QuantizeJob& job, const Corner& at, const Frame& row, const Frame& column,
                                         uint32_t* tile) {
  Source x = job.source;
  x.rows = at.begin + at.rows;
  load_tile<W>(x, at.begin + at.r0, at.c0, job.vector_in, tile);
  const bool replace = job.has_column && job.dequantized;
  // A thread reads and replaces segments of rows that it has put there itself; columns need those of all threads.
  if (job.has_row) run_direction<RowOrder, W, kSums, kPlaced>(job.row, job.find_row, row, tile, replace, x.dtype);
  if (!job.has_column) return;
  __syncthreads();
  run_direction<ColumnOrder, W, kSums, kPlaced>(job.column, job.find_column, column, tile, false, x.dtype);
}

}  // namespace hq
