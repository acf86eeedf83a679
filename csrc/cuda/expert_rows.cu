// Rows between ranks that share out experts. A row that is copied is read once and written once, in words of 16 bytes, in
// memory of this GPU or of another one; an index is worked out by one thread, from tables that fit a cache.
#include <cuda_runtime.h>

#include "cuda/check.cuh"
#include "expert_rows.h"

namespace hq {
namespace {

constexpr int kWarp = 32, kRowsOfBlock = 8;  // a warp has a row
constexpr int kThreads = 256;
constexpr const char* kTooMany = "there are too many rows for one launch";

__global__ void __launch_bounds__(kWarp* kRowsOfBlock) copy_rows(const __grid_constant__ CopiedRows call) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.y;
  const int64_t words = call.bytes / kBytesOfExpertWord;
  if (row >= call.rows) return;
  const int64_t index = call.index[row];
  if (index < 0) return;
  const uint4* from = static_cast<const uint4*>(call.from) + index * words;
  uint4* to = static_cast<uint4*>(call.out) + row * words;
  for (int64_t w = threadIdx.x; w < words; w += kWarp) to[w] = from[w];
}

// How many of `count` ends are at or below a number; they do not fall.
__device__ int64_t ends_up_to(const int64_t* ends, int64_t count, int64_t number) {
  int64_t low = 0;
  while (low < count) {
    const int64_t middle = (low + count) / 2;
    if (ends[middle] <= number) low = middle + 1;
    else count = middle;
  }
  return low;
}

struct Tables : ExpertPlaces {
  __device__ explicit Tables(const ExpertPlaces& call) : ExpertPlaces(call) {}
  __device__ int64_t held() const { return experts / ranks; }
  __device__ int64_t first() const { return rank * held(); }
  // The number of a rank among the others.
  __device__ int64_t among_others(int64_t other) const { return other < rank ? other : other - 1; }
  __device__ int64_t start(int64_t source, int64_t expert) const {
    return expert == 0 ? 0 : ends[source * experts + expert - 1];
  }
  // The rows of an expert of this rank that came from the ranks before `source`.
  __device__ int64_t before(int64_t source, int64_t expert) const {
    return source == 0 ? 0 : here[(source - 1) * held() + expert];
  }

  __device__ void of_place(int64_t place) const {
    int64_t own_row = -1, sent_row = -1, fills = -1;
    const int64_t expert = ends_up_to(offsets + 1, held(), place);
    if (expert < held()) {
      const int64_t number = place - offsets[expert];
      int64_t source = 0;
      while (source < ranks && here[source * held() + expert] <= number) ++source;
      if (source == ranks) {
        fills = expert;
      } else {
        const int64_t row = start(source, first() + expert) + number - before(source, expert);
        if (source == rank) own_row = row;
        else sent_row = among_others(source) * rows + row;
      }
    }
    own[place] = own_row, sent[place] = sent_row, filling[place] = fills;
  }

  __device__ void of_row(int64_t source, int64_t row) const {
    const int64_t all = ends_up_to(ends + source * experts, experts, row), expert = all - first();
    const bool mine = expert >= 0 && expert < held();
    there[source * rows + row] =
        mine ? offsets[expert] + before(source, expert) + row - start(source, all) : int64_t{-1};
    if (source != rank) return;
    const int64_t to = all / held();
    for (int64_t other = 0; other < ranks; ++other) leaving[other * rows + row] = to == other ? row : -1;
    returning[row] = to != rank && to < ranks ? among_others(to) * rows + row : -1;
  }
};

__global__ void __launch_bounds__(kThreads) expert_places(const __grid_constant__ ExpertPlaces call) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const Tables tables(call);
  if (i < call.places) tables.of_place(i);
  else if (i < call.places + call.ranks * call.rows) tables.of_row((i - call.places) / call.rows, (i - call.places) % call.rows);
}

}  // namespace

void copy_rows_cuda(const CopiedRows& call, uintptr_t stream) {
  if (call.rows == 0 || call.bytes == 0) return;
  const unsigned blocks = grid_of((call.rows + kRowsOfBlock - 1) / kRowsOfBlock, "copy_rows_cuda", kTooMany);
  copy_rows<<<blocks, dim3(kWarp, kRowsOfBlock), 0, reinterpret_cast<cudaStream_t>(stream)>>>(call);
  check(cudaGetLastError(), "copy_rows_cuda");
}

void expert_places_cuda(const ExpertPlaces& call, uintptr_t stream) {
  const int64_t threads = call.places + call.ranks * call.rows;
  if (threads == 0) return;
  const unsigned blocks = grid_of((threads + kThreads - 1) / kThreads, "expert_places_cuda", kTooMany);
  expert_places<<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(call);
  check(cudaGetLastError(), "expert_places_cuda");
}

}  // namespace hq
