// Activations, forward and backward, by themselves. One read and one write of each element: for an element of h, swiglu
// moves 6 bytes forward (z 4, h 2) and 10 backward (z 4, dh 2, dz 4), gelu 4 and 6.
#include "cuda/activation.cuh"
#include "cuda/check.cuh"
#include "cuda/direction.cuh"

namespace hq {
namespace {

constexpr int kUnits = 2;  // of 8 elements of h, which a thread loads before it computes

// found = max(found, the largest magnitude of a thread block's words).
__device__ __forceinline__ void raise_block(float most, float* found) {
  __shared__ float warps[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
  if (lane_of_warp() == 0) warps[warp_of_block()] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) most = fmaxf(most, warps[w]);
  raise(found, most);
}

__device__ __forceinline__ float amax_of(const uint32_t words[4]) {
  const Largest found = largest<Bf16>(words, 4);
  return fmaxf(found.of[0], found.of[1]);
}

// Unit n of h, counted along its rows, comes from unit n + row * (inputs - 1) * per_row of z, and from the one per_row
// further. units: those of h.
template <Activation kKind, bool kBackward, bool kAmax>
__global__ void __launch_bounds__(kThreads) activate(const __grid_constant__ Activated call, uint32_t units,
                                                     uint4* __restrict__ out, float* found) {
  constexpr bool two = kInputs<kKind> == 2;
  const uint4* __restrict__ z = static_cast<const uint4*>(call.z);
  const uint4* __restrict__ dh = static_cast<const uint4*>(call.dh);
  const uint32_t per_row = static_cast<uint32_t>(call.width / 8);
  const uint32_t first = blockIdx.x * (kThreads * kUnits) + threadIdx.x;
  uint32_t a[kUnits][4], b[kUnits][4] = {}, gradient[kUnits][4];
  uint64_t from[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const uint32_t unit = first + i * kThreads;
    if (unit >= units) continue;
    from[i] = two ? unit + static_cast<uint64_t>(unit / per_row) * per_row : unit;
    load_unit(z + from[i], a[i]);
    if (two) load_unit(z + from[i] + per_row, b[i]);
    if (kBackward) load_unit(dh + unit, gradient[i]);
  }
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const uint32_t unit = first + i * kThreads;
    if (unit >= units) continue;
    uint32_t result[4];
    if constexpr (!kBackward) {
      activate_words<kKind>(a[i], b[i], result);
      store_unit(out + unit, result);
    } else {
      first_gradient_words<kKind>(gradient[i], a[i], b[i], result);
      store_unit(out + from[i], result);
      if constexpr (two) {
        if (kAmax) most = fmaxf(most, amax_of(result));
        second_gradient_words(gradient[i], a[i], result);
        store_unit(out + from[i] + per_row, result);
      }
    }
    if (kAmax) most = fmaxf(most, amax_of(result));
  }
  if constexpr (kAmax) raise_block(most, found);
}

template <Activation kKind, bool kBackward>
void launch_activate(const Activated& call, void* out, float* amax, cudaStream_t stream) {
  const int64_t units = call.rows * (call.width / 8), per_block = kThreads * kUnits;
  if (units > 0xFFFFFFFF - per_block) throw std::runtime_error("hqsweep._C.activation_cuda: " + std::string(kMatrixTooLarge));
  const auto grid = static_cast<unsigned>((units + per_block - 1) / per_block);
  const auto kernel = amax ? activate<kKind, kBackward, true> : activate<kKind, kBackward, false>;
  kernel<<<grid, kThreads, 0, stream>>>(call, static_cast<uint32_t>(units), static_cast<uint4*>(out), amax);
  check(cudaGetLastError(), "activation_cuda");
}

template <Activation kKind>
void launch_kind(const Activated& call, void* out, float* amax, cudaStream_t stream) {
  call.dh ? launch_activate<kKind, true>(call, out, amax, stream) : launch_activate<kKind, false>(call, out, amax, stream);
}

}  // namespace

void activation_cuda(const Activated& call, void* out, float* amax, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  if (call.rows == 0 || call.width == 0) return;
  call.kind == Activation::swiglu ? launch_kind<Activation::swiglu>(call, out, amax, queue)
                                  : launch_kind<Activation::gelu>(call, out, amax, queue);
}

}  // namespace hq
