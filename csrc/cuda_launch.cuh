// What the launches for one matrix and for a group have in common: the call as a kernel's argument, errors of CUDA, where
// global amaxes stand, and the scales of current scaling.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda_body.cuh"
#include "quantize.h"

namespace hq {

inline void check(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("hqsweep._C.quantize_cuda: ") + cudaGetErrorString(status));
}

inline bool aligned(const Direction& to, int64_t cols) {
  const uintptr_t together = reinterpret_cast<uintptr_t>(to.codes) | reinterpret_cast<uintptr_t>(to.exact);
  return cols % 16 == 0 && together % 16 == 0;
}

inline bool global_family(const Spec& spec) { return spec.family == Family::current || spec.family == Family::nvfp4; }
inline bool plain(const Spec& spec) { return !spec.rht && !spec.row_scaled; }

inline bool wants_sums(const Direction* to) { return to && (to->sums || to->row_errors); }
inline bool wants_sums(const Job& job) {
  return wants_sums(job.has_row ? &job.row : nullptr) || wants_sums(job.has_column ? &job.column : nullptr);
}

inline Job job_of(const Source& x, const Direction* row, const Direction* column, bool dequantized) {
  Job job{};
  job.source = x;
  if (row) job.row = *row, job.row_facts = facts_of(row->spec.element);
  if (column) job.column = *column, job.column_facts = facts_of(column->spec.element);
  job.has_row = row != nullptr;
  job.has_column = column != nullptr;
  job.dequantized = dequantized;
  const int64_t row_bytes = x.row_stride * (x.dtype == Dtype::fp32 ? 4 : 2);
  job.vector_in = x.col_stride == 1 && row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  job.vector_row = row && aligned(*row, x.cols);
  job.vector_column = column && aligned(*column, x.rows);
  return job;
}

// Whether the encoder of cuda_lean.cuh takes the tiles of a job: X's columns are whole ones, its rows may end anywhere.
inline bool lean(const Job& job) {
  const Source& x = job.source;
  const bool vector_column = job.has_column && aligned(job.column, 16);
  return x.dtype == Dtype::bf16 && job.vector_in && x.cols % kTile == 0 && !job.find_row && !job.find_column &&
         (!job.has_row || lean(job.row, job.vector_row)) && (!job.has_column || lean(job.column, vector_column));
}

// The job of a pass that only finds the amaxes of the row or the column.
inline Job finding(Job job, bool column) {
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

// A direction's global amax, `count` of them: where it stands once the work enqueued so far has run. find(job, column)
// enqueues a pass that raises `found`.
template <class Find>
void prepare(Job& job, bool column, int64_t count, cudaStream_t stream, const Find& find) {
  Direction& to = column ? job.column : job.row;
  if (!(column ? job.has_column : job.has_row) || !global_family(to.spec)) return;
  const size_t bytes = sizeof(float) * static_cast<size_t>(count);
  if (!to.amax) {
    const Direction& row = job.row;
    const bool shared = column && job.has_row && !job.dequantized && global_family(row.spec) && plain(row.spec) &&
                        plain(to.spec) && row.amax == row.found;
    if (shared) {
      to.amax = row.amax;
    } else {
      check(cudaMemsetAsync(to.found, 0, bytes, stream));
      find(job, column);
      to.amax = to.found;
      job.backwards = true;
    }
  }
  if (to.global && to.global != to.amax)
    check(cudaMemcpyAsync(to.global, to.amax, bytes, cudaMemcpyDeviceToDevice, stream));
}

// Current scaling stores what multiplies codes back, for each of `count` matrices.
static __global__ void store_scale_inv(const __grid_constant__ Spec spec, const float* amax, float* scale_inv,
                                       int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const float most = facts_of(spec.element).max;
  if (i < count) scale_inv[i] = 1.0f / fp8_scale(amax[i], most, spec.amax_epsilon, spec.pow2, kFloatMax);
}

inline void finish(const Direction& to, int64_t count, cudaStream_t stream) {
  if (to.spec.family != Family::current || !to.scales || count == 0) return;
  const unsigned threads = count < 128 ? static_cast<unsigned>(count) : 128;
  store_scale_inv<<<static_cast<unsigned>(ceil_div(count, threads)), threads, 0, stream>>>(
      to.spec, to.amax, static_cast<float*>(to.scales), count);
  check(cudaGetLastError());
}

}  // namespace hq
