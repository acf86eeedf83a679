// Python bindings: names to enums, checks with both sides in the message, pointers. No loop and no arithmetic.
// Pointers are integers (data_ptr() of a torch tensor or of a numpy array), so nothing here links to torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "numerics.h"
#include "offsets.h"
#include "quantize.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

template <class Enum>
using Names = std::vector<std::pair<const char*, Enum>>;

const Names<hq::Family> kFamilies = {{"current", hq::Family::current}, {"block", hq::Family::block},
                                     {"mx", hq::Family::mx}, {"nvfp4", hq::Family::nvfp4}};
const Names<hq::Element> kElements = {{"e4m3", hq::Element::e4m3}, {"e5m2", hq::Element::e5m2},
                                      {"e2m1", hq::Element::e2m1}, {"e2m3", hq::Element::e2m3},
                                      {"e3m2", hq::Element::e3m2}};
const Names<hq::Dtype> kDtypes = {{"fp32", hq::Dtype::fp32}, {"bf16", hq::Dtype::bf16}, {"fp16", hq::Dtype::fp16}};
const Names<hq::ScaleRounding> kRoundings = {{"up", hq::ScaleRounding::up}, {"floor", hq::ScaleRounding::floor},
                                             {"even", hq::ScaleRounding::even}};
const Names<hq::FourOverSix> kFourOverSix = {{"none", hq::FourOverSix::none}, {"mae", hq::FourOverSix::mae},
                                             {"mse", hq::FourOverSix::mse}};

