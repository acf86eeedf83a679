// CUDA decode of every format, at the speed of memory. A thread takes 16 codes as pieces that fill one 16-byte store
// each (8 of a 16-bit output, 4 of fp32); piece p of neighbouring threads is contiguous, so that a warp's loads and
// stores are whole lines. The arithmetic is numerics.h in the reference's order, so the bytes are those of the CPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "numerics.h"
#include "quantize.h"

namespace hq {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;  // codes

struct Job {
  const uint8_t* codes;
  const void* scales;
  const float* global;
  void* out;
  int64_t rows, cols, pieces_across, tiles_across;
  int row_shift, col_shift;  // log2 of the scale tile's sides
  Family family;
  bool row_scaled, exact;
  float inverse_range;  // nvfp4: fl(1 / (6 * largest block scale))
};

// Consecutive elements of one row: inside one block of every format.
struct Piece {
  int64_t row, col;
  int count;  // elements inside the matrix; 0 beyond the last piece
};

struct OutFp32 {
  using Word = float;
};
struct OutBf16 {
  using Word = uint16_t;
};
struct OutFp16 {
  using Word = uint16_t;
};

template <class Out>
constexpr int kPiece = 16 / static_cast<int>(sizeof(typename Out::Word));

template <int kCount>
__device__ Piece locate(const Job& job, int64_t index) {
  // 64-bit division costs several times the 32-bit one.
  const bool narrow = ((index | job.pieces_across) >> 32) == 0;
  const int64_t row = narrow ? static_cast<uint32_t>(index) / static_cast<uint32_t>(job.pieces_across)
                             : index / job.pieces_across;
  const int64_t col = (index - row * job.pieces_across) * kCount, left = job.cols - col;
  return {row, col, row < job.rows ? static_cast<int>(left < kCount ? left : kCount) : 0};
}

// The piece's codes, the first one in the lowest bits. kBits per code in memory: 8, or 4.
template <int kBits, int kCount>
__device__ uint64_t load_codes(const Job& job, const Piece& piece) {
  constexpr int kBytes = kCount * kBits / 8;
  using Word = std::conditional_t<kBytes == 8, uint64_t, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>;
  const uint8_t* from = job.codes + (piece.row * job.cols + piece.col) * kBits / 8;
  if (piece.count == kCount && reinterpret_cast<uintptr_t>(from) % kBytes == 0)
    return *reinterpret_cast<const Word*>(from);
  uint64_t codes = 0;
  for (int i = 0; i < piece.count * kBits / 8; ++i) codes |= static_cast<uint64_t>(from[i]) << (8 * i);
  return codes;
}

// What the piece's codes are multiplied by.
__device__ float load_scale(const Job& job, const Piece& piece) {
  if (job.family == Family::current) return job.exact ? 1.0f : *static_cast<const float*>(job.scales);
  const int64_t tile = (piece.row >> job.row_shift) * job.tiles_across + (piece.col >> job.col_shift);
  if (job.family == Family::block) return static_cast<const float*>(job.scales)[tile];
  const uint32_t code = static_cast<const uint8_t*>(job.scales)[tile];
  if (job.family == Family::mx) return e8m0_decode(code);
  const float scale = decode<E4M3>(code);
  if (job.exact) return scale;
  return scale * job.global[job.row_scaled ? piece.row : 0] * job.inverse_range;
}

// Two 8-bit codes by the conversion instruction of sm_89: exact in fp16, and so are its infinities and NaNs.
template <class E>
__device__ __forceinline__ void decode_pair(uint32_t codes, float& low, float& high) {
#if __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<E, E4M3> || std::is_same_v<E, E5M2>) {
    const uint16_t pair = static_cast<uint16_t>(codes);
    uint32_t halves;
    if constexpr (std::is_same_v<E, E4M3>)
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    else
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
    const float2 values = __half22float2(__halves2half2(__ushort_as_half(static_cast<uint16_t>(halves)),
                                                        __ushort_as_half(static_cast<uint16_t>(halves >> 16))));
    low = values.x;
    high = values.y;
    return;
  }
#endif
  constexpr int kBits = E::kWidth == 4 ? 4 : 8;
  low = decode<E>(codes & ((1u << kBits) - 1));
  high = decode<E>((codes >> kBits) & ((1u << kBits) - 1));
}

