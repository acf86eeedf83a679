// The host's part of quantization, for one matrix and for a group: the call as a kernel's argument, the passes that find
// global amaxes, and the scales of current scaling. What differs is a `Launch`: MatrixLaunch (quantize.cu) or GroupLaunch
// (quantize_grouped.cu), with
//   stream, matrices             where work is enqueued; 1, or the number of experts
//   encode(job)                  enqueues the kernel that cuda/choose.cuh names
//   find_dense(job, found)       enqueues a search of all X for `found`, if its kernel takes X; whether it did
//   find_columns(job, own)       the same of the columns under the Hadamard transform, and of all X for `own`, or null
//   stores_scale_inv(job)        whether encode stores the scales of current scaling
#pragma once
#include <cuda_runtime.h>

#include "cuda/check.cuh"
#include "cuda/choose.cuh"
#include "cuda/elements.cuh"
#include "cuda/job.cuh"
#include "cuda/store.cuh"
#include "quantize.h"

namespace hq {

inline void check(cudaError_t status) { check(status, "quantize_cuda"); }

inline QuantizeJob job_of(const Source& x, const Direction* row, const Direction* column, bool dequantized) {
  QuantizeJob job{};
  job.source = x;
  if (row) job.row = *row, job.row_facts = facts_of(row->spec.element);
  if (column) job.column = *column, job.column_facts = facts_of(column->spec.element);
  job.has_row = row != nullptr;
  job.has_column = column != nullptr;
  job.dequantized = dequantized;
  const int64_t row_bytes = x.row_stride * (x.dtype == Dtype::fp32 ? 4 : 2);
  job.vector_in = x.col_stride == 1 && row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  job.vector_row = row && stores_segments(*row, x.cols);
  job.vector_column = column && stores_segments(*column, x.rows);
  return job;
}

// The job of a pass that only finds the amaxes of the row or the column.
inline QuantizeJob finding(QuantizeJob job, bool column) {
  const bool from_row = column && job.dequantized;
  job.find_row = !column, job.find_column = column;
  job.has_row = from_row || !column;
  job.has_column = column;
  if (from_row) {
    job.row.codes = nullptr, job.row.exact = nullptr, job.row.scales = nullptr;
    job.row.sums = nullptr, job.row.row_errors = nullptr;
  }
  return job;
}

// found = max(found, amax) for the row or the column of a job.
template <class Launch>
void find_amax(const QuantizeJob& job, bool column, const Launch& launch) {
  const Direction& to = column ? job.column : job.row;
  const bool from_row = column && job.dequantized;
  if (!from_row && amax_is_of_x(to.spec) && launch.find_dense(job, to)) return;
  if (column && launch.find_columns(job, nullptr)) return;
  launch.encode(finding(job, column));
}

// A direction's global amaxes: where they stand once the work enqueued so far has run.
template <class Launch>
void prepare(QuantizeJob& job, bool column, const Launch& launch) {
  Direction& to = column ? job.column : job.row;
  if (!(column ? job.has_column : job.has_row) || !has_global_amax(to.spec)) return;
  const int64_t rows = column ? launch.matrices * job.source.cols : job.source.rows;  // of the operands
  const size_t bytes = sizeof(float) * static_cast<size_t>(to.spec.row_scaled ? rows : launch.matrices);
  if (!to.amax) {
    if (column && column_shares_amax(job)) {
      to.amax = job.row.amax;
    } else {
      check(cudaMemsetAsync(to.found, 0, bytes, launch.stream));
      int32_t* const seen = to.seen;
      to.seen = nullptr;
      find_amax(job, column, launch);
      to.seen = seen;
      to.amax = to.found;
      job.backwards = true;
    }
  }
  if (to.global && to.global != to.amax)
    check(cudaMemcpyAsync(to.global, to.amax, bytes, cudaMemcpyDeviceToDevice, launch.stream));
}

// Current scaling stores what multiplies codes back, for each of `count` matrices or rows.
static __global__ void store_scale_inv(const __grid_constant__ Spec spec, const float* amax, float* scale_inv,
                                       int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const float most = facts_of(spec.element).max;
  if (i < count) scale_inv[i] = 1.0f / fp8_scale(amax[i], most, spec.amax_epsilon, spec.pow2, kFloatMax);
}

// rows: of the operands.
inline void store_current_scales(const Direction& to, int64_t matrices, int64_t rows, cudaStream_t stream) {
  const int64_t count = to.spec.row_scaled ? rows : matrices;
  if (to.spec.family != Family::current || !to.scales || count == 0) return;
  const unsigned threads = count < 128 ? static_cast<unsigned>(count) : 128;
  store_scale_inv<<<static_cast<unsigned>(ceil_div(count, threads)), threads, 0, stream>>>(
      to.spec, to.amax, static_cast<float*>(to.scales), count);
  check(cudaGetLastError());
}

// Amaxes of rows and of columns from one read of X.
template <class Launch>
void prepare_lines(QuantizeJob& job, const Launch& launch) {
  if (!finds_lines(job)) return;
  const int64_t columns = launch.matrices * job.source.cols;
  check(cudaMemsetAsync(job.row.found, 0, sizeof(float) * static_cast<size_t>(job.source.rows), launch.stream));
  check(cudaMemsetAsync(job.column.found, 0, sizeof(float) * static_cast<size_t>(columns), launch.stream));
  QuantizeJob search = job;
  search.find_row = search.find_column = true;
  search.row.seen = search.column.seen = nullptr;
  launch.encode(search);
  job.row.amax = job.row.found, job.column.amax = job.column.found;
  job.backwards = true;
}

static __global__ void clear_both(float* a, float* b) { *a = 0.0f, *b = 0.0f; }

// Both directions' amaxes from one read of X, where its columns are transformed.
template <class Launch>
void prepare_both(QuantizeJob& job, const Launch& launch) {
  if (launch.matrices != 1 || !finds_both_amaxes(job)) return;
  clear_both<<<1, 1, 0, launch.stream>>>(job.row.found, job.column.found);
  check(cudaGetLastError());
  if (!launch.find_columns(job, job.row.found)) return;
  job.row.amax = job.row.found, job.column.amax = job.column.found;
  job.backwards = true;
}

template <class Launch>
void quantize(QuantizeJob job, const Launch& launch) {
  prepare_both(job, launch);
  prepare_lines(job, launch);
  prepare(job, false, launch);
  prepare(job, true, launch);
  launch.encode(job);
  if (launch.stores_scale_inv(job)) return;
  const int64_t rows = job.source.rows, columns = launch.matrices * job.source.cols;
  if (job.has_row) store_current_scales(job.row, launch.matrices, rows, launch.stream);
  if (job.has_column) store_current_scales(job.column, launch.matrices, columns, launch.stream);
}

// found = max(found, amax) for each direction that has `found`.
template <class Launch>
void find_amaxes(QuantizeJob job, const Launch& launch) {
  if (job.has_row && job.row.found) find_amax(job, false, launch);
  if (!job.has_column || !job.column.found) return;
  if (job.dequantized && !job.row.amax) job.row.amax = job.row.found;
  find_amax(job, true, launch);
}

}  // namespace hq
