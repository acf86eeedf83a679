// The arguments of quantization kernels, and the place of a thread block in them.
#pragma once
#include <cstdint>

#include "cuda/elements.cuh"
#include "group.h"
#include "quantize.h"

namespace hq {

// A call for one matrix as a kernel takes it.
struct QuantizeJob {
  Source source;
  Direction row, column;
  bool has_row, has_column;    // take part in this launch
  bool find_row, find_column;  // only their amaxes
  ElementFacts row_facts, column_facts;
  bool dequantized;
  bool vector_in;                  // X's rows are contiguous and 16-byte aligned
  bool vector_row, vector_column;  // the same of the outputs
  bool backwards;  // last tiles first: what a pass before has just read is still in the L2 cache
};

// A call for the rows of many experts.
struct QuantizeGroupJob {
  QuantizeJob job;
  Group group;
  Units units;
};

// Rows of X that are one matrix, and the tile of it that a thread block has.
struct Corner {
  int64_t begin, rows;    // first row in X; number of rows
  int64_t r0, c0, index;  // counted from `begin`; the tile's number along rows of tiles
};

// A corner as the fast encoders take it.
struct FastCorner {
  uint32_t begin, rows, r0, c0;
  uint64_t first;  // elements of X before `begin`
  uint32_t end;    // the column of X at which those of its tile end, if not before
};

// What differs between the experts of a launch; for one matrix, what the directions say.
struct FastOutputs {
  const float* amax;
  Key key;
  uint64_t first_scale;
};

// The tile of a thread block in the fast encoders.
struct FastTile {
  FastCorner at;
  FastOutputs row, column;
};

}  // namespace hq
