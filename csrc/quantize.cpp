// CPU loops of quantization. The matrix is cut into tiles of up to 128 x 128 that hold whole scale tiles. A tile goes
// through stages, each a plain loop over contiguous fp32 that the compiler vectorizes: load (and transpose, when rows
// are the contiguous axis; tile.h), amax per block and scale per scale tile (scales.h), encode and write (here).
// Compiled once per instruction set into namespace HQ_ISA, and therefore without templates or inline functions of the
// standard library: the linker would merge the copies.
#include "quantize.h"

#include <cstring>

#include "numerics.h"
#include "scales.h"
#include "tile.h"

namespace hq {
namespace HQ_ISA {
namespace {

// ---- encode and write ----------------------------------------------------------------------------------------------

// 128 random bits per block of 16 elements; block n of the matrix has counter (n, step).
void draw_random(const Job& job, Tile& tile, int64_t row) {
  const uint64_t first = static_cast<uint64_t>(row * job.source.cols + tile.col0) / 16;
  const uint32_t step0 = static_cast<uint32_t>(job.spec.step), step1 = static_cast<uint32_t>(job.spec.step >> 32);
  for (int b = 0; b < kBlocks; ++b) {
    const uint64_t block = first + static_cast<uint64_t>(b);
    uint32_t counter[4] = {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), step0, step1};
    philox(job.spec.key0, job.spec.key1, counter);
    for (int w = 0; w < 4; ++w) tile.random[b][w] = counter[w];
  }
}

template <class E, int kBlock>
void encode_row(const Job& job, Tile& tile, int r) {
  const int t = job.spec.tile_rows ? r / job.spec.tile_rows : 0;
  if (job.spec.sr) draw_random(job, tile, tile.row0 + r);
  for (int b = 0; b < tile.blocks; ++b) {
    const float* __restrict x = tile.x + r * kWidth + b * kBlock;
    uint32_t* __restrict codes = tile.codes + b * kBlock;
    const float scale = tile.encode_scale[t][b];
    if (kBlock == 16 && job.spec.sr) {
      const uint8_t* __restrict random = reinterpret_cast<const uint8_t*>(tile.random[b]);
      for (int i = 0; i < 16; ++i) codes[i] = encode_e2m1_stochastic(x[i] * scale, random[i]);
    } else {
      for (int i = 0; i < kBlock; ++i) codes[i] = encode<E>(x[i] * scale);
    }
  }
  if (!job.output.exact) return;
  for (int b = 0; b < tile.blocks; ++b) {
    const float scale = tile.decode_scale[t][b];
    const uint32_t* __restrict codes = tile.codes + b * kBlock;
    float* __restrict exact = tile.exact + b * kBlock;
    for (int i = 0; i < kBlock; ++i) exact[i] = decode<E>(codes[i]) * scale;
  }
}

void write_row(const Job& job, const Tile& tile, int r) {
  const int64_t start = (tile.row0 + r) * job.source.cols + tile.col0;
  if (job.output.exact)
    memcpy(static_cast<float*>(job.output.exact) + start, tile.exact, sizeof(float) * static_cast<size_t>(tile.cols));
  if (!job.output.codes) return;
  uint8_t bytes[kWidth];
  for (int i = 0; i < kWidth; ++i) bytes[i] = static_cast<uint8_t>(tile.codes[i]);
  if (job.spec.element != Element::e2m1) {
    memcpy(job.output.codes + start, bytes, static_cast<size_t>(tile.cols));
    return;
  }
  uint16_t pairs[kWidth / 2];
  memcpy(pairs, bytes, sizeof(pairs));
  uint8_t packed[kWidth / 2];
  for (int i = 0; i < kWidth / 2; ++i) packed[i] = static_cast<uint8_t>(pairs[i] | (pairs[i] >> 4));
  memcpy(job.output.codes + start / 2, packed, static_cast<size_t>(tile.cols / 2));
}

template <class E, int kBlock>
void quantize_tile(const Job& job, Tile& tile) {
  const Spec& spec = job.spec;
  if (spec.family == Family::current) {
    tile.encode_scale[0][0] = job.whole_scale;
    tile.decode_scale[0][0] = 1.0f;
  } else {
    block_amax<kBlock>(job, tile);
    for (int t = 0; t * spec.tile_rows < tile.rows; ++t) {
      if (spec.four_over_six == FourOverSix::none)
        block_scales<kBlock>(job, tile, t);
      else
        four_over_six_scales(job, tile, t);
      write_scales(job, tile, t);
    }
  }
  for (int r = 0; r < tile.rows; ++r) {
    encode_row<E, kBlock>(job, tile, r);
    write_row(job, tile, r);
  }
}

template <class E, int kBlock>
void quantize_all(const Job& job, int64_t panels, int64_t columns, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Tile tile;
#pragma omp for schedule(static)
    for (int64_t index = 0; index < panels * columns; ++index) {
      load(job, index / columns, index % columns, tile);
      quantize_tile<E, kBlock>(job, tile);
    }
  }
}

void prepare(Job& job, int64_t panels, int64_t columns, int threads) {
  const Spec& spec = job.spec;
  const Output& output = job.output;
  if (spec.family == Family::current) {
    const float amax = output.amax ? output.amax[0] : scan_whole(job.source, threads);
    job.whole_scale = fp8_scale(amax, job.element_max, spec.amax_epsilon, spec.pow2, kFloatMax);
    if (output.scales) static_cast<float*>(output.scales)[0] = 1.0f / job.whole_scale;
  } else if (spec.family == Family::nvfp4) {
    const size_t entries = spec.row_scaled ? static_cast<size_t>(job.source.rows) : 1;
    if (output.amax)
      memcpy(output.global, output.amax, entries * sizeof(float));
    else if (spec.row_scaled)
      scan_rows(job, panels, columns, threads, output.global);
    else
      output.global[0] = spec.rht ? scan_transformed(job, panels, columns, threads) : scan_whole(job.source, threads);
  }
}

float max_of(Element element) {
  switch (element) {
    case Element::e4m3: return 448.0f;
    case Element::e5m2: return 57344.0f;
    case Element::e2m1: return 6.0f;
    case Element::e2m3: return 7.5f;
    case Element::e3m2: return 28.0f;
  }
  return 0.0f;
}

}  // namespace

