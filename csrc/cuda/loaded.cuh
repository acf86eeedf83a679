// The fast encoders on a matrix that is computed as it is read: what stands between a product and its quantization (an
// activation, a norm) is formed in registers and rounded to bf16 in the tile, where the encoders find it. The bytes are
// those of quantizing the rounded matrix, which is never in memory.
//
// A Loader, passed to kernels by value, has
//   blocks()                  how many thread blocks a row of tiles takes: gridDim.x
//   column(x), end(x)         the columns of X at which the tile of those with this blockIdx.x begins, and at the latest ends
//   load<kRagged>(at, tile)   puts the tile at a FastCorner into shared memory; a warp puts the rows that it reads as rows.
//                             kRagged: what lies outside of X's rows, or beyond the tile's end, is zero
#pragma once
#include <cuda_runtime.h>

#include "cuda/fast_body.cuh"
#include "cuda/launch.cuh"
#include "cuda/mx.cuh"

namespace hq {

// The unit of 8 elements that a thread puts in step i of 8 of loading a tile: a line of 256 bytes to half a warp.
struct LoadPlace {
  static __device__ __forceinline__ uint32_t row(int i) { return warp_of_block() * 16 + lane_of_warp() / 16 + 2 * i; }
  static __device__ __forceinline__ uint32_t col() { return lane_of_warp() % 16 * 8; }
};
constexpr int kLoadSteps = 8;

__device__ __forceinline__ void put_unit(uint32_t* tile, int i, const uint32_t words[4]) {
  *reinterpret_cast<uint4*>(tile + word_offset<Bf16>(LoadPlace::row(i), LoadPlace::col() / 2)) =
      make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Loader>
__device__ __forceinline__ FastTile loaded_tile_of(const QuantizeJob& job, const Loader& loader) {
  return {{0, static_cast<uint32_t>(job.source.rows), blockIdx.y * kTile, loader.column(blockIdx.x), 0, loader.end(blockIdx.x)},
          {job.row.amax, job.row.key, 0},
          {job.column.amax, job.column.key, 0}};
}

// kRagged: some tiles are no whole ones.
template <bool kExact, bool kRagged, class Loader>
__global__ void __launch_bounds__(kThreads, kMxBlocks<kExact, true>)
    quantize_mx_loaded(const __grid_constant__ QuantizeJob job, const __grid_constant__ Loader loader) {
  extern __shared__ __align__(128) uint4 shared[];
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  const FastTile here = loaded_tile_of(job, loader);
  loader.template load<kRagged>(here.at, tile);
  if constexpr (kRagged)
    run_any_mx_tile<kExact>(job, here, tile);
  else
    run_mx_tile<kExact, Part::matrix>(job, here, tile);
}

template <bool kRagged, class Loader>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_fast_loaded(const __grid_constant__ QuantizeJob job, const __grid_constant__ Loader loader) {
  extern __shared__ __align__(128) uint4 shared[];
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  const FastTile here = loaded_tile_of(job, loader);
  loader.template load<kRagged>(here.at, tile);
  if constexpr (kRagged)
    run_any_tile(job, here, tile);
  else
    run_fast_tile<false, Part::matrix>(job, here, tile);
}

// Whether the kernels above quantize the matrix of the call: in the usual formats of blocks. A format with a global amax
// would read twice what it is computed of, which moves as many bytes as making the matrix.
inline bool loaded_takes(const QuantizeJob& job) {
  return fast_takes_matrix(job) && !wants_statistics(job) && !(job.has_row && has_global_amax(job.row.spec)) &&
         !(job.has_column && has_global_amax(job.column.spec));
}

// The encoder's launch; job.source has X's shape, and no data. whole: all tiles are.
template <class Loader>
void launch_loaded(const QuantizeJob& job, const Loader& loader, bool whole, cudaStream_t stream, const char* binding) {
  const dim3 grid(static_cast<unsigned>(loader.blocks()), static_cast<unsigned>(ceil_div(job.source.rows, kTile)));
  const auto launch = [&](auto any, auto matrix) {
    (whole ? matrix : any)<<<grid, kThreads, kTileBytes<Bf16>, stream>>>(job, loader);
  };
  switch (encoder_of_tiles(job)) {
    case Encoder::mx: launch(quantize_mx_loaded<false, true, Loader>, quantize_mx_loaded<false, false, Loader>); break;
    case Encoder::mx_exact: launch(quantize_mx_loaded<true, true, Loader>, quantize_mx_loaded<true, false, Loader>); break;
    default: launch(quantize_fast_loaded<true, Loader>, quantize_fast_loaded<false, Loader>);
  }
  check(cudaGetLastError(), binding);
}

}  // namespace hq
