// Norms on a GPU, forward and backward. Each row is read once and kept in registers; the floor is what memory passes.
// With a residual stream in fp32 and the rest in bf16, bytes an element:
//   forward  10 + 2: reads x 4 and branch 2, writes sum 4 and h 2 (without a branch: reads 4, writes 2)
//   backward 14 + 2: reads dh 2, sum 4 and dsum 4, writes dx 4 and dbranch 2 (without dbranch 14)
// and [blocks, cols] fp32 of partial sums, which are 1 % of it. A branch, or a dh, of which each rank has a summand, is read
// as these are: 2 more for each of the other ranks, where a sum in a pass of its own reads as many, reads 2 and writes 2.
#include <cuda_runtime.h>

#include "cuda/amax.cuh"
#include "cuda/check.cuh"
#include "cuda/norm.cuh"

namespace hq {
namespace {

constexpr int kFew = 4, kMany = 6;  // units of a thread
constexpr int kSlices = 32;         // of the lines of partial sums, which one thread each adds up

// h of a row in fp32, 0 where the row has no element or is not there; the sum and the statistics are stored. All threads of
// a block call it together.
template <int kUnits, bool kCentred, bool kSummed = false>
__device__ __forceinline__ void make_row(const NormForward& call, int64_t row, int units, const RowThreads& own,
                                         float* shared, RowUnits<kUnits>& x) {
  RawUnits<kUnits> x_raw, branch_raw;
  Bf16Units<kUnits> summands[2];
  ask_for_row<kUnits>(call.x, row, call.cols, units, own, x_raw);
  if constexpr (kSummed) {
    for (int rank = 0; rank < 2; ++rank)
      ask_for_summand<kUnits>(call.branch, call.of_branch, rank, call.rows, row, call.cols, units, own, summands[rank]);
  } else if (call.branch.data) {
    ask_for_row<kUnits>(call.branch, row, call.cols, units, own, branch_raw);
  }
  floats_of<kUnits>(x_raw, call.x.dtype, x);
  if (kSummed || call.branch.data) {
    RowUnits<kUnits> branch;
    if constexpr (kSummed)
      summed_row<kUnits>(call.branch, call.of_branch, summands, call.rows, row, call.cols, units, own, branch);
    else
      floats_of<kUnits>(branch_raw, call.branch.dtype, branch);
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
#pragma unroll
      for (int i = 0; i < kNormUnit; ++i)
        x[k][i] = rounded(__fadd_rn(x[k][i], rounded(branch[k][i], call.x.dtype)), call.x.dtype);
    store_row<kUnits>(x, row, call.cols, units, own, call.sum);
  }
  const float count = static_cast<float>(call.cols);
  float mean = 0.0f, squares = 0.0f;
  if constexpr (kCentred) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
#pragma unroll
      for (int i = 0; i < kNormUnit; ++i) mean = __fadd_rn(mean, x[k][i]);
    mean = __fdiv_rn(row_sum(mean, own.threads, shared), count);
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k)
#pragma unroll
    for (int i = 0; i < kNormUnit; ++i) {
      const float off = !kCentred ? x[k][i] : own.lane + k * own.threads < units ? __fsub_rn(x[k][i], mean) : 0.0f;
      squares = __fmaf_rn(off, off, squares);
    }
  const float variance = __fdiv_rn(row_sum(squares, own.threads, shared), count);
  const float rstd = __frsqrt_rn(__fadd_rn(variance, call.epsilon));
  if (own.lane == 0 && units) {
    call.statistics[row] = rstd;
    if constexpr (kCentred) call.statistics[call.rows + row] = mean;
  }
  if (!call.h.data) return;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    float gain[kNormUnit], bias[kNormUnit];
    load_unit(call.gain, own.lane + k * own.threads, units, gain);
    if constexpr (kCentred) load_unit(call.bias, own.lane + k * own.threads, units, bias);
#pragma unroll
    for (int i = 0; i < kNormUnit; ++i) {
      x[k][i] = __fmul_rn(normalized<kCentred>(x[k][i], mean, rstd), gain[i]);
      if constexpr (kCentred) x[k][i] = __fadd_rn(x[k][i], bias[i]);
    }
  }
}

