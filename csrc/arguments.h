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
                                 {"mx", Family::mx}, {"nvfp4", Family::nvfp4}, {"ue5m3", Family::ue5m3}};
const Names<Element> kElements = {{"e4m3", Element::e4m3}, {"e5m2", Element::e5m2}, {"e2m1", Element::e2m1},
                                   {"e2m3", Element::e2m3}, {"e3m2", Element::e3m2}, {"e1m2", Element::e1m2},
                                   {"int8", Element::int8}};
const Names<Dtype> kDtypes = {{"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}, {"fp16", Dtype::fp16}};
const Names<ScaleRounding> kRoundings = {{"up", ScaleRounding::up}, {"floor", ScaleRounding::floor},
                                         {"even", ScaleRounding::even}, {"ceil", ScaleRounding::ceil}};
const Names<FourOverSix> kFourOverSix = {{"none", FourOverSix::none}, {"mae", FourOverSix::mae},
                                         {"mse", FourOverSix::mse}};

// The message is made where the condition does not hold; a call makes none.
#define HQ_REQUIRE(condition, message)                                                                 \
  do {                                                                                                \
    if (!(condition)) throw std::invalid_argument("hqsweep._C: " + std::string(message));             \
  } while (false)

inline std::string text(int64_t number) { return std::to_string(number); }

// Every array of so many elements, of 8 bytes at most, has a size in bytes that 64 bits hold.
constexpr int64_t kMostElements = int64_t{1} << 59;

inline void check_shape(int64_t rows, int64_t cols) {
  HQ_REQUIRE(rows >= 0 && cols >= 0, "rows and cols must be >= 0, got " + text(rows) + " and " + text(cols));
  HQ_REQUIRE(rows == 0 || cols <= kMostElements / rows,
             "a matrix has at most 2^59 elements, got " + text(rows) + " x " + text(cols));
}

inline void check_stride(int64_t count, int64_t stride, const char* name) {
  const int64_t most = kMostElements / (count > 1 ? count : 1);
  HQ_REQUIRE(stride <= most && stride >= -most, std::string(name) + " is " + text(stride) + " for " + text(count) +
                                                    " of them, which leads further than 2^59 elements");
}

// Null, where nothing is wanted or nothing is there, or a whole number of elements.
inline void check_aligned(uintptr_t address, uintptr_t bytes, const char* name) {
  HQ_REQUIRE(address % bytes == 0,
             std::string(name) + " is " + std::to_string(address) + ", no multiple of " + std::to_string(bytes) + " bytes");
}

inline void check_dtype(int dtype, const char* name) {
  HQ_REQUIRE(dtype >= 0 && dtype <= 2,
             std::string(name) + " is " + text(dtype) + ", must be 0 (fp32), 1 (bf16) or 2 (fp16)");
}

inline uintptr_t bytes_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }
inline uintptr_t scale_bytes(const Spec& spec) {
  return spec.family == Family::current || spec.family == Family::block ? 4 : 1;
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

inline std::string tile_text(int rows, int cols) { return text(rows) + " x " + text(cols); }

// Which scale tiles and elements a family has, and which options go together.
inline void check_spec(const Spec& spec) {
  const int rows = spec.tile_rows, cols = spec.tile_cols;
  const bool one_byte = spec.element == Element::e4m3 || spec.element == Element::e5m2 || spec.element == Element::int8;
  const std::string got = ", got " + tile_text(rows, cols);
  switch (spec.family) {
    case Family::current:
      HQ_REQUIRE(cols == 0 && rows == (spec.row_scaled ? 1 : 0),
              "family current has scale tile 0 x 0 (the whole tensor), and 1 x 0 (a row) with row_scaled" + got);
      HQ_REQUIRE(one_byte || is_current_four(spec), "family current takes element e4m3, e5m2, int8 or e2m1");
      break;
    case Family::block:
      HQ_REQUIRE(cols == 128 && (rows == 1 || rows == 128), "family block has scale tile 1 x 128 or 128 x 128" + got);
      HQ_REQUIRE(one_byte, "family block takes element e4m3, e5m2 or int8");
      break;
    case Family::mx:
      HQ_REQUIRE(cols == 32 && (rows == 1 || rows == 32), "family mx has scale tile 1 x 32 or 32 x 32" + got);
      HQ_REQUIRE(spec.element != Element::int8, "family mx takes elements of floating point");
      break;
    case Family::ue5m3:
    case Family::nvfp4:
      HQ_REQUIRE(cols == 16 && (rows == 1 || rows == 16), "family nvfp4 has scale tile 1 x 16 or 16 x 16" + got);
      HQ_REQUIRE(is_four(spec.element), "family nvfp4 takes element e2m1 or e1m2");
      HQ_REQUIRE(spec.e4m3_max == 448.0f || spec.e4m3_max == 256.0f,
              "e4m3_max is " + std::to_string(spec.e4m3_max) + ", must be 448 or 256");
      HQ_REQUIRE(!(spec.row_scaled && rows != 1), "row_scaled needs scale tile 1 x 16" + got);
  }
  const bool adaptive = spec.four_over_six != FourOverSix::none;
  HQ_REQUIRE(spec.family == Family::nvfp4 || !(adaptive || spec.fast_error),
          "four_over_six and fast_error belong to family nvfp4 only");
  HQ_REQUIRE(spec.family == Family::nvfp4 || (spec.family == Family::current && one_byte) || !spec.row_scaled,
          "row_scaled belongs to family nvfp4, and to family current with elements of 8 bits");
  HQ_REQUIRE(is_four(spec.element) || !(spec.rht || spec.sr), "rht and sr belong to elements e2m1 and e1m2");
  HQ_REQUIRE(spec.rht == 0 || spec.rht == 16 || spec.rht == 32 || spec.rht == 64 || spec.rht == 128,
          "rht is " + text(spec.rht) + ", must be 0, 16, 32, 64 or 128");
  const bool alone = rows == 1 && !spec.sr && !adaptive && !spec.row_scaled && spec.element == Element::e2m1;
  HQ_REQUIRE(!spec.eden || (spec.family == Family::nvfp4 && spec.rht && alone),
          "eden belongs to family nvfp4 with rht, scale tile 1 x 16 and element e2m1, without sr and four_over_six");
  HQ_REQUIRE(!(adaptive && (spec.sr || spec.rht)), "four_over_six cannot be combined with sr or rht");
  HQ_REQUIRE(!adaptive || spec.element == Element::e2m1, "four_over_six belongs to element e2m1");
}

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

inline std::unique_ptr<Spec> make_spec(const std::string& family, const std::string& element, int tile_rows,
                                       int tile_cols, bool pow2, float amax_epsilon, const std::string& scale_rounding,
                                       bool row_scaled, int rht, bool rht_sign, bool sr,
                                       const std::string& four_over_six, float e4m3_max, bool fast_error, bool eden) {
  Spec spec{lookup(kFamilies, "family", family), lookup(kElements, "element", element), tile_rows, tile_cols, pow2,
                  amax_epsilon, lookup(kRoundings, "scale_rounding", scale_rounding), row_scaled, rht, rht_sign, sr, eden,
                  lookup(kFourOverSix, "four_over_six", four_over_six), e4m3_max, fast_error, 0.0f, 0.0f, 0.0f};
  check_spec(spec);
  const float most = eden ? kEdenMost : (spec.element == Element::e1m2 ? 3.5f : 6.0f);
  spec.inverse_max = 1.0f / most, spec.full_range = most * e4m3_max, spec.inverse_range = 1.0f / spec.full_range;
  if (spec.family == Family::current) spec.tile_rows = 0;  // the loops go by row_scaled
  return std::make_unique<Spec>(spec);
}

inline Direction make_direction(const Spec& spec, int64_t key0, int64_t key1, uint64_t step, uintptr_t amax,
                                uintptr_t found, uintptr_t codes, uintptr_t scales, uintptr_t global, uintptr_t exact,
                                int exact_dtype, uintptr_t sums, uintptr_t row_errors, uintptr_t keys,
                                bool exact_turned, uintptr_t step_at, uint64_t first_segment,
                                uint64_t segments_across, uintptr_t seen) {
  HQ_REQUIRE(exact_dtype == 0 || exact_dtype == 1, "exact_dtype is " + text(exact_dtype) + ", must be 0 or 1");
  const auto exact_as = static_cast<Dtype>(exact_dtype);
  for (const int64_t word : {key0, key1})
    HQ_REQUIRE(word >= 0 && word <= 0xFFFFFFFF, "a word of the key is " + text(word) + ", must have 32 bits");
  check_aligned(amax | found | global | sums | row_errors | keys | seen, 4,
                "the least of amaxes, sums, errors, keys and what was seen");
  check_aligned(scales, scale_bytes(spec), "scales");
  check_aligned(exact, bytes_of(exact_as), "exact");
  check_aligned(step_at, 8, "step_at");
  HQ_REQUIRE(!segments_across || !keys, "a place is that of one matrix, and keys are those of members");
  const Key key{static_cast<uint32_t>(key0), static_cast<uint32_t>(key1), step, pointer<uint64_t>(step_at),
                first_segment, segments_across};
  return {spec, key, pointer<uint32_t>(keys), pointer<float>(amax), pointer<float>(found), pointer<uint8_t>(codes),
          pointer<void>(scales), pointer<float>(global), pointer<void>(exact), exact_as, exact_turned,
          pointer<TileSums>(sums), pointer<float>(row_errors), pointer<int32_t>(seen)};
}

inline void check_contracted(const Spec& spec, int64_t count, const char* name) {
  const int multiple = contracted_multiple(spec);
  HQ_REQUIRE(count % multiple == 0, std::string(name) + ": the contracted axis has " + text(count) +
                                        " elements, must be a multiple of " + text(multiple) + " for this format");
}

inline void check_direction(const Direction* to, int64_t rows, int64_t cols, bool empty, const char* name) {
  if (!to) return;
  HQ_REQUIRE(to->codes || !to->scales || to->spec.family == Family::current || empty,
             std::string(name) + ": scales are wanted without the codes that they belong to");
  const bool no_amaxes = to->spec.row_scaled && rows == 0;  // an empty tensor's address is null
  HQ_REQUIRE(!has_global_amax(to->spec) || to->amax || to->found || no_amaxes,
             "a format with a global amax needs `amax`, or `found` where it is found");
  check_contracted(to->spec, cols, name);
}

// What the bindings take for a matrix; dtypes are 0 fp32, 1 bf16, 2 fp16.
#define HQ_CALL_PARAMETERS                                                                                         \
  uintptr_t data, int dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,                   \
      const hq::Direction *row, const hq::Direction *column, bool dequantized
#define HQ_CALL_VALUES data, dtype, rows, cols, row_stride, col_stride, row, column, dequantized

inline Call make_call(HQ_CALL_PARAMETERS, bool grouped = false) {
  check_dtype(dtype, "dtype");
  check_shape(rows, cols);
  check_stride(rows, row_stride, "row_stride");
  check_stride(cols, col_stride, "col_stride");
  check_aligned(data, bytes_of(static_cast<Dtype>(dtype)), "data");
  const bool empty = rows * cols == 0;
  HQ_REQUIRE(data != 0 || empty, "data is 0 but the matrix is not empty");
  HQ_REQUIRE(row || !dequantized, "a column made from the decoded row needs the row's format");
  HQ_REQUIRE(!row || !row->exact_turned, "the exact values of a row are not stored turned; those of a column may be");
  check_direction(row, rows, cols, empty, "row");
  const int64_t contracted = grouped ? 0 : rows;  // an expert's rows: only the loops know how many
  check_direction(column, cols, contracted, empty, "column");
  return {{pointer<void>(data), static_cast<Dtype>(dtype), rows, cols, row_stride, col_stride}, row, column,
          dequantized};
}

// Whose rows those of X are: those of one matrix (offsets 0), or of members; offsets [members + 1] are int64.
#define HQ_MEMBER_PARAMETERS uintptr_t offsets, int64_t members

inline std::optional<Group> make_group(int64_t rows, int64_t cols, HQ_MEMBER_PARAMETERS) {
  HQ_REQUIRE(members >= 0, "members is " + text(members) + ", must be >= 0");
  HQ_REQUIRE(offsets != 0 || members == 0, "members need offsets");
  if (offsets == 0) return std::nullopt;
  check_shape(rows, cols);
  check_aligned(offsets, 8, "offsets");
  HQ_REQUIRE(rows < int64_t{1} << 31 && cols < int64_t{1} << 31 && members < int64_t{1} << 31,
             "a call for members takes fewer than 2^31 rows, columns and members, got " + text(rows) + ", " + text(cols) +
                 " and " + text(members));
  return Group{pointer<int64_t>(offsets), members};
}

inline Splits make_splits(uintptr_t splits, bool wide, int64_t count) {
  HQ_REQUIRE(count >= 0 && count < kMostElements && (splits != 0 || count == 0),
             "splits is " + std::to_string(splits) + " but there are " + text(count));
  check_aligned(splits, wide ? 8 : 4, "splits");
  return {pointer<void>(splits), wide, count};
}

// Where offsets go: 0 only where there is no rule.
inline int64_t* make_offsets(const Rules& rules, uintptr_t out) {
  HQ_REQUIRE(out != 0 || rules.count == 0, "out is 0 but there are " + text(rules.count) + " rules");
  check_aligned(out, 8, "out");
  return pointer<int64_t>(out);
}

inline Rules make_rules(const std::vector<int64_t>& divisors, const std::vector<int64_t>& strides) {
  HQ_REQUIRE(divisors.size() == strides.size() && divisors.size() <= kMostRules,
          "got " + std::to_string(divisors.size()) + " divisors and " + std::to_string(strides.size()) +
              " strides, must be as many of both and at most " + std::to_string(kMostRules));
  Rules rules{static_cast<int>(divisors.size()), {}, {}};
  for (size_t r = 0; r < divisors.size(); ++r) {
    HQ_REQUIRE(divisors[r] >= 0, "divisor is " + std::to_string(divisors[r]) + ", must be >= 0");
    rules.divisors[r] = divisors[r], rules.strides[r] = strides[r];
  }
  return rules;
}

inline void check_threads(int threads) {
  HQ_REQUIRE(threads >= 1, "threads is " + text(threads) + ", must be at least 1");
}

inline void check_cpu(int threads, const std::string& isa) {
  check_threads(threads);
  if (isa.empty()) return;
  const std::string known = std::string(" ") + HQ_ISAS + " ", best = std::string(" ") + best_isa() + " ";
  const bool runs = known.find(" " + isa + " ") != std::string::npos &&
                    known.find(" " + isa + " ") <= known.find(best);  // listed from the least to the most demanding
  HQ_REQUIRE(runs, "isa is '" + isa + "'; this build has" + known + "and this processor runs up to" + best);
}

// What the bindings take for an operand, or for packed ones, and where its values go.
#define HQ_DECODE_PARAMETERS                                                                                 \
  const hq::Spec &spec, int64_t rows, int64_t cols, uintptr_t codes, uintptr_t scales, uintptr_t global,     \
      bool exact, uintptr_t out, int out_dtype
#define HQ_DECODE_VALUES spec, rows, cols, codes, scales, global, exact, out, out_dtype

inline Encoded make_encoded(HQ_DECODE_PARAMETERS, bool columns, bool grouped) {
  check_shape(rows, cols);
  check_dtype(out_dtype, "out_dtype");
  HQ_REQUIRE(grouped || !columns, "columns are those of members, which need offsets");
  if (!columns) check_contracted(spec, cols, "operand");  // of columns that is each expert's rows
  const bool empty = rows == 0 || cols == 0, alone = exact && spec.family == Family::current;
  HQ_REQUIRE(empty || (codes && out), "codes and out are 0 for nothing but an empty operand");
  HQ_REQUIRE(empty || scales || alone, "decoding needs the scales of the codes");
  HQ_REQUIRE(empty || spec.family != Family::nvfp4 || global, "decoding nvfp4 needs its global amax");
  check_aligned(out, bytes_of(static_cast<Dtype>(out_dtype)), "out");
  check_aligned(scales, scale_bytes(spec), "scales");
  check_aligned(global, 4, "global_");
  return {spec, rows, cols, pointer<uint8_t>(codes), pointer<void>(scales), pointer<float>(global), false};
}

// The arrays of one operation over n values.
inline void check_arrays(int64_t n, uintptr_t source, uintptr_t source_bytes, uintptr_t to, uintptr_t to_bytes) {
  HQ_REQUIRE(n >= 0 && n < kMostElements, "n is " + text(n) + ", must be >= 0 and less than 2^59");
  HQ_REQUIRE(n == 0 || (source && to), "an array of " + text(n) + " values is at address 0");
  check_aligned(source, source_bytes, "src_ptr");
  check_aligned(to, to_bytes, "dst_ptr");
}

#if defined(HQ_HAVE_CUDA)
inline Product make_product(uintptr_t product, int dtype, float before, uintptr_t factor, int64_t rows, int64_t cols,
                            int row_step, int col_step, uintptr_t out, int out_dtype) {
  HQ_REQUIRE(dtype == 0 || dtype == 1, "dtype of the product is " + text(dtype) + ", must be 0 (fp32) or 1 (bf16)");
  check_dtype(out_dtype, "out_dtype");
  check_shape(rows, cols);
  check_stride(rows, row_step, "row_step");
  check_stride(cols, col_step, "col_step");
  HQ_REQUIRE(rows * cols == 0 || (product && factor && out), "product, factor and out are 0 only without elements");
  check_aligned(product, bytes_of(static_cast<Dtype>(dtype)), "product");
  check_aligned(factor, 4, "factor");
  check_aligned(out, bytes_of(static_cast<Dtype>(out_dtype)), "out");
  return {pointer<void>(product), static_cast<Dtype>(dtype), before, pointer<float>(factor), rows, cols, row_step,
          col_step};
}
#endif

}  // namespace hq::arguments
