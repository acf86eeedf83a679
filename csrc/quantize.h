// What a quantization is: the plain data that the bindings fill in and the CPU and CUDA loops read.
#pragma once
#include <cstdint>

#include "numerics.h"

namespace hq {

enum class Family { current, block, mx, nvfp4, ue5m3 };
enum class Dtype { fp32, bf16, fp16 };
enum class FourOverSix { none, mae, mse };

// The format, as far as the loops care. A scale tile has tile_rows x tile_cols elements; 0 x 0 is the whole
// tensor, or (row_scaled) a row.
struct Spec {
  Family family;
  Element element;
  int tile_rows, tile_cols;
  bool pow2;                    // current, block: scales are powers of two
  float amax_epsilon;           // current, block: smaller amaxes count as this
  ScaleRounding scale_rounding; // mx: how amax / element max becomes a power of two
  bool row_scaled;              // current, nvfp4: one global amax per row
  int rht;                      // 4 bits: random Hadamard transform of so many elements each, 16 to 128; 0: none
  bool rht_sign;                // with the fixed signs or without
  bool sr;                      // 4 bits: stochastic rounding of the elements
  bool eden;                    // nvfp4: MS-EDEN, the transform draws its signs and block scales are corrected
  FourOverSix four_over_six;
  float e4m3_max;               // nvfp4: largest block scale, 448 or 256
  bool fast_error;              // nvfp4 4over6: error measured in the scaled domain
  float inverse_max;            // nvfp4, ue5m3: fl(1 / largest element)
  float full_range;             // nvfp4: largest element times e4m3_max
  float inverse_range;          // nvfp4: fl(1 / full_range)
};

// Stream of random bits: Philox key, and the upper half of its counter: `step`, or, where `step_at` is not null,
// what stands there when the loops run, so that one captured CUDA graph draws the bits of every step. The lower half is
// the number of a segment of 16 elements: `first`, where the operand is a part of a whole, plus `across` for each row.
struct Key {
  uint32_t key0, key1;
  uint64_t step;
  const uint64_t* step_at;
  uint64_t first, across;  // across 0: as many as the operand's own rows have
};

// Element (r, c) of the matrix X is data[r * row_stride + c * col_stride].
struct Source {
  const void* data;
  Dtype dtype;
  int64_t rows, cols, row_stride, col_stride;
};

constexpr int kTile = 128;  // statistics are summed over tiles of 128 x 128 elements of X

// Sums over the elements of one tile: x is what the format approximates (after the Hadamard transform, if any), q the
// decoded value. lost: x != 0 and q == 0, and lost2 is their x^2. saturated: |x| above (1 + 2^-8) * scale * largest
// element.
struct TileSums {
  float x2, error2, q2, amax, nonzero, lost, saturated, lost2;
};

// One operand, [rows, cols] in its own orientation (that of X, or of X.T): what is made of it and where it goes, as
// compact row-major arrays; null means not wanted.
struct Direction {
  Spec spec;
  Key key;
  const uint32_t* keys;  // of a grouped call: two words for each expert, in place of those of `key`; or null
  const float* amax;  // input: global amax, [1] or [rows] when row_scaled; null: found in a pass before
  float* found;       // [1] or [rows]: where that pass finds it (current, nvfp4 without `amax`); may equal `global`
  uint8_t* codes;     // [rows, cols], or [rows, cols / 2] of 4 bits, even index in the low nibble
  void* scales;       // fp32 scale_inv (current, block), or bytes: E8M0 (mx), E4M3 (nvfp4), UE5M3; one per scale tile, or row
  float* global;      // nvfp4 global amax: [1], or [rows] when row_scaled
  void* exact;        // [rows, cols] decoded code times block scale, rounded to exact_dtype
  Dtype exact_dtype;  // fp32 or bf16
  bool exact_turned;  // it is stored as its transpose [cols, rows]: of a column, at the places of X's own elements
  TileSums* sums;     // one per tile of X, in row-major order of X's tiles
  float* row_errors;  // [rows, ceil(cols / 128)]: sums of (x - q)^2 over 128 elements of a row
  int32_t* seen;      // [3]: set to 1 where what is encoded has a NaN, has an inf, and (in find_amax) where its amax is inf
};

// The format has one amax of the whole tensor, or of each row.
HQ_HD bool has_global_amax(const Spec& spec) { return spec.family == Family::current || spec.family == Family::nvfp4; }

// A global amax is then that of X's own elements, in whatever order they are read.
HQ_HD bool amax_is_of_x(const Spec& spec) { return !spec.rht && !spec.row_scaled; }

HQ_HD bool wants_statistics(const Direction* to) { return to && (to->sums || to->row_errors); }

// E2M1 codes under the one scale of current scaling.
HQ_HD bool is_current_four(const Spec& spec) { return spec.family == Family::current && spec.element == Element::e2m1; }

// The contracted axis has a multiple of this many elements: of 16 where random bits come by 16, or of the transform's.
HQ_HD int contracted_multiple(const Spec& spec) {
  const bool sixteen = spec.family == Family::nvfp4 || spec.family == Family::ue5m3 || is_current_four(spec) || spec.sr;
  const int least = sixteen ? 16 : (is_four(spec.element) ? 2 : 1);
  return spec.rht > least ? spec.rht : least;
}

// Both directions of X in one read. row has blocks along X's columns; column has blocks along X's rows, and its arrays
// are those of X.T. Either may be null. dequantized: column is made from the decoded values of row, rounded to X's
// dtype, instead of from X; row is then not null, though its outputs may be.
struct Call {
  Source source;
  const Direction* row;
  const Direction* column;
  bool dequantized;
};

// Experts that own X's rows: e has rows offsets[e] to offsets[e + 1], which begin with 0, do not decrease and lie in X.
// Rows beyond the last expert's are not read. Arrays of a direction are then packed: the concatenation, in expert order,
// of what a call for each expert's rows would take and give (amax, found and global: one an expert, or one a row of each
// operand). The offsets are where the loops run: in the host's memory, or the device's.
struct Group {
  const int64_t* offsets;  // [experts + 1]
  int64_t experts;
};

// An operand to decode; null scales or global where the format has none. turned: its transpose [cols, rows] is written.
struct Encoded {
  Spec spec;
  int64_t rows, cols;
  const uint8_t* codes;
  const void* scales;
  const float* global;
  bool turned;
};

// Packed operands of experts, of X [rows, cols] or (columns) of its transposes. They are decoded to the places of X's own
// elements: columns are turned back.
struct EncodedGroup {
  Encoded packed;
  bool columns;
  Group group;
};

// value: TransformerEngine's dequantize. exact: code times block scale, the matrix that gemm=exact multiplies.
enum class Decoding { value, exact };

// Runs the loops compiled for the named instruction set ("" = the best one this processor has).
void quantize_cpu(const Call& call, int threads, const char* isa);
// found = max(found, amax) in place, for each direction that has `found`.
void find_amax_cpu(const Call& call, int threads, const char* isa);
// One call for all experts; std::invalid_argument for offsets and numbers of rows that the formats cannot have.
void quantize_grouped_cpu(const Call& call, const Group& group, int threads, const char* isa);
// find_amax_cpu of every expert; raises as quantize_grouped_cpu.
void find_amax_grouped_cpu(const Call& call, const Group& group, int threads, const char* isa);
void dequantize_cpu(const Encoded& encoded, Decoding decoding, void* out, Dtype out_dtype, int threads);
// Raises as quantize_grouped_cpu does for offsets.
void dequantize_grouped_cpu(const EncodedGroup& encoded, Decoding decoding, void* out, Dtype out_dtype, int threads);
const char* best_isa();

// Test entry points: one operation over n values.
void encode_elements(Element element, const float* source, uint8_t* codes, int64_t n);
void decode_elements(Element element, const uint8_t* codes, float* values, int64_t n);
void e8m0_up_elements(const float* source, uint8_t* codes, int64_t n);
void e8m0_elements(ScaleRounding rounding, Element element, const float* amax, uint8_t* codes, int64_t n);
void stochastic_e2m1_elements(const float* source, const uint8_t* random, uint8_t* codes, int64_t n);

#if defined(HQ_HAVE_CUDA)
// Raise std::runtime_error with CUDA's own message. Work is only enqueued, and all memory comes from the caller.
void quantize_cuda(const Call& call, uintptr_t stream);
void find_amax_cuda(const Call& call, uintptr_t stream);
void quantize_grouped_cuda(const Call& call, const Group& group, uintptr_t stream);
void find_amax_grouped_cuda(const Call& call, const Group& group, uintptr_t stream);
// pitch: elements of out from one row to the next.
void dequantize_cuda(const Encoded& encoded, Decoding decoding, void* out, int64_t pitch, Dtype out_dtype,
                     uintptr_t stream);
void dequantize_grouped_cuda(const EncodedGroup& encoded, Decoding decoding, void* out, Dtype out_dtype,
                             uintptr_t stream);
// out[r, c] = fl(fl(product[r, c] * before) * factor[r * row_step + c * col_step]), rounded to out_dtype; out may be
// product. product: fp32 or bf16.
struct Product {
  const void* product;
  Dtype dtype;
  float before;
  const float* factor;
  int64_t rows, cols;
  int row_step, col_step;
};
void scale_product_cuda(const Product& call, void* out, Dtype out_dtype, uintptr_t stream);
int cuda_device_count();
#endif

}  // namespace hq
