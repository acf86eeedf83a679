// Activations of an MLP between its two linears: h = activation(z), and dz of dh.
#pragma once
#include <cstdint>

#include "quantize.h"

namespace hq {

enum class Activation { swiglu, gelu };

// How many times h's width z has: gate and up side by side, or one.
constexpr int inputs_of(Activation kind) { return kind == Activation::swiglu ? 2 : 1; }
template <Activation kKind>
constexpr int kInputs = inputs_of(kKind);

// bf16 matrices without gaps, at multiples of 16 bytes: z [rows, inputs * width]; dh [rows, width], or null. width is a
// multiple of 8.
struct Activated {
  Activation kind;
  int64_t rows, width;
  const void* z;
  const void* dh;
  const int64_t* end;  // [1] on the GPU: rows from there on are nobody's, and are left out; null: there are none
};

// float32 [1] each, or null, that are raised to largest magnitudes of a matrix, NaN aside: of its own elements, and of its
// columns after the random Hadamard transform, with the fixed signs or without, for which its rows are whole strips of 16.
struct Amaxes {
  float* own;
  float* columns;
  bool signs;
};

#if defined(HQ_HAVE_CUDA)
// out: h [rows, width], or with dh the gradient of z, in z's shape. columns is wanted with own alone. Raises
// std::runtime_error with CUDA's own message; work is only enqueued.
void activation_cuda(const Activated& call, void* out, const Amaxes& found, uintptr_t stream);
// Quantizes that output, rounded to bf16, without making it; as quantize_cuda. False, and nothing is done, where no kernel
// does that: for shapes, formats and outputs that the fast encoders do not take, and for formats with global amaxes.
bool quantize_activated_cuda(const Activated& of, const Direction* row, const Direction* column, bool dequantized,
                             uintptr_t stream);
#endif

}  // namespace hq
