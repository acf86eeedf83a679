// Rows of a table by tokens, and the table's gradient; the entries of the table may lie over ranks, of which rank r of
// `ranks` has [r * entries, (r + 1) * entries).
#pragma once
#include <cstdint>

#include "quantize.h"

namespace hq {

constexpr int kBytesOfRowWord = 16;  // of one load; rows are whole words

// out[t] = the row of tokens[t]: from `table` where this rank has its entry, else from received, which has what the other
// ranks, in their order, have of these rows. Without `received` rows of other ranks are left as they are. A token that no
// rank has gives a row of bytes 0xFF, which are NaN.
struct Embedding {
  const int64_t* tokens;  // [rows]
  const void* table;      // [entries, bytes]
  const void* received;   // [ranks - 1, rows, bytes], or null
  void* out;              // [rows, bytes]
  int64_t rows, entries, bytes, ranks, rank;
};

// out[t] = rows[t] where `rank` has the entry of tokens[t]; other rows are left as they are.
struct RowsOfRank {
  const int64_t* tokens;  // [rows]
  const void* from;       // [rows, bytes]
  void* out;              // [rows, bytes]
  int64_t rows, entries, bytes, rank;
};

// table[v] = the sum of the gradients of the rows of all tokens that have the entry v of this rank, in float32: of up to
// kFewRows in their order, of more in four sums by turns, which are then added. A token's row is at the same place of its
// rank's part, one of `ranks` equal ones that follow each other: in `own`, or in received, as in Embedding.
struct EmbeddingGradient {
  const int64_t* tokens;  // [ranks * rows]
  const int64_t* order;   // [ranks * rows]: tokens by their entry; those of an entry in their order
  const int64_t* starts;  // [entries + 1]: where the tokens of this rank's entries begin in that order
  const void* own;        // [rows, width], of `dtype`
  const void* received;   // [ranks - 1, rows, width], or null
  Dtype dtype;            // fp32 or bf16
  float* table;           // [entries, width]
  int64_t rows, entries, ranks, rank;
  int width;              // a multiple of 4 in fp32, of 8 in bf16
};

#if defined(HQ_HAVE_CUDA)
// Raise std::runtime_error with CUDA's own message. Work is only enqueued.
void embed_cuda(const Embedding& call, uintptr_t stream);
void rows_of_rank_cuda(const RowsOfRank& call, uintptr_t stream);
void embedding_gradient_cuda(const EmbeddingGradient& call, uintptr_t stream);
#endif

}  // namespace hq
