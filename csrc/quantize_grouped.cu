// CUDA quantization of the rows of many experts in one launch. The grid has a thread block for each tile that there can
// be at most, M / 128 + experts rows of them; a block finds its expert from the offsets on the device, and those beyond
// the last tile leave. So nothing waits for the offsets, and one captured graph serves all of them. A tile is encoded by
// the code for one matrix (cuda_body.cuh), and the bytes are those of a call for each expert.
#include <cuda_runtime.h>

#include <stdexcept>

#include "cuda_amax.cuh"
#include "cuda_body.cuh"
#include "cuda_group.cuh"
#include "cuda_launch.cuh"
#include "cuda_mx.cuh"
#include "quantize.h"

namespace hq {
namespace {

struct GroupJob {
  Job job;
  Group group;
  Units units;
};

__device__ __forceinline__ Key key_of(const Direction& to, int64_t expert) {
  if (!to.keys) return to.key;
  return {__ldg(to.keys + 2 * expert), __ldg(to.keys + 2 * expert + 1), to.key.step};
}

__device__ __forceinline__ LeanTile lean_tile_of(const GroupJob& launch, const Member& member, uint32_t c0) {
  const Job& job = launch.job;
  const Before& before = member.before;
  return {{static_cast<uint32_t>(before.rows), static_cast<uint32_t>(member.rows), static_cast<uint32_t>(member.r0), c0,
           static_cast<uint64_t>(before.rows * job.source.cols)},
          {job.row.amax + before.expert, key_of(job.row, before.expert),
           static_cast<uint64_t>(before.row_units * launch.units.row_scales)},
          {job.column.amax + before.expert, key_of(job.column, before.expert),
           static_cast<uint64_t>(before.column_units * launch.units.column_scales)}};
}

template <class W, bool kSums>
__device__ __forceinline__ void run_member(const GroupJob& launch, const Member& member, int64_t c0, uint32_t* tile) {
  const Job& job = launch.job;
  const Before& before = member.before;
  const int64_t cols = job.source.cols, across = ceil_div(cols, kTile);
  const Corner at{before.rows, member.rows, member.r0, c0, member.r0 / kTile * across + c0 / kTile};
  const bool vector = job.vector_column && member.rows % 16 == 0 && before.rows * cols % 16 == 0;
  const Starts of_row = starts_of(job.row.spec, false, launch.units, before, cols);
  const Starts of_column = starts_of(job.column.spec, true, launch.units, before, cols);
  const Frame row = frame_of(job, false, at, job.vector_row, key_of(job.row, before.expert), of_row);
  const Frame column = frame_of(job, true, at, vector, key_of(job.column, before.expert), of_column);
  run_tile<W, kSums>(job, at, row, column, tile);
}

enum class Encoder { general, lean, mx, mx_exact };

template <class W, bool kSums, Encoder kEncoder>
constexpr int kBlocks = kEncoder == Encoder::mx         ? kMxBlocks<false, true>
                        : kEncoder == Encoder::mx_exact ? kMxBlocks<true, true>
                                                        : (W::kPack == 1 || kSums ? 3 : 4);

template <class W, bool kSums, Encoder kEncoder>
__global__ void __launch_bounds__(kThreads, kBlocks<W, kSums, kEncoder>)
    quantize_members(const __grid_constant__ GroupJob launch) {
  extern __shared__ __align__(128) uint4 shared[];
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  const Job& job = launch.job;
  const uint32_t index = job.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t across = static_cast<uint32_t>((job.source.cols + kTile - 1) / kTile);
  const uint32_t down = index / across, c0 = (index - down * across) * kTile;
  if constexpr (kEncoder == Encoder::general) {
    __shared__ Member member;
    if (threadIdx.x < 32) find_member(launch.group, launch.units, job.source.rows, down, member);
    __syncthreads();
    if (member.rows) run_member<W, kSums>(launch, member, c0, tile);
  } else {
    __shared__ LeanTile here;  // read where it is used, which takes no registers meanwhile
    if (threadIdx.x < 32) {
      Member mine;
      if (search(launch.group, launch.units, job.source.rows, down, mine)) here = lean_tile_of(launch, mine, c0);
    }
    __syncthreads();
    const LeanCorner& at = here.at;
    if (at.rows == 0) return;
    load_rows_async(job.source, at.begin + at.r0, c0, at.rows - at.r0, tile);
    if constexpr (kEncoder == Encoder::lean)
      run_any_tile(job, here, tile);
    else
      run_any_mx_tile<kEncoder == Encoder::mx_exact>(job, here, tile);
  }
}

// found[e] = max(found[e], amax of expert e's rows), where rows lie one after the other in units of 16 bytes. A thread
// block takes a strip of 16 rows.
constexpr int kStrip = 16;

template <class T>
__global__ void __launch_bounds__(kAmaxThreads) find_members(const __grid_constant__ GroupJob launch, float* found) {
  __shared__ Member member;
  constexpr int strips = kTile / kStrip;
  const Source& x = launch.job.source;
  if (threadIdx.x < 32) find_member(launch.group, launch.units, x.rows, blockIdx.x / strips, member);
  __syncthreads();
  const int r0 = member.r0 + blockIdx.x % strips * kStrip;
  if (member.rows == 0 || r0 >= member.rows) return;
  const int64_t row_units = x.cols * (4 / T::kPack) / 16, first = (member.before.rows + r0) * row_units;
  const int64_t rows = member.rows - r0 < kStrip ? member.rows - r0 : kStrip;
  raise_to_amax<T>(static_cast<const uint4*>(x.data) + first, threadIdx.x, rows * row_units, kAmaxThreads,
                   found + member.before.expert);
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class W, bool kSums, Encoder kEncoder = Encoder::general>
void launch_members(const GroupJob& launch, cudaStream_t stream) {
  const Source& x = launch.job.source;
  const int64_t grid = (x.rows / kTile + launch.group.experts) * ceil_div(x.cols, kTile);
  if (grid == 0 || x.rows == 0) return;
  if (grid > 0x7FFFFFFF) throw std::runtime_error("hqsweep._C.quantize_grouped_cuda: too many tiles for one launch");
  const int shared = kTileBytes<W>;
  if (shared > 48 * 1024)
    check(cudaFuncSetAttribute(quantize_members<W, kSums, kEncoder>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  quantize_members<W, kSums, kEncoder><<<static_cast<unsigned>(grid), kThreads, shared, stream>>>(launch);
  check(cudaGetLastError());
}

void launch(const Job& job, const Group& group, const Units& units, cudaStream_t stream) {
  const bool sums = wants_sums(job);
  const GroupJob members{job, group, units};
  if (lean(job) && !sums) {
    if (!mx(job)) return launch_members<Bf16, false, Encoder::lean>(members, stream);
    return decodes(job) ? launch_members<Bf16, false, Encoder::mx_exact>(members, stream)
                        : launch_members<Bf16, false, Encoder::mx>(members, stream);
  }
  if (job.source.dtype == Dtype::bf16)
    return sums ? launch_members<Bf16, true>(members, stream) : launch_members<Bf16, false>(members, stream);
  sums ? launch_members<Fp32, true>(members, stream) : launch_members<Fp32, false>(members, stream);
}

bool find_in_strips(const GroupJob& launch, float* found, cudaStream_t stream) {
  const Source& x = launch.job.source;
  const int64_t grid = (x.rows / kTile + launch.group.experts) * (kTile / kStrip);
  const int64_t row_bytes = x.cols * (x.dtype == Dtype::fp32 ? 4 : 2);
  if (x.rows == 0 || x.cols == 0) return true;
  if (!launch.job.vector_in || x.row_stride != x.cols || row_bytes % 16 || grid > 0x7FFFFFFF) return false;
  const auto blocks = static_cast<unsigned>(grid);
  switch (x.dtype) {
    case Dtype::fp32: find_members<Fp32><<<blocks, kAmaxThreads, 0, stream>>>(launch, found); break;
    case Dtype::bf16: find_members<Bf16><<<blocks, kAmaxThreads, 0, stream>>>(launch, found); break;
    case Dtype::fp16: find_members<Fp16><<<blocks, kAmaxThreads, 0, stream>>>(launch, found); break;
  }
  check(cudaGetLastError());
  return true;
}

// found = max(found, amax) of every expert, for the row or the column of a job.
void find(const Job& job, bool column, const Group& group, const Units& units, cudaStream_t stream) {
  const Direction& to = column ? job.column : job.row;
  const bool from_row = column && job.dequantized;
  if (!from_row && plain(to.spec) && find_in_strips({job, group, units}, to.found, stream)) return;
  launch(finding(job, column), group, units, stream);
}

// Whether the rows of all experts are those of one matrix: no scale depends on where an expert begins.
bool alike(const Call& call) {
  if (call.column || !call.row || call.row->keys || wants_sums(call.row)) return false;
  const Spec& spec = call.row->spec;
  return (spec.family == Family::mx || spec.family == Family::block) && spec.tile_rows == 1;
}

}  // namespace

void quantize_grouped_cuda(const Call& call, const Group& group, uintptr_t stream) {
  if (alike(call)) return quantize_cuda(call, stream);
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  const Source& x = call.source;
  Job job = job_of(x, call.row, call.column, call.dequantized);
  job.vector_column = call.column && aligned(*call.column, 16);
  const Units units = units_of(call.row, call.column, x.cols);
  const auto search = [&](const Job& job, bool column) { find(job, column, group, units, queue); };
  const bool row_scaled = job.row.spec.row_scaled, column_scaled = job.column.spec.row_scaled;
  prepare(job, false, row_scaled ? x.rows : group.experts, queue, search);
  prepare(job, true, column_scaled ? group.experts * x.cols : group.experts, queue, search);
  launch(job, group, units, queue);
  if (job.has_row) finish(job.row, group.experts, queue);
  if (job.has_column) finish(job.column, group.experts, queue);
}

void find_amax_grouped_cuda(const Call& call, const Group& group, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  Job job = job_of(call.source, call.row, call.column, call.dequantized);
  const Units units = units_of(call.row, call.column, call.source.cols);
  if (job.has_row && job.row.found) find(job, false, group, units, queue);
  if (!job.has_column || !job.column.found) return;
  if (job.dequantized && !job.row.amax) job.row.amax = job.row.found;
  find(job, true, group, units, queue);
}

}  // namespace hq