void require(bool condition, const std::string& message) {
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

std::string tile_text(int rows, int cols) { return std::to_string(rows) + " x " + std::to_string(cols); }

// Which scale tiles and elements a family has, and which options go together.
void check_spec(const hq::Spec& spec) {
  const int rows = spec.tile_rows, cols = spec.tile_cols;
  const bool one_byte = spec.element == hq::Element::e4m3 || spec.element == hq::Element::e5m2;
  const std::string got = ", got " + tile_text(rows, cols);
  switch (spec.family) {
    case hq::Family::current:
      require(rows == 0 && cols == 0, "family current has scale tile 0 x 0 (the whole tensor)" + got);
      require(one_byte, "family current takes element e4m3 or e5m2");
      break;
    case hq::Family::block:
      require(cols == 128 && (rows == 1 || rows == 128), "family block has scale tile 1 x 128 or 128 x 128" + got);
      require(one_byte, "family block takes element e4m3 or e5m2");
      break;
    case hq::Family::mx:
      require(cols == 32 && (rows == 1 || rows == 32), "family mx has scale tile 1 x 32 or 32 x 32" + got);
      break;
    case hq::Family::nvfp4:
      require(cols == 16 && (rows == 1 || rows == 16), "family nvfp4 has scale tile 1 x 16 or 16 x 16" + got);
      require(spec.element == hq::Element::e2m1, "family nvfp4 takes element e2m1");
      require(spec.e4m3_max == 448.0f || spec.e4m3_max == 256.0f,
              "e4m3_max is " + std::to_string(spec.e4m3_max) + ", must be 448 or 256");
      require(!(spec.row_scaled && rows != 1), "row_scaled needs scale tile 1 x 16" + got);
  }
  const bool adaptive = spec.four_over_six != hq::FourOverSix::none;
  const bool nvfp4_only = spec.row_scaled || spec.rht || spec.sr || adaptive || spec.fast_error;
  require(spec.family == hq::Family::nvfp4 || !nvfp4_only,
          "row_scaled, rht, sr, four_over_six and fast_error belong to family nvfp4 only");
  require(!(adaptive && (spec.sr || spec.rht)), "four_over_six cannot be combined with sr or rht");
}

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

std::unique_ptr<hq::Spec> make_spec(const std::string& family, const std::string& element, int tile_rows, int tile_cols,
                                    bool pow2, float amax_epsilon, const std::string& scale_rounding, bool row_scaled,
                                    bool rht, bool rht_sign, bool sr, const std::string& four_over_six, float e4m3_max,
                                    bool fast_error) {
  const hq::Spec spec{lookup(kFamilies, "family", family), lookup(kElements, "element", element), tile_rows, tile_cols,
                      pow2, amax_epsilon, lookup(kRoundings, "scale_rounding", scale_rounding), row_scaled, rht, rht_sign,
                      sr, lookup(kFourOverSix, "four_over_six", four_over_six), e4m3_max, fast_error};
  check_spec(spec);
  return std::make_unique<hq::Spec>(spec);
}

hq::Direction make_direction(const hq::Spec& spec, uint32_t key0, uint32_t key1, uint64_t step, uintptr_t amax,
                             uintptr_t found, uintptr_t codes, uintptr_t scales, uintptr_t global, uintptr_t exact,
                             int exact_dtype, uintptr_t sums, uintptr_t row_errors, uintptr_t keys) {
  require(exact_dtype == 0 || exact_dtype == 1, "exact_dtype is " + std::to_string(exact_dtype) + ", must be 0 or 1");
  return {spec, {key0, key1, step}, pointer<uint32_t>(keys), pointer<float>(amax), pointer<float>(found), pointer<uint8_t>(codes),
          pointer<void>(scales), pointer<float>(global), pointer<void>(exact), static_cast<hq::Dtype>(exact_dtype),
          pointer<hq::TileSums>(sums), pointer<float>(row_errors)};
}

void check_direction(const hq::Direction* to, int64_t rows, int64_t cols, bool empty, const char* name) {
  if (!to) return;
  require(to->codes || !to->scales || to->spec.family == hq::Family::current || empty,
          std::string(name) + ": scales are wanted without the codes that they belong to");
  const bool global_family = to->spec.family == hq::Family::current || to->spec.family == hq::Family::nvfp4;
  const bool no_amaxes = to->spec.row_scaled && rows == 0;  // an empty tensor's address is null
  require(!global_family || to->amax || to->found || no_amaxes,
          "a format with a global amax needs `amax`, or `found` where it is found");
  const int multiple = to->spec.family == hq::Family::nvfp4 ? 16 : (to->spec.element == hq::Element::e2m1 ? 2 : 1);
  require(cols % multiple == 0, std::string(name) + ": the contracted axis has " + std::to_string(cols) +
                                    " elements, must be a multiple of " + std::to_string(multiple) + " for this format");
}

// What the bindings take for a matrix; dtypes are 0 fp32, 1 bf16, 2 fp16.
#define HQ_CALL_PARAMETERS                                                                                         \
  uintptr_t data, int dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,                   \
      const hq::Direction *row, const hq::Direction *column, bool dequantized
#define HQ_CALL_VALUES data, dtype, rows, cols, row_stride, col_stride, row, column, dequantized
#define HQ_CALL_ARGS                                                                                               \
  "data"_a, "dtype"_a, "rows"_a, "cols"_a, "row_stride"_a, "col_stride"_a, "row"_a.none(true),                     \
      "column"_a.none(true), "dequantized"_a = false

hq::Call make_call(HQ_CALL_PARAMETERS, bool grouped = false) {
  require(dtype >= 0 && dtype <= 2, "dtype is " + std::to_string(dtype) + ", must be 0 (fp32), 1 (bf16) or 2 (fp16)");
  require(rows >= 0 && cols >= 0,
          "rows and cols must be >= 0, got " + std::to_string(rows) + " and " + std::to_string(cols));
  require(data != 0 || rows * cols == 0, "data is 0 but the matrix is not empty");
  require(row || !dequantized, "a column made from the decoded row needs the row's format");
  check_direction(row, rows, cols, rows * cols == 0, "row");
  check_direction(column, cols, grouped ? 0 : rows, rows * cols == 0, "column");  // of each expert's rows: known to the loops only
  return {{pointer<void>(data), static_cast<hq::Dtype>(dtype), rows, cols, row_stride, col_stride}, row, column,
          dequantized};
}

// A call for experts that own X's rows; offsets [experts + 1] are int64.
#define HQ_GROUP_PARAMETERS HQ_CALL_PARAMETERS, uintptr_t offsets, int64_t experts
#define HQ_GROUP_ARGS                                                                                              \
  "data"_a, "dtype"_a, "rows"_a, "cols"_a, "row_stride"_a, "col_stride"_a, "row"_a.none(true),                     \
      "column"_a.none(true), "dequantized"_a, "offsets"_a, "experts"_a

hq::Group make_group(const hq::Call& call, uintptr_t offsets, int64_t experts) {
  require(experts >= 0, "experts is " + std::to_string(experts) + ", must be >= 0");
  require(offsets != 0, "a grouped call needs offsets");
  const int64_t rows = call.source.rows, cols = call.source.cols;
  require(rows < int64_t{1} << 31 && cols < int64_t{1} << 31 && experts < int64_t{1} << 31,
          "a grouped call takes fewer than 2^31 rows, columns and experts, got " + std::to_string(rows) + ", " +
              std::to_string(cols) + " and " + std::to_string(experts));
  return {pointer<int64_t>(offsets), experts};
}

hq::Splits make_splits(uintptr_t splits, bool wide, int64_t count) {
  require(count >= 0 && (splits != 0 || count == 0), "splits is 0 but there are " + std::to_string(count));
  return {pointer<void>(splits), wide, count};
}

hq::Rules make_rules(const std::vector<int64_t>& divisors, const std::vector<int64_t>& strides) {
  require(divisors.size() == strides.size() && divisors.size() <= hq::kMostRules,
          "got " + std::to_string(divisors.size()) + " divisors and " + std::to_string(strides.size()) +
              " strides, must be as many of both and at most " + std::to_string(hq::kMostRules));
  hq::Rules rules{static_cast<int>(divisors.size()), {}, {}};
  for (size_t r = 0; r < divisors.size(); ++r) {
    require(divisors[r] >= 0, "divisor is " + std::to_string(divisors[r]) + ", must be >= 0");
    rules.divisors[r] = divisors[r], rules.strides[r] = strides[r];
  }
  return rules;
}

void check_cpu(int threads, const std::string& isa) {
  require(threads >= 1, "threads is " + std::to_string(threads) + ", must be at least 1");
  const std::string known = std::string(" ") + HQ_ISAS + " ", best = std::string(" ") + hq::best_isa() + " ";
  const bool runs = known.find(" " + isa + " ") != std::string::npos &&
                    known.find(" " + isa + " ") <= known.find(best);  // listed from the least to the most demanding
  require(isa.empty() || runs, "isa is '" + isa + "'; this build has" + known + "and this processor runs up to" + best);
}

hq::Encoded make_encoded(const hq::Spec& spec, int64_t rows, int64_t cols, uintptr_t codes, uintptr_t scales,
                         uintptr_t global) {
  require(spec.family != hq::Family::nvfp4 || global || rows == 0, "decoding nvfp4 needs its global amax");
  return {spec, rows, cols, pointer<uint8_t>(codes), pointer<void>(scales), pointer<float>(global)};
}

py::dict build_info() {
  py::dict info("version"_a = HQ_VERSION, "compiler"_a = HQ_CXX_COMPILER, "cxx_flags"_a = HQ_CXX_FLAGS,
                "isas"_a = HQ_ISAS, "isa"_a = hq::best_isa(), "openmp"_a = _OPENMP, "cuda"_a = false);
#if defined(HQ_HAVE_CUDA)
  info["cuda"] = true;
  info["cuda_compiler"] = HQ_CUDA_COMPILER;
  info["cuda_flags"] = HQ_CUDA_FLAGS;
  info["cuda_archs"] = HQ_CUDA_ARCHS;
#endif
  return info;
}

#define HQ_DECODE_PARAMETERS                                                                                 \
  const hq::Spec &spec, int64_t rows, int64_t cols, uintptr_t codes, uintptr_t scales, uintptr_t global,     \
      bool exact, uintptr_t out, int out_dtype
#define HQ_DECODE_ARGS                                                                                       \
  "spec"_a, "rows"_a, "cols"_a, "codes"_a, "scales"_a, "global_"_a, "exact"_a, "out"_a, "out_dtype"_a

void bind_cpu(py::module_& m) {
  m.def("quantize_cpu", [](HQ_CALL_PARAMETERS, int threads, const std::string& isa) {
    const hq::Call call = make_call(HQ_CALL_VALUES);
    check_cpu(threads, isa);
    py::gil_scoped_release release;
    hq::quantize_cpu(call, threads, isa.c_str());
  }, HQ_CALL_ARGS, "threads"_a = 1, "isa"_a = "",
     "Quantize X [rows, cols] along its rows and its columns; what is not 0 in the directions is written.");
  m.def("find_amax_cpu", [](HQ_CALL_PARAMETERS, int threads, const std::string& isa) {
    const hq::Call call = make_call(HQ_CALL_VALUES);
    check_cpu(threads, isa);
    py::gil_scoped_release release;
    hq::find_amax_cpu(call, threads, isa.c_str());
  }, HQ_CALL_ARGS, "threads"_a = 1, "isa"_a = "", "found = max(found, amax) of each direction, in place.");
  m.def("quantize_grouped_cpu", [](HQ_GROUP_PARAMETERS, int threads, const std::string& isa) {
    const hq::Call call = make_call(HQ_CALL_VALUES, true);
    const hq::Group group = make_group(call, offsets, experts);
    check_cpu(threads, isa);
    py::gil_scoped_release release;
    hq::quantize_grouped_cpu(call, group, threads, isa.c_str());
  }, HQ_GROUP_ARGS, "threads"_a = 1, "isa"_a = "",
     "quantize_cpu for each expert's rows of X, to packed arrays: one expert's after the other's.");
  m.def("offsets_cpu", [](uintptr_t splits, bool wide, int64_t count, const std::vector<int64_t>& divisors,
                          const std::vector<int64_t>& strides, uintptr_t out) {
    hq::offsets_cpu(make_splits(splits, wide, count), make_rules(divisors, strides), pointer<int64_t>(out));
  }, "splits"_a, "wide"_a, "count"_a, "divisors"_a, "strides"_a, "out"_a,
     "out[r, i] = strides[r] * the sum of ceil(splits[j] / divisors[r]) for j < i; wide: int64, else int32.");
  m.def("dequantize_cpu", [](HQ_DECODE_PARAMETERS, int threads) {
    const hq::Encoded encoded = make_encoded(spec, rows, cols, codes, scales, global);
    py::gil_scoped_release release;
    hq::dequantize_cpu(encoded, exact ? hq::Decoding::exact : hq::Decoding::value, pointer<void>(out),
                       static_cast<hq::Dtype>(out_dtype), threads);
  }, HQ_DECODE_ARGS, "threads"_a = 1, "An operand's values, or (exact) its codes times block scales.");
}

#if defined(HQ_HAVE_CUDA)
void bind_cuda(py::module_& m) {
  m.def("quantize_cuda", [](HQ_CALL_PARAMETERS, uintptr_t stream) {
    hq::quantize_cuda(make_call(HQ_CALL_VALUES), stream);
  }, HQ_CALL_ARGS, "stream"_a = 0, "quantize_cpu on the current GPU, enqueued on a stream (cudaStream_t as an integer).");
  m.def("find_amax_cuda", [](HQ_CALL_PARAMETERS, uintptr_t stream) {
    hq::find_amax_cuda(make_call(HQ_CALL_VALUES), stream);
  }, HQ_CALL_ARGS, "stream"_a = 0, "find_amax_cpu on the current GPU.");
  m.def("quantize_grouped_cuda", [](HQ_GROUP_PARAMETERS, uintptr_t stream) {
    const hq::Call call = make_call(HQ_CALL_VALUES, true);
    hq::quantize_grouped_cuda(call, make_group(call, offsets, experts), stream);
  }, HQ_GROUP_ARGS, "stream"_a = 0, "quantize_grouped_cpu on the current GPU, where the offsets are.");
  m.def("offsets_cuda", [](uintptr_t splits, bool wide, int64_t count, const std::vector<int64_t>& divisors,
                           const std::vector<int64_t>& strides, uintptr_t out, uintptr_t overflow, uintptr_t stream) {
    hq::offsets_cuda(make_splits(splits, wide, count), make_rules(divisors, strides), pointer<int64_t>(out),
                     pointer<int>(overflow), stream);
  }, "splits"_a, "wide"_a, "count"_a, "divisors"_a, "strides"_a, "out"_a, "overflow"_a = 0, "stream"_a = 0,
     "offsets_cpu on the current GPU; overflow: an int32 set to 1 where an offset does not fit.");
  m.def("dequantize_cuda", [](HQ_DECODE_PARAMETERS, uintptr_t stream) {
    hq::dequantize_cuda(make_encoded(spec, rows, cols, codes, scales, global),
                        exact ? hq::Decoding::exact : hq::Decoding::value, pointer<void>(out),
                        static_cast<hq::Dtype>(out_dtype), stream);
  }, HQ_DECODE_ARGS, "stream"_a = 0, "dequantize_cpu on the current GPU.");
  m.def("scale_product_cuda", [](uintptr_t product, uintptr_t factor, int64_t rows, int64_t cols, int row_step,
                                 int col_step, uintptr_t out, int out_dtype, uintptr_t stream) {
    hq::scale_product_cuda(pointer<float>(product), pointer<float>(factor), rows, cols, row_step, col_step,
                           pointer<void>(out), static_cast<hq::Dtype>(out_dtype), stream);
  }, "product"_a, "factor"_a, "rows"_a, "cols"_a, "row_step"_a, "col_step"_a, "out"_a, "out_dtype"_a, "stream"_a = 0,
     "A GEMM's fp32 product times a factor, one or per row or per column, rounded to the output's dtype.");
  m.def("cuda_device_count", &hq::cuda_device_count, "Visible GPUs; 0 without a driver.");
}
#endif

// One operation over n values, for tests.
void bind_elements(py::module_& m) {
  m.def("cast_elements", [](const std::string& element, uintptr_t src_ptr, uintptr_t dst_ptr, int64_t n) {
    hq::encode_elements(lookup(kElements, "element", element), pointer<float>(src_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "element"_a, "src_ptr"_a, "dst_ptr"_a, "n"_a, "fp32 values to codes, one byte each.");
  m.def("decode_elements", [](const std::string& element, uintptr_t src_ptr, uintptr_t dst_ptr, int64_t n) {
    hq::decode_elements(lookup(kElements, "element", element), pointer<uint8_t>(src_ptr), pointer<float>(dst_ptr), n);
  }, "element"_a, "src_ptr"_a, "dst_ptr"_a, "n"_a, "Codes, one byte each, to fp32 values.");
  m.def("e8m0_up", [](uintptr_t src_ptr, uintptr_t dst_ptr, int64_t n) {
    hq::e8m0_up_elements(pointer<float>(src_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "src_ptr"_a, "dst_ptr"_a, "n"_a, "Non-negative fp32 values to E8M0 codes, rounded up.");
  m.def("e8m0_scale", [](const std::string& rounding, const std::string& element, uintptr_t amax_ptr, uintptr_t dst_ptr,
                         int64_t n) {
    hq::e8m0_elements(lookup(kRoundings, "rounding", rounding), lookup(kElements, "element", element),
                      pointer<float>(amax_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "rounding"_a, "element"_a, "amax_ptr"_a, "dst_ptr"_a, "n"_a, "Block amaxes to the E8M0 codes of their scales.");
  m.def("stochastic_e2m1", [](uintptr_t src_ptr, uintptr_t bytes_ptr, uintptr_t dst_ptr, int64_t n) {
    hq::stochastic_e2m1_elements(pointer<float>(src_ptr), pointer<uint8_t>(bytes_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "src_ptr"_a, "bytes_ptr"_a, "dst_ptr"_a, "n"_a, "fp32 values and one random byte each to E2M1 codes.");
  m.def("philox", [](uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t counter[4] = {c0, c1, c2, c3};
    hq::philox(key0, key1, counter);
    return std::array<uint32_t, 4>{counter[0], counter[1], counter[2], counter[3]};
  }, "key0"_a, "key1"_a, "c0"_a, "c1"_a, "c2"_a, "c3"_a, "Philox4x32-10.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled quantizers of hqsweep: pointers, shapes and strides in elements; see hqsweep.ops for tensors.";
  m.def("build_info", &build_info, "Version, compiler, flags and instruction sets of this build, as a dict.");
  py::class_<hq::Spec>(m, "Spec", "A format as the loops know it; made once, used in many calls.")
      .def(py::init(&make_spec), py::kw_only(), "family"_a, "element"_a, "tile_rows"_a, "tile_cols"_a, "pow2"_a = false,
           "amax_epsilon"_a = 0.0f, "scale_rounding"_a = "up", "row_scaled"_a = false, "rht"_a = false,
           "rht_sign"_a = true, "sr"_a = false, "four_over_six"_a = "none", "e4m3_max"_a = 448.0f,
           "fast_error"_a = false);
  py::class_<hq::Direction>(m, "Direction", "What is made of a matrix in one direction, and the addresses it goes to.")
      .def(py::init(&make_direction), "spec"_a, "key0"_a = 0, "key1"_a = 0, "step"_a = 0, "amax"_a = 0, "found"_a = 0,
           "codes"_a = 0, "scales"_a = 0, "global_"_a = 0, "exact"_a = 0, "exact_dtype"_a = 0, "sums"_a = 0,
           "row_errors"_a = 0, "keys"_a = 0);
  bind_cpu(m);
#if defined(HQ_HAVE_CUDA)
  bind_cuda(m);
#endif
  bind_elements(m);
}
