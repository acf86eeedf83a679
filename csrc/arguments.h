// What the bindings are given, as the loops' plain data: names to enums, addresses to pointers, and checks with both sides
// in the message. Pointers are integers (data_ptr() of a torch tensor or of a numpy array), so nothing here links to torch.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "numerics.h"
#include "offsets.h"
#include "quantize.h"

namespace hq::arguments {

template <class Enum>
using Names = std::vector<std::pair<const char*, Enum>>;

const Names<Family> kFamilies = {{"current", Family::current}, {"block", Family::block},
                                 {"mx", Family::mx}, {"nvfp4", Family::nvfp4}};
const Names<Element> kElements = {{"e4m3", Element::e4m3}, {"e5m2", Element::e5m2}, {"e2m1", Element::e2m1},
                                   {"e2m3", Element::e2m3}, {"e3m2", Element::e3m2}};
const Names<Dtype> kDtypes = {{"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}, {"fp16", Dtype::fp16}};
const Names<ScaleRounding> kRoundings = {{"up", ScaleRounding::up}, {"floor", ScaleRounding::floor},
                                         {"even", ScaleRounding::even}};
const Names<FourOverSix> kFourOverSix = {{"none", FourOverSix::none}, {"mae", FourOverSix::mae},
                                         {"mse", FourOverSix::mse}};

inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument("hqsweep._C: " + message);
}

template <class Enum>
Enum lookup(const Names<Enum>& names, const char* what, const std::string& name) {
  std::string allowed;
  for (const auto& [known, value] : names) {
    if (name == known) return value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(known);
  }
  throw std::invalid_argument("hqsweep._C: " + std::string(what) + " is '" + name + "', must be one of " + allowed);
}

inline std::string tile_text(int rows, int cols) { return std::to_string(rows) + " x " + std::to_string(cols); }

// Which scale tiles and elements a family has, and which options go together.
inline void check_spec(const Spec& spec) {
  const int rows = spec.tile_rows, cols = spec.tile_cols;
  const bool one_byte = spec.element == Element::e4m3 || spec.element == Element::e5m2;
  const std::string got = ", got " + tile_text(rows, cols);
  switch (spec.family) {
    case Family::current:
      require(rows == 0 && cols == 0, "family current has scale tile 0 x 0 (the whole tensor)" + got);
      require(one_byte || is_current_four(spec), "family current takes element e4m3, e5m2 or e2m1");
      break;
    case Family::block:
      require(cols == 128 && (rows == 1 || rows == 128), "family block has scale tile 1 x 128 or 128 x 128" + got);
      require(one_byte, "family block takes element e4m3 or e5m2");
      break;
    case Family::mx:
      require(cols == 32 && (rows == 1 || rows == 32), "family mx has scale tile 1 x 32 or 32 x 32" + got);
      break;
    case Family::nvfp4:
      require(cols == 16 && (rows == 1 || rows == 16), "family nvfp4 has scale tile 1 x 16 or 16 x 16" + got);
      require(spec.element == Element::e2m1, "family nvfp4 takes element e2m1");
      require(spec.e4m3_max == 448.0f || spec.e4m3_max == 256.0f,
              "e4m3_max is " + std::to_string(spec.e4m3_max) + ", must be 448 or 256");
      require(!(spec.row_scaled && rows != 1), "row_scaled needs scale tile 1 x 16" + got);
  }
  const bool adaptive = spec.four_over_six != FourOverSix::none;
  require(spec.family == Family::nvfp4 || !(spec.row_scaled || adaptive || spec.fast_error),
          "row_scaled, four_over_six and fast_error belong to family nvfp4 only");
  require(spec.family == Family::nvfp4 || is_current_four(spec) || !(spec.rht || spec.sr),
          "rht and sr belong to family nvfp4, and to family current with element e2m1");
  require(!(adaptive && (spec.sr || spec.rht)), "four_over_six cannot be combined with sr or rht");
}

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

inline std::unique_ptr<Spec> make_spec(const std::string& family, const std::string& element, int tile_rows,
                                       int tile_cols, bool pow2, float amax_epsilon, const std::string& scale_rounding,
                                       bool row_scaled, bool rht, bool rht_sign, bool sr,
                                       const std::string& four_over_six, float e4m3_max, bool fast_error) {
  const Spec spec{lookup(kFamilies, "family", family), lookup(kElements, "element", element), tile_rows, tile_cols, pow2,
                  amax_epsilon, lookup(kRoundings, "scale_rounding", scale_rounding), row_scaled, rht, rht_sign, sr,
                  lookup(kFourOverSix, "four_over_six", four_over_six), e4m3_max, fast_error};
  check_spec(spec);
  return std::make_unique<Spec>(spec);
}

inline Direction make_direction(const Spec& spec, uint32_t key0, uint32_t key1, uint64_t step, uintptr_t amax,
                                uintptr_t found, uintptr_t codes, uintptr_t scales, uintptr_t global, uintptr_t exact,
                                int exact_dtype, uintptr_t sums, uintptr_t row_errors, uintptr_t keys,
                                bool exact_turned) {
  require(exact_dtype == 0 || exact_dtype == 1, "exact_dtype is " + std::to_string(exact_dtype) + ", must be 0 or 1");
  return {spec, {key0, key1, step}, pointer<uint32_t>(keys), pointer<float>(amax), pointer<float>(found),
          pointer<uint8_t>(codes), pointer<void>(scales), pointer<float>(global), pointer<void>(exact),
          static_cast<Dtype>(exact_dtype), exact_turned, pointer<TileSums>(sums), pointer<float>(row_errors)};
}

inline void check_direction(const Direction* to, int64_t rows, int64_t cols, bool empty, const char* name) {
  if (!to) return;
  require(to->codes || !to->scales || to->spec.family == Family::current || empty,
          std::string(name) + ": scales are wanted without the codes that they belong to");
  const bool no_amaxes = to->spec.row_scaled && rows == 0;  // an empty tensor's address is null
  require(!has_global_amax(to->spec) || to->amax || to->found || no_amaxes,
          "a format with a global amax needs `amax`, or `found` where it is found");
  const int multiple = contracted_multiple(to->spec);
  require(cols % multiple == 0, std::string(name) + ": the contracted axis has " + std::to_string(cols) +
                                    " elements, must be a multiple of " + std::to_string(multiple) + " for this format");
}

// What the bindings take for a matrix; dtypes are 0 fp32, 1 bf16, 2 fp16.
#define HQ_CALL_PARAMETERS                                                                                         \
  uintptr_t data, int dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,                   \
      const hq::Direction *row, const hq::Direction *column, bool dequantized
#define HQ_CALL_VALUES data, dtype, rows, cols, row_stride, col_stride, row, column, dequantized

inline Call make_call(HQ_CALL_PARAMETERS, bool grouped = false) {
  require(dtype >= 0 && dtype <= 2, "dtype is " + std::to_string(dtype) + ", must be 0 (fp32), 1 (bf16) or 2 (fp16)");
  require(rows >= 0 && cols >= 0,
          "rows and cols must be >= 0, got " + std::to_string(rows) + " and " + std::to_string(cols));
  require(data != 0 || rows * cols == 0, "data is 0 but the matrix is not empty");
  require(row || !dequantized, "a column made from the decoded row needs the row's format");
  require(!row || !row->exact_turned, "the exact values of a row are not stored turned; those of a column may be");
  check_direction(row, rows, cols, rows * cols == 0, "row");
  const int64_t contracted = grouped ? 0 : rows;  // an expert's rows: only the loops know how many
  check_direction(column, cols, contracted, rows * cols == 0, "column");
  return {{pointer<void>(data), static_cast<Dtype>(dtype), rows, cols, row_stride, col_stride}, row, column,
          dequantized};
}

// Whose rows those of X are: those of one matrix (offsets 0), or of members; offsets [members + 1] are int64.
#define HQ_MEMBER_PARAMETERS uintptr_t offsets, int64_t members

inline std::optional<Group> make_group(int64_t rows, int64_t cols, HQ_MEMBER_PARAMETERS) {
  require(members >= 0, "members is " + std::to_string(members) + ", must be >= 0");
  require(offsets != 0 || members == 0, "members need offsets");
  if (offsets == 0) return std::nullopt;
  require(rows >= 0 && cols >= 0,
          "rows and cols must be >= 0, got " + std::to_string(rows) + " and " + std::to_string(cols));
  require(rows < int64_t{1} << 31 && cols < int64_t{1} << 31 && members < int64_t{1} << 31,
          "a call for members takes fewer than 2^31 rows, columns and members, got " + std::to_string(rows) + ", " +
              std::to_string(cols) + " and " + std::to_string(members));
  return Group{pointer<int64_t>(offsets), members};
}

inline Splits make_splits(uintptr_t splits, bool wide, int64_t count) {
  require(count >= 0 && (splits != 0 || count == 0), "splits is 0 but there are " + std::to_string(count));
  return {pointer<void>(splits), wide, count};
}

inline Rules make_rules(const std::vector<int64_t>& divisors, const std::vector<int64_t>& strides) {
  require(divisors.size() == strides.size() && divisors.size() <= kMostRules,
          "got " + std::to_string(divisors.size()) + " divisors and " + std::to_string(strides.size()) +
              " strides, must be as many of both and at most " + std::to_string(kMostRules));
  Rules rules{static_cast<int>(divisors.size()), {}, {}};
  for (size_t r = 0; r < divisors.size(); ++r) {
    require(divisors[r] >= 0, "divisor is " + std::to_string(divisors[r]) + ", must be >= 0");
    rules.divisors[r] = divisors[r], rules.strides[r] = strides[r];
  }
  return rules;
}

inline void check_cpu(int threads, const std::string& isa) {
  require(threads >= 1, "threads is " + std::to_string(threads) + ", must be at least 1");
  const std::string known = std::string(" ") + HQ_ISAS + " ", best = std::string(" ") + best_isa() + " ";
  const bool runs = known.find(" " + isa + " ") != std::string::npos &&
                    known.find(" " + isa + " ") <= known.find(best);  // listed from the least to the most demanding
  require(isa.empty() || runs, "isa is '" + isa + "'; this build has" + known + "and this processor runs up to" + best);
}

inline Encoded make_encoded(const Spec& spec, int64_t rows, int64_t cols, uintptr_t codes, uintptr_t scales,
                            uintptr_t global) {
  require(spec.family != Family::nvfp4 || global || rows == 0, "decoding nvfp4 needs its global amax");
  return {spec, rows, cols, pointer<uint8_t>(codes), pointer<void>(scales), pointer<float>(global), false};
}

}  // namespace hq::arguments
