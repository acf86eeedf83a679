// What a quantization is: the plain data that the bindings fill in and the CPU and CUDA loops read.
#pragma once
#include <cstdint>

namespace hq {

enum class Family { current, block, mx, nvfp4 };
enum class Element { e4m3, e5m2, e2m1, e2m3, e3m2 };
enum class Dtype { fp32, bf16, fp16 };
enum class FourOverSix { none, mae, mse };

// The format, as far as the loops care. A scale tile has tile_rows x tile_cols elements; 0 x 0 is the whole tensor.
struct Spec {
  Family family;
  Element element;
  int tile_rows, tile_cols;
  bool pow2;            // current, block: scales are powers of two
  float amax_epsilon;   // current, block: smaller amaxes count as this
  bool row_scaled;      // nvfp4: one global amax per row
  bool rht, rht_sign;   // nvfp4: random Hadamard transform of each 16 elements, with the fixed signs or without
  bool sr;              // nvfp4: stochastic rounding of the elements
  FourOverSix four_over_six;
  float e4m3_max;       // nvfp4: largest block scale, 448 or 256
  bool fast_error;      // nvfp4 4over6: error measured in the scaled domain
  uint32_t key0, key1;  // sr: Philox key
  uint64_t step;        // sr: upper half of the Philox counter
};

// Element (r, c) of the logical matrix is source[r * row_stride + c * col_stride]; blocks run along c.
struct Source {
  const void* data;
  Dtype dtype;
  int64_t rows, cols, row_stride, col_stride;
};

// Where results go; null means not wanted. Compact row-major arrays.
struct Output {
  uint8_t* codes;     // [rows, cols], or [rows, cols / 2] for e2m1, even index in the low nibble
  void* scales;       // fp32 scale_inv (current, block), E8M0 (mx) or E4M3 (nvfp4) bytes, one per scale tile
  float* global;      // nvfp4 global amax: [1], or [rows] when row_scaled
  void* exact;        // [rows, cols] decoded code times block scale, rounded to exact_dtype
  Dtype exact_dtype;  // fp32; on CUDA also bf16, what tensor cores multiply
  const float* amax;  // input: given amax (current [1]; nvfp4 as `global`) instead of a scan
};

// Runs the loops compiled for the named instruction set ("" = the best one this processor has).
void quantize_cpu(const Spec& spec, const Source& source, const Output& output, int threads, const char* isa);
const char* best_isa();

// Test entry points: one operation over n values.
void encode_elements(Element element, const float* source, uint8_t* codes, int64_t n);
void decode_elements(Element element, const uint8_t* codes, float* values, int64_t n);
void e8m0_up_elements(const float* source, uint8_t* codes, int64_t n);
void stochastic_e2m1_elements(const float* source, const uint8_t* random, uint8_t* codes, int64_t n);

#if defined(HQ_HAVE_CUDA)
// Raises std::runtime_error with CUDA's own message. Work is only enqueued, and memory comes from the caller: without
// a given amax, the scan for it needs `global` (nvfp4) or `scales` (current) as its scratch.
void quantize_cuda(const Spec& spec, const Source& source, const Output& output, uintptr_t stream);
int cuda_device_count();
#endif

}  // namespace hq
