// Quantization of an activation, or of its gradient, from what it is computed of. For an element of h, in both directions
// of MXFP8: 6 bytes are moved forward for swiglu (z 4, codes 2) where two passes move 10; backward 10 (z 4, dh 2, codes 4)
// where they move 18.
#include "cuda/activation.cuh"
#include "cuda/loaded.cuh"

namespace hq {
namespace {

// X is h, or with dh the gradient of z. Each half of swiglu's gradient has tiles of its own, the last of which may end
// early; those of the two halves that read the same elements lie side by side in the grid, so that the L2 cache serves
// the second.
struct ActivationLoader {
  Activated of;

  __host__ __device__ bool has_halves() const { return of.dh && of.kind == Activation::swiglu; }
  __host__ __device__ bool is_second(uint32_t block) const { return has_halves() && block % 2; }
  int64_t blocks() const { return ceil_div(of.width, kTile) * (has_halves() ? 2 : 1); }

  __device__ __forceinline__ uint32_t column(uint32_t block) const {
    const uint32_t tile = has_halves() ? block / 2 : block;
    return tile * kTile + (is_second(block) ? static_cast<uint32_t>(of.width) : 0);
  }
  __device__ __forceinline__ uint32_t end(uint32_t block) const {
    return static_cast<uint32_t>(of.width) * (is_second(block) ? 2 : 1);
  }

  // Puts what `compute` makes of each of a thread's units: z's first input there, whose second lies per_row units further,
  // and dh. left: how far the tile's columns go.
  template <bool kRagged, class Compute>
  __device__ __forceinline__ void put_units(uint32_t r0, uint32_t c0, uint32_t left, uint32_t inputs, uint32_t* tile,
                                            Compute compute) const {
    const uint64_t per_row = static_cast<uint64_t>(of.width) / 8;
    const uint64_t col = (c0 + LoadPlace::col()) / 8;
    const uint4* z = static_cast<const uint4*>(of.z) + col;
    const uint4* dh = static_cast<const uint4*>(of.dh) + col;
#pragma unroll 2
    for (int i = 0; i < kLoadSteps; ++i) {
      const uint64_t row = r0 + LoadPlace::row(i);
      uint32_t words[4] = {};
      if (!kRagged || (row < static_cast<uint64_t>(of.rows) && LoadPlace::col() < left))
        compute(z + row * inputs * per_row, dh + row * per_row, per_row, words);
      put_unit(tile, i, words);
    }
  }

  template <bool kRagged, Activation kKind>
  __device__ __forceinline__ void load_kind(const FastCorner& at, uint32_t* tile) const {
    constexpr uint32_t inputs = kInputs<kKind>;
    const uint32_t left = at.end - at.c0;
    const auto both = [](const uint4* z, uint64_t per_row, uint32_t a[4], uint32_t b[4]) {
      load_unit(z, a);
      if (inputs == 2) load_unit(z + per_row, b);
    };
    if (!of.dh) {
      put_units<kRagged>(at.r0, at.c0, left, inputs, tile,
                         [&](const uint4* z, const uint4*, uint64_t per_row, uint32_t words[4]) {
                           uint32_t a[4], b[4] = {};
                           both(z, per_row, a, b);
                           activate_words<kKind>(a, b, words);
                         });
    } else if (at.c0 < of.width) {
      put_units<kRagged>(at.r0, at.c0, left, inputs, tile,
                         [&](const uint4* z, const uint4* dh, uint64_t per_row, uint32_t words[4]) {
                           uint32_t a[4], b[4] = {}, gradient[4];
                           both(z, per_row, a, b);
                           load_unit(dh, gradient);
                           first_gradient_words<kKind>(gradient, a, b, words);
                         });
    } else {
      put_units<kRagged>(at.r0, at.c0 - static_cast<uint32_t>(of.width), left, inputs, tile,
                         [](const uint4* z, const uint4* dh, uint64_t, uint32_t words[4]) {
                           uint32_t a[4], gradient[4];
                           load_unit(z, a);
                           load_unit(dh, gradient);
                           second_gradient_words(gradient, a, words);
                         });
    }
  }

  template <bool kRagged>
  __device__ __forceinline__ void load(const FastCorner& at, uint32_t* tile) const {
    of.kind == Activation::swiglu ? load_kind<kRagged, Activation::swiglu>(at, tile)
                                  : load_kind<kRagged, Activation::gelu>(at, tile);
  }
};

// Scale tiles of X end with the first half: those of a row, and those of a column that hold several of X's columns.
bool ends_with_scale_tiles(const QuantizeJob& job, int64_t width) {
  return width % 32 == 0 && (width % kTile == 0 || ((!job.has_row || job.row.spec.tile_cols <= 32) &&
                                                    (!job.has_column || job.column.spec.tile_rows <= 32)));
}

}  // namespace

bool quantize_activated_cuda(const Activated& of, const Direction* row, const Direction* column, bool dequantized,
                             uintptr_t stream) {
  const ActivationLoader loader{of};
  const int64_t cols = of.width * (of.dh ? inputs_of(of.kind) : 1);
  const QuantizeJob job = job_of({of.z, Dtype::bf16, of.rows, cols, cols, 1}, row, column, dequantized);
  if (!loaded_takes(job) || (loader.has_halves() && !ends_with_scale_tiles(job, of.width))) return false;
  const bool whole = of.rows % kTile == 0 && of.width % kTile == 0;
  launch_loaded(job, loader, whole, reinterpret_cast<cudaStream_t>(stream), "quantize_activated_cuda");
  return true;
}

}  // namespace hq