// fp32 to the output, the NaNs as the host leaves them: quiet and positive. The conversion instruction has its own NaN,
// which `nan` (there is one in this piece) replaces.
template <class Out>
__device__ __forceinline__ uint32_t round_pair(float low, float high, bool nan) {
  uint32_t word;
  if constexpr (std::is_same_v<Out, OutBf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  if (nan) {
    constexpr uint32_t quiet = std::is_same_v<Out, OutBf16> ? 0x7FC0u : 0x7E00u;
    if (low != low) word = (word & 0xFFFF0000u) | quiet;
    if (high != high) word = (word & 0x0000FFFFu) | quiet << 16;
  }
  return word;
}

template <class Out>
__device__ void store(const Job& job, const Piece& piece, const float v[kPiece<Out>], bool nan) {
  using Word = typename Out::Word;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Out, OutFp32>)
      words[i] = nan && v[i] != v[i] ? 0x7FC00000u : to_bits(v[i]);
    else
      words[i] = round_pair<Out>(v[2 * i], v[2 * i + 1], nan);
  }
  Word* to = static_cast<Word*>(job.out) + piece.row * job.cols + piece.col;
  if (piece.count == kPiece<Out> && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece<Out>; ++i) {
    if (i >= piece.count) break;
    if constexpr (std::is_same_v<Out, OutFp32>)
      to[i] = to_float(words[i]);
    else
      to[i] = static_cast<Word>(words[i / 2] >> (16 * (i % 2)));
  }
}

template <class E, class Out>
__global__ void __launch_bounds__(kThreads) decode_pieces(const __grid_constant__ Job job) {
  constexpr int kCount = kPiece<Out>, kPieces = kPerThread / kCount, kBits = E::kWidth == 4 ? 4 : 8;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kPieces) + threadIdx.x;
  Piece pieces[kPieces];
  uint64_t codes[kPieces];
  float scales[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    pieces[p] = locate<kCount>(job, first + p * kThreads);
    if (pieces[p].count == 0) continue;
    codes[p] = load_codes<kBits, kCount>(job, pieces[p]);
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
    store<Out>(job, pieces[p], v, nan);
  }
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class E, class Out>
void launch(Job job, cudaStream_t stream) {
  job.pieces_across = (job.cols + kPiece<Out> - 1) / kPiece<Out>;
  const int64_t per_block = kThreads * kPerThread / kPiece<Out>;
  const int64_t grid = (job.rows * job.pieces_across + per_block - 1) / per_block;
  if (grid > 0x7FFFFFFF) throw std::runtime_error("hqsweep._C.dequantize_cuda: the matrix is too large for one launch");
  decode_pieces<E, Out><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(job);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("hqsweep._C.dequantize_cuda: ") + cudaGetErrorString(status));
}

template <class E>
void launch_to(const Job& job, Dtype out_dtype, cudaStream_t stream) {
  switch (out_dtype) {
    case Dtype::fp32: return launch<E, OutFp32>(job, stream);
    case Dtype::bf16: return launch<E, OutBf16>(job, stream);
    case Dtype::fp16: return launch<E, OutFp16>(job, stream);
  }
}

int log2_of(int side) {  // tile sides are powers of two
  int shift = 0;
  while ((1 << shift) < side) ++shift;
  return shift;
}

}  // namespace

void dequantize_cuda(const Encoded& encoded, Decoding decoding, void* out, Dtype out_dtype, uintptr_t stream) {
  if (encoded.rows == 0 || encoded.cols == 0) return;
  const Spec& spec = encoded.spec;
  const int across = spec.tile_cols;
  const Job job{encoded.codes,
                encoded.scales,
                encoded.global,
                out,
                encoded.rows,
                encoded.cols,
                0,
                across ? (encoded.cols + across - 1) / across : 1,
                log2_of(spec.tile_rows),
                log2_of(across),
                spec.family,
                spec.row_scaled,
                decoding == Decoding::exact,
                1.0f / (6.0f * spec.e4m3_max)};
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  switch (spec.element) {
    case Element::e4m3: return launch_to<E4M3>(job, out_dtype, queue);
    case Element::e5m2: return launch_to<E5M2>(job, out_dtype, queue);
    case Element::e2m1: return launch_to<E2M1>(job, out_dtype, queue);
    case Element::e2m3: return launch_to<E2M3>(job, out_dtype, queue);
    case Element::e3m2: return launch_to<E3M2>(job, out_dtype, queue);
  }
}

}  // namespace hq
