// Products of bfloat16 matrices by cuBLASLt, with a factor of the whole product in place of its alpha.
#pragma once
#include <cstdint>
#include <memory>

#include "quantize.h"

namespace hq {

// A matrix [rows, contracted] in memory: element (r, c) at r * stride + c, or, turned, at c * stride + r. Of several
// matrices each begins `step` elements after the one before. alignment: bytes that the address is a multiple of.
struct Factor {
  int64_t stride, step;
  bool turned;
  uint32_t alignment;
};

// out [count, m, n], row-major without gaps, fp32 or bf16: a [count, m, k] times the transposes of b [count, n, k].
struct ProductShape {
  int64_t count, m, n, k;
  Factor a, b;
  Dtype out_dtype;
  uint32_t out_alignment;
  bool accumulate;  // out is added to
  bool scaled;      // there are factors in the device's memory
  int64_t most_workspace;  // bytes that an algorithm may ask for
  int rank;                // which of the algorithms, as the library ranks them
};

constexpr int kMostRanks = 16;

// What one call multiplies: out = fl(alpha * sum) in fp32, rounded once to its dtype, or with accumulate alpha * sum + out,
// where alpha = fl(fl(factor_a * factor_b) * constant). A null factor is none.
struct ProductCall {
  const void *a, *b;
  void* out;
  const float *factor_a, *factor_b;
  float constant;
  void* scratch;  // kProductHead bytes and the plan's workspace, aligned to 256 bytes
};

constexpr int64_t kProductHead = 256;  // alpha and beta, padded so that the workspace behind them stays aligned

// An algorithm for one shape on one GPU, which must be the current one. Threads may share it. Calls only enqueue work, so
// that CUDA graphs capture them.
class ProductPlan {
 public:
  ProductPlan(const ProductShape& shape, int device);  // raises std::runtime_error without the library
  ~ProductPlan();
  bool found() const;         // whether the library has an algorithm for the shape
  int64_t workspace() const;  // bytes
  void run(const ProductCall& call, uintptr_t stream) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The version of the cuBLASLt that this process has loaded; 0 without one that is known.
int64_t product_library_version();

}  // namespace hq
