// Tokens on their way to the experts of a mixture and back: what a call is, and what is exported.
//
// M tokens choose k experts each. Choice c = token * k + rank has its row at places[c] among the M * k rows that go by
// expert: places is a permutation, which is the caller's promise.
//
// Where experts are filled up to whole blocks of rows, expert e has rows starts[1][e] to starts[1][e + 1]. The first
// starts[0][e + 1] - starts[0][e] of them are those of its choices, as places then has them; the others are zeros, which
// dispatch_rows and combine_rows_back write. What stands behind the last expert is left open.
#pragma once
#include <cstdint>

#include "quantize.h"

namespace hq {

constexpr int kMostExperts = 256;
constexpr int kChoicesOfBlock = 1024;  // that one thread block counts and places

struct Choices {
  const int64_t* places;  // [tokens * choices]
  int64_t tokens;
  int choices;
  int64_t dim;  // elements of a row, a multiple of 8; rows are without gaps, at multiples of 16 bytes
  const int64_t* starts;  // [2, experts + 1], or null: experts are not filled up
  int experts;            // 0 without starts
};

// y[t] = fl(.. fl(0 + fl(w[t, 0] * row[t, 0])) + .. fl(w[t, k - 1] * row[t, k - 1])) (+ added[t]) in fp32, row[t, r]
// being rows[places[t * k + r]] in bf16.
struct Combined {
  Choices choices;
  const void* rows;      // bf16 [tokens * choices, dim], or more rows where experts are filled up
  const float* weights;  // [tokens, choices]
  const void* added;     // bf16 [tokens, dim], or null
};

// Places by a stable count of `chosen`: order lists the choices by expert, places is its inverse.
struct Placing {
  const int64_t* chosen;  // [choices], each of 0 to experts - 1
  int64_t choices;
  int experts;
  int* counts;      // scratch: [experts, ceil(choices / kChoicesOfBlock)]
  int64_t* order;   // [choices]
  int64_t* places;  // [choices]
  int64_t* tokens;  // [experts]: how many choices fell on each
};

// Which experts tokens choose. p is the softmax of a row of logits; its k largest entries, of equals the lower index and
// NaN before all, are chosen, and weighed by their shares of their sum. tokens: how many choices fell on each expert.
struct Routed {
  int64_t tokens;
  int experts, choices;
  const float* logits;      // [tokens, experts]
  float* probabilities;     // [tokens, experts]
  int64_t* chosen;          // [tokens, choices]
  float* weights;           // [tokens, choices]
  float* sums;              // scratch: [blocks_of_tokens(tokens), experts]
};

constexpr int kMostChoices = 32;      // of a token, where they are chosen here
constexpr int kTokensOfBlock = 64;    // whose probabilities one thread block adds up
inline int64_t blocks_of_tokens(int64_t tokens) { return (tokens + kTokensOfBlock - 1) / kTokensOfBlock; }

#if defined(HQ_HAVE_CUDA)
void route_cuda(const Routed& call, uintptr_t stream);
// balance = experts * the sum over experts of fl(counts / (tokens * choices)) * fl(sum of probabilities / tokens).
void balance_cuda(const Routed& call, const int64_t* counts, float* balance, uintptr_t stream);
// dlogits [tokens, experts] from dweights [tokens, choices] and dbalance [1], either of which may be null.
void route_back_cuda(const Routed& call, const int64_t* counts, const float* dweights, const float* dbalance,
                     float* dlogits, uintptr_t stream);
// x [tokens, dim] fp32 or bf16, rounded to bf16 -> rows.
void dispatch_rows_cuda(const Choices& call, const void* x, Dtype dtype, void* rows, uintptr_t stream);
// The sums over each token's rows in fp32, the first choice first, rounded to bf16 and stored as dtype, fp32 or bf16.
void sum_rows_cuda(const Choices& call, const void* rows, void* out, Dtype dtype, uintptr_t stream);
void combine_rows_cuda(const Combined& call, float* y, uintptr_t stream);
// From dy fp32 [tokens, dim]: of the rows, fl(dy * w) rounded to bf16; of the weights, the sum of fl(dy * row) over the
// elements, those 256 further of a lane first, then over the lanes of a warp; dadded (or null), dy in bf16.
void combine_rows_back_cuda(const Combined& call, const float* dy, void* drows, float* dweights, void* dadded,
                            uintptr_t stream);
void place_choices_cuda(const Placing& call, uintptr_t stream);
#endif

}  // namespace hq
