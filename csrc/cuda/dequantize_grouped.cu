// CUDA decode of the packed operands of many experts in one launch, to the places of X's own elements. The grid is that of
// quantize_grouped.cu: a thread block has 128 x 128 elements of one expert, found from the offsets on the device. Rows are
// pieces of one 16-byte store. Columns are turned in registers: a thread takes 16 codes of each of two neighbouring
// columns of X and stores 16 pairs, which are lines of 128 bytes with those of its warp. The arithmetic is
// the same as in dequantize.cu.
#include <cuda_runtime.h>

#include "cuda/check.cuh"
#include "cuda/decode.cuh"
#include "cuda/group.cuh"

namespace hq {
namespace {

constexpr int kThreads = 256;
constexpr int kTurned = 16;  // codes of a column that a thread has at a time: inside one block of every format

struct DecodeGroupJob {
  EncodedGroup encoded;
  Units units;
  void* out;
  int row_shift, col_shift;  // log2 of the scale tile's sides
  bool exact;
  float inverse_range;  // nvfp4: fl(1 / (largest element * largest block scale))
};

// An expert's operand as its thread blocks see it; row and col are the operand's.
struct MemberCodes {
  const DecodeGroupJob& job;
  Starts starts;
  int64_t rows, cols, tiles_across;

  __device__ __forceinline__ MemberCodes(const DecodeGroupJob& of, const Member& member) : job(of) {
    const Encoded& packed = job.encoded.packed;
    starts = starts_of(packed.spec, job.encoded.columns, job.units, member.before, packed.cols);
    rows = job.encoded.columns ? packed.cols : member.rows;
    cols = job.encoded.columns ? member.rows : packed.cols;
    tiles_across = (cols + (int64_t{1} << job.col_shift) - 1) >> job.col_shift;
  }
  template <int kBits>
  __device__ __forceinline__ const uint8_t* codes(int64_t row, int64_t col) const {
    return job.encoded.packed.codes + starts.codes + (row * cols + col) * kBits / 8;
  }
  __device__ __forceinline__ float scale(int64_t row, int64_t col) const {
    const Encoded& packed = job.encoded.packed;
    const Family family = packed.spec.family;
    const auto* floats = static_cast<const float*>(packed.scales) + starts.scales;
    if (family == Family::current) return job.exact ? 1.0f : floats[packed.spec.row_scaled ? row : 0];
    const int64_t tile = (row >> job.row_shift) * tiles_across + (col >> job.col_shift);
    if (family == Family::block) return floats[tile];
    const uint32_t code = (static_cast<const uint8_t*>(packed.scales) + starts.scales)[tile];
    if (family == Family::mx) return e8m0_decode(code);
    if (family == Family::ue5m3) return decode<UE5M3>(code);
    const float scale = decode<E4M3>(code);
    if (job.exact) return scale;
    return scale * packed.global[starts.amax + (packed.spec.row_scaled ? row : 0)] * job.inverse_range;
  }
};

template <class E>
constexpr int kBitsOf = E::kWidth == 4 ? 4 : 8;

template <class E, class Out>
__device__ __forceinline__ void decode_rows(const MemberCodes& member, int64_t r0, int64_t c0,
                                            typename Out::Word* to) {
  constexpr int kCount = kPiece<Out>, kAcross = kTile / kCount, kBatch = 4, kBits = kBitsOf<E>;
#pragma unroll 1
  for (int first = 0; first < kTile * kAcross; first += kBatch * kThreads) {
    uint64_t codes[kBatch];
    float scales[kBatch];
    int counts[kBatch];
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      const int index = first + p * kThreads + threadIdx.x;
      const int64_t row = r0 + index / kAcross, col = c0 + index % kAcross * kCount, left = member.cols - col;
      counts[p] = row < member.rows && left > 0 ? static_cast<int>(left < kCount ? left : kCount) : 0;
      if (counts[p] == 0) continue;
      codes[p] = load_codes<kBits, kCount>(member.codes<kBits>(row, col), counts[p]);
      scales[p] = member.scale(row, col);
    }
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      if (counts[p] == 0) continue;
      const int index = first + p * kThreads + threadIdx.x;
      const int64_t row = r0 + index / kAcross, col = c0 + index % kAcross * kCount;
      float v[kCount];
      bool nan = false;
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        decode_pair<E>(static_cast<uint32_t>(codes[p] >> (kBits * i)), v[i], v[i + 1]);
        v[i] = __fmul_rn(v[i], scales[p]);
        v[i + 1] = __fmul_rn(v[i + 1], scales[p]);
        nan = nan || v[i] != v[i] || v[i + 1] != v[i + 1];
      }
      store_piece<Out>(to + row * member.cols + col, v, counts[p], nan);
    }
  }
}

// 16 codes, the first one in the lowest bits. Codes that are not aligned are read as aligned words, and only as words that
// have one of them.
template <int kBits>
__device__ __forceinline__ void load_turned(const uint8_t* from, int count, uint32_t words[kBits / 2]) {
  constexpr int kWords = kBits / 2, kBytes = kWords * 4;
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (count == kTurned && address % kBytes == 0) {
    if constexpr (kWords == 4) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else {
      const uint2 all = *reinterpret_cast<const uint2*>(from);
      words[0] = all.x, words[1] = all.y;
    }
  } else if (count == kTurned) {
    const auto* aligned = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    const uint32_t shift = static_cast<uint32_t>(address % 4) * 8;
    uint32_t low = aligned[0];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t high = i + 1 < kWords || shift ? aligned[i + 1] : 0;
      words[i] = __funnelshift_r(low, high, shift);
      low = high;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
#pragma unroll
    for (int i = 0; i < kBytes; ++i)
      if (i < count * kBits / 8) words[i / 4] |= static_cast<uint32_t>(from[i]) << (8 * (i % 4));
  }
}

