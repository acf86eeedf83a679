// Activations, forward and backward, by themselves. One read and one write of each element: for an element of h, swiglu
// moves 6 bytes forward (z 4, h 2) and 10 backward (z 4, dh 2, dz 4), gelu 4 and 6.
#include "cuda/activation.cuh"
#include "cuda/amax.cuh"
#include "cuda/check.cuh"

namespace hq {
namespace {

constexpr int kUnits = 2;  // of 8 elements of h, which a thread loads before it computes

template <int kCount>
__device__ __forceinline__ float amax_of(const uint32_t words[kCount]) {
  const Largest found = largest<Bf16>(words, kCount);
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
  if (call.end) units = min(units, static_cast<uint32_t>(*call.end) * per_row);
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
        if (kAmax) most = fmaxf(most, amax_of<4>(result));
        second_gradient_words(gradient[i], a[i], result);
        store_unit(out + from[i] + per_row, result);
      }
    }
    if (kAmax) most = fmaxf(most, amax_of<4>(result));
  }
  if constexpr (kAmax) {
    __shared__ float warps[kThreads / 32];
    raise_together(most, warps, kThreads / 32, found);
  }
}

// The same with both amaxes: a thread takes strips of 16 rows and 2 columns of h, so that it has whole segments of columns
// to transform. per_row: words of h's rows. units: strips times per_row.
template <Activation kKind, bool kBackward>
__global__ void __launch_bounds__(kThreads, 3)
    activate_strips(const __grid_constant__ Activated call, uint32_t units, uint32_t* __restrict__ out,
                    const __grid_constant__ Amaxes found) {
  constexpr bool two = kInputs<kKind> == 2;
  const uint32_t per_row = static_cast<uint32_t>(call.width / 2), unit = blockIdx.x * kThreads + threadIdx.x;
  float own = 0.0f, columns = 0.0f;
  if (unit < units) {
    const uint32_t strip = unit / per_row, at = unit - strip * per_row, pitch = per_row * kInputs<kKind>;
    const uint64_t row = static_cast<uint64_t>(strip) * kSegment;
    const uint32_t* __restrict__ z = static_cast<const uint32_t*>(call.z) + row * pitch + at;
    const uint32_t* __restrict__ dh = static_cast<const uint32_t*>(call.dh) + row * per_row + at;
    uint32_t a[kSegment], b[kSegment] = {}, gradient[kSegment];
#pragma unroll
    for (int i = 0; i < kSegment; ++i) {
      a[i] = __ldg(z + i * static_cast<uint64_t>(pitch));
      if (two) b[i] = __ldg(z + i * static_cast<uint64_t>(pitch) + per_row);
      if (kBackward) gradient[i] = __ldg(dh + i * static_cast<uint64_t>(per_row));
    }
    out += row * (kBackward ? pitch : per_row) + at;
#pragma unroll
    for (int i = 0; i < kSegment; ++i) {  // results take the places of what they are computed of
      uint32_t* to = out + i * static_cast<uint64_t>(kBackward ? pitch : per_row);
      if constexpr (kBackward) {
        const uint32_t first = first_gradient_word<kKind>(gradient[i], a[i], b[i]);
        if (two) b[i] = second_gradient_word(gradient[i], a[i]), to[per_row] = b[i];
        a[i] = first;
      } else {
        a[i] = activated_word<kKind>(a[i], b[i]);
      }
      *to = a[i];
    }
    const float flipped = found.signs ? -0.25f : 0.25f;
    own = amax_of<kSegment>(a);
    columns = fmaxf(transformed_amax(a, 1, 0, flipped), transformed_amax(a, 1, 1, flipped));
    if (kBackward && two) {
      own = fmaxf(own, amax_of<kSegment>(b));
      columns = fmaxf(columns, fmaxf(transformed_amax(b, 1, 0, flipped), transformed_amax(b, 1, 1, flipped)));
    }
  }
  __shared__ float warps[2][kThreads / 32];
  raise_together(own, warps[0], kThreads / 32, found.own);
  raise_together(round_to_bf16(columns), warps[1], kThreads / 32, found.columns);
}

unsigned grid_of_units(int64_t units, int64_t per_block) {
  if (units > 0xFFFFFFFF - per_block) throw std::runtime_error("hqsweep._C.activation_cuda: " + std::string(kMatrixTooLarge));
  return static_cast<unsigned>((units + per_block - 1) / per_block);
}

template <Activation kKind, bool kBackward>
void launch_activate(const Activated& call, void* out, const Amaxes& found, cudaStream_t stream) {
  if (found.columns) {
    const int64_t units = call.rows / kSegment * (call.width / 2);
    activate_strips<kKind, kBackward><<<grid_of_units(units, kThreads), kThreads, 0, stream>>>(
        call, static_cast<uint32_t>(units), static_cast<uint32_t*>(out), found);
  } else {
    const int64_t units = call.rows * (call.width / 8);
    const auto kernel = found.own ? activate<kKind, kBackward, true> : activate<kKind, kBackward, false>;
    kernel<<<grid_of_units(units, kThreads * kUnits), kThreads, 0, stream>>>(call, static_cast<uint32_t>(units),
                                                                             static_cast<uint4*>(out), found.own);
  }
  check(cudaGetLastError(), "activation_cuda");
}

template <Activation kKind>
void launch_kind(const Activated& call, void* out, const Amaxes& found, cudaStream_t stream) {
  call.dh ? launch_activate<kKind, true>(call, out, found, stream)
          : launch_activate<kKind, false>(call, out, found, stream);
}

}  // namespace

void activation_cuda(const Activated& call, void* out, const Amaxes& found, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  if (call.rows == 0 || call.width == 0) return;
  call.kind == Activation::swiglu ? launch_kind<Activation::swiglu>(call, out, found, queue)
                                  : launch_kind<Activation::gelu>(call, out, found, queue);
}

}  // namespace hq