template <int kUnits, bool kCentred, bool kSummed>
__global__ void __launch_bounds__(kNormThreads) norm_forward(const __grid_constant__ NormForward call, int threads) {
  __shared__ float shared[kNormThreads / 32];
  const RowThreads own = row_threads(threads);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * own.groups + own.group;
  const int units = row < call.rows ? call.cols / kNormUnit : 0;
  RowUnits<kUnits> h;
  make_row<kUnits, kCentred, kSummed>(call, row, units, own, shared, h);
  if (call.h.data) store_row<kUnits>(h, row, call.cols, units, own, call.h);
  for (int copy = 0; copy < call.copies.count; ++copy)
    store_row<kUnits>(h, row, call.cols, units, own, {call.copies.to[copy], call.h.dtype});
}

// A thread block has a strip of 16 rows, which it keeps as bf16 in shared memory: [16, cols]. A thread then has whole
// segments of columns to transform.
template <int kUnits, bool kCentred>
__global__ void __launch_bounds__(kNormThreads, 3)
    norm_measured(const __grid_constant__ NormForward call, int threads, const __grid_constant__ Amaxes found) {
  extern __shared__ __align__(16) uint2 strip[];
  __shared__ float shared[kNormThreads / 32], warps[2][kNormThreads / 32];
  const RowThreads own = row_threads(threads);
  const int units = call.cols / kNormUnit;
#pragma unroll 1
  for (int i = own.group; i < kNormStrip; i += own.groups) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kNormStrip + i;
    RowUnits<kUnits> h;
    make_row<kUnits, kCentred>(call, row, units, own, shared, h);
    store_row<kUnits>(h, row, call.cols, units, own, call.h);
    store_row<kUnits>(h, i, call.cols, units, own, {strip, Dtype::bf16});
  }
  __syncthreads();
  const uint32_t* words = reinterpret_cast<const uint32_t*>(strip);
  const int per_row = call.cols / 2;
  const float flipped = found.signs ? -0.25f : 0.25f;
  float most = 0.0f, transformed = 0.0f;
  for (int at = static_cast<int>(threadIdx.x); at < per_row; at += kNormThreads) {
    uint32_t column[kSegment];
#pragma unroll
    for (int i = 0; i < kSegment; ++i) column[i] = words[i * per_row + at];
    const Largest part = largest<Bf16>(column, kSegment);
    most = fmaxf(most, fmaxf(part.of[0], part.of[1]));
    if (found.columns)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        transformed = fmaxf(transformed, transformed_amax(column, 1, half, flipped));
  }
  raise_together(most, warps[0], kNormThreads / 32, found.own);
  if (found.columns) raise_together(round_to_bf16(transformed), warps[1], kNormThreads / 32, found.columns);
}

// The thread's sums of its columns, one group of threads after the other, as one line of partial sums.
template <int kUnits>
__device__ __forceinline__ void store_partials(const RowUnits<kUnits>& sums, int cols, const RowThreads& own,
                                               float* shared, float* line) {
  __syncthreads();  // what was stored here before has been read
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int unit = own.lane + k * own.threads;
    if (unit < cols / kNormUnit) {
      float* to = shared + own.group * cols + unit * kNormUnit;
#pragma unroll
      for (int i = 0; i < kNormUnit; ++i) to[i] = sums[k][i];
    }
  }
  __syncthreads();
  for (int col = static_cast<int>(threadIdx.x); col < cols; col += kNormThreads) {
    float sum = shared[col];
    for (int group = 1; group < own.groups; ++group) sum = __fadd_rn(sum, shared[group * cols + col]);
    line[col] = sum;
  }
}

