// Python bindings: names to enums, checks with both sides in the message, pointers. No loop and no arithmetic.
// Pointers are integers (data_ptr() of a torch tensor or of a numpy array), so nothing here links to torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "numerics.h"
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

void check_source(const hq::Spec& spec, const hq::Source& source) {
  require(source.rows >= 0 && source.cols >= 0,
          "rows and cols must be >= 0, got " + std::to_string(source.rows) + " and " + std::to_string(source.cols));
  require(source.data != nullptr || source.rows * source.cols == 0, "src_ptr is 0 but the matrix is not empty");
  const int multiple = spec.family == hq::Family::nvfp4 ? 16 : (spec.element == hq::Element::e2m1 ? 2 : 1);
  require(source.cols % multiple == 0, "cols is " + std::to_string(source.cols) + ", must be a multiple of " +
                                           std::to_string(multiple) + " for this format");
}

struct Call {
  hq::Spec spec;
  hq::Source source;
  hq::Output output;
};

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

Call parse(uintptr_t src_ptr, const std::string& dtype, int64_t rows, int64_t cols, int64_t row_stride,
           int64_t col_stride, const std::string& family, const std::string& element, int tile_rows, int tile_cols,
           bool pow2, float amax_epsilon, bool row_scaled, bool rht, bool rht_sign, bool sr, int four_over_six,
           float e4m3_max, bool fast_error, uint32_t key0, uint32_t key1, uint64_t step, uintptr_t q_ptr,
           uintptr_t s_ptr, uintptr_t g_ptr, uintptr_t exact_ptr, const std::string& exact_dtype, uintptr_t amax_ptr) {
  require(four_over_six >= 0 && four_over_six <= 2,
          "four_over_six is " + std::to_string(four_over_six) + ", must be 0 (off), 1 (MAE) or 2 (MSE)");
  Call call{
      {lookup(kFamilies, "family", family), lookup(kElements, "element", element), tile_rows, tile_cols, pow2,
       amax_epsilon, row_scaled, rht, rht_sign, sr, static_cast<hq::FourOverSix>(four_over_six), e4m3_max, fast_error,
       key0, key1, step},
      {pointer<void>(src_ptr), lookup(kDtypes, "dtype", dtype), rows, cols, row_stride, col_stride},
      {pointer<uint8_t>(q_ptr), pointer<void>(s_ptr), pointer<float>(g_ptr), pointer<void>(exact_ptr),
       lookup(kDtypes, "exact_dtype", exact_dtype), pointer<float>(amax_ptr)}};
  check_spec(call.spec);
  check_source(call.spec, call.source);
  return call;
}

// The arguments that both devices share, in order, for m.def.
#define HQ_QUANTIZE_ARGS                                                                                              \
  "src_ptr"_a, "dtype"_a, "rows"_a, "cols"_a, "row_stride"_a, "col_stride"_a, py::kw_only(), "family"_a, "element"_a, \
      "tile_rows"_a, "tile_cols"_a, "pow2"_a = false, "amax_epsilon"_a = 0.0f, "row_scaled"_a = false,                \
      "rht"_a = false, "rht_sign"_a = true, "sr"_a = false, "four_over_six"_a = 0, "e4m3_max"_a = 448.0f,             \
      "fast_error"_a = false, "key0"_a = 0, "key1"_a = 0, "step"_a = 0, "q_ptr"_a = 0, "s_ptr"_a = 0, "g_ptr"_a = 0,  \
      "exact_ptr"_a = 0, "exact_dtype"_a = "fp32", "amax_ptr"_a = 0

#define HQ_QUANTIZE_PARAMETERS                                                                                        \
  uintptr_t src_ptr, const std::string &dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,    \
      const std::string &family, const std::string &element, int tile_rows, int tile_cols, bool pow2,                 \
      float amax_epsilon, bool row_scaled, bool rht, bool rht_sign, bool sr, int four_over_six, float e4m3_max,       \
      bool fast_error, uint32_t key0, uint32_t key1, uint64_t step, uintptr_t q_ptr, uintptr_t s_ptr,                 \
      uintptr_t g_ptr, uintptr_t exact_ptr, const std::string &exact_dtype, uintptr_t amax_ptr

