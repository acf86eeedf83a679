// Quantization of a norm's output from the sum and the statistics of its rows, which the pass of the residual sum leaves.
// With the stream in bf16 and both directions of MXFP8, codes: 4 bytes an element are moved (sum 2, codes 2) behind a pass of
// 6, where a norm that writes its output moves 8 and the quantizer 4. A stream in fp32 gains nothing by it.
#include "cuda/loaded.cuh"
#include "cuda/norm.cuh"

namespace hq {
namespace {

struct NormLoader {
  Normed of;

  int64_t blocks() const { return ceil_div(of.cols, kTile); }
  __device__ __forceinline__ uint32_t column(uint32_t block) const { return block * kTile; }
  __device__ __forceinline__ uint32_t end(uint32_t) const { return static_cast<uint32_t>(of.cols); }

  template <bool kRagged, bool kCentred>
  __device__ __forceinline__ void load_norm(const FastCorner& at, uint32_t* tile) const {
    const uint32_t col = at.c0 + LoadPlace::col(), units = static_cast<uint32_t>(of.cols) / 8;
    float gain[8], bias[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int unit = static_cast<int>(col) / kNormUnit + half, count = of.cols / kNormUnit;
      load_unit(of.gain, unit, count, *reinterpret_cast<float(*)[kNormUnit]>(gain + half * kNormUnit));
      if constexpr (kCentred)
        load_unit(of.bias, unit, count, *reinterpret_cast<float(*)[kNormUnit]>(bias + half * kNormUnit));
    }
    const uint4* from = static_cast<const uint4*>(of.sum) + col / 8;
#pragma unroll 4
    for (int i = 0; i < kLoadSteps; ++i) {
      const uint64_t row = at.r0 + LoadPlace::row(i);
      uint32_t words[4] = {};
      if (kRagged && (row >= static_cast<uint64_t>(of.rows) || col >= at.end)) {
        put_unit(tile, i, words);
        continue;
      }
      const uint4 four = __ldg(from + row * units);
      const uint32_t x[4] = {four.x, four.y, four.z, four.w};
      const float rstd = __ldg(of.statistics + row);
      const float mean = kCentred ? __ldg(of.statistics + of.rows + row) : 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float h[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          h[k] = __fmul_rn(normalized<kCentred>(widen<Bf16>(x[w], k), mean, rstd), gain[2 * w + k]);
          if constexpr (kCentred) h[k] = __fadd_rn(h[k], bias[2 * w + k]);
        }
        words[w] = two_bf16(h[0], h[1]);
      }
      put_unit(tile, i, words);
    }
  }

  template <bool kRagged>
  __device__ __forceinline__ void load(const FastCorner& at, uint32_t* tile) const {
    of.bias ? load_norm<kRagged, true>(at, tile) : load_norm<kRagged, false>(at, tile);
  }
};

}  // namespace

bool quantize_normed_cuda(const Normed& of, const Direction* row, const Direction* column, bool dequantized,
                          uintptr_t stream) {
  const QuantizeJob job = job_of({of.sum, Dtype::bf16, of.rows, of.cols, of.cols, 1}, row, column, dequantized);
  if (of.rows == 0 || of.cols % 8 || !loaded_takes(job)) return false;
  const bool whole = of.rows % kTile == 0 && of.cols % kTile == 0;
  launch_loaded(job, NormLoader{of}, whole, reinterpret_cast<cudaStream_t>(stream), "quantize_normed_cuda");
  return true;
}

}  // namespace hq
