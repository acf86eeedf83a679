// CUDA decode of every format, at the speed of memory. A thread takes 16 codes as pieces that fill one 16-byte store
// each (8 of a 16-bit output, 4 of fp32); piece p of neighbouring threads is contiguous, so that a warp's loads and
// stores are whole lines. The arithmetic is numerics.h in the reference's order, so the bytes are those of the CPU.
#include <cuda_runtime.h>

#include "cuda/check.cuh"
#include "cuda/decode.cuh"
#include "numerics.h"
#include "quantize.h"

namespace hq {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;  // codes

struct DecodeJob {
  const uint8_t* codes;
  const void* scales;
  const float* global;
  void* out;
  int64_t rows, cols, pitch, pieces_across, tiles_across;
  int row_shift, col_shift;  // log2 of the scale tile's sides
  Family family;
  bool row_scaled, exact;
  float inverse_range;  // nvfp4: fl(1 / (largest element * largest block scale))
};

// Consecutive elements of one row: inside one block of every format.
struct Piece {
  int64_t row, col;
  int count;  // elements inside the matrix; 0 beyond the last piece
};

template <int kCount>
__device__ Piece locate(const DecodeJob& job, int64_t index) {
  // 64-bit division costs several times the 32-bit one.
  const bool narrow = ((index | job.pieces_across) >> 32) == 0;
  const int64_t row = narrow ? static_cast<uint32_t>(index) / static_cast<uint32_t>(job.pieces_across)
                             : index / job.pieces_across;
  const int64_t col = (index - row * job.pieces_across) * kCount, left = job.cols - col;
  return {row, col, row < job.rows ? static_cast<int>(left < kCount ? left : kCount) : 0};
}

// The factor of the piece's codes.
__device__ float load_scale(const DecodeJob& job, const Piece& piece) {
  if (job.family == Family::current)
    return job.exact ? 1.0f : static_cast<const float*>(job.scales)[job.row_scaled ? piece.row : 0];
  const int64_t tile = (piece.row >> job.row_shift) * job.tiles_across + (piece.col >> job.col_shift);
  if (job.family == Family::block) return static_cast<const float*>(job.scales)[tile];
  const uint32_t code = static_cast<const uint8_t*>(job.scales)[tile];
  if (job.family == Family::mx) return e8m0_decode(code);
  if (job.family == Family::ue5m3) return decode<UE5M3>(code);
  const float scale = decode<E4M3>(code);
  if (job.exact) return scale;
  return scale * job.global[job.row_scaled ? piece.row : 0] * job.inverse_range;
}

template <class E, class Out>
__global__ void __launch_bounds__(kThreads) decode_pieces(const __grid_constant__ DecodeJob job) {
  constexpr int kCount = kPiece<Out>, kPieces = kPerThread / kCount, kBits = E::kWidth == 4 ? 4 : 8;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kPieces) + threadIdx.x;
  Piece pieces[kPieces];
  uint64_t codes[kPieces];
  float scales[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    pieces[p] = locate<kCount>(job, first + p * kThreads);
    if (pieces[p].count == 0) continue;
    codes[p] = load_codes<kBits, kCount>(job.codes + (pieces[p].row * job.cols + pieces[p].col) * kBits / 8,
                                         pieces[p].count);
    scales[p] = load_scale(job, pieces[p]);
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (pieces[p].count == 0) continue;
    float v[kCount];
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      decode_pair<E>(static_cast<uint32_t>(codes[p] >> (kBits * i)), v[i], v[i + 1]);
      v[i] = __fmul_rn(v[i], scales[p]);
      v[i + 1] = __fmul_rn(v[i + 1], scales[p]);
      nan = nan || v[i] != v[i] || v[i + 1] != v[i + 1];
    }
    typename Out::Word* to = static_cast<typename Out::Word*>(job.out) + pieces[p].row * job.pitch + pieces[p].col;
    store_piece<Out>(to, v, pieces[p].count, nan);
  }
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class E, class Out>
void launch_decode_pieces(DecodeJob job, cudaStream_t stream) {
  job.pieces_across = (job.cols + kPiece<Out> - 1) / kPiece<Out>;
  const int64_t per_block = kThreads * kPerThread / kPiece<Out>;
  const int64_t blocks = (job.rows * job.pieces_across + per_block - 1) / per_block;
  const unsigned grid = grid_of(blocks, "dequantize_cuda", kMatrixTooLarge);
  decode_pieces<E, Out><<<grid, kThreads, 0, stream>>>(job);
  check(cudaGetLastError(), "dequantize_cuda");
}

}  // namespace

void dequantize_cuda(const Encoded& encoded, Decoding decoding, void* out, int64_t pitch, Dtype out_dtype,
                     uintptr_t stream) {
  if (encoded.rows == 0 || encoded.cols == 0) return;
  const Spec& spec = encoded.spec;
  const int across = spec.tile_cols;
  const DecodeJob job{encoded.codes,
                encoded.scales,
                encoded.global,
                out,
                encoded.rows,
                encoded.cols,
                pitch,
                0,
                across ? (encoded.cols + across - 1) / across : 1,
                log2_of(spec.tile_rows),
                log2_of(across),
                spec.family,
                spec.row_scaled,
                decoding == Decoding::exact,
                spec.inverse_range};
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  with_types(spec.element, out_dtype, [&](auto element, auto to) {
    launch_decode_pieces<decltype(element), decltype(to)>(job, queue);
  });
}

}  // namespace hq