// output.global is never null for nvfp4.
void quantize(const Spec& spec, const Source& source, const Output& output, int threads) {
  const float half_max = source.dtype == Dtype::bf16 ? 0x1.FEp127f : 65504.0f;
  const float input_max = source.dtype == Dtype::fp32 ? kFloatMax : half_max;
  const int height = spec.tile_rows > 32 ? spec.tile_rows : 32;
  const int block = spec.tile_cols ? spec.tile_cols : kWidth;
  Job job{spec, source, output, height, block, max_of(spec.element), input_max, 1.0f};
  const int64_t panels = (source.rows + height - 1) / height, columns = (source.cols + kWidth - 1) / kWidth;
  prepare(job, panels, columns, threads);
  const bool wide = block == kWidth;
  switch (spec.element) {
    case Element::e4m3:
      return wide ? quantize_all<E4M3, 128>(job, panels, columns, threads)
                  : quantize_all<E4M3, 32>(job, panels, columns, threads);
    case Element::e5m2:
      return wide ? quantize_all<E5M2, 128>(job, panels, columns, threads)
                  : quantize_all<E5M2, 32>(job, panels, columns, threads);
    case Element::e2m1:
      return block == 16 ? quantize_all<E2M1, 16>(job, panels, columns, threads)
                         : quantize_all<E2M1, 32>(job, panels, columns, threads);
    case Element::e2m3: return quantize_all<E2M3, 32>(job, panels, columns, threads);
    case Element::e3m2: return quantize_all<E3M2, 32>(job, panels, columns, threads);
  }
}

}  // namespace HQ_ISA
}  // namespace hq
