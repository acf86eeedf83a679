// A grouped call on the host as one call for each expert, whose directions point to its parts of the packed arrays.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "group.h"
#include "quantize.h"

namespace hq {

inline int multiple_of(const Spec& spec) {
  return spec.family == Family::nvfp4 ? 16 : (spec.element == Element::e2m1 ? 2 : 1);
}

class Members {
 public:
  Members(const Call& call, const Group& group) {
    const size_t count = static_cast<size_t>(group.experts);
    const Units units = units_of(call.row, call.column, call.source.cols);
    directions_.resize(2 * count);  // the calls point into it
    calls_.resize(count);
    Before before{0, group.offsets[0], 0, 0, 0};
    if (before.rows != 0)
      throw std::invalid_argument("hqsweep._C: offsets begin with " + std::to_string(before.rows) + ", must begin with 0");
    for (size_t i = 0; i < count; ++i) {
      const int64_t rows = rows_of(call, group, before);
      calls_[i] = call;
      calls_[i].source = part_of(call.source, before.rows, rows);
      calls_[i].row = member(call.row, directions_[2 * i], false, units, before, call.source.cols);
      calls_[i].column = member(call.column, directions_[2 * i + 1], true, units, before, call.source.cols);
      before = {before.expert + 1, before.rows + rows, before.tiles + up(rows, 7),
                before.row_units + up(rows, units.row_shift), before.column_units + up(rows, units.column_shift)};
    }
  }
  const Call* calls() const { return calls_.data(); }
  int64_t count() const { return static_cast<int64_t>(calls_.size()); }

 private:
  static int64_t up(int64_t rows, int shift) { return (rows + (int64_t{1} << shift) - 1) >> shift; }

  static int64_t rows_of(const Call& call, const Group& group, const Before& before) {
    const int64_t begin = before.rows, end = group.offsets[before.expert + 1];
    const std::string name = "hqsweep._C: expert " + std::to_string(before.expert);
    if (end < begin || end > call.source.rows)
      throw std::invalid_argument(name + " has rows " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
                                  std::to_string(call.source.rows) + "; offsets must not decrease and must lie in X");
    const int multiple = call.column ? multiple_of(call.column->spec) : 1;
    if ((end - begin) % multiple)
      throw std::invalid_argument(name + ": the contracted axis has " + std::to_string(end - begin) +
                                  " elements, must be a multiple of " + std::to_string(multiple) + " for this format");
    return end - begin;
  }

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

}  // namespace hq
