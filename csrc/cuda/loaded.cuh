// The fast encoders on a matrix that is computed as it is read: what stands between a product and its quantization (an
// activation, a norm) is formed in registers and rounded to bf16 in the tile, where the encoders find it. The bytes are
// those of quantizing the rounded matrix, which is never in memory.
//
// A Loader, passed to kernels by value, has
//   column(block)        the first column of X of the thread blocks with this blockIdx.x, in any order of the tiles
//   load(r0, c0, tile)   puts the tile at (r0, c0) of X into shared memory; a warp puts the rows that it reads as rows
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
  return {{0, static_cast<uint32_t>(job.source.rows), blockIdx.y * kTile, loader.column(blockIdx.x), 0,
           static_cast<uint32_t>(job.source.cols)},
          {job.row.amax, job.row.key, 0},
          {job.column.amax, job.column.key, 0}};
}

template <bool kExact, class Loader>
__global__ void __launch_bounds__(kThreads, kMxBlocks<kExact, true>)
    quantize_mx_loaded(const __grid_constant__ QuantizeJob job, const __grid_constant__ Loader loader) {
  extern __shared__ __align__(128) uint4 shared[];
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  const FastTile here = loaded_tile_of(job, loader);
  loader.load(here.at.r0, here.at.c0, tile);
  run_mx_tile<kExact, Part::matrix>(job, here, tile);
}

template <class Loader>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_fast_loaded(const __grid_constant__ QuantizeJob job, const __grid_constant__ Loader loader) {
  extern __shared__ __align__(128) uint4 shared[];
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  const FastTile here = loaded_tile_of(job, loader);
  loader.load(here.at.r0, here.at.c0, tile);
  run_fast_tile<false, Part::matrix>(job, here, tile);
}

// Whether the kernels above quantize the matrix of the call: in whole tiles, in the usual formats of blocks. A format with
// a global amax would read twice what it is computed of, which moves as many bytes as making the matrix.
inline bool loaded_takes(const QuantizeJob& job) {
  return has_whole_tiles(job.source) && fast_takes_matrix(job) && !wants_statistics(job) &&
         !(job.has_row && has_global_amax(job.row.spec)) && !(job.has_column && has_global_amax(job.column.spec));
}

// The encoder's launch; job.source has X's shape, and no data.
template <class Loader>
void launch_loaded(const QuantizeJob& job, const Loader& loader, cudaStream_t stream, const char* binding) {
  const dim3 grid(static_cast<unsigned>(job.source.cols / kTile), static_cast<unsigned>(job.source.rows / kTile));
  const auto launch = [&](auto kernel) { kernel<<<grid, kThreads, kTileBytes<Bf16>, stream>>>(job, loader); };
  switch (encoder_of_tiles(job)) {
    case Encoder::mx: launch(quantize_mx_loaded<false, Loader>); break;
    case Encoder::mx_exact: launch(quantize_mx_loaded<true, Loader>); break;
    default: launch(quantize_fast_loaded<Loader>);
  }
  check(cudaGetLastError(), binding);
}

}  // namespace hq