// Two neighbouring elements of X; pairs: both are inside, and aligned.
template <class Out>
__device__ __forceinline__ void store_pair(typename Out::Word* to, float low, float high, bool pairs, bool inside) {
  if constexpr (std::is_same_v<Out, OutFp32>) {
    const float first = low != low ? to_float(0x7FC00000u) : low, second = high != high ? to_float(0x7FC00000u) : high;
    if (pairs) {
      *reinterpret_cast<float2*>(to) = make_float2(first, second);
    } else {
      to[0] = first;
      if (inside) to[1] = second;
    }
  } else {
    const uint32_t word = round_pair<Out>(low, high, low != low || high != high);
    if (pairs) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      to[0] = static_cast<uint16_t>(word);
      if (inside) to[1] = static_cast<uint16_t>(word >> 16);
    }
  }
}

// (r0, c0) is the corner of the tile of X, whose columns are the operand's rows.
template <class E, class Out>
__device__ __forceinline__ void decode_columns(const MemberCodes& member, int64_t r0, int64_t c0,
                                               typename Out::Word* to) {
  constexpr int kBits = kBitsOf<E>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t c = c0 + warp % 2 * 64 + lane * 2, width = member.rows;
  if (c >= width) return;
  const bool inside = c + 1 < width;
  const bool pairs = inside && width % 2 == 0 && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(*to)) == 0;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {  // the second one's codes are in the first one's sectors
    const int64_t r = r0 + warp / 2 * 32 + half * kTurned;
    const int64_t left = member.cols - r;
    if (left <= 0) return;
    const int count = static_cast<int>(left < kTurned ? left : kTurned);
    uint32_t first[kBits / 2], second[kBits / 2] = {};
    load_turned<kBits>(member.codes<kBits>(c, r), count, first);
    if (inside) load_turned<kBits>(member.codes<kBits>(c + 1, r), count, second);
    const float scale = member.scale(c, r), other = inside ? member.scale(c + 1, r) : 0.0f;
    typename Out::Word* line = to + r * width + c;
#pragma unroll
    for (int i = 0; i < kTurned; i += 2) {
      float a[2], b[2];
      decode_pair<E>(first[i * kBits / 32] >> (i * kBits % 32), a[0], a[1]);
      decode_pair<E>(second[i * kBits / 32] >> (i * kBits % 32), b[0], b[1]);
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (i + k < count)
          store_pair<Out>(line + (i + k) * width, __fmul_rn(a[k], scale), __fmul_rn(b[k], other), pairs, inside);
    }
  }
}

template <class E, class Out>
__global__ void __launch_bounds__(kThreads) decode_members(const __grid_constant__ DecodeGroupJob job) {
  __shared__ Member member;
  const Encoded& packed = job.encoded.packed;
  const uint32_t across = static_cast<uint32_t>((packed.cols + kTile - 1) / kTile), down = blockIdx.x / across;
  if (threadIdx.x < 32) find_member(job.encoded.group, job.units, packed.rows, down, member);
  __syncthreads();
  if (member.rows == 0) return;
  const MemberCodes codes(job, member);
  const int64_t c0 = static_cast<int64_t>(blockIdx.x - down * across) * kTile;
  auto* to = static_cast<typename Out::Word*>(job.out) + codes.starts.elements;
  if (job.encoded.columns)
    decode_columns<E, Out>(codes, member.r0, c0, to);
  else
    decode_rows<E, Out>(codes, member.r0, c0, to);
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class E, class Out>
void launch_decode_members(const DecodeGroupJob& job, cudaStream_t stream) {
  const Encoded& packed = job.encoded.packed;
  const int64_t blocks = (packed.rows / kTile + job.encoded.group.experts) * ((packed.cols + kTile - 1) / kTile);
  const unsigned grid = grid_of(blocks, "dequantize_grouped_cuda", kTooManyTiles);
  decode_members<E, Out><<<grid, kThreads, 0, stream>>>(job);
  check(cudaGetLastError(), "dequantize_grouped_cuda");
}

}  // namespace

void dequantize_grouped_cuda(const EncodedGroup& encoded, Decoding decoding, void* out, Dtype out_dtype,
                             uintptr_t stream) {
  const Encoded& packed = encoded.packed;
  if (packed.rows == 0 || packed.cols == 0 || encoded.group.experts == 0) return;
  const Spec& spec = packed.spec;
  const DecodeGroupJob job{encoded, units_of(spec, encoded.columns, packed.cols), out, log2_of(spec.tile_rows),
                     log2_of(spec.tile_cols), decoding == Decoding::exact, spec.inverse_range};
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  with_types(spec.element, out_dtype, [&](auto element, auto to) {
    launch_decode_members<decltype(element), decltype(to)>(job, queue);
  });
}

}  // namespace hq
