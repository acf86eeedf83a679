// Rotary positions (Su et al., arXiv 2104.09864) of queries and keys on their way between the linear that makes them and
// attention: what a call is, and what is exported.
#pragma once
#include <cstdint>

namespace hq {

constexpr int kMostPairs = 256;  // of a head; a launch takes their frequencies as an argument of the kernel

// Elements (2i, 2i + 1) of a head turn by position * frequency[i], with cos and sin of the fp32 product; 0 pairs: none do.
struct Rope {
  int pairs;
  float frequency[kMostPairs];
};

// q, k or v in bf16: element e of head h at position t of sequence b is data[b * sequence + t * position + h * head + e].
struct Heads {
  void* data;
  int64_t sequence, position, head;  // in elements; multiples of 8, and data of 16 bytes
};

// from[i] -> to[i] for q, k and, with three parts, v, which never turns; both may be the same places. back: the other way.
struct RopeCall {
  int parts;
  Heads from[3], to[3];
  int64_t sequences, positions;
  int heads, width;  // width: of a head, a multiple of 8
  bool back;
};

#if defined(HQ_HAVE_CUDA)
// Real and imaginary parts are fl(fl(a c) - fl(b s)) and fl(fl(a s) + fl(b c)) in fp32, rounded once to bf16.
void rope_cuda(const RopeCall& call, const Rope& rope, uintptr_t stream);
#endif

}  // namespace hq
