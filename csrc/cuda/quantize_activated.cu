// Quantization of an activation, or of its gradient, from what it is computed of. For an element of h, in both directions
// of MXFP8: 6 bytes are moved forward for swiglu (z 4, codes 2) where two passes move 10; backward 10 (z 4, dh 2, codes 4)
// where they move 18.
#include "cuda/activation.cuh"
#include "cuda/loaded.cuh"

namespace hq {
namespace {

// X is h, or with dh the gradient of z. Each half of swiglu's gradient has whole tiles; those of the two halves that read
// the same elements lie side by side in the grid, so that the L2 cache serves the second.
struct ActivationLoader {
  Activated of;

  __device__ __forceinline__ bool has_halves() const { return of.dh && of.kind == Activation::swiglu; }

  __device__ __forceinline__ uint32_t column(uint32_t block) const {
    const uint32_t width = static_cast<uint32_t>(of.width);
    return has_halves() ? block / 2 * kTile + (block % 2 ? width : 0) : block * kTile;
  }

  // What a thread's units are computed of. a: z's first input at the element; b its second, per_row units further.
  template <class Compute>
  __device__ __forceinline__ void put_units(uint32_t r0, uint32_t c0, uint32_t inputs, uint32_t* tile,
                                            Compute compute) const {
    const uint64_t per_row = static_cast<uint64_t>(of.width) / 8;
    const uint64_t col = (c0 + LoadPlace::col()) / 8;
    const uint4* z = static_cast<const uint4*>(of.z) + col;
    const uint4* dh = static_cast<const uint4*>(of.dh) + col;
#pragma unroll 2
    for (int i = 0; i < kLoadSteps; ++i) {
      const uint64_t row = r0 + LoadPlace::row(i);
      uint32_t words[4];
      compute(z + row * inputs * per_row, dh + row * per_row, per_row, words);
      put_unit(tile, i, words);
    }
  }

  template <Activation kKind>
  __device__ __forceinline__ void load_kind(uint32_t r0, uint32_t c0, uint32_t* tile) const {
    constexpr uint32_t inputs = kInputs<kKind>;
    const auto both = [](const uint4* z, uint64_t per_row, uint32_t a[4], uint32_t b[4]) {
      load_unit(z, a);
      if (inputs == 2) load_unit(z + per_row, b);
    };
    if (!of.dh) {
      put_units(r0, c0, inputs, tile, [&](const uint4* z, const uint4*, uint64_t per_row, uint32_t words[4]) {
        uint32_t a[4], b[4] = {};
        both(z, per_row, a, b);
        activate_words<kKind>(a, b, words);
      });
    } else if (c0 < of.width) {
      put_units(r0, c0, inputs, tile, [&](const uint4* z, const uint4* dh, uint64_t per_row, uint32_t words[4]) {
        uint32_t a[4], b[4] = {}, gradient[4];
        both(z, per_row, a, b);
        load_unit(dh, gradient);
        first_gradient_words<kKind>(gradient, a, b, words);
      });
    } else {
      put_units(r0, c0 - static_cast<uint32_t>(of.width), inputs, tile,
                [](const uint4* z, const uint4* dh, uint64_t, uint32_t words[4]) {
                  uint32_t a[4], gradient[4];
                  load_unit(z, a);
                  load_unit(dh, gradient);
                  second_gradient_words(gradient, a, words);
                });
    }
  }

  __device__ __forceinline__ void load(uint32_t r0, uint32_t c0, uint32_t* tile) const {
    of.kind == Activation::swiglu ? load_kind<Activation::swiglu>(r0, c0, tile)
                                  : load_kind<Activation::gelu>(r0, c0, tile);
  }
};

}  // namespace

bool quantize_activated_cuda(const Activated& of, const Direction* row, const Direction* column, bool dequantized,
                             uintptr_t stream) {
  const int64_t cols = of.width * (of.dh ? inputs_of(of.kind) : 1);
  const QuantizeJob job = job_of({of.z, Dtype::bf16, of.rows, cols, cols, 1}, row, column, dequantized);
  if (of.width % kTile || !loaded_takes(job)) return false;
  launch_loaded(job, ActivationLoader{of}, reinterpret_cast<cudaStream_t>(stream), "quantize_activated_cuda");
  return true;
}

}  // namespace hq
