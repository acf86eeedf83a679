// A grouped call on the host as one call for each expert, whose directions point to its parts of the packed arrays.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "group.h"
#include "quantize.h"

namespace hq {

inline int64_t first_row(const Group& group) {
  if (group.offsets[0] != 0)
    throw std::invalid_argument("hqsweep._C: offsets begin with " + std::to_string(group.offsets[0]) +
                                ", must begin with 0");
  return 0;
}

// How many rows the next expert has. all: the rows of X; column: a format whose blocks run along them, or null.
inline int64_t rows_of(const Group& group, const Before& before, int64_t all, const Spec* column) {
  const int64_t begin = before.rows, end = group.offsets[before.expert + 1];
  const std::string name = "hqsweep._C: expert " + std::to_string(before.expert);
  if (end < begin || end > all)
    throw std::invalid_argument(name + " has rows " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
                                std::to_string(all) + "; offsets must not decrease and must lie in X");
  const int multiple = column ? contracted_multiple(*column) : 1;
  if ((end - begin) % multiple)
    throw std::invalid_argument(name + ": the contracted axis has " + std::to_string(end - begin) +
                                " elements, must be a multiple of " + std::to_string(multiple) + " for this format");
  return end - begin;
}

// What lies before the expert after one of `rows` rows.
inline Before after(const Before& before, int64_t rows, const Units& units) {
  const auto up = [&](int shift) { return (rows + (int64_t{1} << shift) - 1) >> shift; };
  return {before.expert + 1, before.rows + rows, before.tiles + up(7), before.row_units + up(units.row_shift),
          before.column_units + up(units.column_shift)};
}

class Members {
 public:
  Members(const Call& call, const Group& group) {
    const size_t count = static_cast<size_t>(group.experts);
    const Units units = units_of(call.row, call.column, call.source.cols);
    directions_.resize(2 * count);  // the calls point into it
    calls_.resize(count);
    Before before{0, first_row(group), 0, 0, 0};
    for (size_t i = 0; i < count; ++i) {
      const int64_t rows = rows_of(group, before, call.source.rows, call.column ? &call.column->spec : nullptr);
      calls_[i] = call;
      calls_[i].source = part_of(call.source, before.rows, rows);
      calls_[i].row = member(call.row, directions_[2 * i], false, units, before, call.source.cols);
      calls_[i].column = member(call.column, directions_[2 * i + 1], true, units, before, call.source.cols);
      before = after(before, rows, units);
    }
  }
  const Call* calls() const { return calls_.data(); }
  int64_t count() const { return static_cast<int64_t>(calls_.size()); }

 private:
  static Source part_of(const Source& x, int64_t begin, int64_t rows) {
    const int64_t bytes = begin * x.row_stride * (x.dtype == Dtype::fp32 ? 4 : 2);
    return {static_cast<const char*>(x.data) + bytes, x.dtype, rows, x.cols, x.row_stride, x.col_stride};
  }

  template <class T>
  static void advance(T*& pointer, int64_t by) {
    if (pointer) pointer += by;
  }
  static void advance(void*& pointer, int64_t by, int size) {
    if (pointer) pointer = static_cast<char*>(pointer) + by * size;
  }

  static const Direction* member(const Direction* packed, Direction& to, bool columns, const Units& units,
                                 const Before& before, int64_t cols) {
    if (!packed) return nullptr;
    to = *packed;
    const Spec& spec = to.spec;
    const Starts starts = starts_of(spec, columns, units, before, cols);
    const bool floats = spec.family == Family::current || spec.family == Family::block;
    if (to.keys) to.key.key0 = to.keys[2 * before.expert], to.key.key1 = to.keys[2 * before.expert + 1];
    advance(to.amax, starts.amax);
    advance(to.found, starts.amax);
    advance(to.global, starts.amax);
    advance(to.codes, starts.codes);
    advance(to.scales, starts.scales, floats ? 4 : 1);
    advance(to.exact, starts.elements, to.exact_dtype == Dtype::fp32 ? 4 : 2);
    advance(to.sums, starts.sums);
    advance(to.row_errors, starts.row_errors);
    return &to;
  }

  std::vector<Direction> directions_;
  std::vector<Call> calls_;
};

// decode(operand, its first element) for each expert of packed operands.
template <class Decode>
void each_member(const EncodedGroup& encoded, const Decode& decode) {
  const Encoded& packed = encoded.packed;
  const bool columns = encoded.columns, floats = packed.spec.family == Family::current || packed.spec.family == Family::block;
  const Units units = units_of(packed.spec, columns, packed.cols);
  Before before{0, first_row(encoded.group), 0, 0, 0};
  while (before.expert < encoded.group.experts) {
    const int64_t rows = rows_of(encoded.group, before, packed.rows, columns ? &packed.spec : nullptr);
    const Starts starts = starts_of(packed.spec, columns, units, before, packed.cols);
    Encoded member = packed;
    member.rows = columns ? packed.cols : rows, member.cols = columns ? rows : packed.cols;
    member.turned = columns;
    if (packed.codes) member.codes += starts.codes;
    if (packed.scales) member.scales = static_cast<const char*>(packed.scales) + starts.scales * (floats ? 4 : 1);
    if (packed.global) member.global += starts.amax;
    decode(member, starts.elements);
    before = after(before, rows, units);
  }
}

}  // namespace hq