template <int kUnits, bool kCentred, bool kSummed>
__global__ void __launch_bounds__(kNormThreads, kCentred ? 1 : 2)
    norm_backward(const __grid_constant__ NormBackward call, int threads) {
  // Groups of threads times cols is at most the threads of a block times what each can hold.
  __shared__ float shared[kNormThreads * kUnits * kNormUnit];
  const RowThreads own = row_threads(threads);
  const float count = static_cast<float>(call.cols);
  RowUnits<kUnits> dgain = {}, dbias = {};
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * own.groups; first < call.rows;
       first += static_cast<int64_t>(call.blocks) * own.groups) {
    const int64_t row = first + own.group;
    const int units = row < call.rows ? call.cols / kNormUnit : 0;
    RawUnits<kUnits> x_raw, g_raw, d_raw;
    Bf16Units<kUnits> summands[2];
    ask_for_row<kUnits>(call.sum, row, call.cols, units, own, x_raw);
    if constexpr (kSummed)
      for (int rank = 0; rank < 2; ++rank)
        ask_for_summand<kUnits>(call.dh, call.of_dh, rank, call.rows, row, call.cols, units, own, summands[rank]);
    else
      ask_for_row<kUnits>(call.dh, row, call.cols, units, own, g_raw);
    if (call.dsum.data) ask_for_row<kUnits>(call.dsum, row, call.cols, units, own, d_raw);
    const float rstd = units ? call.statistics[row] : 0.0f;
    const float mean = kCentred && units ? call.statistics[call.rows + row] : 0.0f;
    RowUnits<kUnits> x, g;
    floats_of<kUnits>(x_raw, call.sum.dtype, x);
    if constexpr (kSummed)
      summed_row<kUnits>(call.dh, call.of_dh, summands, call.rows, row, call.cols, units, own, g);
    else
      floats_of<kUnits>(g_raw, call.dh.dtype, g);
    float along = 0.0f, mean_g = 0.0f;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      float gain[kNormUnit];
      load_unit(call.gain, own.lane + k * threads, units, gain);
#pragma unroll
      for (int i = 0; i < kNormUnit; ++i) {
        x[k][i] = normalized<kCentred>(x[k][i], mean, rstd);
        dgain[k][i] = __fmaf_rn(g[k][i], x[k][i], dgain[k][i]);
        if constexpr (kCentred) dbias[k][i] = __fadd_rn(dbias[k][i], g[k][i]);
        g[k][i] = __fmul_rn(g[k][i], gain[i]);
        along = __fmaf_rn(g[k][i], x[k][i], along);
        if constexpr (kCentred) mean_g = __fadd_rn(mean_g, g[k][i]);
      }
    }
    along = __fdiv_rn(row_sum(along, threads, shared), count);
    if constexpr (kCentred) mean_g = __fdiv_rn(row_sum(mean_g, threads, shared), count);
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
#pragma unroll
      for (int i = 0; i < kNormUnit; ++i) {
        float inner = __fmaf_rn(-x[k][i], along, g[k][i]);
        if constexpr (kCentred) inner = __fsub_rn(inner, mean_g);
        x[k][i] = rounded(__fmul_rn(rstd, inner), call.dx.dtype);
      }
    if (call.dsum.data) {
      floats_of<kUnits>(d_raw, call.dsum.dtype, g);
#pragma unroll
      for (int k = 0; k < kUnits; ++k)
#pragma unroll
        for (int i = 0; i < kNormUnit; ++i) x[k][i] = rounded(__fadd_rn(x[k][i], g[k][i]), call.dx.dtype);
    }
    store_row<kUnits>(x, row, call.cols, units, own, call.dx);
    if (call.dbranch.data) store_row<kUnits>(x, row, call.cols, units, own, call.dbranch);
  }
  const int64_t line = static_cast<int64_t>(blockIdx.x) * call.cols;
  store_partials<kUnits>(dgain, call.cols, own, shared, call.partials + line);
  if constexpr (kCentred)
    store_partials<kUnits>(dbias, call.cols, own, shared,
                           call.partials + static_cast<int64_t>(call.blocks) * call.cols + line);
}

