// RMSNorm and LayerNorm of the rows of x [rows, cols], with the addition of a branch before them in the same pass.
// cols is a multiple of kNormUnit and at most kNormMostCols. Arrays are compact and row-major, aligned to a unit.
//   sum  = x + branch, the branch rounded to x's dtype, the sum too
//   rstd = 1 / sqrt(mean(sum^2) + epsilon); LayerNorm: 1 / sqrt(mean((sum - mean)^2) + epsilon), mean = mean(sum)
//   h    = ((sum - mean) * rstd) * gain + bias, without mean and bias for RMSNorm; fp32, rounded once to h's dtype
// Sums are fp32, in an order that depends on cols alone.
#pragma once
#include <cstdint>

#include "activation.h"
#include "quantize.h"

namespace hq {

constexpr int kNormUnit = 4;         // elements that a thread reads together
constexpr int kNormMostCols = 6144;  // 256 threads of 6 units
constexpr int kNormStrip = 16;       // rows of a strip whose columns are transformed together
constexpr int kNormMostMeasured = 3072;  // columns of strips that shared memory holds three of

// fp32 or bf16; data is null where there is nothing.
struct NormArray {
  void* data;
  Dtype dtype;
};

// The summands of the other ranks, in their order, of an array of bf16 that is a sum over `ranks` ranks, of which the array
// itself is that of `rank`: [ranks - 1, rows, cols] of bf16. They are added in the order of ranks, in fp32, and rounded
// once. null: the array is whole.
struct Summands {
  const void* received;
  int ranks, rank;
};

constexpr int kNormMostCopies = 15;

// Arrays as h that get it, too: memory of other GPUs, perhaps.
struct Copies {
  void* to[kNormMostCopies];
  int count;
};

struct NormForward {
  NormArray x, branch, sum, h;  // sum: of x's dtype, null without a branch; h: null where only the rest is wanted
  Summands of_branch;
  const float *gain, *bias;     // bias: null for RMSNorm
  float* statistics;            // rstd [rows]; of LayerNorm mean [rows] after it
  float epsilon;
  int64_t rows;
  int cols;
  Copies copies;
};

// d sum_i = rstd * (g_i - xhat_i * mean(g * xhat) [- mean(g)]), g = dh * gain, xhat = (sum - mean) * rstd, rounded to the
// sum's dtype; dx = that + dsum, rounded to it again; dbranch = dx. d gain = the sum over rows of dh * xhat, d bias of dh:
// each of `blocks` thread blocks takes every blocks-th group of rows in order and leaves one line of `partials`, and
// these are added in an order that depends on `blocks` alone.
struct NormBackward {
  NormArray dh, sum, dsum, dx, dbranch;  // dsum and dbranch may be null
  Summands of_dh;
  const float *gain, *statistics;
  float* partials;  // [1 (LayerNorm: 2), blocks, cols]
  float* dgain;     // [1 (LayerNorm: 2), cols]: d gain, then d bias
  int64_t rows;
  int cols, blocks;
  bool centred;  // LayerNorm
};

// What h is computed of, bf16: the sum, with what its norm has left.
struct Normed {
  const void* sum;
  const float *gain, *bias, *statistics;
  int64_t rows;
  int cols;
};

#if defined(HQ_HAVE_CUDA)
void norm_forward_cuda(const NormForward& call, uintptr_t stream);
// The same, with the amaxes of h: bf16, of whole strips of rows and at most kNormMostMeasured columns. found.own is there.
void norm_measured_cuda(const NormForward& call, const Amaxes& found, uintptr_t stream);
// Quantizes h, rounded to bf16, without making it; as quantize_cuda. False, and nothing is done, where no kernel does that:
// for shapes, formats and outputs that the fast encoders do not take, and for formats with global amaxes.
bool quantize_normed_cuda(const Normed& of, const Direction* row, const Direction* column, bool dequantized,
                          uintptr_t stream);
void norm_backward_cuda(const NormBackward& call, uintptr_t stream);
#endif

}  // namespace hq