#define HQ_QUANTIZE_VALUES                                                                                            \
  src_ptr, dtype, rows, cols, row_stride, col_stride, family, element, tile_rows, tile_cols, pow2, amax_epsilon,      \
      row_scaled, rht, rht_sign, sr, four_over_six, e4m3_max, fast_error, key0, key1, step, q_ptr, s_ptr, g_ptr,      \
      exact_ptr, exact_dtype, amax_ptr

void quantize_cpu(HQ_QUANTIZE_PARAMETERS, int threads, const std::string& isa) {
  const Call call = parse(HQ_QUANTIZE_VALUES);
  require(exact_dtype == "fp32", "exact_dtype is '" + exact_dtype + "', must be fp32 on the CPU");
  require(threads >= 1, "threads is " + std::to_string(threads) + ", must be at least 1");
  require(isa.empty() || isa == "base" || isa == hq::best_isa(),
          "isa is '" + isa + "', this build and processor have base and " + hq::best_isa());
  py::gil_scoped_release release;
  hq::quantize_cpu(call.spec, call.source, call.output, threads, isa.c_str());
}

#if defined(HQ_HAVE_CUDA)
void quantize_cuda(HQ_QUANTIZE_PARAMETERS, uintptr_t stream) {
  const Call call = parse(HQ_QUANTIZE_VALUES);
  require(exact_dtype != "fp16", "exact_dtype is 'fp16', must be fp32 or bf16");
  require(call.output.amax || call.output.global || call.spec.family != hq::Family::nvfp4,
          "family nvfp4 without amax_ptr needs g_ptr, where the amax is found");
  require(call.output.amax || call.output.scales || call.spec.family != hq::Family::current,
          "family current without amax_ptr needs s_ptr, where the amax is found");
  py::gil_scoped_release release;
  hq::quantize_cuda(call.spec, call.source, call.output, stream);
}
#endif

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

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled quantizers of hqsweep: pointers, shapes and strides in elements; see hqsweep.ops for tensors.";
  m.def("build_info", &build_info, "Version, compiler, flags and instruction sets of this build, as a dict.");
  m.def("quantize_cpu", &quantize_cpu, HQ_QUANTIZE_ARGS, "threads"_a = 1, "isa"_a = "",
        "Quantize the matrix at src_ptr along its last axis; results go to the pointers that are not 0.");
#if defined(HQ_HAVE_CUDA)
  m.def("quantize_cuda", &quantize_cuda, HQ_QUANTIZE_ARGS, "stream"_a = 0,
        "quantize_cpu on the current GPU, enqueued on a stream (cudaStream_t as an integer).");
  m.def("cuda_device_count", &hq::cuda_device_count, "Visible GPUs; 0 without a driver.");
#endif
  m.def("cast_elements", [](const std::string& element, uintptr_t src_ptr, uintptr_t dst_ptr, int64_t n) {
    hq::encode_elements(lookup(kElements, "element", element), pointer<float>(src_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "element"_a, "src_ptr"_a, "dst_ptr"_a, "n"_a, "fp32 values to codes, one byte each.");
  m.def("decode_elements", [](const std::string& element, uintptr_t src_ptr, uintptr_t dst_ptr, int64_t n) {
    hq::decode_elements(lookup(kElements, "element", element), pointer<uint8_t>(src_ptr), pointer<float>(dst_ptr), n);
  }, "element"_a, "src_ptr"_a, "dst_ptr"_a, "n"_a, "Codes, one byte each, to fp32 values.");
  m.def("e8m0_up", [](uintptr_t src_ptr, uintptr_t dst_ptr, int64_t n) {
    hq::e8m0_up_elements(pointer<float>(src_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "src_ptr"_a, "dst_ptr"_a, "n"_a, "Non-negative fp32 values to E8M0 codes, rounded up.");
  m.def("stochastic_e2m1", [](uintptr_t src_ptr, uintptr_t bytes_ptr, uintptr_t dst_ptr, int64_t n) {
    hq::stochastic_e2m1_elements(pointer<float>(src_ptr), pointer<uint8_t>(bytes_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "src_ptr"_a, "bytes_ptr"_a, "dst_ptr"_a, "n"_a, "fp32 values and one random byte each to E2M1 codes.");
  m.def("philox", [](uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t counter[4] = {c0, c1, c2, c3};
    hq::philox(key0, key1, counter);
    return std::array<uint32_t, 4>{counter[0], counter[1], counter[2], counter[3]};
  }, "key0"_a, "key1"_a, "c0"_a, "c1"_a, "c2"_a, "c3"_a, "Philox4x32-10.");
}