// Thread (col, slice) adds up the lines slice, slice + 32, ... of a column; then its slices are added in order. blockIdx.y:
// of the gain, or of the bias.
__global__ void __launch_bounds__(32 * kSlices) norm_add_partials(const float* partials, int blocks, int cols, float* out) {
  __shared__ float shared[kSlices][33];
  const int col = static_cast<int>(blockIdx.x) * 32 + static_cast<int>(threadIdx.x);
  const float* lines = partials + static_cast<int64_t>(blockIdx.y) * blocks * cols;
  float sum = 0.0f;
  if (col < cols)
    for (int line = static_cast<int>(threadIdx.y); line < blocks; line += kSlices)
      sum = __fadd_rn(sum, lines[static_cast<int64_t>(line) * cols + col]);
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
  for (int slice = 1; slice < kSlices; ++slice) sum = __fadd_rn(sum, shared[slice][threadIdx.x]);
  out[static_cast<int64_t>(blockIdx.y) * cols + col] = sum;
}

// The fewest threads for a row of so many units.
int threads_of(int cols) {
  int threads = 32;
  while (threads * kMany * kNormUnit < cols) threads *= 2;
  return threads;
}

bool few_units(int cols) { return threads_of(cols) * kFew * kNormUnit >= cols; }

template <bool kSummed>
auto forward_kernel(const NormForward& call) {
  if (call.bias) return few_units(call.cols) ? norm_forward<kFew, true, kSummed> : norm_forward<kMany, true, kSummed>;
  return few_units(call.cols) ? norm_forward<kFew, false, kSummed> : norm_forward<kMany, false, kSummed>;
}

template <bool kSummed>
auto backward_kernel(const NormBackward& call) {
  if (call.centred) return few_units(call.cols) ? norm_backward<kFew, true, kSummed> : norm_backward<kMany, true, kSummed>;
  return few_units(call.cols) ? norm_backward<kFew, false, kSummed> : norm_backward<kMany, false, kSummed>;
}

}  // namespace

void norm_forward_cuda(const NormForward& call, uintptr_t stream) {
  if (call.rows == 0) return;
  const int threads = threads_of(call.cols), groups = kNormThreads / threads;
  const unsigned grid = grid_of((call.rows + groups - 1) / groups, "norm_forward_cuda", kMatrixTooLarge);
  const auto kernel = call.of_branch.received ? forward_kernel<true>(call) : forward_kernel<false>(call);
  kernel<<<grid, kNormThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(call, threads);
  check(cudaGetLastError(), "norm_forward_cuda");
}

void norm_measured_cuda(const NormForward& call, const Amaxes& found, uintptr_t stream) {
  if (call.rows == 0) return;
  const auto few = call.bias ? norm_measured<kFew, true> : norm_measured<kFew, false>;
  const auto many = call.bias ? norm_measured<kMany, true> : norm_measured<kMany, false>;
  const auto kernel = few_units(call.cols) ? few : many;
  const int bytes = kNormStrip * call.cols * 2;
  if (bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "norm_measured_cuda");
  const unsigned grid = grid_of(call.rows / kNormStrip, "norm_measured_cuda", kMatrixTooLarge);
  kernel<<<grid, kNormThreads, bytes, reinterpret_cast<cudaStream_t>(stream)>>>(call, threads_of(call.cols), found);
  check(cudaGetLastError(), "norm_measured_cuda");
}

void norm_backward_cuda(const NormBackward& call, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  if (call.blocks > 0) {
    const auto kernel = call.of_dh.received ? backward_kernel<true>(call) : backward_kernel<false>(call);
    kernel<<<static_cast<unsigned>(call.blocks), kNormThreads, 0, queue>>>(call, threads_of(call.cols));
    check(cudaGetLastError(), "norm_backward_cuda");
  }
  const dim3 grid(static_cast<unsigned>((call.cols + 31) / 32), call.centred ? 2 : 1);
  norm_add_partials<<<grid, dim3(32, kSlices), 0, queue>>>(call.partials, call.blocks, call.cols, call.dgain);
  check(cudaGetLastError(), "norm_backward_cuda");
}

}  // namespace hq
