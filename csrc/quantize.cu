// CUDA loops of the mx family along rows: 1 x 32 blocks, one-byte elements, codes and E8M0 scales. The arithmetic is
// numerics.h, so the bytes are those of the CPU. Four neighbouring threads share a block of 32, eight elements each.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "numerics.h"
#include "quantize.h"

namespace hq {
namespace {

constexpr int kBlock = 32;
constexpr int kPerThread = 8;
constexpr int kThreads = 256;
constexpr int kTileRows = kThreads * kPerThread / kBlock;  // 64

struct Fp32 {
  float value;
  __device__ float widen() const { return value; }
};
struct Bf16 {
  uint16_t bits;
  __device__ float widen() const { return bf16_to_float(bits); }
};
struct Fp16 {
  uint16_t bits;
  __device__ float widen() const { return half_to_float(bits); }
};

struct Matrix {
  int64_t rows, cols, row_stride, col_stride;
};

// Codes of a thread's eight elements as two words; the scale code of their block goes to `scale_code`.
template <class E>
__device__ uint2 encode_eight(const float x[kPerThread], float reciprocal_max, uint32_t& scale_code) {
  int32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) amax = max(amax, amax_bits(x[i]));
  amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
  amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
  scale_code = e8m0_up(to_float(static_cast<uint32_t>(amax)) * reciprocal_max);
  const float scale = e8m0_reciprocal(scale_code);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) words[i / 4] |= encode<E>(x[i] * scale) << (8 * (i % 4));
  return make_uint2(words[0], words[1]);
}

// Rows contiguous and 16-byte aligned, cols a multiple of 32: straight from registers.
template <class T, class E>
__global__ void __launch_bounds__(kThreads) quantize_aligned(const T* source, Matrix m, float reciprocal_max,
                                                             uint8_t* codes, uint8_t* scales) {
  const int64_t per_row = m.cols / kPerThread;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool active = index < m.rows * per_row;
  const int64_t row = active ? index / per_row : 0, part = active ? index % per_row : 0;
  struct alignas(16) Chunk {
    T items[16 / sizeof(T)];
  };
  constexpr int kChunks = kPerThread * sizeof(T) / 16;
  const Chunk* chunks = reinterpret_cast<const Chunk*>(source + row * m.row_stride + part * kPerThread);
  float x[kPerThread];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const uint4 raw = *reinterpret_cast<const uint4*>(chunks + k);
    Chunk chunk;
    memcpy(&chunk, &raw, sizeof(chunk));
#pragma unroll
    for (int i = 0; i < kPerThread / kChunks; ++i) x[k * (kPerThread / kChunks) + i] = chunk.items[i].widen();
  }
  uint32_t scale_code;
  const uint2 words = encode_eight<E>(x, reciprocal_max, scale_code);
  if (!active) return;
  *reinterpret_cast<uint2*>(codes + index * kPerThread) = words;
  if (part % 4 == 0) scales[index / 4] = static_cast<uint8_t>(scale_code);
}

// Any strides and any size: a tile of 64 rows x 32 columns goes through shared memory, read along whichever axis is
// contiguous.
template <class T, class E>
__global__ void __launch_bounds__(kThreads) quantize_strided(const T* source, Matrix m, float reciprocal_max,
                                                             uint8_t* codes, uint8_t* scales) {
  __shared__ float tile[kBlock][kTileRows + 1];
  const int64_t blocks = (m.cols + kBlock - 1) / kBlock;
  const int64_t row0 = blockIdx.x / blocks * kTileRows, block = blockIdx.x % blocks, col0 = block * kBlock;
  const bool along_rows = m.row_stride == 1;
  for (int i = threadIdx.x; i < kBlock * kTileRows; i += kThreads) {
    const int r = along_rows ? i % kTileRows : i / kBlock, c = along_rows ? i / kTileRows : i % kBlock;
    const bool inside = row0 + r < m.rows && col0 + c < m.cols;
    tile[c][r] = inside ? source[(row0 + r) * m.row_stride + (col0 + c) * m.col_stride].widen() : 0.0f;
  }
  __syncthreads();
  const int r = threadIdx.x / 4, first = threadIdx.x % 4 * kPerThread;
  float x[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) x[i] = tile[first + i][r];
  uint32_t scale_code;
  const uint2 words = encode_eight<E>(x, reciprocal_max, scale_code);
  const int64_t row = row0 + r;
  if (row >= m.rows) return;
  if (first == 0) scales[row * blocks + block] = static_cast<uint8_t>(scale_code);
  for (int i = 0; i < kPerThread && col0 + first + i < m.cols; ++i)
    codes[row * m.cols + col0 + first + i] = static_cast<uint8_t>((i < 4 ? words.x : words.y) >> (8 * (i % 4)));
}

void check(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("hqsweep._C.quantize_cuda: ") + cudaGetErrorString(status));
}

template <class T, class E>
void launch(const Source& source, const Output& output, float fp8_max, cudaStream_t stream) {
  const Matrix m{source.rows, source.cols, source.row_stride, source.col_stride};
  if (m.rows == 0 || m.cols == 0) return;
  const T* data = static_cast<const T*>(source.data);
  uint8_t* scales = static_cast<uint8_t*>(output.scales);
  const float reciprocal_max = 1.0f / fp8_max;
  const bool aligned = m.col_stride == 1 && m.cols % kBlock == 0 &&
                       reinterpret_cast<uintptr_t>(data) % 16 == 0 && m.row_stride * sizeof(T) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(output.codes) % kPerThread == 0;
  const int64_t blocks_per_row = (m.cols + kBlock - 1) / kBlock;
  const int64_t grid = aligned ? (m.rows * m.cols / kPerThread + kThreads - 1) / kThreads
                               : (m.rows + kTileRows - 1) / kTileRows * blocks_per_row;
  if (grid > 0x7FFFFFFF) throw std::runtime_error("hqsweep._C.quantize_cuda: the matrix is too large for one launch");
  const auto kernel = aligned ? quantize_aligned<T, E> : quantize_strided<T, E>;
  kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(data, m, reciprocal_max, output.codes, scales);
  check(cudaGetLastError());
}

template <class E>
void launch_dtype(const Source& source, const Output& output, float fp8_max, cudaStream_t stream) {
  switch (source.dtype) {
    case Dtype::fp32: return launch<Fp32, E>(source, output, fp8_max, stream);
    case Dtype::bf16: return launch<Bf16, E>(source, output, fp8_max, stream);
    case Dtype::fp16: return launch<Fp16, E>(source, output, fp8_max, stream);
  }
}

}  // namespace

void quantize_cuda(const Spec& spec, const Source& source, const Output& output, uintptr_t stream) {
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  switch (spec.element) {
    case Element::e4m3: return launch_dtype<E4M3>(source, output, 448.0f, queue);
    case Element::e5m2: return launch_dtype<E5M2>(source, output, 57344.0f, queue);
    case Element::e2m3: return launch_dtype<E2M3>(source, output, 7.5f, queue);
    case Element::e3m2: return launch_dtype<E3M2>(source, output, 28.0f, queue);
    case Element::e2m1: throw std::runtime_error("hqsweep._C.quantize_cuda: packed elements are not supported");
  }
}

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace hq
