// Rows of tokens between ranks that share out experts, where only the device knows how many go where.
//
// Each of `ranks` has `rows` rows, those of the first expert first, and each holds as many of the experts as the others,
// in the order of ranks. At an expert rows stand by rank, and at a rank in its order. Experts may be filled up, and rows
// may have room behind the last one.
#pragma once
#include <cstdint>

namespace hq {

constexpr int kBytesOfExpertWord = 16;  // of one load; rows are whole words

// out[i] = from[index[i]]; where the index is negative, out stays as it is.
struct CopiedRows {
  const int64_t* index;  // [rows]
  const void* from;      // rows of `bytes`
  void* out;             // [rows, bytes]
  int64_t rows, bytes;
};

// Where rows stand, as indices; -1 where there is none.
struct ExpertPlaces {
  const int64_t* ends;     // [ranks, experts]: where the rows of each expert end at each rank
  const int64_t* here;     // [ranks, experts / ranks]: rows of this rank's experts, of all ranks up to each
  const int64_t* offsets;  // [experts / ranks + 1]: where this rank's experts begin
  int64_t ranks, experts, rank, rows, places;
  // [places], of each place at this rank's experts: its row at this rank, among those that other ranks have sent,
  // [ranks - 1, rows], and the expert that it fills up. At most one of them is there.
  int64_t *own, *sent, *filling;
  int64_t* there;      // [ranks, rows]: the place at this rank's experts of each row of each rank
  int64_t* leaving;    // [ranks, rows]: the rows of this rank that are of each rank's experts, as their own index
  int64_t* returning;  // [rows]: of this rank's rows, those at other ranks, among what these send back, [ranks - 1, rows]
};

#if defined(HQ_HAVE_CUDA)
// Raise std::runtime_error with CUDA's own message. Work is only enqueued.
void copy_rows_cuda(const CopiedRows& call, uintptr_t stream);
void expert_places_cuda(const ExpertPlaces& call, uintptr_t stream);
#endif

}  // namespace hq
