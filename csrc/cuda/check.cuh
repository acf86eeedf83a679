// Errors of CUDA, and of launches that it cannot hold, as exceptions that name the binding.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace hq {

inline void check(cudaError_t status, const char* binding) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("hqsweep._C.") + binding + ": " + cudaGetErrorString(status));
}

// The number of thread blocks as a launch takes it; `what` says in words that there are too many.
inline unsigned grid_of(int64_t blocks, const char* binding, const char* what) {
  if (blocks > 0x7FFFFFFF) throw std::runtime_error(std::string("hqsweep._C.") + binding + ": " + what);
  return static_cast<unsigned>(blocks);
}

constexpr const char* kMatrixTooLarge = "the matrix is too large for one launch";
constexpr const char* kTooManyTiles = "too many tiles for one launch";

}  // namespace hq
