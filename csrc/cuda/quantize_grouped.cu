// CUDA quantization of the rows of many experts in one launch. The grid has M / 128 + experts rows of tiles, the most that
// there can be; a thread block finds its expert from the offsets on the device, and blocks beyond the last tile leave. So
// nothing waits for the offsets, and one captured graph serves all of them. A tile is encoded by
// the code for one matrix (body.cuh), and the bytes are those of a call for each expert.
#include <cuda_runtime.h>

#include "cuda/amax.cuh"
#include "cuda/body.cuh"
#include "cuda/choose.cuh"
#include "cuda/fast_body.cuh"
#include "cuda/group.cuh"
#include "cuda/launch.cuh"
#include "cuda/mx.cuh"
#include "quantize.h"

namespace hq {
namespace {

__device__ __forceinline__ Key key_of(const Direction& to, int64_t expert) {
  if (!to.keys) return to.key;
  return {__ldg(to.keys + 2 * expert), __ldg(to.keys + 2 * expert + 1), to.key.step, to.key.step_at, 0, 0};
}

__device__ __forceinline__ FastTile fast_tile_of(const QuantizeGroupJob& launch, const Member& member, uint32_t c0) {
  const QuantizeJob& job = launch.job;
  const Before& before = member.before;
  return {{static_cast<uint32_t>(before.rows), static_cast<uint32_t>(member.rows), static_cast<uint32_t>(member.r0), c0,
           static_cast<uint64_t>(before.rows * job.source.cols), static_cast<uint32_t>(job.source.cols)},
          {job.row.amax + (job.row.spec.row_scaled ? before.rows : before.expert), key_of(job.row, before.expert),
           static_cast<uint64_t>(before.row_units * launch.units.row_scales)},
          {job.column.amax + before.expert * (job.column.spec.row_scaled ? job.source.cols : 1), key_of(job.column, before.expert),
           static_cast<uint64_t>(before.column_units * launch.units.column_scales)}};
}

template <class W, bool kSums>
__device__ __forceinline__ void run_member(const QuantizeGroupJob& launch, const Member& member, int64_t c0, uint32_t* tile) {
  const QuantizeJob& job = launch.job;
  const Before& before = member.before;
  const int64_t cols = job.source.cols, across = ceil_div(cols, kTile);
  const Corner at{before.rows, member.rows, member.r0, c0, member.r0 / kTile * across + c0 / kTile};
  const bool vector = job.vector_column && member.rows % 16 == 0 && before.rows * cols % 16 == 0;
  const Starts of_row = starts_of(job.row.spec, false, launch.units, before, cols);
  const Starts of_column = starts_of(job.column.spec, true, launch.units, before, cols);
  const Frame row = frame_of(job, false, at, job.vector_row, key_of(job.row, before.expert), of_row);
  const Frame column = frame_of(job, true, at, vector, key_of(job.column, before.expert), of_column);
  run_tile<W, kSums, false>(job, at, row, column, tile);
}

template <class W, bool kSums, Encoder kEncoder>
constexpr int kBlocks = kEncoder == Encoder::mx         ? kMxBlocks<false, true>
                        : kEncoder == Encoder::mx_exact ? kMxBlocks<true, true>
                                                        : (W::kPack == 1 || kSums ? 3 : 4);

template <class W, bool kSums, Encoder kEncoder>
__global__ void __launch_bounds__(kThreads, kBlocks<W, kSums, kEncoder>)
    quantize_members(const __grid_constant__ QuantizeGroupJob launch) {
  extern __shared__ __align__(128) uint4 shared[];
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  const QuantizeJob& job = launch.job;
  const uint32_t index = job.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t across = static_cast<uint32_t>((job.source.cols + kTile - 1) / kTile);
  const uint32_t down = index / across, c0 = (index - down * across) * kTile;
  if constexpr (kEncoder == Encoder::general) {
    __shared__ Member member;
    if (threadIdx.x < 32) find_member(launch.group, launch.units, job.source.rows, down, member);
    __syncthreads();
    if (member.rows) run_member<W, kSums>(launch, member, c0, tile);
  } else {
    __shared__ FastTile here;  // read where it is used, which takes no registers meanwhile
    if (threadIdx.x < 32) {
      Member mine;
      if (search(launch.group, launch.units, job.source.rows, down, mine)) here = fast_tile_of(launch, mine, c0);
    }
    __syncthreads();
    const FastCorner& at = here.at;
    if (at.rows == 0) return;
    load_rest_async(job.source, at.begin + at.r0, c0, at.rows - at.r0, tile);
    if constexpr (kEncoder == Encoder::fast)
      run_any_tile(job, here, tile);
    else
      run_any_mx_tile<kEncoder == Encoder::mx_exact>(job, here, tile);
  }
}

// found[e] = max(found[e], amax of expert e's rows), where rows lie one after the other in units of 16 bytes. A thread
// block takes a strip of 16 rows.
constexpr int kStrip = 16;

template <class T>
__global__ void __launch_bounds__(kAmaxThreads) find_members(const __grid_constant__ QuantizeGroupJob launch, float* found,
                                                             int32_t* seen) {
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
                   found + member.before.expert, seen);
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class W, bool kSums, Encoder kEncoder = Encoder::general>
void launch_members(const QuantizeGroupJob& launch, cudaStream_t stream) {
  const Source& x = launch.job.source;
  const int64_t blocks = (x.rows / kTile + launch.group.experts) * ceil_div(x.cols, kTile);
  if (blocks == 0 || x.rows == 0) return;
  const unsigned grid = grid_of(blocks, "quantize_grouped_cuda", kTooManyTiles);
  const int shared = kTileBytes<W>;
  if (shared > 48 * 1024)
    check(cudaFuncSetAttribute(quantize_members<W, kSums, kEncoder>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  quantize_members<W, kSums, kEncoder><<<grid, kThreads, shared, stream>>>(launch);
  check(cudaGetLastError());
}

struct GroupLaunch {
  cudaStream_t stream;
  Group group;
  Units units;
  int64_t matrices;

  void encode(const QuantizeJob& job) const {
    const bool sums = wants_statistics(job);
    const QuantizeGroupJob members{job, group, units};
    switch (encoder_of_group(job)) {
      case Encoder::mx: return launch_members<Bf16, false, Encoder::mx>(members, stream);
      case Encoder::mx_exact: return launch_members<Bf16, false, Encoder::mx_exact>(members, stream);
      case Encoder::fast: return launch_members<Bf16, false, Encoder::fast>(members, stream);
      case Encoder::four_over_six:
      case Encoder::general:
      case Encoder::mx_flat: break;
    }
    if (job.source.dtype == Dtype::bf16)
      return sums ? launch_members<Bf16, true>(members, stream) : launch_members<Bf16, false>(members, stream);
    sums ? launch_members<Fp32, true>(members, stream) : launch_members<Fp32, false>(members, stream);
  }

  bool find_dense(const QuantizeJob& job, const Direction& to) const {
    const Source& x = job.source;
    const int64_t grid = (x.rows / kTile + group.experts) * (kTile / kStrip);
    if (x.rows == 0 || x.cols == 0) return true;
    if (!find_members_takes(job) || grid > 0x7FFFFFFF) return false;
    const QuantizeGroupJob members{job, group, units};
    const auto blocks = static_cast<unsigned>(grid);
    switch (x.dtype) {
      case Dtype::fp32: find_members<Fp32><<<blocks, kAmaxThreads, 0, stream>>>(members, to.found, to.seen); break;
      case Dtype::bf16: find_members<Bf16><<<blocks, kAmaxThreads, 0, stream>>>(members, to.found, to.seen); break;
      case Dtype::fp16: find_members<Fp16><<<blocks, kAmaxThreads, 0, stream>>>(members, to.found, to.seen); break;
    }
    check(cudaGetLastError());
    return true;
  }

  bool find_columns(const QuantizeJob&, float*) const { return false; }

  bool stores_scale_inv(const QuantizeJob&) const { return false; }
};

GroupLaunch launch_of(const Call& call, const Group& group, uintptr_t stream) {
  const Units units = units_of(call.row, call.column, call.source.cols);
  return {reinterpret_cast<cudaStream_t>(stream), group, units, group.experts};
}

// Whether an expert's columns are whole segments is seen on the device; here, whether they begin at aligned addresses.
QuantizeJob members_job_of(const Call& call) {
  QuantizeJob job = job_of(call.source, call.row, call.column, call.dequantized);
  job.vector_column = call.column && stores_segments(*call.column, 16);
  return job;
}

}  // namespace

void quantize_grouped_cuda(const Call& call, const Group& group, uintptr_t stream) {
  if (group_is_one_matrix(call)) return quantize_cuda(call, stream);
  quantize(members_job_of(call), launch_of(call, group, stream));
}

void find_amax_grouped_cuda(const Call& call, const Group& group, uintptr_t stream) {
  find_amaxes(members_job_of(call), launch_of(call, group, stream));
}

}  // namespace hq
