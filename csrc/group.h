// Experts that own the rows of X one after the other: expert e those from offsets[e] to offsets[e + 1]. A packed output is
// the concatenation, in expert order, of what each expert's own call would write; here stands where each part begins.
#pragma once
#include <cstdint>

#include "numerics.h"
#include "quantize.h"

namespace hq {

// What of X lies before an expert's rows: rows, tiles of 128 rows, and units of rows that own scales: the scale tiles of
// the row direction, and the blocks of the column direction, which restart at each expert.
struct Before {
  int64_t expert, rows, tiles, row_units, column_units;
};

// Rows of a unit as a power of two, and how many scales a unit has.
struct Units {
  int row_shift, column_shift;
  int64_t row_scales, column_scales;
};

// First entries of an expert in the packed arrays of one direction.
struct Starts {
  int64_t amax, elements, codes, scales, sums, row_errors;
};

inline Units units_of(const Direction* row, const Direction* column, int64_t cols) {
  Units units{0, 0, 0, 0};
  if (row && row->spec.tile_rows) {
    units.row_shift = __builtin_ctz(static_cast<unsigned>(row->spec.tile_rows));
    units.row_scales = (cols + row->spec.tile_cols - 1) / row->spec.tile_cols;
  }
  if (column && column->spec.tile_rows) {
    units.column_shift = __builtin_ctz(static_cast<unsigned>(column->spec.tile_cols));
    units.column_scales = (cols + column->spec.tile_rows - 1) / column->spec.tile_rows;
  }
  return units;
}

inline Units units_of(const Spec& spec, bool columns, int64_t cols) {
  Direction only{};
  only.spec = spec;
  return units_of(columns ? nullptr : &only, columns ? &only : nullptr, cols);
}

// cols: of X.
HQ_HD Starts starts_of(const Spec& spec, bool columns, const Units& units, const Before& before, int64_t cols) {
  const int64_t across = (cols + kTile - 1) / kTile, elements = before.rows * cols;
  const int64_t rows = columns ? before.expert * cols : before.rows;  // of the operands before
  const int64_t scales = columns ? before.column_units * units.column_scales : before.row_units * units.row_scales;
  return {spec.row_scaled ? rows : before.expert,
          elements,
          is_four(spec.element) ? elements / 2 : elements,
          spec.family == Family::current ? (spec.row_scaled ? rows : before.expert) : scales,
          before.tiles * across,
          columns ? before.tiles * cols : before.rows * across};
}

}  // namespace hq
